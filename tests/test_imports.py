"""Tests that a process only loads the modules it needs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import ngramspec_cli
import pytest
import typer
from ngramspec_cli.app import COMMANDS, app
from support.cli_runner import run, run_process

import ngramspec

STAGES = {
    "import ngramspec; ngramspec.__version__": [],
    "from ngramspec_cli.app import run; run(['--help']); run(['--version'])": [],
    "from ngramspec import SpeculativeDecoder": ["numpy"],
    "run(['complete', '--help'])": ["numpy", "llama_cpp", "jinja2"],
}
REPORT = """
print(*(m for m in ("numpy", "llama_cpp", "prompt_toolkit", "jinja2") if m in sys.modules), file=sys.stderr)
"""


def test_import_of_each_part_loads_only_required_modules(env: dict[str, str]) -> None:
    script = "\n".join(["import sys", *(stage + REPORT for stage in STAGES)])
    done = run_process(env, command=[sys.executable, "-c", script])
    assert done.code == 0, done.err
    assert [line.split() for line in done.err.splitlines()] == [*STAGES.values()]


WITHOUT_POSIX = """
import builtins, importlib, pkgutil
import ngramspec, ngramspec_cli

POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
there = builtins.__import__

def elsewhere(name, importer=None, *more):
    if name in POSIX and (importer or {}).get("__name__", "").startswith("ngramspec"):
        raise ImportError(name)
    return there(name, importer, *more)

builtins.__import__ = elsewhere
for package in (ngramspec, ngramspec_cli):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.mark.exhaustive
def test_import_of_every_module_works_without_posix_modules(env: dict[str, str]) -> None:
    done = run_process(env, command=[sys.executable, "-c", WITHOUT_POSIX])
    assert done.code == 0, done.err
    assert {"ngramspec_cli.chat_input", "ngramspec.llama.crash_check", "ngramspec.server.app"} <= set(done.out.split())


TOOLS = sorted((Path(__file__).parent.parent / "tools").glob("*.py"))


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_import_of_every_tool_works(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tool.parent)
    runpy.run_path(str(tool))


def test_public_names_resolve_and_unknown_name_raises() -> None:
    for name in ngramspec.__all__:
        assert getattr(ngramspec, name).__name__ == name
    with pytest.raises(AttributeError, match="'ngramspec' has no attribute 'Sampler'"):
        ngramspec.Sampler  # noqa: B018


def test_help_lists_every_command_and_suggests_similar_name(env: dict[str, str]) -> None:
    commands = typer.main.get_command(app).commands
    shown = run(env, "--help").out
    modules = {path.stem for path in Path(ngramspec_cli.__file__).parent.glob("*.py")}
    for name, line in COMMANDS.items():
        assert name.replace("-", "_") in modules
        assert f"  {name}  " in shown
        assert " ".join(line.split()[:3]) in shown
        assert commands[name].help
    assert "Did you mean 'complete'?" in run(env, "compleet").error_message
