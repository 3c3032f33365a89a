"""resolve: which model a name asks for, and where the error says it came from. Hub: test_hub.py."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import pytest
from tiny_gguf import write_gguf

from ngramspec.errors import ModelError, NGramSpecError
from ngramspec.source import ModelSource, is_model_argument, resolve

DEMO = Path(__file__).parent.parent / "ngramspec" / "demo" / "demo.gguf"


def test_without_a_name_the_demo_model() -> None:
    for env in ({}, {"NGRAMSPEC_MODEL": ""}):
        chosen = resolve(None, env)
        assert chosen.demo
        assert chosen.path.samefile(DEMO)


def test_the_environment_names_a_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert resolve(None, {"NGRAMSPEC_MODEL": str(path)}) == ModelSource(path, "m.gguf", False)
    with pytest.raises(ModelError, match=r"no such .*\(the model is named by NGRAMSPEC_MODEL\)"):
        resolve(None, {"NGRAMSPEC_MODEL": str(tmp_path / "none.gguf")})


def test_a_name_wins_over_the_environment(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert resolve(str(path), {"NGRAMSPEC_MODEL": "none.gguf"}).path == path
    with pytest.raises(ModelError) as caught:
        resolve("none.gguf", {"NGRAMSPEC_MODEL": str(path)})
    assert "NGRAMSPEC_MODEL" not in str(caught.value)


def test_the_environment_of_the_process_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NGRAMSPEC_MODEL", str(write_gguf(tmp_path / "m.gguf")))
    assert resolve(None).label == "m.gguf"


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    path = write_gguf(tmp_path / "m.gguf")
    assert resolve("~/m.gguf", {}).path == path
    assert is_model_argument("~/m.gguf")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("https://huggingface.co/a/b", "is a URL; download the file, or write hf:owner/repo:"),
        ("hf:nonsense", "is not a valid name"),
        ("a\0b", "a\0b"),
    ],
)
def test_names_that_cannot_be(name: str, reason: str) -> None:
    with pytest.raises(NGramSpecError, match=reason):
        resolve(name, {})


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "essay.txt"
    path.write_text("Once upon a time")
    with pytest.raises(ModelError, match="looks like a text file"):
        resolve(str(path), {})


def test_a_missing_demo_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda _package: tmp_path)
    with pytest.raises(ModelError, match="demo model is missing"):
        resolve(None, {})


def test_is_model_argument(tmp_path: Path) -> None:
    # By its first bytes, not by its name.
    odd = write_gguf(tmp_path / "m.gguf").rename(tmp_path / "weights.txt")
    text = tmp_path / "text.gguf"
    text.write_text("Once upon a time")
    assert is_model_argument("hf:owner/repo")
    assert is_model_argument(str(odd))
    for argument in (str(text), str(tmp_path), "", "-", "Once upon a time", "~nobody-x/m", "a\0b"):
        assert not is_model_argument(argument)
    assert not is_model_argument("long " * 2000)
