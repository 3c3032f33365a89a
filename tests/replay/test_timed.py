"""Timed replay on a target whose passes take a known time: the measured ratio is known, and so is the modelled one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from support.mock_target import Clock, MockTarget
from support.recordings import recordings

from ngramspec.cost.given import GivenCurve
from ngramspec.drafting import make_drafter
from ngramspec.replay.recording import Recording
from ngramspec.replay.replay import Replay
from ngramspec.replay.report import Comparison
from ngramspec.replay.tally import Tally
from ngramspec.replay.timed import TimedReplay

CLOCK = Clock(0.0)
POINTS = {1: 1.0, 2: 1.3, 3: 1.9, 4: 1.4, 8: 2.0, 16: 3.0, 64: 12.0}
CURVE = GivenCurve(POINTS)
SOME = recordings(8, seed=2)


@pytest.fixture(autouse=True)
def mock_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("decoding.decoder", "cost.measure", "replay.timed"):
        monkeypatch.setattr(f"ngramspec.{module}.time", CLOCK)


def target(seconds: Callable[[int], float] = CURVE.ratio, n_ctx: int = 4096, **options: object) -> MockTarget:
    # Token 3 ends the mock's own texts, and must not end a record.
    return MockTarget(300, seconds=seconds, clock=CLOCK, n_ctx=n_ctx, eog=(3,), **options)  # type: ignore[arg-type]


def total(timed: TimedReplay) -> Tally:
    tally = Tally()
    for one in timed.drafted.values():
        tally.merge(one)
    return tally


def ran(mock: MockTarget, *drafting: object) -> TimedReplay:
    timed = TimedReplay(mock, make_drafter("ngram"), *drafting)  # type: ignore[arg-type]
    for recording in SOME:
        timed.run(recording)
    return timed


def test_measured_and_modelled_agree_where_passes_take_what_they_take() -> None:
    timed = ran(target())
    assert total(timed).stats.tokens == sum(len(r.response) - 1 for r in SOME)
    # Were the target's own logits asked, hardly any of these drafts would be right.
    assert total(timed).stats.accepted > 50
    assert timed.measured() == pytest.approx(total(timed).speedup(timed.curve), rel=1e-6)
    assert timed.measured() > 1.1
    assert timed.measured_with_drafting() < timed.measured()
    assert timed.single == pytest.approx(1.0)
    assert timed.curve.switch == pytest.approx(0.0, abs=1e-9)


def test_plain_passes_are_really_run_over_the_same_tokens_at_the_same_contexts() -> None:
    mock, seen = target(), []
    evaluate = mock.evaluate

    def watched(tokens: Sequence[int]) -> object:
        seen.append((len(mock.tokens), list(tokens)))
        return evaluate(tokens)

    mock.evaluate = watched  # type: ignore[method-assign, assignment]
    timed = TimedReplay(mock, make_drafter("ngram"))
    recording = SOME[0]
    timed.run(recording)
    singles = [(depth, tokens[0]) for depth, tokens in seen if len(tokens) == 1]
    text = [*recording.prompt, *recording.response]
    # Every token but the last is fed at its place.
    assert set(singles) >= {(i, text[i]) for i in range(len(recording.prompt), len(text) - 1)}
    assert timed.plain == {"even": pytest.approx([1.0] * (len(recording.response) - 1))}
    assert mock.tokens[: len(recording.prompt)] == recording.prompt


def test_it_drafts_as_the_modelled_replay_does_at_the_same_costs() -> None:
    timed, replay = ran(target(), "fixed"), Replay(make_drafter("ngram"), "fixed", curve=CURVE)
    modelled: dict[str, Tally] = {}
    for recording in SOME:
        modelled.setdefault(recording.category, Tally()).merge(replay.run(recording))
    for category, tally in modelled.items():
        assert timed.drafted[category].batches == tally.batches
        assert timed.drafted[category].stats.accepted == tally.stats.accepted


def test_a_context_that_slows_passes_down_slows_both() -> None:
    mock = target()
    mock._seconds = lambda n: CURVE.ratio(n) * (1 + len(mock.tokens) / 500)
    timed = ran(mock)
    assert timed.measured() == pytest.approx(total(timed).speedup(timed.curve), rel=0.05)


def test_an_interruption_says_nothing() -> None:
    calls = itertools.count(1)
    timed = ran(target(lambda size: CURVE.ratio(size) * (1.0 if next(calls) % 97 else 100.0)), "fixed")
    calm = ran(target(), "fixed")
    assert calm.disturbed == 0 < timed.disturbed
    assert timed.measured() == pytest.approx(calm.measured(), rel=0.03)


def test_sizes_beyond_those_timed_cost_what_the_mean_slope_says() -> None:
    # The largest batch timed is cheaper than the one before it, and its neighbour's slope would lead below zero.
    falling = GivenCurve({1: 1.0, 8: 5.0, 16: 2.0, 64: 2.0})
    timed = TimedReplay(target(falling.ratio), make_drafter("ngram"), "fixed", 3)
    timed.run(SOME[0])
    assert timed.curve.ratio(16) == pytest.approx(2.0)
    assert timed.curve.ratio(64) == pytest.approx(2.0 + 48 / 15)


def test_what_does_not_fit() -> None:
    timed = TimedReplay(target(n_ctx=200), make_drafter("ngram"))
    assert timed.fits(Recording("c", "i", [1] * 100, [2] * 36))
    assert not timed.fits(Recording("c", "i", [1] * 100, [2] * 37))


def test_in_a_report() -> None:
    timed = TimedReplay(target(), make_drafter("ngram"))
    runs = Comparison(SOME, "ngram", {}, {}, timed=timed)
    nothing = runs.document()
    assert (nothing["transcripts"], nothing["complete"]) == (0, False)
    assert "timed" not in nothing
    assert len(list(runs.run())) == len(SOME)
    document = runs.document()
    rows = document["results"]["ngram@timed"]
    assert rows["overall"]["measured_speedup"] == document["timed"]["measured"] == pytest.approx(timed.measured())
    assert rows["overall"]["speedup"]["timed"] == document["timed"]["modelled"]
    assert document["timed"]["modelled_over_measured"] == pytest.approx(1.0, rel=1e-6)
    assert set(rows) == {"even", "odd", "overall", "macro"} == set(document["oracle"])
    assert list(document["curves"]) == ["timed"]
