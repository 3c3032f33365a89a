"""What Tab offers: as bash asks, word by word."""

from __future__ import annotations

from pathlib import Path

import pytest
from ngramspec_cli import completion
from support.cli_runner import DEMO, NO_SMOLLM, run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models of LM Studio's below and some files, in which the shell is."""
    monkeypatch.syspath_prepend(NO_SMOLLM)
    for name in ("HF_HUB_CACHE", "OLLAMA_MODELS", "HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    studio = tmp_path / ".lmstudio" / "models" / "me" / "toy"
    studio.mkdir(parents=True)
    for name in ("a.gguf", "b.gguf"):
        (studio / name).symlink_to(DEMO)
    (tmp_path / "models").mkdir()
    (tmp_path / "my.gguf").symlink_to(DEMO)
    (tmp_path / "models" / "large.gguf").symlink_to(DEMO)
    (tmp_path / "app.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


BOTH = ["lmstudio:me/toy:a.gguf", "lmstudio:me/toy:b.gguf"]


def test_names_and_files(home: Path) -> None:
    assert completion.models("") == [*BOTH, "my.gguf", "models/"]
    assert completion.models("lm") == BOTH
    assert completion.models("m") == ["my.gguf", "models/"]
    assert completion.models("models/") == ["models/large.gguf"]
    assert completion.models(f"{home}/my") == [f"{home}/my.gguf"]
    assert completion.models("~/my") == ["~/my.gguf"]


@pytest.mark.parametrize("incomplete", ["app", "mo", "models/x", "no/such/folder/", "lmstudio:you", "a\0b"])
def test_nothing_where_the_shell_knows_better(home: Path, incomplete: str) -> None:
    assert completion.models(incomplete) == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["lmstudio", ":"], ["me/toy:a.gguf", "me/toy:b.gguf"]),
        (["lmstudio", ":", "me"], ["me/toy:a.gguf", "me/toy:b.gguf"]),
        (["lmstudio", ":", "me/toy", ":", "b"], ["b.gguf"]),
        (["lmstudio", ":", "me/toy", ":"], ["a.gguf", "b.gguf"]),
        (["lmstudio"], BOTH),
        (["lmstudio:me"], BOTH),  # where the user has told bash to leave colons alone
    ],
)
def test_bash_takes_names_apart_at_colons(
    home: Path, words: list[str], offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", "\n".join(["ngramspec", "chat", *words]))
    monkeypatch.setenv("COMP_CWORD", str(1 + len(words)))
    monkeypatch.setenv("_NGRAMSPEC_BEFORE_COLON", "")
    completion.join_at_colons(completion.os.environ)
    asked, at = completion.os.environ["COMP_WORDS"].split(), int(completion.os.environ["COMP_CWORD"])
    assert (asked[:2], at) == (["ngramspec", "chat"], 2)
    assert completion.models(asked[2].strip("'")) == offered


def test_as_the_shell_asks(home: Path, env: dict[str, str]) -> None:
    def offered(*words: str) -> list[str]:
        asked = {"COMP_WORDS": "\n".join(["ngramspec", *words]), "COMP_CWORD": str(len(words))}
        told = run(env | asked | {"HOME": str(home), "_NGRAMSPEC_COMPLETE": "complete_bash"})
        assert told.code == 0, told.err
        return told.out.splitlines()

    assert offered("ch") == ["chat"]
    assert offered("chat", "lmstudio", ":", "me") == ["me/toy:a.gguf", "me/toy:b.gguf"]
    assert {"--hf-repo", "--help"} <= {*offered("complete", "my.gguf", "--h")}
