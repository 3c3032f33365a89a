"""Fixtures of the tests of `ngramspec.llama`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ngramspec.llama import devices


@pytest.fixture
def set_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces the devices of the build."""
    return lambda *made: monkeypatch.setattr(devices, "devices", lambda: [*made])
