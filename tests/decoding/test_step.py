"""The drafting side of the loop on its own: what it asks, what it sends, and what it tells the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ngramspec.backend import ModelBase
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import RestoreCost
from ngramspec.decoding.drafts import Drafts, Plan, Text, no_draft
from ngramspec.decoding.step import Speculation
from ngramspec.drafting.draft import NO_DRAFT, Chooser, Draft, Drafter, MarginalCost
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.policies.policy import FixedPolicy
from ngramspec.steps import Step


class Parrot(Drafter):
    """Always proposes 1, 2, 3, ...; remembers what it was asked and told."""

    name = "parrot"
    estimates = True

    def __init__(self) -> None:
        self.limits: list[int] = []
        self.fixed_length: list[bool] = []
        self.told: list[tuple[int, ...]] = []
        self.begun: list[list[int]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.begun.append(list(prompt))

    def propose(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Draft:
        self.limits.append(limit)
        self.fixed_length.append(fixed_length)
        tokens = tuple(range(1, limit + 1))
        return Draft(tokens, acceptance_probs=(0.5,) * limit, source="parrot") if self.estimates else Draft(tokens[:4])

    def accept(self, tokens: Sequence[int]) -> int:
        self.told.append(tuple(tokens))
        return len(tokens) - 1


class Recorder(FixedPolicy):
    """Sends three tokens at most, and keeps the passes it is told of."""

    def __init__(self, most: int = 8) -> None:
        super().__init__(most)
        self.passes: list[Step] = []
        self.costs: list[RestoreCost | None] = []

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        self.costs.append(restore)
        k, _ = super().plan(draft, curve, sizes)
        return min(3, k), min(3, k) + 2

    def record(self, done: Step) -> None:
        self.passes.append(done)


class Alone(Speculation):
    """The drafting side of one text, on a model that nothing is asked of."""

    def __init__(self, drafter: Drafter | None, policy: FixedPolicy) -> None:
        super().__init__(policy)
        self.drafts, self.model = Drafts(drafter, policy), ModelBase()
        self.model.max_batch = 64
        self.text = Text(self.drafts, self.model)
        self.observe_logits, self.first = self.drafts.observe_logits, self.drafts.first

    @property
    def proposal(self) -> Draft | None:
        return self.drafts.proposal

    def begin(self, prompt: Sequence[int], **how: Any) -> None:
        super().begin()
        self.drafts.begin(prompt, **how)

    def plan(self, left: int, owed: int = 0) -> Plan:
        self.text.left, self.model.owed = left, owed
        (plan,) = super().plan([self.text])
        return plan

    def learn(self, done: Step, overhead: float = 0.0) -> None:
        super().learn(self.text, done, overhead)


def prepared(most: int = 8, sizes: Sequence[int] = range(1, 17)) -> tuple[Alone, Parrot, Recorder]:
    drafter, policy = Parrot(), Recorder(most)
    speculation = Alone(drafter, policy)
    speculation.prepare(CostCurve({1: 1.0, 16: 2.5}), sizes)
    return speculation, drafter, policy


def test_a_request_from_beginning_to_end() -> None:
    speculation, drafter, policy = prepared()
    speculation.begin([7, 8])
    speculation.first(9)
    plan = speculation.plan(100)
    assert (plan.sent.tokens, plan.size, plan.ends) == ((1, 2, 3), 5, False)
    assert plan.verified_draft == plan.sent
    assert speculation.proposal is not None
    assert speculation.proposal.tokens == tuple(range(1, 9))
    done = Step((1, 2, 5), drafted=(1, 2, 3), accepted=2, batch=5, seconds=1.4)
    told = replace(done, correct_guesses=2, draft_seconds=0.25, plain_seconds=1.0, expected_seconds=1.4)
    speculation.learn(done, 0.25)
    assert done == told
    assert policy.passes == [done]
    assert drafter.begun == [[7, 8]]
    assert drafter.told == [(9,), (1, 2, 5)]
    assert speculation.curve is not None
    assert speculation.curve.last == 5


@pytest.mark.parametrize(
    ("most", "left", "sizes", "asked"),
    [(8, 100, range(1, 17), 8), (8, 4, range(1, 17), 3), (40, 100, range(1, 17), 15), (8, 100, (2, 4), 3)],
)
def test_what_is_asked_for_fits(most: int, left: int, sizes: Sequence[int], asked: int) -> None:
    speculation, drafter, _ = prepared(most, sizes)
    speculation.begin([7], fixed_length=True)
    speculation.plan(left)
    assert drafter.limits == [asked]
    assert drafter.fixed_length == [True]


@pytest.mark.parametrize(("most", "left"), [(0, 100), (8, 1)])
def test_the_drafter_is_not_asked_in_vain(most: int, left: int) -> None:
    speculation, drafter, policy = prepared(most)
    assert speculation.plan(left) == no_draft(1)
    assert speculation.proposal is None
    assert drafter.limits == []
    speculation.learn(Step((4,), batch=1, seconds=1.0), 0.25)
    assert policy.passes[-1].draft_seconds == 0.0  # nobody was asked, so nobody is to blame
    assert drafter.told == [(4,)]


def test_plain_decoding_only_refreshes_the_curve() -> None:
    policy = Recorder()
    speculation = Alone(None, policy)
    curve = CostCurve({1: 1.0, 2: 0.5})
    speculation.prepare(curve, (1, 2))
    speculation.begin([1])
    speculation.first(2)
    assert speculation.plan(50) == no_draft(2)  # the cheaper batch
    done = Step((3,), batch=2, seconds=0.5)
    speculation.learn(done)
    assert done.plain_seconds == pytest.approx(0.5)
    assert policy.passes == []
    assert curve.last == 2


@pytest.mark.parametrize(("fixed_length", "length"), [(False, 4), (True, 8)])
def test_drafts_without_estimates_get_those_of_earlier_ones(fixed_length: bool, length: int) -> None:
    """Blind ones for as many tokens as were asked for, however many were drawn."""
    speculation, drafter, _ = prepared()
    drafter.estimates = False
    speculation.begin([7], fixed_length=fixed_length)
    for _ in range(300):
        speculation.plan(100)
        speculation.learn(Step((1, 2, 9), drafted=(1, 2, 3), accepted=2, batch=5, seconds=1.0))
    speculation.plan(100)
    assert speculation.proposal is not None
    chances = speculation.proposal.acceptance_probs
    assert len(chances) == length
    assert chances[0] > chances[1] - 0.1 > 0.7
    assert chances[2] < 0.2


@pytest.mark.parametrize(
    ("end", "tokens", "size", "ends"), [(2, (1, 2), 3, True), (3, (1, 2, 3), 5, True), (4, (1, 2, 3), 5, False)]
)
def test_nothing_is_sent_past_the_end_of_the_text(end: int, tokens: tuple[int, ...], size: int, ends: bool) -> None:
    speculation, _, _ = prepared()
    speculation.begin([7], is_eog=lambda token: token == end)
    plan = speculation.plan(100)
    assert plan.verified_draft == plan.sent
    assert (plan.sent.tokens, plan.size, plan.ends) == (tokens, size, ends)


class Allowing(GrammarGuide):
    """Allows what it is told to, and forces nothing; keeps what it was asked and told."""

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
        (False, (1, 2), (1, 2), (1, 2), False),  # cut before the policy saw it
        (True, (1, 2), (1, 2, 3), (1, 2), False),  # the first forbidden one is judged: it was drawn
        (True, (1, 2, 3), (1, 2, 3), (1, 2, 3), True),
        (True, (), (1,), (), False),
    ],
)
def test_what_a_grammar_forbids_is_not_sent(
    fixed_length: bool, allowed: tuple[int, ...], judged: tuple[int, ...], sent: tuple[int, ...], ends: bool
) -> None:
    speculation, _, _ = prepared()
    guide = Allowing(*allowed)
    speculation.begin([7], guide=guide, is_eog=lambda token: token == 3, fixed_length=fixed_length)
    plan = speculation.plan(100)
    assert (plan.verified_draft.tokens, plan.sent.tokens, plan.ends) == (judged, sent, ends)
    # As the policy padded it, or the smallest size for what is left of its choice.
    assert plan.size == (len(sent) + 2 if ends or not fixed_length else len(sent) + 1)
    speculation.learn(Step((1, 9), drafted=sent, accepted=1, batch=plan.size, seconds=1.0))
    assert guide.told == [(len(sent), 1, (1, 9))]


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


class Watcher(FixedPolicy):
    """Reads rows, and tells the first logit of the last one."""

    wants_logits = True

    def __init__(self) -> None:
        super().__init__(2)
        self.rows: list[NDArray[np.float32]] = []

    def explain(self) -> dict[str, float]:
        return {"first": float(self.rows[-1][0])} if self.rows else {}

    def observe_logits(self, row: NDArray[np.float32]) -> None:
        self.rows.append(row.copy())


def explained(speculation: Alone) -> Mapping[str, float]:
    """Return the record of a pass."""
    done = Step((1, 5), accepted=1, batch=3, seconds=1.0)
    speculation.learn(done)
    return done.policy_details


def test_a_policy_sees_the_row_that_decided_the_last_token_and_explains_the_plan() -> None:
    policy = Watcher()
    speculation = Alone(Parrot(), policy)
    speculation.prepare(None, range(1, 9))
    speculation.begin([7, 8])
    speculation.observe_logits(8, NO_DRAFT, ROWS[:1])
    speculation.first(9)
    plan = speculation.plan(100)
    speculation.observe_logits(9, plan.sent, ROWS, accepted=1)
    assert explained(speculation) == {"first": 0.0}  # still that of the draft that was sent
    speculation.plan(1)  # nothing to draft for
    assert explained(speculation) == {"first": 3.0}
    assert [row.tolist() for row in policy.rows] == [[0, 1, 2], [3, 4, 5]]
    speculation.begin([7])
    assert explained(speculation) == {}


def test_without_drafts_or_without_a_reader_nobody_looks_at_rows() -> None:
    watcher = Watcher()
    for drafter, policy in ((None, watcher), (Parrot(), FixedPolicy())):
        speculation = Alone(drafter, policy)
        speculation.begin([7])
        speculation.observe_logits(7, NO_DRAFT, ROWS[:, :0])  # nothing in it to be read
        speculation.plan(9)
        assert explained(speculation) == {}
    assert watcher.rows == []


def test_what_is_owed_is_part_of_the_pass() -> None:
    speculation, drafter, policy = prepared(sizes=range(1, 9))
    speculation.begin([7, 8])
    speculation.first(9)
    speculation.plan(100)
    assert policy.costs == [None]
    assert speculation.curve is not None
    speculation.prepare(speculation.curve, range(1, 9), RestoreCost(0.25, 0.5))
    speculation.plan(100)
    speculation.plan(100, owed=3)
    # The checkpoint before the tokens that are owed is still there: it costs nothing.
    assert policy.costs[1:] == [RestoreCost(0.25, 0.5), RestoreCost(0.0, 0.5, 3)]
    assert drafter.limits == [7, 7, 4]
    assert speculation.plan(100, owed=7) == no_draft(1)
