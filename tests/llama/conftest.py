"""Model files that these tests write are good, and are not tried in child processes; see `test_crash_check`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fake_child import FakeChild


@pytest.fixture(scope="module", autouse=True)
def _trusted_files(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_crash_check"):
            crash_check = pytest.importorskip("ngramspec.llama.crash_check")
            patch.setattr(crash_check, "run", lambda *_: None)  # no verdict, so that none is kept either
        yield


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    return FakeChild(monkeypatch)
