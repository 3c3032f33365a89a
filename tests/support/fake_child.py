"""A stand-in for the child processes that try a kernel or a model file."""

from __future__ import annotations

import pytest

from ngramspec.llama import crash_check
from ngramspec.llama.crash_check import ChildEnd

HANGS: ChildEnd = None, ""


class FakeChild:
    """Replacement of `crash_check.run`.

    Attributes:
        result: Result of the child process; `None` means that it cannot be started.
        starts: Number of attempts to start it.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.result: ChildEnd | None = (0, "")
        self.starts = 0
        patch.setattr(crash_check, "run", self._run)

    def _run(self, command: list[str], patience: float) -> ChildEnd | None:
        self.starts += 1
        return self.result
