"""Chat in a real terminal: a separate tmux window that tests type into and read."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.cli_runner import PATIENCE

PROMPT = r"^> *\n+.* of \d+ tokens \(\d+%\).*\n*\Z"
"""Pattern of the end of a screen that waits for a message."""


class Terminal:
    """Tmux window in which chat runs; `home` has variables with the folders of the user and of Python's packages."""

    def __init__(self, home: Mapping[str, str], folder: Path, command: Sequence[str]) -> None:
        # A server that was just killed may still use its socket, so each window has a separate one. The path of a
        # socket must be short, and tmp_path is too long.
        self._folder = tempfile.TemporaryDirectory()
        self._tmux = ["tmux", "-S", f"{self._folder.name}/tmux", "-f", os.devnull]
        names = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "PYTHONPATH")
        unset = [f"-u{n}" for n in (*names, "NGRAMSPEC_MODEL", "COLUMNS", "LINES", "NO_COLOR")]
        chat = shlex.join(["env", *unset, *(f"{n}={home[n]}" for n in names if n in home), *command])
        script = f"cd {shlex.quote(str(folder))}; {chat}; echo exit code $?; stty -a; exec sleep 600"
        self._run("new-session", "-d", "-x", "100", "-y", "40", "bash", "-c", script)
        try:
            self.wait(r"/help lists commands.*\n(.*\n)*>")
        except BaseException:
            self.close()
            raise

    def _run(self, *arguments: str) -> str:
        run = subprocess.run([*self._tmux, *arguments], capture_output=True, timeout=PATIENCE, check=True)
        return run.stdout.decode()

    def close(self) -> None:
        self._run("kill-server")
        self._folder.cleanup()

    def text(self, *, colours: bool = False) -> str:
        """Return all that the terminal has shown, with wrapped lines joined."""
        return self._run("capture-pane", "-p", "-J", "-S", "-", *(["-e"] if colours else []))

    def resize(self, columns: int, lines: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(lines))

    def keys(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def paste(self, text: str) -> None:
        self._run("set-buffer", text)
        self._run("paste-buffer", "-p")

    def type(self, line: str) -> None:
        self._run("send-keys", "-l", line)
        self.keys("Enter")

    def wait(self, pattern: str, count: int = 1) -> str:
        """Wait until the terminal has shown the pattern `count` times, and return its text."""
        end = time.monotonic() + PATIENCE
        while len(re.findall(pattern, text := self.text(), re.MULTILINE)) < count:
            assert time.monotonic() < end, f"no {pattern!r} in:\n{text}"
            time.sleep(0.02)
        return text

    def ask(self, line: str, pattern: str, count: int = 1) -> str:
        """Type a line, wait until the pattern was shown `count` times in all, then wait for the next prompt."""
        self.type(line)
        self.wait(pattern, count)
        return self.wait(PROMPT)
