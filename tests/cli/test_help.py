"""Tests of the help: no text is cut at any width, and the options that people use first come first."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer.main
from ngramspec_cli.app import app, import_command
from ngramspec_cli.options import COMMON, GROUPS, NoEffect
from support.cli_runner import run

from ngramspec.sampling.settings import options

TOP = {name: import_command(name) for name in typer.main.get_command(app).commands}
MEMORY = {f"memory {name}": command for name, command in TOP["memory"].commands.items()}
COMMANDS: dict[str, Any] = {"": typer.main.get_command(app), **TOP, **MEMORY}


def squeeze(text: str) -> str:
    return "".join(text.split())


def show_help(env: dict[str, str], name: str, width: int) -> str:
    return run({**env, "COLUMNS": str(width)}, *name.split(), "--help").ok().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_text_in_full_at_every_width(env: dict[str, str], name: str) -> None:
    command = COMMANDS[name]
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
