"""Tests of the settings file: comments are kept, and invalid files are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from ngramspec.data import NGramSpecError
from ngramspec.memory.memory import saves_answers, write_save_answers


@pytest.mark.parametrize("text", ['# mine\n  "save_answers"=false # so far\n', "# save_answers = true\n", "\n\n"])
def test_write_save_answers_keeps_comments_of_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    write_save_answers(True, path)
    assert saves_answers(path)
    assert all(part in path.read_text() for part in text.split("\n") if part.startswith("#"))
    assert path.read_text().count("# so far") == text.count("# so far")


def test_saves_answers_rejects_invalid_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for raw, words in (
        (b"save_answers = maybe\n", "not valid TOML"),
        (b"save_answers = 1\n", "true or false"),
        (b"save_answers = 'on'\n", "true or false"),
        (b"remembr = true\n", "'remembr'"),
        (b"\xff\xfe", "not UTF-8"),
    ):
        path.write_bytes(raw)
        for use in (lambda: saves_answers(path), lambda: write_save_answers(True, path)):
            with pytest.raises(NGramSpecError, match=words) as error:
                use()
            assert str(path) in str(error.value)
            assert "\n" not in str(error.value)
        assert path.read_bytes() == raw
    with pytest.raises(NGramSpecError, match="cannot"):
        write_save_answers(True, path / "config.toml")
