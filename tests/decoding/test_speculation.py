"""The drafting side of the loop on its own: what it asks, what it sends, and what it tells the policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import Replay
from ngramspec.decoding.speculation import Speculation
from ngramspec.drafting.draft import NO_DRAFT, Choose, Draft
from ngramspec.drafting.price import TokenPrice
from ngramspec.policies.entropy import EntropyPolicy
from ngramspec.policies.policy import Debt, Gauge, Pass
from ngramspec.policies.simple import FixedPolicy


class Parrot:
    """Always proposes 1, 2, 3, ...; remembers what it was asked and told."""

    name = "parrot"

    def __init__(self) -> None:
        self.limits: list[int] = []
        self.blind: list[bool] = []
        self.told: list[tuple[int, ...]] = []
        self.begun: list[list[int]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.begun.append(list(prompt))

    def propose(
        self, limit: int, choose: Choose | None = None, *, blind: bool = False, price: TokenPrice | None = None
    ) -> Draft:
        self.limits.append(limit)
        self.blind.append(blind)
        tokens = tuple(range(1, limit + 1))
        return Draft(tokens, acceptance=(0.5,) * limit, source="parrot")

    def accept(self, tokens: Sequence[int]) -> int:
        self.told.append(tuple(tokens))
        return len(tokens) - 1


class Recorder(FixedPolicy):
    """Sends three tokens at most, and keeps the passes it is told of."""

    def __init__(self, most: int = 8) -> None:
        super().__init__(most)
        self.passes: list[Pass] = []
        self.debts: list[Debt | None] = []

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], debt: Debt | None = None
    ) -> tuple[int, int]:
        self.debts.append(debt)
        k, _ = super().plan(draft, curve, sizes)
        return min(3, k), min(3, k) + 2

    def record(self, done: Pass) -> None:
        self.passes.append(done)


def prepared(most: int = 8, sizes: Sequence[int] = range(1, 17)) -> tuple[Speculation, Parrot, Recorder]:
    drafter, policy = Parrot(), Recorder(most)
    speculation = Speculation(drafter, policy)
    speculation.prepare(CostCurve({1: 1.0, 16: 2.5}), sizes)
    return speculation, drafter, policy


def test_a_request_from_beginning_to_end() -> None:
    speculation, drafter, policy = prepared()
    speculation.begin([7, 8])
    speculation.first(9)
    draft, size = speculation.plan(100)
    assert (draft.tokens, size) == ((1, 2, 3), 5)
    assert speculation.proposal is not None
    assert speculation.proposal.tokens == tuple(range(1, 9))
    done = speculation.learn((1, 2, 5), draft, size, 1.4, 0.25)
    assert done == Pass(emitted=3, drafted=3, guessed=2, seconds=1.4, draft_seconds=0.25, plain_seconds=1.0)
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
    speculation.plan(left, blind=True)
    assert drafter.limits == [asked]
    assert drafter.blind == [True]


@pytest.mark.parametrize(("most", "left"), [(0, 100), (8, 1)])
def test_the_drafter_is_not_asked_in_vain(most: int, left: int) -> None:
    speculation, drafter, policy = prepared(most)
    assert speculation.plan(left) == (NO_DRAFT, 1)
    assert speculation.proposal is None
    assert drafter.limits == []
    speculation.learn((4,), NO_DRAFT, 1, 1.0, 0.25)
    assert policy.passes[-1].draft_seconds == 0.0  # nobody was asked, so nobody is to blame
    assert drafter.told == [(4,)]


def test_plain_decoding_only_refreshes_the_curve() -> None:
    policy = Recorder()
    speculation = Speculation(None, policy)
    curve = CostCurve({1: 1.0, 2: 0.5})
    speculation.prepare(curve, (1, 2))
    speculation.begin([1])
    speculation.first(2)
    assert speculation.plain == 2  # the cheaper batch
    assert speculation.plan(50) == (NO_DRAFT, 2)
    assert speculation.learn((3,), NO_DRAFT, 2, 0.5).plain_seconds == pytest.approx(0.5)
    assert policy.passes == []
    assert curve.last == 2


def test_without_a_curve_nothing_is_known_of_plain_passes() -> None:
    speculation = Speculation(Parrot(), Recorder())
    speculation.prepare(None, (1, 2, 3, 4, 5))
    draft, size = speculation.plan(3)
    assert speculation.learn((1, 2), draft, size, 0.1).plain_seconds == 0.0


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


class Watcher(FixedPolicy):
    """Reads rows, and makes the first logit of the last one its gauge."""

    def __init__(self) -> None:
        super().__init__(2)
        self.rows: list[NDArray[np.float32]] = []

    @property
    def gauge(self) -> Gauge | None:
        return Gauge(float(self.rows[-1][0]), 2) if self.rows else None

    def see(self, row: NDArray[np.float32]) -> None:
        self.rows.append(row.copy())


def test_a_policy_sees_the_row_that_decided_the_last_token_and_its_gauge_is_the_plans() -> None:
    policy = Watcher()
    speculation = Speculation(Parrot(), policy)
    speculation.prepare(None, range(1, 9))
    speculation.begin([7, 8])
    assert speculation.gauge is None
    speculation.see(8, NO_DRAFT, ROWS[:1])
    speculation.first(9)
    draft, size = speculation.plan(100)
    assert speculation.gauge == (0.0, 2)
    speculation.see(9, draft, ROWS, accepted=1)
    speculation.learn((1, 5), draft, size, 1.0)
    assert speculation.gauge == (0.0, 2)  # still that of the draft that was sent
    speculation.plan(1)  # nothing to draft for
    assert speculation.gauge == (3.0, 2)
    assert [row.tolist() for row in policy.rows] == [[0, 1, 2], [3, 4, 5]]
    speculation.begin([7])
    assert speculation.gauge is None


def test_without_drafts_or_without_a_reader_nobody_looks_at_rows() -> None:
    watcher = Watcher()
    for drafter, policy in ((None, watcher), (Parrot(), FixedPolicy())):
        speculation = Speculation(drafter, policy)
        speculation.begin([7])
        speculation.see(7, NO_DRAFT, ROWS[:, :0])  # nothing in it to be read
        speculation.plan(9)
        assert speculation.gauge is None
    assert watcher.rows == []


def test_the_entropy_policy_in_the_loop() -> None:
    policy = EntropyPolicy(8)
    speculation, drafter = Speculation(Parrot(), policy), Parrot()
    speculation.drafter = drafter
    speculation.prepare(None, range(1, 17))
    speculation.begin([7])
    sure, lost = np.array([50, 0, 0, 0], np.float32), np.zeros(4, np.float32)
    speculation.see(7, NO_DRAFT, sure[np.newaxis])
    draft, _ = speculation.plan(100)
    assert speculation.gauge == (pytest.approx(0), 8)
    speculation.see(9, draft, np.stack([sure, sure, lost, sure]), accepted=2)
    speculation.plan(100)
    assert speculation.gauge == (pytest.approx(0.5), 4)  # 1 + 7 / 4^0.5, a half to even
    assert drafter.limits == [8, 4]


def test_what_is_owed_is_part_of_the_pass() -> None:
    speculation, drafter, policy = prepared(sizes=range(1, 9))
    speculation.begin([7, 8])
    speculation.first(9)
    speculation.plan(100)
    assert policy.debts == [None]
    assert speculation.curve is not None
    speculation.prepare(speculation.curve, range(1, 9), Replay(0.25, 0.5))
    speculation.plan(100)
    speculation.plan(100, owed=3)
    # The checkpoint before the tokens that are owed is still there: it costs nothing.
    assert policy.debts[1:] == [Debt(0, 0.25, 0.5), Debt(3, 0.0, 0.5)]
    assert drafter.limits == [7, 7, 4]
    assert speculation.plan(100, owed=7) == (NO_DRAFT, 1)
