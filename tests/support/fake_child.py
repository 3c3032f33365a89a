"""A child process that does what a test says, in place of one that tries a kernel or a model file."""

from __future__ import annotations

import sys
from pathlib import Path


class Child:
    """A fake child command, and how often it was started."""

    def __init__(self, folder: Path, script: str) -> None:
        self._count = folder / "count"
        self._count.write_text("")
        self.command = [sys.executable, "-c", f"open({str(self._count)!r}, 'a').write('x')\n{script}"]

    @property
    def starts(self) -> int:
        return len(self._count.read_text())
