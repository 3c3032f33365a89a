"""What a child process came to, without one: in place of those that try a kernel or a model file."""

from __future__ import annotations

import pytest

from ngramspec.llama import crash_check
from ngramspec.llama.crash_check import Ended

HANGS: Ended = None, ""


class FakeChild:
    """Stands in for `crash_check.run`.

    Attributes:
        ended: how the child ends; None: it cannot be started.
        starts: how often it was to be started.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ended: Ended | None = (0, "")
        self.starts = 0
        patch.setattr(crash_check, "run", self._run)

    def _run(self, command: list[str], patience: float) -> Ended | None:
        self.starts += 1
        return self.ended
