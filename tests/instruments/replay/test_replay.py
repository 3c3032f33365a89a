"""Tests of the replay of recordings in the real loop: its counts against a simple loop, invariants, and the plugin."""

from __future__ import annotations

import importlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.mock_target import Clock, MockTarget, plain_generate
from support.recordings import make_recordings

from ngramspec.acceptance.rules import Verdict
from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.cost.fixed_curves import CURVES, find_curves, make_fixed_curve, parse_curve
from ngramspec.cost.times import PassTimes
from ngramspec.data import NGramSpecError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DEFAULT, REMEMBERING, make_drafter
from ngramspec.drafting.draft import Ask, Draft, Drafter
from ngramspec.instruments.replay.comparison import CurveComparison, by_category, figures
from ngramspec.instruments.replay.replay import ENDLESS, RecordedTarget, Recording, Replay, ReplayCounts, TimedLoop
from ngramspec.policies.policy import FixedPolicy
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step
from ngramspec.tokens import common_prefix

CPU = find_curves("cpu-1.5b-q4_0")["cpu-1.5b-q4_0"]
FLAT = find_curves("flat")["flat"]


class Scripted(Drafter):
    """Drafter that proposes given drafts in order, with estimates of 0.75."""

    name = "scripted"

    def __init__(self, *drafts: Sequence[int]) -> None:
        self._drafts = iter(drafts)
        self.told: list[tuple[int, ...]] = []
        self.limits: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.told = []

    def propose(self, ask: Ask) -> Draft:
        self.limits.append(ask.limit)
        tokens = tuple(next(self._drafts))
        return Draft(tokens, acceptance_probs=(0.75,) * len(tokens), source=self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        self.told.append(tuple(tokens))
        return 0


def replayed(drafter: Scripted, response: Sequence[int], most: int = 8, curve: PassTimes = CPU) -> ReplayCounts:
    return Replay(drafter, FixedPolicy(most), curve=curve).run(Recording("c", "i", [1, 2, 3], response))


def test_replay_step_emits_accepted_tokens_and_one_more() -> None:
    drafter = Scripted([11, 12, 99, 14], [], [15, 16])
    tally = replayed(drafter, [10, 11, 12, 13, 14, 15, 16, 17])
    assert drafter.told == [(10,), (11, 12, 13), (14,), (15, 16, 17)]
    stats = tally.stats
    assert (stats.tokens, stats.passes, stats.passes_without_draft, stats.drafted, stats.accepted) == (7, 3, 1, 6, 4)
    assert (tally.batches, tally.changes) == ({5: 1, 1: 1, 3: 1}, 3)
    assert stats.seconds == pytest.approx(CPU.ratio(5) + CPU.ratio(1) + CPU.ratio(3))
    assert tally.speedup(CPU) == pytest.approx(7 / (2.33 + 1 + 2.16))
    assert (stats.drafted_at, stats.accepted_at) == ([2, 2, 1, 1], [2, 2, 0, 0])


@pytest.mark.parametrize(("draft", "accepted"), [([11, 12, 13, 14], 2), ([11, 12], 2), ([11], 1)])
def test_replay_at_end_of_recording_counts_whole_batch(draft: list[int], accepted: int) -> None:
    # All correct tokens are emitted, no token follows, and the whole batch counts as cost.
    drafter = Scripted(draft)
    tally = replayed(drafter, [10, 11, 12], most=63)
    assert (tally.stats.tokens, tally.stats.passes, tally.stats.accepted) == (2, 1, accepted)
    assert tally.batches == {1 + len(draft): 1}
    assert drafter.limits == [63]  # The loop does not know the end of the recording.


def test_replay_without_drafter_equals_plain_decoding() -> None:
    total = ReplayCounts()
    for recording in make_recordings(5):
        total.merge(Replay(None, curve=CPU).run(recording))
    assert total.stats.tokens == total.stats.passes == sum(len(r.response) - 1 for r in make_recordings(5))
    assert total.speedup(CPU) == pytest.approx(total.stats.tokens_per_pass) == 1.0


def test_replay_charges_batch_size_changes_by_curve() -> None:
    curve = make_fixed_curve({1: 1.0, 64: 1.0}, switch=0.5)
    tally = replayed(Scripted([11], [], []), [10, 11, 12, 13, 14], 4, curve)
    assert tally.changes == 2
    assert tally.stats.seconds == pytest.approx(3 + 2 * 0.5)
    assert tally.speedup(curve) == pytest.approx(4 / 4.0)


def test_replay_of_greedy_text_equals_decoding() -> None:
    """A replay of greedy decoding with the same costs takes the same passes."""
    drafter = "ngram"  # This drafter reads no logits, which a recording does not have.
    points = {1: 1.0, 2: 1.2, 4: 1.3, 8: 2.0, 64: 12.0}
    clock = Clock(0.0)
    mock = MockTarget(12, seconds=make_fixed_curve(points).ratio, clock=clock, peak=6.0)
    decoder = SpeculativeDecoder(mock, drafter=drafter, times=make_fixed_curve(points), clock=clock.perf_counter)
    replay = Replay(make_drafter(drafter), curve=make_fixed_curve(points))
    for first in range(6):
        prompt = [first, 2, 3]
        steps: list[Step] = []
        # A recording does not announce its end, so `max_tokens` must not announce it here either.
        running = decoder.generate(prompt, max_tokens=3000)
        while sum(len(step.tokens) for step in steps) < 200:
            steps.append(next(running))
        running.close()
        response = [token for step in steps for token in step.tokens]
        assert response == plain_generate(MockTarget(12, peak=6.0), prompt, len(response), Sampling())
        tally = replay.run(Recording("c", str(first), prompt, response))
        assert tally.batches == Counter(step.batch for step in steps[1:])
        assert tally.stats.accepted == sum(step.accepted for step in steps)
        assert tally.stats.accepted > 20


def test_replay_reliability_includes_unsent_draft_tokens() -> None:
    tally = replayed(Scripted([11, 12, 13], [99]), [10, 11, 12, 13], most=1)
    assert tally.stats.drafted == 2
    assert tally.reliability[::2, 7].tolist() == [4, 3]


def test_replay_reliability_counts_up_to_first_wrong_token() -> None:
    counts, other = ReplayCounts(), ReplayCounts()
    assert figures(counts, {})["calibration_error"] is None
    counts.add_proposal(Draft((1, 2, 3, 4), acceptance_probs=(0.95, 0.55, 0.51, 1.0)), [1, 2, 9, 4])
    other.add_proposal(Draft((1, 2), acceptance_probs=(0.0, 1.0)), [1])
    counts.merge(other)
    found = figures(counts, {})
    assert [cell["count"] for cell in found["reliability"]] == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert found["reliability"][5] == {"from": 0.5, "to": 0.6, "count": 2, "predicted": 0.53, "observed": 0.5}
    assert found["reliability"][1] == {"from": 0.1, "to": 0.2, "count": 0, "predicted": None, "observed": None}
    assert found["calibration_error"] == pytest.approx((1.0 + 0.06 + 0.05) / 4)
    counts.add_proposal(Draft((7,), acceptance_probs=(1.0,)), [7])
    assert counts.reliability[0, 9] == 2


def test_metered_loop_counts_only_drafting_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("ngramspec.instruments.replay.replay.time", Mock(thread_time=lambda: float(next(ticks))))
    target = RecordedTarget(CPU)
    options = {"drafter": Scripted([11], []), "policy": FixedPolicy(4), "times": CPU, "clock": target.clock}
    decoder = SpeculativeDecoder(target, **options)
    decoder.loop = meter = TimedLoop(decoder.policy, target.clock)
    verifier = Mock(fixed_length=False, **{"choose.return_value": None, "verify.return_value": Verdict((10,), 0)})
    steps = decoder.generate([1, 2], max_tokens=ENDLESS, acceptance=verifier)
    for _ in range(3):
        next(steps)
    steps.close()
    assert meter.work_seconds == 6.0  # two passes: drafting, learning of the drafter, and of the policy


def test_replay_with_branches_saves_decode_calls_if_rows_are_cheap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(6)
    answer = [t for _ in range(150) for t in (1, 2, *rng.choice([[3, 5, 6], [4, 7, 8]]))]
    recording = Recording("kind", "one", [1, 2, 3, 5, 6, 1, 2, 4, 7, 8], answer)

    def replay(curve: PassTimes, leaves: int) -> ReplayCounts:
        monkeypatch.setattr(RecordedTarget, "leaves", leaves)
        steps: list[Step] = []
        tally = Replay(make_drafter("mixture"), curve=curve).run(recording, steps.append)
        assert [t for step in steps for t in step.tokens] == answer
        return tally

    assert replay(FLAT, 8).stats.passes < 0.9 * replay(FLAT, 0).stats.passes
    steep = make_fixed_curve({1: 1.0, 64: 58.0})
    assert replay(steep, 8).batches == replay(steep, 0).batches


def test_by_category_returns_figures_and_one_total() -> None:
    replay = Replay(make_drafter("ngram"), curve=CPU)
    tallies: dict[str, ReplayCounts] = {}
    for recording in make_recordings(12):
        tallies.setdefault(recording.category, ReplayCounts()).merge(replay.run(recording))
    rows = by_category(tallies, {"cpu": CPU, "flat": FLAT})
    assert list(rows) == ["even", "odd", "overall"]
    for key in ("tokens", "passes", "transcripts", "prompt_tokens"):
        assert rows["overall"][key] == rows["even"][key] + rows["odd"][key]
    assert rows["overall"]["speedup"]["flat"] == pytest.approx(rows["overall"]["tokens_per_pass"])
    assert by_category({}, {"cpu": CPU}) == {}
    empty = figures(ReplayCounts(), {"cpu": CPU})
    assert (empty["tokens"], empty["acceptance"], empty["speedup"]) == (0, None, {"cpu": 1.0})
    reaching = rows["overall"]["drafts_reaching_position"]
    assert reaching == sorted(reaching, reverse=True)
    assert len(reaching) == rows["overall"]["max_draft"]
    assert sum(cell["count"] for cell in rows["overall"]["reliability"]) > 0


def comparison() -> CurveComparison:
    curves = {"cpu": CPU, "flat": FLAT}
    replays = {name: Replay(make_drafter("ngram"), curve=curve) for name, curve in curves.items()}
    return CurveComparison(make_recordings(10), "ngram", replays)


def test_curve_comparison_drafts_by_each_curve() -> None:
    runs = comparison()
    assert len(list(runs.run())) == 10
    document = runs.document()
    assert document["complete"]
    cpu, flat = document["results"]["ngram@cpu"], document["results"]["ngram@flat"]
    assert cpu["overall"]["drafted_per_pass"] < flat["overall"]["drafted_per_pass"]
    assert cpu["overall"]["speedup"]["cpu"] > flat["overall"]["speedup"]["cpu"]
    assert document["categories"] == {"even": 5, "odd": 5}


def test_curve_comparison_when_interrupted_keeps_finished_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = itertools.count(1), Replay.run

    def interrupted(self: Replay, *of: Any) -> ReplayCounts:
        if next(calls) == 6:  # This is the second curve of the third recording.
            raise KeyboardInterrupt
        return plain(self, *of)

    runs = comparison()
    monkeypatch.setattr(Replay, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(runs.run())
    document = runs.document()
    assert (document["complete"], document["transcripts"]) == (False, 2)
    for rows in document["results"].values():
        assert rows["overall"]["transcripts"] == 2
        assert rows["overall"]["tokens"] == document["decode_tokens"]


@pytest.fixture
def decoder(tmp_path: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder(MockTarget(12, peak=6.0), times=CPU, calibration_folder=tmp_path)


def test_decoder_with_given_times_neither_learns_nor_saves(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    steps = list(decoder.generate([1, 2, 3], max_tokens=100))
    assert decoder.target.batches == [step.batch for step in steps[1:]]
    assert decoder.times.to_json() == CPU.copy().to_json()
    assert list(tmp_path.iterdir()) == []


def test_generate_with_verifier_uses_its_sampling(decoder: SpeculativeDecoder) -> None:
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        given = RuleVerifier(decoder.target.vocabulary.sampler(sampling))
        ways: list[dict[str, Any]] = [{"acceptance": given}, {"sampling": sampling}]
        one, other = (list(decoder.generate([1, 2, 3], max_tokens=50, **how)) for how in ways)
        assert [t for s in one for t in s.tokens] == [t for s in other for t in s.tokens]
        with pytest.raises(ValueError, match="has its own"):
            decoder.generate([1, 2, 3], max_tokens=5, sampling=sampling, acceptance=given)


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
ODD = {"1": 1.0, "2": 1.1, "3": 3.0, "4": 1.2, "5": 4.0, "8": 1.6, "9": 6.0, "16": 3.0, "64": 60.0}
SOME = ("flat", "cpu-1.5b-q4_0", "odd")
REST = [pytest.param(name, marks=pytest.mark.exhaustive) for name in CURVES if name not in SOME]


@pytest.mark.parametrize("name", [*SOME, *REST])
def test_replay_plugin_equals_internal_replay(ours: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedTarget, "leaves", 0)
    points = ODD if name == "odd" else CURVES[name][0]
    plugin = ours(points)
    replay, total = Replay(make_drafter(DEFAULT), curve=parse_curve(points)), ReplayCounts()
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


def test_replay_plugin_without_curve_uses_flat_curve_and_with_memory_saves_decode_calls(ours: Any) -> None:
    given, default = ours({"1": 1.0, "64": 1.0}), ours()
    assert all(drive(default, recording) == drive(given, recording) for recording in make_recordings(10))
    for wrong in ({"2": 1.0}, {"1": 1.0, "2": -1.0}, {}):
        with pytest.raises(NGramSpecError):
            ours(wrong)
    told = make_recordings(4, vocabulary=5000)
    passes = [sum(drive(plugin, r)[1] for r in [*told, *told]) for plugin in (ours(memory=True), ours())]
    assert DEFAULT in REMEMBERING
    assert passes[0] < passes[1]
