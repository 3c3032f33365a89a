"""What need not be loaded is not: by the modules that a process has afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from ngramspec_cli import subcommands
from ngramspec_cli.app import app
from support.cli_runner import run

import ngramspec

HEAVY = ("numpy", "llama_cpp", "prompt_toolkit", "jinja2")
REPORT = f"""
import atexit, sys
atexit.register(lambda: print(*(m for m in {HEAVY!r} if m in sys.modules), file=sys.stderr))
"""


@pytest.mark.parametrize(
    ("script", "loaded"),
    [
        ("import ngramspec; ngramspec.__version__", []),
        ("from ngramspec import SpeculativeDecoder", ["numpy"]),
        ("from ngramspec_cli.app import run; run(['--help'])", []),
        ("from ngramspec_cli.app import run; run(['--version'])", []),
        ("from ngramspec_cli.app import run; run(['complete', '--help'])", ["numpy", "llama_cpp", "jinja2"]),
    ],
)
def test_what_is_imported(env: dict[str, str], script: str, loaded: list[str]) -> None:
    done = run(env, command=[sys.executable, "-c", REPORT + script])
    assert done.code == 0, done.err
    assert done.err.split() == loaded


def test_the_public_names() -> None:
    for name in ngramspec.__all__:
        assert getattr(ngramspec, name).__name__ == name
    with pytest.raises(AttributeError, match="'ngramspec' has no attribute 'Sampler'"):
        ngramspec.Sampler  # noqa: B018


def test_every_command_has_a_line_and_a_help_of_its_own(env: dict[str, str]) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = run(env, "--help").out
    modules = {path.stem for path in Path(subcommands.__file__).parent.glob("*.py")}
    for name, line in subcommands.COMMANDS.items():
        assert name.replace("-", "_") in modules
        assert f"  {name}  " in shown
        assert " ".join(line.split()[:3]) in shown
        assert commands[name].help
    assert "Did you mean 'complete'?" in run(env, "compleet").complaint
