"""How much to draft where a refusal means evaluating the pass again, in front of the next one."""

from __future__ import annotations

import itertools
import random

import pytest
from support.decoder_loop import Oracle, drive, model, unmeasured
from support.mock_target import plain_generate
from support.passes import Rich, passed

from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import Replay
from ngramspec.drafting.draft import Draft
from ngramspec.policies.cost_aware import CostPolicy
from ngramspec.policies.policy import Debt
from ngramspec.sampling.settings import Sampling

SIZES = range(1, 65)


def draft(acceptance: list[float]) -> Draft:
    return Draft(tuple(range(len(acceptance))), chances=tuple(acceptance))


def curve(slope: float) -> CostCurve:
    return CostCurve({1: 1.0, 64: 1 + 63 * slope})


def worth_of(k: int, acceptance: list[float], t: CostCurve, debt: Debt) -> float:
    """Tokens less seconds, by going through everything that may be refused; a second is worth a token."""
    value = 0.0
    for outcome in itertools.product((True, False), repeat=k):
        p = 1.0
        for right, a in zip(outcome, acceptance, strict=False):
            p *= a if right else 1 - a
        accepted = next((i for i, right in enumerate(outcome) if not right), k)
        seconds = t.ratio(debt.owed + 1 + k) + (debt.save if k else 0.0)
        if accepted < k:
            seconds += debt.restore + t.ratio(debt.owed + accepted + 2) - t.ratio(1)
        value += p * (1 + accepted - seconds)
    return value


@pytest.mark.parametrize("seed", range(60))
def test_the_length_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    acceptance = [rng.random() ** 0.3 for _ in range(6)]
    t = curve(rng.choice((0.02, 0.1, 0.4)))
    debt = Debt(rng.choice((0, 0, 3, 20)), rng.choice((0.0, 0.1, 0.5)), rng.choice((0.0, 0.1)))
    best = max(range(7), key=lambda k: worth_of(k, acceptance, t, debt))
    assert Rich().plan(draft(acceptance), t, SIZES, debt) == (best, 1 + best)


def test_a_refusal_costs() -> None:
    t, acceptance = curve(0.4), [0.7] * 8
    free, _ = Rich().plan(draft(acceptance), t, SIZES)
    cheap, _ = Rich().plan(draft(acceptance), t, SIZES, Debt(0, 0.0, 0.0))
    dear, _ = Rich().plan(draft(acceptance), t, SIZES, Debt(0, 0.5, 0.5))
    assert free > cheap >= dear == 0


def test_no_pass_is_larger_than_the_largest() -> None:
    k, size = Rich().plan(draft([0.99] * 60), curve(0.01), SIZES, Debt(40, 0.0, 0.0))
    assert size == 1 + k
    assert 40 + size <= 64


def run(p: float, slope: float, replay: Replay, tokens: int = 3000, seed: int = 0) -> tuple[float, int]:
    """(time over plain decoding's, tokens drafted) on a text of which each guess is right with probability p."""
    rng, policy, t = random.Random(seed), CostPolicy(), curve(slope)
    seconds, emitted, owed, drafted = 0.0, 0, 0, 0
    while emitted < tokens:
        k = 0
        if policy.limit():
            k, _ = policy.plan(draft([p] * 15), t, SIZES, Debt(owed, 0.0 if owed else replay.save, replay.restore))
        accepted = 0
        while accepted < k and rng.random() < p:
            accepted += 1
        spent = t.ratio(owed + 1 + k)
        overhead = (replay.save if k and not owed else 0.0) + (replay.restore if accepted < k else 0.0)
        policy.record(passed(1 + accepted, k, accepted, spent, overhead, 1.0))
        owed = owed + 1 + accepted if accepted < k else 0
        seconds += spent + overhead
        emitted += 1 + accepted
        drafted += k
    return seconds / emitted, drafted


@pytest.mark.parametrize("p", [0.2, 0.5, 0.7, 0.9, 0.98])
@pytest.mark.parametrize("slope", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("replay", [Replay(0.0, 0.0), Replay(0.1, 0.1), Replay(2.0, 2.0)], ids=str)
def test_never_slower(p: float, slope: float, replay: Replay) -> None:
    ratio, drafted = run(p, slope, replay)
    assert ratio < 1.02
    if p == 0.98 and slope == 0.05:
        assert ratio < 0.6
    if replay.save == 2.0 and p <= 0.7:
        assert drafted == 0


@pytest.mark.parametrize("replay", [Replay(0.0, 0.0), Replay(0.1, 0.1)], ids=str)
@pytest.mark.parametrize("slope", [0.05, 0.3])
def test_a_draft_that_is_refused_loses_a_text_little(slope: float, replay: Replay) -> None:
    t, policy = curve(slope), CostPolicy()
    for _ in range(50):  # a text that gained much
        policy.record(passed(16, 15, 15, t.ratio(16), 0.0, 1.0))
    policy.begin()
    seconds, owed = 0.0, 0
    for _ in range(64):
        k, _ = policy.plan(draft([0.98] * 15), t, SIZES, Debt(owed, 0.0 if owed else replay.save, replay.restore))
        overhead = (0.0 if owed else replay.save) + replay.restore if k else 0.0
        spent = t.ratio(owed + 1 + k)
        policy.record(passed(1, k, 0, spent, overhead, 1.0))
        owed = owed + 1 if k else 0
        seconds += spent + overhead
    # The funds at the beginning, what fades and is allowed meanwhile, and the last draft beyond them.
    assert seconds - 64 < 2 + 1 + 5 * slope + 2 * (replay.save + replay.restore)


@pytest.mark.parametrize("policy", ["fixed", "heuristic", "threshold", "entropy", "cost"])
@pytest.mark.parametrize("wrong", [0, 2, 3, 5, 9])
def test_the_text_is_plain_whatever_is_taken_back(policy: str, wrong: int) -> None:
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    expected = plain_generate(model(), prompt, 120, Sampling())
    mock = model(replays=True)
    decoder = unmeasured(mock, drafter=Oracle([*prompt, *expected], wrong), policy=policy)
    decoder.calibration.replay = Replay(0.01, 0.01)
    text, steps = drive(decoder, prompt, max_tokens=120)
    assert text == expected
    assert any(step.drafted for step in steps)
    assert mock.batches == [step.batch for step in steps if step.batch]
    if wrong:
        assert any(step.batch > 1 + len(step.drafted) for step in steps)
