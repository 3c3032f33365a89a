"""Tests of the help, whose texts are shown in full at any width, and of tab completion in bash."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from ngramspec_cli import app, models
from ngramspec_cli.app import import_command
from ngramspec_cli.options import COMMON, GROUPS, NoEffect
from support.cli_runner import DEMO, NO_SMOLLM, run

from ngramspec.sampling.settings import options

TOP = {name: import_command(name) for name in typer.main.get_command(app.app).commands}
MEMORY = {f"memory {name}": command for name, command in TOP["memory"].commands.items()}
COMMANDS: dict[str, Any] = {"": typer.main.get_command(app.app), **TOP, **MEMORY}


def squeeze(text: str) -> str:
    return "".join(text.split())


def show_help(env: dict[str, str], name: str, width: int) -> str:
    return run({**env, "COLUMNS": str(width)}, *name.split(), "--help").ok().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_text_in_full_at_every_width(env: dict[str, str], name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    shown = [parameter for parameter in command.params if not parameter.hidden]
    texts = [command.help or "", command.epilog or "", *(parameter.help or "" for parameter in shown)]
    if name in ("", "memory"):
        texts += [(sub.help or "").partition("\n\n")[0] for sub in command.commands.values()]
    for width in (60, 80, 100, 140):
        out = show_help(env, name, width)
        assert not [text for text in texts if squeeze(text) not in squeeze(out)]
        assert "…" not in out
        assert max(map(len, out.splitlines())) <= width
        assert not [p.opts for p in shown if p.opts[0].startswith("-") and not re.search(rf" {p.opts[0]}\b", out)]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("chat", "MODEL -f -p -sys -n --temp -s -c -ngl --no-draft"),
        ("complete", "MODEL -f -p -n --temp -s -c -ngl --no-draft"),
        ("serve", "MODEL --host --port -np -n -c -ngl"),
        ("bench", "MODEL --prompts -n --temp -s -c -ngl --no-draft"),
    ],
)
def test_first_screen_of_help_has_options_used_first(env: dict[str, str], name: str, flags: str) -> None:
    screen = "\n".join(show_help(env, name, 80).splitlines()[:24])
    assert not [flag for flag in flags.split() if not re.search(rf"^  {flag}\b", screen, re.MULTILINE)], screen


def test_every_name_in_a_group_is_an_option() -> None:
    known = {parameter.name for command in COMMANDS.values() for parameter in command.params}
    assert {*COMMON, *(name for names in GROUPS.values() for name in names)} <= known | {"help"}


def test_options_without_effect_are_hidden(env: dict[str, str]) -> None:
    shown = set(re.findall(r"--[\w-]+", show_help(env, "serve", 100)))
    flags = {flag for spec in options(NoEffect).values() for flag in spec.flags}
    assert shown & flags <= {"--slots"}


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
