"""The settings file: off unless it says so, and never half understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from ngramspec.errors import NGramSpecError
from ngramspec.memory.memory import remembers, write_remember


def test_off_unless_switched_on(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "config.toml"
    assert not remembers(path)
    for value, text in ((True, "remember = true\n"), (False, "remember = false\n")):
        write_remember(value, path)
        assert path.read_text() == text
        assert remembers(path) == value
    assert [p.name for p in path.parent.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("text", ['# mine\n  "remember"=false # so far\n', "# remember = true\n", "\n\n"])
def test_the_rest_of_the_file_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    write_remember(True, path)
    assert remembers(path)
    assert all(part in path.read_text() for part in text.split("\n") if part.startswith("#"))
    assert path.read_text().count("# so far") == text.count("# so far")


def test_what_means_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for raw, words in (
        (b"remember = maybe\n", "no TOML"),
        (b"remember = 1\n", "true or false"),
        (b"remember = 'on'\n", "true or false"),
        (b"remembr = true\n", "'remembr'"),
        (b"\xff\xfe", "not UTF-8"),
    ):
        path.write_bytes(raw)
        for use in (lambda: remembers(path), lambda: write_remember(True, path)):
            with pytest.raises(NGramSpecError, match=words) as error:
                use()
            assert str(path) in str(error.value)
            assert "\n" not in str(error.value)
        assert path.read_bytes() == raw
    with pytest.raises(NGramSpecError, match="cannot"):
        write_remember(True, path / "config.toml")
