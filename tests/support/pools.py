"""A patch that gives a CPU a common pool of cells for all sequences, as only a GPU has."""

from __future__ import annotations

import pytest

from ngramspec.llama.target import Target


def use_pooled_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "_pooled", property(lambda self: self.exact == "off" and self.weights.can_pool))
