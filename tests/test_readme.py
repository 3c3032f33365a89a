"""The README is true to the last flag, and its test command is the one that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
from ngramspec_cli import chat_commands
from ngramspec_cli.app import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
TOP = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# `memory` is a group: its commands count, not the group.
COMMANDS = {n: c for name, top in TOP.items() for n, c in getattr(top, "commands", {name: top}).items()}


def flags(command: str) -> set[str]:
    return {flag for parameter in COMMANDS[command].params for flag in parameter.opts if flag.startswith("-")}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_is_in_the_readme(command: str) -> None:
    missing = [flag for flag in flags(command) - {"--help"} if f"`{flag}" not in README]
    assert not missing


def test_every_option_in_the_readme_exists() -> None:
    known = set.union(*(flags(command) for command in COMMANDS))
    named = re.findall(r"`(--?[a-z][a-z-]*)", README)
    assert len(named) > 30
    assert not set(named) - known


def test_every_chat_command_is_in_the_readme() -> None:
    assert not [name for name in chat_commands.COMMANDS if f"`{name.split()[0]}" not in README]


def test_ci_runs_the_readmes_test_command() -> None:
    command = next(line.strip() for line in README.splitlines() if line.endswith(".venv/bin/pytest"))
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    assert all(part.strip() in ci for part in command.split("&&"))
