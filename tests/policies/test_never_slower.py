"""Tests that decoding with drafts, however bad, is never slower than plain decoding by more than a stated bound.

The cost policy decodes alone on a simulated machine, and in the passes of `serve` on a mock model. Times are in plain
passes. Wrong costs, and what disturbs their measurement, are the subject of `test_promise.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from support.decoder_loop import Oracle
from support.grid import grid
from support.mock_shared import MockShared
from support.mock_target import MockTarget, plain_generate
from support.passes import make_step
from support.simulation import SIZES, Decoding, Machine

from ngramspec.backend import ExactnessMode
from ngramspec.batching.request import ActiveRequest
from ngramspec.batching.writer import Writer
from ngramspec.cost.times import PassTimes
from ngramspec.decoding.text import Drafts as TextDrafts
from ngramspec.drafting.draft import Draft
from ngramspec.policies.budget import LossBudget
from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling

Cost = Callable[[int], float]

CURVES: dict[str, Cost] = {
    "flat": lambda n: 1.0,
    "a little more each": lambda n: 1 + 0.05 * (n - 1),
    "typical": lambda n: 1 + 0.25 * (n - 1),
    "steep": lambda n: 1 + 0.6 * (n - 1),
    "no gain": float,
    "knee": lambda n: max(1.0, n / 8),
    # In a mixture of experts, two tokens cost much more than one, and further tokens add little.
    "experts": lambda n: 1 + 1.5 * min(n - 1, 1) + 0.2 * max(0, n - 2),
}


class Drafts(NamedTuple):
    """The quality of a drafter: the probability that a guess is correct, and the drafter's estimate of it."""

    right: float
    claimed: float
    length: int = 15
    repeats: bool = False  # `repeats` of its drafts

    def decode(self, decoding: Decoding, tokens: int) -> float:
        """Return the time for this number of tokens, relative to plain decoding."""
        rng, began = decoding.machine.random, len(decoding.ends) - 1
        draft = Draft((7,) * self.length, acceptance_probs=(self.claimed,) * self.length, repeats=self.repeats)
        while len(decoding.ends) <= began + tokens:
            decoding.step(
                lambda: (draft, next((i for i in range(self.length) if rng.random() >= self.right), self.length))
            )
        return (decoding.ends[-1] - decoding.ends[began]) / (len(decoding.ends) - 1 - began)


NOTHING, GOOD = Drafts(0.0, 0.0, 0), Drafts(0.9, 0.9)
QUALITIES = {
    "nothing": NOTHING,
    "wrong and sure": Drafts(0.0, 0.95),
    "wrong and unsure": Drafts(0.0, 0.3),
    "too optimistic": Drafts(0.15, 0.7),
    "poor": Drafts(0.4, 0.4),
    "good": GOOD,
}
KINDS: dict[str, dict[str, Any]] = {
    "alone": {"ask": 0.01},
    "slow to ask": {"ask": 0.1},
    "replaying": {"restore": (0.0, 0.0)},
    "replaying, expensive": {"restore": (0.1, 0.1)},
    "replaying, too expensive": {"restore": (2.0, 2.0)},
    "switching": {"changes": (0.3, 0.0)},
    "switching, expensive": {"changes": (1.0, 0.0)},
    "capturing": {"changes": (1.0, 2.0)},
}


@grid(kind=KINDS, curve=CURVES, drafts=QUALITIES)
def test_cost_policy_never_exceeds_plain_decoding_by_more_than_bound(kind: str, curve: str, drafts: str) -> None:
    """The loss is at most 2 % and ten plain passes."""
    ratio = QUALITIES[drafts].decode(Decoding(Machine(CURVES[curve], **KINDS[kind])), 3000)
    assert ratio <= 1.02 + 10 / 3000


@pytest.mark.parametrize(("curve", "most"), [("typical", 0.8), ("flat", 0.2)])
@pytest.mark.parametrize("kind", ["alone", "replaying", "switching", "switching, expensive", "capturing"])
def test_cost_policy_with_good_drafts_reduces_time(kind: str, curve: str, most: float) -> None:
    assert GOOD.decode(Decoding(Machine(CURVES[curve], **KINDS[kind])), 4000) < most


@grid(
    claimed=(0.6, 0.9, 0.99),
    slope=(0.05, 0.25, 0.6),
    kind=({}, {"restore": (0.1, 0.1)}, {"changes": (0.3, 0.0)}),
    repeats=(False, True),
)
def test_cost_policy_after_savings_limits_loss_of_short_text(
    claimed: float, slope: float, kind: dict[str, Any], repeats: bool
) -> None:
    """In every text, confident copies are wrong, and a refused draft of 15 tokens costs up to nine plain passes."""
    decoding = Decoding(Machine(lambda n: 1 + slope * (n - 1), **kind))
    Drafts(0.97, 0.97).decode(decoding, 5000)
    for _ in range(20):
        decoding.policy.begin()
        lost = (Drafts(0.0, claimed, repeats=repeats).decode(decoding, 64) - 1) * 64
        # The terms are START, CREDIT, what fades and is allowed meanwhile, and the last draft beyond the budget.
        assert lost < 0.5 + 1 + 1 + 5 * slope + (0.4 if "restore" in kind else 1.2 if kind else 0.0)


@grid(ask=(0.0025, 0.02, 0.1), before=(NOTHING, Drafts(0.0, 0.6), Drafts(0.0, 0.95)))
def test_cost_policy_resumes_drafting_when_drafts_improve(ask: float, before: Drafts) -> None:
    """Losses in 4,000 tokens must not prevent drafts in the next 2,000."""
    decoding = Decoding(Machine(CURVES["typical"], ask=ask))
    before.decode(decoding, 4000)
    drafted = decoding.drafted
    assert GOOD.decode(decoding, 500) < 1.02
    assert decoding.drafted > drafted
    assert GOOD.decode(decoding, 1500) < 0.9


@pytest.mark.parametrize("ask", [0.0005, 0.01, 0.05, 1.0])
def test_cost_policy_without_drafts_asks_drafter_less_often(ask: float) -> None:
    decoding = Decoding(Machine(CURVES["typical"], ask=ask))
    NOTHING.decode(decoding, 2000)
    assert decoding.asked >= 2000 / 150  # This is often enough to notice a change.
    assert decoding.asked * ask <= max(0.01, 0.07 * ask) * decoding.ends[-1]
    # A draft that the policy sends ends the pauses.
    Drafts(0.95, 0.95).decode(decoding, 400)
    decoding.asked = decoding.passes = 0
    Drafts(0.95, 0.95).decode(decoding, 400)
    assert ask >= 0.5 or decoding.asked >= 0.9 * decoding.passes


def decode_together(curve: str, texts: int, split: bool, wrong: int) -> tuple[float, float]:
    """Return the time on the mock's clock for texts, and for the same tokens in plain passes of as many texts.

    Every guess at a `wrong`-th position is wrong.
    """
    tokens = min(400, 1600 // texts)
    model = MockShared(texts, split=split, seconds=lambda n: 0.01 * CURVES[curve](n), peak=3.0)
    clock = model.clock.perf_counter
    times = PassTimes({n: CURVES[curve](n) for n in SIZES})
    writer = Writer(model, times, ExactnessMode(), drafts=True, draft_max=63, clock=clock)
    requests = []
    for sequence in model.sequences:
        request = ActiveRequest(Request([1, sequence.number], tokens), lambda _: None, clock)
        request.prepare(sequence, sequence, counts_calls=False)
        text = plain_generate(MockTarget(peak=3.0), [1, sequence.number], tokens, Sampling())
        request.start(sequence, TextDrafts(Oracle(text, wrong)), aligned=False, max_chunk=lambda: 512)
        while request.reader is not None:
            request.read()
        requests.append(request)
    began, plain = model.clock.now, 0.0
    while requests:
        sequences = [request.sequence for request in requests if request.sequence]
        n_tokens = sum(len(step.tokens) for _, step, *_ in writer.step(requests) if step is not None)
        parts = model.batches([1] * len(sequences), sequences)
        plain += n_tokens / len(requests) * sum(0.01 * CURVES[curve](part) for part in parts)
        requests = [request for request in requests if request.text is not None and request.text.stop is None]
    return model.clock.now - began, plain


@grid(curve=CURVES, texts=(1, 2, 4, 8), wrong=(2, 1, 20), split=(False, True))
def test_cost_policy_with_several_texts_never_exceeds_time_bound(
    curve: str, texts: int, wrong: int, split: bool
) -> None:
    drafted, plain = decode_together(curve, texts, split, wrong)
    # After accepted drafts the texts end one after the other, and each number of texts has a separate loss budget.
    assert drafted <= 1.02 * plain + 0.01 * sum(map(CURVES[curve], range(1, texts + 1)))
    if curve in ("flat", "a little more each") and wrong == 20:
        assert drafted < 0.5 * plain


# --------------------------------------------------------------------------- entries of the budget


def book(budget: LossBudget, *passes: tuple[int, int, int, float, float]) -> LossBudget:
    """Record passes: emitted, drafted and correctly guessed tokens, their cost, and that of the drafter."""
    for done in passes:
        budget.record(make_step(*done), drafting=done[1] > 0)
    return budget


def test_loss_budget_book_adds_saved_time_and_subtracts_cost() -> None:
    budget, done = LossBudget(), make_step(1, 4, 0, 1.4, 0.1)
    done.correction = 0.25
    budget.record(done, drafting=True)
    assert budget.remaining == pytest.approx(1.0 - 1.5 - 0.25 + LossBudget.ALLOWANCE * 1.5 + LossBudget.CREDIT)


def test_loss_budget_of_new_text_forgets_inherited_loss_alone() -> None:
    budget, fresh = LossBudget(), LossBudget()
    book(budget, (1, 4, 0, 2.5, 0.0)).begin()
    for each in (budget, fresh):
        book(each, (1, 2, 0, 1.5, 0.0))
    assert budget.remaining < fresh.remaining - 1
    for _ in range(2):
        budget.forget_inherited_loss()
        assert budget.remaining == pytest.approx(fresh.remaining, abs=0.02)


@pytest.mark.parametrize(("n_accepted", "pays"), [(2, False), (3, True)])
def test_can_draft_after_many_unverified_drafts_requires_net_gain(n_accepted: int, pays: bool) -> None:
    """Every second draft is accepted and saves one or two passes; the other one loses one."""
    budget, n_calls = LossBudget(), 0
    for right in (n_accepted, 0) * 50:
        book(budget, (1 + right, 3, right, 2.0, 0.0))
        for _ in range(4):
            draft_cost = 0.04 if budget.can_draft() else 0.0
            n_calls += draft_cost > 0
            book(budget, (1, 0, 0, 1.0, draft_cost))
    assert n_calls == 400 if pays else n_calls < 200
