"""What a child process came to, without one: in place of those that try a kernel or a model file."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from ngramspec import child
from ngramspec.child import Ended

HANGS = subprocess.TimeoutExpired("child", 1)


class FakeChild:
    """Stands in for `child.run`.

    Attributes:
        ended: how the child ends; None: it cannot be started.
        starts: how often it was to be started.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ended: Ended | subprocess.TimeoutExpired | None = Ended(0, "")
        self.starts = 0
        patch.setattr(child, "run", self._run)

    def _run(self, command: Sequence[str], patience: float) -> Ended | None:
        self.starts += 1
        if isinstance(self.ended, subprocess.TimeoutExpired):
            raise self.ended
        return self.ended
