"""Tests of the drafting side of the loop alone: its calls of the drafter, its passes, and its reports to the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ngramspec.backend import ModelBase
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import DraftedText, Drafts, Plan, no_draft
from ngramspec.drafting.draft import NO_DRAFT, Ask, Draft, Drafter
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.policies.policy import FixedPolicy
from ngramspec.steps import Step
from ngramspec.tokens import TokenTable


class Parrot(Drafter):
    """Drafter that always proposes 1, 2, 3, ... and records its arguments."""

    name = "parrot"
    estimates = True

    def __init__(self) -> None:
        self.limits: list[int] = []
        self.fixed_length: list[bool] = []
        self.told: list[tuple[int, ...]] = []
        self.begun: list[list[int]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.begun.append(list(prompt))

    def propose(self, ask: Ask) -> Draft:
        limit = ask.limit
        self.limits.append(limit)
        self.fixed_length.append(ask.fixed_length)
        tokens = tuple(range(1, limit + 1))
        return Draft(tokens, acceptance_probs=(0.5,) * limit, source="parrot") if self.estimates else Draft(tokens[:4])

    def accept(self, tokens: Sequence[int]) -> int:
        self.told.append(tuple(tokens))
        return len(tokens) - 1


class Recorder(FixedPolicy):
    """Policy that sends at most three tokens and records its passes."""

    def __init__(self, most: int = 8) -> None:
        super().__init__(most)
        self.passes: list[Step] = []
        self.costs: list[RestoreCost | None] = []

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        self.costs.append(restore)
        k, _ = super().plan(draft, times, sizes)
        return min(3, k), min(3, k) + 2

    def record(self, done: Step) -> None:
        self.passes.append(done)


class Alone(DecodingLoop):
    """The drafting side of one text, on a model that is never called."""

    def __init__(self, drafter: Drafter | None, policy: FixedPolicy) -> None:
        super().__init__(policy, clock=lambda: 0.0)
        self.drafts, self.model = Drafts(drafter, policy), ModelBase()
        self.model.max_batch = 64
        self.text = DraftedText(self.drafts, self.model)
        self.first = self.drafts.first

    @property
    def proposal(self) -> Draft | None:
        return self.drafts.proposal

    def start(self, prompt: Sequence[int], **how: Any) -> None:
        self.policy.begin()
        self.drafts.begin(prompt, **how)

    def plan_next(self, left: int, owed: int = 0) -> Plan:
        self.text.tokens_left, self.model.owed = left, owed
        if self.drafts.drafter is None:
            return self._plain
        return self.plan(self.text, owed)

    def end_pass(self, done: Step, size: int, seconds: float = 1.0, planning: float = 0.0) -> None:
        """Report a pass over `size` tokens that resulted in the step `done`."""
        current = Pass((self.text,), (no_draft(size),), size, 0, self.proposal is not None)
        current.seconds, current.planning_seconds = seconds, planning
        self.finish(current, done)


def prepared(most: int = 8, sizes: Sequence[int] = range(1, 17)) -> tuple[Alone, Parrot, Recorder]:
    drafter, policy = Parrot(), Recorder(most)
    loop = Alone(drafter, policy)
    loop.prepare(make_fixed_curve({1: 1.0, 16: 2.5}), sizes)
    return loop, drafter, policy


def test_decoding_loop_over_one_request_calls_drafter_and_policy() -> None:
    loop, drafter, policy = prepared()
    loop.start([7, 8])
    loop.first(9)
    plan = loop.plan_next(100)
    assert (plan.draft.tokens, plan.size, plan.ends) == ((1, 2, 3), 5, False)
    assert plan.verified_draft == plan.draft
    assert loop.proposal is not None
    assert loop.proposal.tokens == tuple(range(1, 9))
    done = Step((1, 2, 5), drafted=(1, 2, 3), accepted=2)
    complete = replace(done, batch=5, seconds=1.4, cost=1.4, correct_guesses=2, draft_seconds=0.25, draft_cost=0.25)
    loop.end_pass(done, 5, 1.4, 0.25)
    assert done == complete
    assert policy.passes == [done]
    assert drafter.begun == [[7, 8]]
    assert drafter.told == [(9,), (1, 2, 5)]
    assert loop.times is not None
    assert loop.times.last == 5


@pytest.mark.parametrize(
    ("most", "left", "sizes", "asked"),
    [(8, 100, range(1, 17), 8), (8, 4, range(1, 17), 3), (40, 100, range(1, 17), 15), (8, 100, (2, 4), 3)],
)
def test_decoding_loop_limits_draft_to_policy_text_and_batch(
    most: int, left: int, sizes: Sequence[int], asked: int
) -> None:
    loop, drafter, _ = prepared(most, sizes)
    loop.start([7], fixed_length=True)
    loop.plan_next(left)
    assert drafter.limits == [asked]
    assert drafter.fixed_length == [True]


@pytest.mark.parametrize(("most", "left"), [(0, 100), (8, 1)])
def test_decoding_loop_without_room_for_drafts_skips_drafter(most: int, left: int) -> None:
    loop, drafter, policy = prepared(most)
    assert loop.plan_next(left) == no_draft(1)
    assert loop.proposal is None
    assert drafter.limits == []
    loop.end_pass(Step((4,)), 1, 1.0, 0.25)
    assert policy.passes[-1].draft_seconds == 0.0  # The loop did not call the drafter, so the drafter took no time.
    assert drafter.told == [(4,)]


def test_decoding_loop_without_drafter_only_updates_times() -> None:
    policy = Recorder()
    loop = Alone(None, policy)
    times = make_fixed_curve({1: 1.0, 64: 1.0})
    loop.prepare(times, (2, 4))
    loop.start([1])
    loop.first(2)
    assert loop.plan_next(50) == no_draft(2)  # This is the smallest batch that is allowed.
    done = Step((3,))
    loop.end_pass(done, 2, 0.5)
    assert done.cost == pytest.approx(0.5)
    assert policy.passes == []
    assert times.last == 2


@pytest.mark.parametrize(("fixed_length", "length"), [(False, 4), (True, 8)])
def test_decoding_loop_estimates_probabilities_of_drafts_without_them(fixed_length: bool, length: int) -> None:
    """With `fixed_length`, the estimates cover as many tokens as the loop requested, however many the drafter drew."""
    loop, drafter, _ = prepared()
    drafter.estimates = False
    loop.start([7], fixed_length=fixed_length)
    for _ in range(300):
        loop.plan_next(100)
        loop.end_pass(Step((1, 2, 9), drafted=(1, 2, 3), accepted=2), 5)
    loop.plan_next(100)
    assert loop.proposal is not None
    chances = loop.proposal.acceptance_probs
    assert len(chances) == length
    assert chances[0] > chances[1] - 0.1 > 0.7
    assert chances[2] < 0.2


@pytest.mark.parametrize(
    ("end", "tokens", "size", "ends"), [(2, (1, 2), 3, True), (3, (1, 2, 3), 5, True), (4, (1, 2, 3), 5, False)]
)
def test_decoding_loop_truncates_draft_at_end_token(end: int, tokens: tuple[int, ...], size: int, ends: bool) -> None:
    loop, _, _ = prepared()
    loop.start([7], ends=TokenTable(lambda token: token == end))
    plan = loop.plan_next(100)
    assert plan.verified_draft == plan.draft
    assert (plan.draft.tokens, plan.size, plan.ends) == (tokens, size, ends)


class Allowing(GrammarGuide):
    """Guide that allows given tokens, forces none, and records its arguments."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.told: list[tuple[int, int, Sequence[int]]] = []

    def shape(self, draft: Draft, limit: int, *, fixed_length: bool = False) -> Draft:
        return draft if fixed_length else draft.head(self.legal(draft))

    def legal(self, draft: Draft) -> int:
        return next((i for i, token in enumerate(draft.tokens) if token not in self.allowed), len(draft))

    def learn(self, sent: int, accepted: int, tokens: Sequence[int]) -> None:
        self.told.append((sent, accepted, tokens))


@pytest.mark.parametrize(
    ("fixed_length", "allowed", "judged", "sent", "ends"),
    [
        (False, (1, 2), (1, 2), (1, 2), False),  # The guide cuts the draft before the policy plans it.
        (True, (1, 2), (1, 2, 3), (1, 2), False),  # The first forbidden token was drawn, so it is verified.
        (True, (1, 2, 3), (1, 2, 3), (1, 2, 3), True),
        (True, (), (1,), (), False),
    ],
)
def test_decoding_loop_with_guide_does_not_send_forbidden_tokens(
    fixed_length: bool, allowed: tuple[int, ...], judged: tuple[int, ...], sent: tuple[int, ...], ends: bool
) -> None:
    loop, _, _ = prepared()
    guide = Allowing(*allowed)
    loop.start([7], guide=guide, ends=TokenTable(lambda token: token == 3), fixed_length=fixed_length)
    plan = loop.plan_next(100)
    assert (plan.verified_draft.tokens, plan.draft.tokens, plan.ends) == (judged, sent, ends)
    # The size is the padded one of the policy, or the smallest one that the rest of its choice allows.
    assert plan.size == (len(sent) + 2 if ends or not fixed_length else len(sent) + 1)
    loop.end_pass(Step((1, 9), drafted=sent, accepted=1), plan.size)
    assert guide.told == [(len(sent), 1, (1, 9))]


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


class Watcher(FixedPolicy):
    """Policy that reads rows and reports the first logit of the last one."""

    wants_logits = True

    def __init__(self) -> None:
        super().__init__(2)
        self.rows: list[NDArray[np.float32]] = []
        self.details: dict[str, float] = {}

    def limit(self) -> int:
        self.details = {"first": float(self.rows[-1][0])} if self.rows else {}
        return super().limit()

    def record(self, done: Step) -> None:
        done.policy_details = self.details

    def observe_logits(self, row: NDArray[np.float32]) -> None:
        self.rows.append(row.copy())


def explained(loop: Alone) -> Mapping[str, float]:
    """Return the record of a pass."""
    done = Step((1, 5), accepted=1)
    loop.end_pass(done, 3)
    return done.policy_details


def test_decoding_loop_passes_deciding_logits_to_policy() -> None:
    policy = Watcher()
    loop = Alone(Parrot(), policy)
    loop.prepare(None, range(1, 9))
    loop.start([7, 8])
    loop.text.last = 8
    loop.text.observe_logits(NO_DRAFT, ROWS[:1])
    loop.first(9)
    plan = loop.plan_next(100)
    loop.text.observe_logits(plan.draft, ROWS, n_accepted=1)
    assert explained(loop) == {"first": 0.0}  # The details still belong to the draft that was sent.
    loop.plan_next(1)  # There is no token left to draft.
    assert explained(loop) == {"first": 3.0}
    assert [row.tolist() for row in policy.rows] == [[0, 1, 2], [3, 4, 5]]


def test_decoding_loop_without_drafter_or_reader_ignores_logits() -> None:
    watcher = Watcher()
    for drafter, policy in ((None, watcher), (Parrot(), FixedPolicy())):
        loop = Alone(drafter, policy)
        loop.start([7])
        loop.text.observe_logits(NO_DRAFT, ROWS[:, :0])  # These rows are empty.
        loop.plan_next(9)
        assert explained(loop) == {}
    assert watcher.rows == []


def test_decoding_loop_with_owed_tokens_shortens_draft() -> None:
    loop, drafter, policy = prepared(sizes=range(1, 9))
    loop.start([7, 8])
    loop.first(9)
    loop.plan_next(100)
    assert policy.costs == [None]
    times = PassTimes()
    times.observe(1, 1.0)
    times.observe_copy(0.25, is_load=False)
    times.observe_copy(0.5, is_load=True)
    loop.model.replays = True
    loop.prepare(times, range(1, 9))
    loop.plan_next(100)
    loop.plan_next(100, owed=3)
    # The checkpoint before the owed tokens still exists, so it costs nothing.
    assert policy.costs[1:] == [RestoreCost(0.25, 0.5), RestoreCost(0.0, 0.5, 3)]
    assert drafter.limits == [7, 7, 4]
    assert loop.plan_next(100, owed=7) == no_draft(1)
