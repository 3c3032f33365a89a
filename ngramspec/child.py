"""Try something in a child process: if it crashes, only the child ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

_FROM_OUTSIDE = (-2, -9, -15)  # SIGINT, SIGKILL (also for want of RAM), SIGTERM


def module(name: str) -> tuple[str, ...]:
    """The command that runs a module of this package."""
    return sys.executable, "-P", "-m", name


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended."""

    code: int  # its exit code; negative for a signal (on Windows a crash is beyond 255 instead)
    said: str  # what it wrote to stderr

    @property
    def died(self) -> bool:
        """Whether it crashed by itself."""
        return (self.code < 0 and self.code not in _FROM_OUTSIDE) or self.code > 255


def run(command: Sequence[str], patience: float) -> Ended | None:
    """Run a child to its end; None where it cannot be started, TimeoutExpired after `patience` seconds."""
    # The program of a frozen application is no Python: it would start the application again.
    if not command[0] or getattr(sys, "frozen", False):
        return None
    # The child imports from where this process does, and not from the folder it happens to run in.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)}
    none = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, stdin=none, stdout=none, stderr=subprocess.PIPE, env=env, timeout=patience, check=False
        )
    except OSError:
        return None
    return Ended(done.returncode, done.stderr.decode("utf-8", "replace"))


def confine(cpu_seconds: int | None = None) -> None:
    """For the child: leave no core file in the user's folder, and die (SIGXCPU) of too much work."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if cpu_seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
