"""Tests of the plugin for replay harnesses, used as by a harness, against `ngramspec.instruments.replay.replay`."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.recordings import make_recordings

from ngramspec.cost.fixed_curves import CURVES, make_fixed_curve
from ngramspec.data import NGramSpecError
from ngramspec.drafting import DEFAULT, REMEMBERING, make_drafter
from ngramspec.instruments.replay.replay import RecordedTarget, Recording, Replay, ReplayCounts
from ngramspec.tokens import common_prefix


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the class that a harness loads."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools")
    return importlib.import_module("replay_plugin").Ours


def drive(drafter: Any, recording: Recording) -> tuple[int, int, int, Counter[int]]:
    """Return the results of a harness: (tokens, passes, accepted, passes by batch size)."""
    response = list(recording.response)
    drafter.start(list(recording.prompt))
    drafter.accept(response[:1])
    at, passes, accepted, batches = 1, 0, 0, Counter[int]()
    while at < len(response):
        proposal = drafter.draft()
        right = common_prefix(proposal, response[at:])
        new = response[at : at + right + 1]
        drafter.accept(new)
        at += len(new)
        passes += 1
        accepted += right
        batches[1 + len(proposal)] += 1
    return at - 1, passes, accepted, batches


# With this curve, padding of a batch of 3, 5 or 9 pays.
ODD = {1: 1.0, 2: 1.1, 3: 3.0, 4: 1.2, 5: 4.0, 8: 1.6, 9: 6.0, 16: 3.0, 64: 60.0}
SOME = ("flat", "cpu-1.5b-q4_0", "odd")
REST = [pytest.param(name, marks=pytest.mark.exhaustive) for name in CURVES if name not in SOME]


@pytest.mark.parametrize("name", [*SOME, *REST])
def test_replay_plugin_equals_internal_replay(ours: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedTarget, "leaves", 0)
    points = ODD if name == "odd" else CURVES[name][0]
    plugin = ours({str(size): cost for size, cost in points.items()})
    replay, total = Replay(make_drafter(DEFAULT), curve=make_fixed_curve(points)), ReplayCounts()
    found = []
    for recording in make_recordings(30, seed=3):
        found.append(drive(plugin, recording))
        total.merge(replay.run(recording))
    *counts, batches = zip(*found, strict=True)
    assert [sum(count) for count in counts] == [total.stats.tokens, total.stats.passes, total.stats.accepted]
    assert sum(batches, Counter()) == total.batches
    assert total.stats.accepted > 0
    if name == "odd":
        assert total.batches[3] == total.batches[5] == total.batches[9] == 0 < total.batches[4]


def test_replay_plugin_without_curve_uses_flat_curve(ours: Any) -> None:
    given, default = ours({"1": 1.0, "64": 1.0}), ours()
    assert all(drive(default, recording) == drive(given, recording) for recording in make_recordings(10))
    for wrong in ({"2": 1.0}, {"1": 1.0, "2": -1.0}, {}):
        with pytest.raises(NGramSpecError):
            ours(wrong)


def test_replay_plugin_with_memory_saves_decode_calls(ours: Any) -> None:
    if DEFAULT in REMEMBERING:
        told = make_recordings(4, vocabulary=5000)
        one, other = ours(memory=True), ours()
        with_memory, without = (sum(drive(plugin, r)[1] for r in [*told, *told]) for plugin in (one, other))
        assert with_memory < without
    else:
        with pytest.raises(ValueError, match="does not use earlier answers"):
            ours(memory=True)
