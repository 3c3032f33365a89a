"""Tests of the loop alone: calls of the drafter, plans, reports to the policy, and passes over several texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoder_loop import Oracle
from support.mock_shared import MockShared
from support.mock_target import plain_generate

from ngramspec.backend import ExactnessMode, ModelBase
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import DraftedText, Drafts, Plan, Text, no_draft
from ngramspec.drafting.draft import NO_DRAFT, Ask, Draft, Drafter
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.policy import FixedPolicy
from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step
from ngramspec.tokens import TokenTable


class Parrot(Drafter):
    """Drafter that always proposes 1, 2, 3, ... and records its arguments."""

    name = "parrot"

    def __init__(self, *, estimates: bool = True) -> None:
        self.estimates = estimates
        self.asked: list[tuple[int, bool]] = []
        self.told: list[tuple[int, ...]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.told = [tuple(prompt)]

    def propose(self, ask: Ask) -> Draft:
        self.asked.append((ask.limit, ask.fixed_length))
        tokens = tuple(range(1, ask.limit + 1))
        return Draft(tokens, acceptance_probs=(0.5,) * ask.limit) if self.estimates else Draft(tokens[:4])

    def accept(self, tokens: Sequence[int]) -> int:
        self.told.append(tuple(tokens))
        return len(tokens) - 1


class Recorder(FixedPolicy):
    """Policy that pads a draft of at most three tokens by one, reads logits, and records its passes."""

    wants_logits = True

    def __init__(self, most: int = 8) -> None:
        super().__init__(most)
        self.passes: list[Step] = []
        self.costs: list[RestoreCost | None] = []
        self.rows: list[list[float]] = []

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        self.costs.append(restore)
        length = min(3, super().plan(draft, times, sizes)[0])
        return length, length + 2

    def record(self, done: Step) -> None:
        self.passes.append(done)

    def observe_logits(self, row: NDArray[np.float32]) -> None:
        self.rows.append(row.tolist())


class Alone(DecodingLoop):
    """The drafting side of one text, on a model that is never called."""

    def __init__(self, drafter: Drafter | None, most: int = 8, sizes: Sequence[int] = range(1, 17), **how: Any) -> None:
        self.recorder, self.model = Recorder(most), ModelBase()
        super().__init__(self.recorder, clock=lambda: 0.0)
        self.model.max_batch = 64
        self.text = DraftedText(Drafts(drafter, self.policy), self.model)
        self.text.last = 8
        self.prepare(make_fixed_curve({1: 1.0, 16: 2.5}), sizes)
        self.text.drafts.begin([7, 8], **how)
        self.text.drafts.first(9)

    def plan_next(self, left: int = 100, owed: int = 0) -> Plan:
        self.text.tokens_left, self.model.owed = left, owed
        return self.plan(self.text, owed)

    def end_pass(self, done: Step, size: int, seconds: float = 1.0, planning: float = 0.0) -> Step:
        """Report a pass over `size` tokens that resulted in the step `done`."""
        current = Pass((self.text,), (no_draft(size),), size, 0, self.text.drafts.proposal is not None)
        current.seconds, current.planning_seconds = seconds, planning
        self.finish(current, done)
        return done


def test_decoding_loop_calls_drafter_and_policy_in_each_pass() -> None:
    drafter = Parrot()
    loop = Alone(drafter)
    plan = loop.plan_next()
    assert (plan.draft.tokens, plan.size, plan.ends, plan.verified_draft) == ((1, 2, 3), 5, False, plan.draft)
    assert loop.text.drafts.proposal is not None
    assert loop.text.drafts.proposal.tokens == tuple(range(1, 9))
    done = loop.end_pass(Step((1, 2, 5), drafted=(1, 2, 3), accepted=2), 5, 1.4, 0.25)
    assert (done.batch, done.seconds, done.cost, done.correct_guesses) == (5, 1.4, 1.4, 2)
    assert (done.draft_seconds, done.draft_cost) == (0.25, 0.25)
    assert loop.recorder.passes == [done]
    assert drafter.told == [(7, 8), (9,), (1, 2, 5)]
    assert loop.times is not None
    assert loop.times.last == 5


@pytest.mark.parametrize(
    ("most", "left", "sizes", "asked"),
    [(8, 100, range(1, 17), 8), (8, 4, range(1, 17), 3), (40, 100, range(1, 17), 15), (8, 100, (2, 4), 3)],
)
def test_decoding_loop_limits_draft_to_policy_text_and_batch(
    most: int, left: int, sizes: Sequence[int], asked: int
) -> None:
    drafter = Parrot()
    Alone(drafter, most, sizes, fixed_length=True).plan_next(left)
    assert drafter.asked == [(asked, True)]


@pytest.mark.parametrize(("most", "left"), [(0, 100), (8, 1)])
def test_decoding_loop_without_room_for_drafts_skips_drafter(most: int, left: int) -> None:
    drafter = Parrot()
    loop = Alone(drafter, most)
    assert loop.plan_next(left) == no_draft(1)
    assert loop.text.drafts.proposal is None
    assert drafter.asked == []
    done = loop.end_pass(Step((4,)), 1, 1.0, 0.25)
    assert done.draft_seconds == 0.0  # The loop did not call the drafter, so the drafter took no time.
    assert drafter.told[-1] == (4,)


def test_decoding_loop_without_drafter_only_updates_times() -> None:
    loop = Alone(None, sizes=(2, 4))
    loop.text.observe_logits(NO_DRAFT, np.empty((1, 0), np.float32))  # nothing reads these
    assert loop.end_pass(Step((3,)), 2, 0.5).cost == pytest.approx(0.5)
    assert loop.recorder.passes == loop.recorder.rows == []
    assert loop.times is not None
    assert loop.times.last == 2


@pytest.mark.parametrize(("fixed_length", "length"), [(False, 4), (True, 8)])
def test_decoding_loop_estimates_probabilities_of_drafts_without_them(fixed_length: bool, length: int) -> None:
    """With `fixed_length`, the estimates cover as many tokens as the loop requested, however many the drafter drew."""
    loop = Alone(Parrot(estimates=False), fixed_length=fixed_length)
    for _ in range(300):
        loop.plan_next()
        loop.end_pass(Step((1, 2, 9), drafted=(1, 2, 3), accepted=2), 5)
    loop.plan_next()
    assert loop.text.drafts.proposal is not None
    chances = loop.text.drafts.proposal.acceptance_probs
    assert len(chances) == length
    assert chances[0] > chances[1] - 0.1 > 0.7
    assert chances[2] < 0.2


class Allowing(GrammarGuide):
    """Guide that allows given tokens, forces none, and records its arguments."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.told: list[tuple[int, int, Sequence[int]]] = []

    def shape(self, draft: Draft, limit: int, *, fixed_length: bool = False) -> Draft:
        return draft if fixed_length else draft.head(self.legal(draft))

    def legal(self, draft: Draft) -> int:
        return next((i for i, token in enumerate(draft.tokens) if token not in self.allowed), len(draft))

    def learn(self, n_sent: int, n_accepted: int, tokens: Sequence[int]) -> None:
        self.told.append((n_sent, n_accepted, tokens))


@pytest.mark.parametrize(
    ("end", "allowed", "fixed_length", "verified", "sent", "size", "ends"),
    [
        (2, None, False, (1, 2), (1, 2), 3, True),
        (3, None, False, (1, 2, 3), (1, 2, 3), 5, True),
        (4, None, False, (1, 2, 3), (1, 2, 3), 5, False),
        # The guide cuts the draft before the policy plans it.
        (3, (1, 2), False, (1, 2), (1, 2), 4, False),
        # The first forbidden token was drawn, so it is verified. The size is the smallest one that the rest allows.
        (3, (1, 2), True, (1, 2, 3), (1, 2), 3, False),
        (3, (1, 2, 3), True, (1, 2, 3), (1, 2, 3), 5, True),
        (3, (), True, (1,), (), 1, False),
    ],
)
def test_decoding_loop_sends_no_token_after_the_end_or_against_the_guide(
    end: int,
    allowed: tuple[int, ...] | None,
    fixed_length: bool,
    verified: tuple[int, ...],
    sent: tuple[int, ...],
    size: int,
    ends: bool,
) -> None:
    guide = None if allowed is None else Allowing(*allowed)
    loop = Alone(Parrot(), guide=guide, ends=TokenTable(lambda token: token == end), fixed_length=fixed_length)
    plan = loop.plan_next()
    assert (plan.verified_draft.tokens, plan.draft.tokens, plan.size, plan.ends) == (verified, sent, size, ends)
    loop.end_pass(Step((1, 9), drafted=sent, accepted=1), plan.size)
    assert guide is None or guide.told == [(len(sent), 1, (1, 9))]


def test_decoding_loop_shows_deciding_logits_to_policy() -> None:
    loop, rows = Alone(Parrot()), np.arange(12, dtype=np.float32).reshape(4, 3)
    loop.text.observe_logits(NO_DRAFT, rows[:1])
    loop.text.observe_logits(loop.plan_next().draft, rows, n_accepted=1)
    assert loop.recorder.rows == [[0, 1, 2], [3, 4, 5]]


def test_decoding_loop_with_owed_tokens_shortens_draft() -> None:
    drafter = Parrot()
    loop = Alone(drafter, sizes=range(1, 9))
    loop.plan_next()
    times = PassTimes()
    times.observe(1, 1.0)
    times.observe_copy(0.25, is_load=False)
    times.observe_copy(0.5, is_load=True)
    loop.model.replays = True
    loop.prepare(times, range(1, 9))
    for owed in (0, 3):
        loop.plan_next(owed=owed)
    # The checkpoint before the owed tokens still exists, so it costs nothing.
    assert loop.recorder.costs == [None, RestoreCost(0.25, 0.5), RestoreCost(0.0, 0.5, 3)]
    assert [limit for limit, _ in drafter.asked] == [7, 7, 4]
    assert loop.plan_next(owed=7) == no_draft(1)


# --------------------------------------------------------------------------- several texts


class SharedRecorder(CostPolicy):
    """Policy that records the steps of whole passes."""

    def for_n_sequences(self, texts: int) -> CostPolicy:
        self.recorded: list[Step] = []
        shared = super().for_n_sequences(texts)
        shared.record = self.recorded.append  # type: ignore[method-assign]
        return shared


class Guesser(Oracle):
    """Drafter that knows the text and calls three of its guesses right."""

    def accept(self, tokens: Sequence[int]) -> int:
        super().accept(tokens)
        return 3


def make_pass(
    model: MockShared, numbers: Sequence[int], slope: float, **exactness: Any
) -> tuple[SharedRecorder, list[Step]]:
    """Make a pass over texts in these sequences, of which all after the first end after three more tokens."""
    policy = SharedRecorder(4)
    loop = DecodingLoop(policy, model.clock.perf_counter, model)
    loop.exactness = ExactnessMode(**exactness)
    loop.prepare(make_fixed_curve({1: 1.0, 64: 1.0 + 63 * slope}), range(1, 65))
    texts = []
    for number in numbers:
        sequence, prompt = model.sequences[number], [number, 1, 2]
        request = Request(prompt, 4 if number else 50)
        text = Text(request, sequence, sequence)
        text.begin(Drafts(Guesser(plain_generate(MockShared(1).sequences[0], prompt, 50, Sampling()))), sequence)
        text.first(sequence.prefill(prompt)[np.newaxis])
        text.drafts.first(text.last)
        texts.append(text)
    current = loop.submit(texts)
    loop.commit(current)
    return policy, [step for step in loop.report(current) if step is not None]


@pytest.mark.parametrize(("slope", "sizes", "filled"), [(0.1, None, True), (1.0, None, False), (0.1, (1, 2), False)])
def test_idle_sequence_between_two_texts_joins_if_that_is_cheaper(
    slope: float, sizes: tuple[int, ...] | None, filled: bool
) -> None:
    """Without the one between, texts in separate caches take two batches."""
    model = MockShared(3, split=True)
    model.sequences[1].prefill([7, 8, 9])
    make_pass(model, (0, 2), slope, sizes=sizes)
    assert {number for number, _ in model.passes[-1]} == ({0, 1, 2} if filled else {0, 2})
    assert model.sequences[1].tokens == [7, 8, 9]


def test_texts_share_the_costs_of_their_pass() -> None:
    model = MockShared(2)
    policy, steps = make_pass(model, (0, 1), 0.001)
    (whole,) = policy.recorded
    assert [step.batch for step in steps] == [5, 3]
    assert whole.batch == 8
    assert whole.tokens == (*steps[0].tokens, *steps[1].tokens)
    assert (whole.accepted, whole.correct_guesses) == (6, 3)
    assert [step.seconds for step in steps] == pytest.approx([5 / 8 * whole.seconds, 3 / 8 * whole.seconds])
    assert [step.draft_seconds for step in steps] == [whole.draft_seconds / 2] * 2
    # A plain pass gives each text a token, so it costs each of them one.
    assert [step.cost for step in steps] == pytest.approx([2 * 5 / 8 * whole.cost, 2 * 3 / 8 * whole.cost])
    assert [step.draft_cost for step in steps] == [whole.draft_cost] * 2
