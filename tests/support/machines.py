"""Devices that do not exist, for tests of placement, memory and keys, and a pool of cells as only a GPU has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ngramspec.llama.devices import Device
from ngramspec.llama.target import Target

GIB = 2**30
CPU = Device("CPU", "EPYC", False, 8 * GIB, 16 * GIB, backend="CPU", handle=14)
CARD = Device("CUDA0", "RTX 3090", True, 20 * GIB, 24 * GIB, backend="CUDA", id="0000:01:00.0", handle=11)
OTHER = Device("CUDA1", "RTX 4090", True, 20 * GIB, 24 * GIB, backend="CUDA", id="0000:02:00.0", handle=12)
AGAIN = replace(CARD, name="Vulkan0", backend="Vulkan")
SHARED = Device("Vulkan1", "Iris", True, 12 * GIB, 14 * GIB, True, "Vulkan", handle=13)
SHARED_AGAIN = replace(SHARED, name="SYCL0", backend="SYCL")
WORKER = Device("RPC0", "10.0.0.2:50052", True, 30 * GIB, 32 * GIB, backend="RPC")


def use_pooled_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a CPU a common pool of cells for all sequences."""
    monkeypatch.setattr(Target, "_pooled", property(lambda self: self.exact == "off" and self.weights.can_pool))
