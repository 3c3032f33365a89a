"""Tests that decoding with drafts, however bad, is never slower than plain decoding by more than a stated bound.

The first tests use the cost policy alone on a simulated clock. They vary cost curves, qualities of drafts and numbers
of texts that share a pass. Then follow the passes of `serve` on a mock model. Times are in units of a pass over one
token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
from support.grid import grid
from support.mock_shared import MockShared
from support.mock_target import MockTarget, plain_generate

from ngramspec.backend import ExactnessMode
from ngramspec.batching.request import ActiveRequest
from ngramspec.batching.writer import Writer
from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.decoding.drafts import Drafts as TextDrafts
from ngramspec.drafting.draft import NO_DRAFT, Draft, Drafter
from ngramspec.policies.cost import CostPolicy
from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step
from ngramspec.tokens import common_prefix

Cost = Callable[[int], float]

SIZES = range(1, 65)
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

    def next(self, rng: random.Random) -> tuple[Draft, int]:
        """Return a draft and the number of its correct tokens."""
        right = next((i for i in range(self.length) if rng.random() >= self.right), self.length)
        chances = (self.claimed,) * self.length
        return Draft((7,) * self.length, acceptance_probs=chances, repeats=self.repeats), right


NOTHING, GOOD = Drafts(0.0, 0.0, 0), Drafts(0.9, 0.9)
QUALITIES = {
    "nothing": NOTHING,
    "wrong and sure": Drafts(0.0, 0.95),
    "wrong and unsure": Drafts(0.0, 0.3),
    "too optimistic": Drafts(0.15, 0.7),
    "poor": Drafts(0.4, 0.4),
    "good": GOOD,
}


@dataclass
class Machine:
    """Simulation of the cost policy with known durations of passes.

    Args:
        cost: Cost of a pass by its size.
        believed: What passes cost according to a stored file; `None` means the true costs.
        texts: Number of texts that share each pass.
        ask: Cost of a call of the drafters.
        restore: Cost of a checkpoint and of its restoration, if tokens are evaluated again after a refusal.
        switch: Cost of a change of the size.
        capture: Cost of a change of the size for the second pass of the new size.
        interrupted: Share of passes that the system interrupts, for the time of up to three plain passes.
    """

    cost: Cost
    believed: Cost | None = None
    texts: int = 1
    ask: float = 0.01
    restore: RestoreCost | None = None
    switch: float = 0.0
    capture: float = 0.0
    interrupted: float = 0.0

    def __post_init__(self) -> None:
        points = {n: (self.believed or self.cost)(n) / self.cost(1) for n in SIZES}
        self.times = PassTimes(points, (self.switch, self.capture))
        self.budget = CostPolicy()
        self.seconds = 0.0
        self.tokens = self.passes = self.asked = self.drafted = 0
        self.since: int | None = None
        """Number of passes before the first draft of the last run."""
        self._rng = random.Random(0)
        self._owed, self._last, self._has_changed = 0, 1, False

    def run(self, tokens: int, drafts: Drafts) -> float:
        """Return the time for this number of tokens of all texts, relative to plain decoding."""
        seconds, began, passes = self.seconds, self.tokens, self.passes
        self.since = None
        while self.tokens < began + tokens:
            drafted = self.drafted
            self._pass(drafts)
            if self.drafted > drafted and self.since is None:
                self.since = self.passes - passes
        plain = self.cost(self.texts) / self.texts
        return (self.seconds - seconds) / ((self.tokens - began) * plain)

    def _pass(self, kind: Drafts) -> None:
        n, policy, times = self.texts, self.budget.for_n_sequences(self.texts), self.times.for_plain(self.texts)
        asks = policy.limit() > 0
        guesses = [kind.next(self._rng) if asks else (NO_DRAFT, 0) for _ in range(n)]
        restore = times.restore(self._owed) if self.restore is not None else None
        drafts = [draft for draft, _ in guesses]
        if n == 1:
            planned = [policy.plan(drafts[0], times, SIZES, restore)]
        else:
            planned = policy.plan_batch(drafts, times, SIZES, lambda parts: [sum(parts)])
        size = self._owed + sum(size for _, size in planned)
        sent = sum(k for k, _ in planned)
        kept = sum(min(k, right) for (k, _), (_, right) in zip(planned, guesses, strict=True))
        overhead = self.ask * asks
        if self.restore is not None:
            if sent and not self._owed:
                overhead += self.restore.save
                times.observe_copy(self.restore.save, is_load=False)
            if kept < sent:
                overhead += self.restore.load
                times.observe_copy(self.restore.load, is_load=True)
            self._owed = self._owed + 1 + kept if kept < sent else 0
        spent = self.cost(size)
        if size != self._last:
            spent += self.switch
        elif self._has_changed:
            spent += self.capture
        if self._rng.random() < self.interrupted:
            spent += self._rng.uniform(0, 3)
        done = Step(
            (7,) * (n + kept),
            drafted=(7,) * sent,
            accepted=kept,
            correct_guesses=sum(right for _, right in guesses) // n,
            batch=size,
        )
        done.cost, done.correction, _ = times.observe(size, spent)
        done.draft_cost = overhead / times.level
        policy.record(done)
        self._has_changed, self._last = size != self._last, size
        self.seconds += spent + overhead
        self.tokens += n + kept
        self.passes += 1
        self.asked += asks
        self.drafted += sent


KINDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "slow to ask": {"ask": 0.1},
    "two": {"texts": 2},
    "four": {"texts": 4},
    "eight": {"texts": 8},
    "replaying": {"restore": RestoreCost(0.0, 0.0)},
    "replaying, expensive": {"restore": RestoreCost(0.1, 0.1)},
    "replaying, too expensive": {"restore": RestoreCost(2.0, 2.0)},
    "switching": {"switch": 0.3},
    "switching, expensive": {"switch": 1.0},
    "capturing": {"switch": 1.0, "capture": 2.0},
}


@grid(kind=KINDS, curve=CURVES, drafts=QUALITIES)
def test_cost_policy_never_exceeds_plain_decoding_by_more_than_bound(kind: str, curve: str, drafts: str) -> None:
    """The loss is at most 2 % and ten plain passes."""
    machine = Machine(CURVES[curve], **KINDS[kind])
    machine.run(3000, QUALITIES[drafts])
    plain = machine.cost(machine.texts)
    assert machine.seconds <= (1.02 * machine.tokens / machine.texts + 10) * plain


@pytest.mark.parametrize(
    ("kind", "curve", "most"),
    [
        ("alone", "typical", 0.75),
        ("alone", "flat", 0.2),
        ("four", "a little more each", 0.5),
        ("replaying", "a little more each", 0.5),
        ("switching", "typical", 0.8),
        ("switching", "flat", 0.2),
        ("switching, expensive", "flat", 0.2),
        ("capturing", "flat", 0.2),
    ],
)
def test_cost_policy_with_good_drafts_reduces_time(kind: str, curve: str, most: float) -> None:
    assert Machine(CURVES[curve], **KINDS[kind]).run(4000, GOOD) < most


@grid(
    claimed=(0.6, 0.9, 0.99),
    slope=(0.05, 0.25, 0.6),
    kind=("alone", "replaying, expensive", "switching"),
    repeats=(False, True),
)
def test_cost_policy_after_savings_limits_loss_of_short_text(
    claimed: float, slope: float, kind: str, repeats: bool
) -> None:
    """In every text, confident copies are wrong, and a refused draft of 15 tokens costs up to nine plain passes."""
    machine = Machine(lambda n: 1 + slope * (n - 1), **{**KINDS[kind], "ask": 0.0})
    machine.run(5000, Drafts(0.97, 0.97))
    for _ in range(20):
        machine.budget.begin()
        lost = (machine.run(64, Drafts(0.0, claimed, repeats=repeats)) - 1) * 64
        # The terms are START, CREDIT, what fades and is allowed meanwhile, and the last draft beyond the budget.
        assert lost < 0.5 + 1 + 1 + 5 * slope + 4 * (machine.switch + (0.1 if machine.restore else 0.0))


@grid(ask=(0.0025, 0.02, 0.1), before=(NOTHING, Drafts(0.0, 0.6), Drafts(0.0, 0.95)))
def test_cost_policy_resumes_drafting_when_drafts_improve(ask: float, before: Drafts) -> None:
    """Losses in 4,000 tokens must not prevent drafts in the next 2,000."""
    machine = Machine(CURVES["typical"], ask=ask)
    machine.run(4000, before)
    ratio = machine.run(2000, GOOD)
    assert machine.since is not None
    assert machine.since < 500
    assert ratio < 0.9


@pytest.mark.parametrize("ask", [0.0005, 0.01, 0.05, 1.0])
def test_cost_policy_without_drafts_asks_drafter_less_often(ask: float) -> None:
    machine = Machine(CURVES["typical"], ask=ask)
    machine.run(2000, NOTHING)
    assert machine.asked >= 2000 / 150  # This is often enough to notice a change.
    assert machine.asked * ask <= max(0.01, 0.07 * ask) * machine.seconds
    # A draft that the policy sends ends the pauses.
    machine.run(400, Drafts(0.95, 0.95))
    machine.asked = machine.passes = 0
    machine.run(400, Drafts(0.95, 0.95))
    if ask < 0.5:
        assert machine.asked >= 0.9 * machine.passes


@pytest.mark.parametrize(("true", "believed", "p"), [(0.6, 0.1, 0.5), (0.9, 0.3, 0.7)])
def test_cost_policy_with_wrong_cost_curve_corrects_it(true: float, believed: float, p: float) -> None:
    """The curve may be from a short context with cheaper batches; only passes with a draft reveal the difference."""
    machine = Machine(lambda n: 1 + true * (n - 1), believed=lambda n: 1 + believed * (n - 1))
    assert machine.run(4000, Drafts(p, p)) < 1.03
    assert machine.times.level == pytest.approx(1.0, rel=0.1)


def test_cost_policy_with_interrupted_calls_still_drafts() -> None:
    """One pass in five is interrupted, and drafts still pay as without interruptions."""
    drafted = []
    for share in (0.0, 0.2):
        machine = Machine(CURVES["typical"], ask=0.0, interrupted=share)
        machine.run(2000, Drafts(0.85, 0.85))
        drafted.append(machine.drafted)
    assert drafted[1] > 0.8 * drafted[0] > 0


class Guess(Drafter):
    """Drafter that knows the text and is correct with probability `right`, but gives no estimates."""

    name = "guess"

    def __init__(self, text: Sequence[int], right: float, seed: int) -> None:
        self._text, self._right, self._random = list(text), right, random.Random(seed)
        self._guess: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self._at = 0

    def propose(self, limit: int, choose: object = None, *, fixed_length: bool = False, price: object = None) -> Draft:
        true = self._text[self._at : self._at + min(limit, 8)]
        self._guess = [t if self._random.random() < self._right else (t + 1) % 16 for t in true]
        return Draft(tuple(self._guess), source="guess")

    def accept(self, tokens: Sequence[int]) -> int:
        self._at += len(tokens)
        return common_prefix(self._guess, tokens)


@cache
def known(number: int, tokens: int) -> tuple[int, ...]:
    """Return the mock model's continuation of the prompt of a sequence."""
    return tuple(plain_generate(MockTarget(peak=3.0), [1, number], tokens, Sampling()))


@cache
def seconds(curve: str, texts: int, split: bool, right: float | None) -> float:
    """Return the time on the mock's clock to generate the texts; `None` for `right` means without drafts."""
    tokens = min(400, 1600 // texts)
    cost = lambda n: 0.01 * CURVES[curve](n)  # noqa: E731
    model = MockShared(texts, split=split, seconds=cost, peak=3.0)
    clock = model.clock.perf_counter
    times = PassTimes({n: CURVES[curve](n) for n in SIZES})
    writer = Writer(model, times, ExactnessMode(), drafts=right is not None, draft_max=63, clock=clock)
    requests = []
    for sequence in model.sequences:
        request = ActiveRequest(Request([1, sequence.number], tokens), lambda _: None, clock)
        request.prepare(sequence, n_ctx=sequence.n_ctx, n_vocab=sequence.n_vocab, counts_calls=False)
        guess = Guess(known(sequence.number, tokens), right or 0.0, sequence.number)
        request.start(sequence, TextDrafts(guess), aligned=False, max_chunk=lambda: 512)
        while request.reader is not None:
            request.read()
        requests.append(request)
    began = model.clock.now
    while requests:
        writer.step(requests)
        requests = [request for request in requests if request.text is not None and request.text.stop is None]
    return model.clock.now - began


@grid(curve=CURVES, texts=(1, 2, 4, 8), right=(0.5, 0.0, 0.95), split=(False, True))
def test_cost_policy_with_several_texts_never_exceeds_time_bound(
    curve: str, texts: int, right: float, split: bool
) -> None:
    drafted, plain = (seconds(curve, texts, split, chance) for chance in (right, None))
    # Each number of texts has a separate loss budget, and after accepted drafts the texts end one after the other.
    assert drafted <= 1.02 * plain + 0.01 * sum(map(CURVES[curve], range(1, texts + 1)))
    if curve == "flat" and right > 0.9:
        assert drafted < 0.5 * plain
