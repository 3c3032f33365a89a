"""Fixtures of the tests of `ngramspec.llama`: the check of model files in child processes is off.

The tests write valid model files; `test_crash_check` tests the check."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ngramspec.llama import crash_check, devices


@pytest.fixture(scope="module", autouse=True)
def _trusted_files(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_crash_check"):
            patch.setattr(crash_check, "run", lambda *_: None)  # Without a result, the check also stores none.
        yield


@pytest.fixture
def set_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces the devices of the build."""
    return lambda *made: monkeypatch.setattr(devices, "devices", lambda: [*made])
