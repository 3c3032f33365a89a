"""The settings file: off unless it says so, and never half understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from ngramspec.memory.remember import Settings, SettingsError, read_settings, write_remember


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "config.toml"


def test_nothing_is_remembered_unless_asked_for(path: Path) -> None:
    assert read_settings(path) == Settings(remember=False)


def test_on_and_off(path: Path) -> None:
    write_remember(True, path)
    assert path.read_text() == "remember = true\n"
    assert read_settings(path).remember
    write_remember(False, path)
    assert path.read_text() == "remember = false\n"
    assert not read_settings(path).remember
    assert [p.name for p in path.parent.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("text", ['# mine\n  "remember"=false # so far\n', "# remember = true\n", "\n\n"])
def test_the_rest_of_the_file_stays(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    write_remember(True, path)
    assert read_settings(path).remember
    assert all(part in path.read_text() for part in text.split("\n") if part.startswith("#"))
    assert path.read_text().count("# so far") == text.count("# so far")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"remember = maybe\n", "no TOML"),
        (b"remember = 1\n", "true or false"),
        (b"remember = 'on'\n", "true or false"),
        (b"remembr = true\n", "'remembr'"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_what_means_nothing_is_refused(path: Path, raw: bytes, words: str) -> None:
    path.parent.mkdir()
    path.write_bytes(raw)
    for use in (lambda: read_settings(path), lambda: write_remember(True, path)):
        with pytest.raises(SettingsError, match=words) as error:
            use()
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    assert path.read_bytes() == raw


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot"):
        write_remember(True, tmp_path / "file" / "config.toml")
