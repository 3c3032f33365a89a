"""Tests of tab completion, as bash requests it, word by word."""

from __future__ import annotations

from pathlib import Path

import pytest
from ngramspec_cli import app, models
from support.cli_runner import DEMO, NO_SMOLLM


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with two models of LM Studio and some files, and make it the working directory."""
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


def test_complete_model_returns_model_names_and_files(home: Path) -> None:
    for incomplete, offered in {
        "": [*BOTH, "my.gguf", "models/"],
        "lm": BOTH,
        "m": ["my.gguf", "models/"],
        "models/": ["models/large.gguf"],
        f"{home}/my": [f"{home}/my.gguf"],
        "~/my": ["~/my.gguf"],
        **{other: [] for other in ("app", "mo", "models/x", "no/such/folder/", "lmstudio:you", "a\0b")},
    }.items():
        assert models.complete_model(incomplete) == offered, incomplete


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ch"], {"chat"}),
        (["complete", "my.gguf", "--h"], {"--hf-repo", "--help"}),
        (["info", "-m", "my"], {"my.gguf"}),
        # bash splits names at colons,
        (["chat", "lmstudio", ":"], {"me/toy:a.gguf", "me/toy:b.gguf"}),
        (["chat", "lmstudio", ":", "me"], {"me/toy:a.gguf", "me/toy:b.gguf"}),
        (["chat", "lmstudio", ":", "me/toy", ":", "b"], {"b.gguf"}),
        (["chat", "lmstudio", ":", "me/toy", ":"], {"a.gguf", "b.gguf"}),
        (["chat", "lmstudio"], set(BOTH)),
        # unless the user disables that.
        (["chat", "lmstudio:me"], set(BOTH)),
    ],
)
@pytest.mark.usefixtures("home")
def test_bash_completion_offers_commands_options_and_models(
    words: list[str], offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "raise_on_signals", lambda: None)
    shell = {"COMP_WORDS": "\n".join(["ngramspec", *words]), "COMP_CWORD": str(len(words))}
    for name, value in (shell | {"_NGRAMSPEC_COMPLETE": "complete_bash", "_NGRAMSPEC_BEFORE_COLON": ""}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        app.run([])
    assert ended.value.code == 0
    assert set(capsys.readouterr().out.splitlines()) == offered
