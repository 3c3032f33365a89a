"""A pool of cells for all sequences on a CPU, where only a GPU has one."""

from __future__ import annotations

import pytest

from ngramspec.llama.target import Target


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "_pooled", property(lambda self: self.exact == "off" and self.can_pool))
