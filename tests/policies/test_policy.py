"""Draft lengths: the cost policy against brute force, and a simulated machine on which it may not lose time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.passes import Rich, passed

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.draft import NO_DRAFT, Draft, Question
from ngramspec.policies import POLICIES, make_policy
from ngramspec.policies.cost_aware import CostPolicy
from ngramspec.policies.policy import Policy, smallest

ALL = range(1, 65)
Cost = Callable[[int], float]


def draft(acceptance: Sequence[float], length: int | None = None) -> Draft:
    n = len(acceptance) if length is None else length
    return Draft((7,) * n, ({7: 1.0},) * n, (3,) * n, (5,) * n, tuple(acceptance), "ngram")


def curve_of(cost: Cost, sizes: Sequence[int] = range(1, 17)) -> CostCurve:
    return CostCurve({n: cost(n) for n in sizes})


# --------------------------------------------------------------------------- simple policies


def test_policies_by_name() -> None:
    assert set(POLICIES) == {"fixed", "heuristic", "entropy", "threshold", "cost"}
    for name in POLICIES:
        assert make_policy(name).name == name
        assert make_policy(name).limit() >= 1
        assert 1 <= make_policy(name, 1).limit() <= 1
        for wrong in (0, -3):
            with pytest.raises(ValueError, match="draft_max"):
                make_policy(name, wrong)
    with pytest.raises(ValueError, match="cost"):
        make_policy("bold")


@pytest.mark.parametrize("name", ["fixed", "heuristic"])
def test_simple_policies_send_what_there_is(name: str) -> None:
    policy = make_policy(name, 4)
    assert policy.plan(draft([0.01] * 4), None, ALL) == (4, 5)
    assert policy.plan(draft([0.01] * 2), None, ALL) == (2, 3)
    assert policy.plan(draft([0.01] * 9), None, ALL) == (4, 5)
    assert policy.plan(NO_DRAFT, None, ALL) == (0, 1)
    assert policy.plan(draft([0.01] * 4), None, (1, 2, 3)) == (2, 3)
    assert policy.plan(draft([0.01] * 3), None, (2, 8)) == (3, 8)
    assert policy.plan(NO_DRAFT, None, (2, 8)) == (0, 2)


def test_fixed_stays() -> None:
    policy = make_policy("fixed", 6)
    for emitted in (1, 7, 1, 1):
        policy.record(passed(emitted, 6, emitted - 1, 1.0, 0.0, 1.0))
        assert policy.limit() == 6


def test_heuristic_goes_two_up_and_one_down() -> None:
    policy = make_policy("heuristic", 8)
    length, rng = policy.limit(), random.Random(0)
    for _ in range(200):
        drafted = rng.randrange(length + 1)
        emitted = rng.choice([1, drafted + 1])
        policy.record(passed(emitted, drafted, emitted - 1, 1.0, 0.0, 1.0))
        if drafted:
            length = max(1, min(8, length + 2 if emitted == drafted + 1 else length - 1))
        assert policy.limit() == length
    assert make_policy("heuristic", 2).limit() == 2


def test_smallest_size_that_fits() -> None:
    assert [smallest(n, (2, 4, 8)) for n in (1, 2, 3, 5, 8)] == [2, 2, 4, 8, 8]


# --------------------------------------------------------------------------- cost: the length


def brute_force(acceptance: Sequence[float], costs: Cost, sizes: Sequence[int], rate: float) -> float:
    """The largest value of a pass, and of those after it while the chain holds; batches are the cheapest that fit."""
    return max(_values(acceptance, costs, sizes, rate))


def value(acceptance: Sequence[float], k: int, costs: Cost, sizes: Sequence[int], rate: float) -> float:
    """That of a pass with k draft tokens: E[tokens(k)] - rate * T(1 + k), and what the passes after it are worth."""
    return _values(acceptance, costs, sizes, rate)[k]


def _values(acceptance: Sequence[float], costs: Cost, sizes: Sequence[int], rate: float) -> list[float]:
    time = [rate * min(costs(n) for n in sizes if n > k) for k in range(sizes[-1])]
    values: list[float] = []
    later = [0.0, 0.0]  # behind all of the chain, and behind one token of it less
    for begin in range(max(0, len(acceptance) - 1), -1, -1):
        chain = acceptance[begin:]
        values = [
            1 + sum(math.prod(chain[:j]) for j in range(1, k + 1)) - time[k] + math.prod(chain[: k + 1]) * later[-k - 1]
            for k in range(min(len(chain), sizes[-1] - 1) + 1)
        ]
        later.append(max(values))
    return values


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    costs=st.lists(st.floats(0.5, 20.0), min_size=16, max_size=16),
    acceptance=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=15),
    sizes=st.sampled_from([tuple(range(1, 17)), (1, 2, 4, 8, 16), (2, 3, 5, 8), (3, 9)]),
)
def test_length_maximises_the_objective(costs: list[float], acceptance: list[float], sizes: tuple[int, ...]) -> None:
    costs = [1.0, *(min(c, 1.5 * n) for n, c in enumerate(costs[1:], 2))]  # no batch is dearer than the curve admits

    def cost(n: int) -> float:
        return costs[n - 1]

    k, size = Rich().plan(draft(acceptance), curve_of(cost), sizes)
    assert size in sizes
    assert size >= 1 + k
    cheapest = min(cost(n) for n in sizes if n >= 1 + k)
    assert cost(size) <= 1.05 * cheapest  # padding has to save a little more than noise
    rate = 1 / min(cost(n) for n in sizes)  # nothing was recorded: plain decoding's throughput
    assert (
        value(acceptance, k, cost, sizes, rate) >= brute_force(acceptance, cost, sizes, rate) - 0.05 * cheapest * rate
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(throughput=st.floats(1.0, 4.0), p=st.floats(0.3, 0.95), slope=st.floats(0.05, 0.5))
def test_recent_throughput_is_the_price_of_time(throughput: float, p: float, slope: float) -> None:
    def cost(n: int) -> float:
        return 0.01 * (1 + slope * (n - 1))

    policy = Rich()
    for _ in range(300):  # passes of 10 tokens that reach the throughput
        policy.record(passed(10, 9, 9, 10 * 0.01 / throughput, 0.0, 0.01))
    k, _ = policy.plan(draft([p] * 15), curve_of(cost), ALL)
    rate = throughput / 0.01
    at_k = value([p] * 15, k, cost, ALL, rate)
    assert at_k >= brute_force([p] * 15, cost, range(1, 17), rate) - 0.02


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    costs=st.lists(st.floats(0.5, 20.0), min_size=16, max_size=16),
    acceptance=st.lists(st.floats(0.01, 0.99), min_size=15, max_size=15),
    sizes=st.sampled_from([tuple(range(1, 17)), (1, 2, 4, 8, 16), (2, 3, 5, 8), (3, 9)]),
    passes=st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 4.0)), max_size=5),
)
def test_a_price_ends_no_draft_that_would_pay(
    costs: list[float], acceptance: list[float], sizes: tuple[int, ...], passes: list[tuple[int, float]]
) -> None:
    curve, policy = curve_of(lambda n: costs[n - 1]), Rich()
    for emitted, seconds in passes:
        policy.record(passed(emitted, 0, 0, seconds, 0.0, 1.0))
    price = policy.price(curve, sizes)
    assert price is not None
    cut, reach = 0, 1.0
    for p in acceptance[: sizes[-1] - 1]:
        cut += 1
        reach *= p
        if reach < price.worth * price.slopes[cut]:
            break
    ended, whole = policy.plan(draft(acceptance[:cut]), curve, sizes), policy.plan(draft(acceptance), curve, sizes)
    # A token that is hardly ever reached is worth less than rounding, on either side of the end.
    assert ended == whole or math.prod(acceptance[: min(ended[0], whole[0]) + 1]) < 1e-9


def test_only_the_cost_policy_looks_at_costs() -> None:
    curve = curve_of(lambda n: 1 + 0.1 * (n - 1))
    for name in ("fixed", "heuristic", "entropy"):
        assert make_policy(name).price(curve, ALL) is None
    policy = Rich()
    assert policy.price(None, ALL) is None
    for throughput in (0.5, 1.0, 2.0):  # tokens per second; a plain pass takes one
        for _ in range(300):
            policy.record(passed(4, 3, 3, 4 / throughput, 0.0, 1.0))
        price = policy.price(curve, ALL)
        assert price is not None
        assert price.worth == pytest.approx(max(1.0, throughput))
        assert price.slopes[:5] == curve.slopes(ALL)[:5]


def test_steep_curves_and_poor_guesses_get_no_draft() -> None:
    steep, flat = curve_of(float), curve_of(lambda n: 1 + 0.001 * n)
    assert Rich().plan(draft([0.99] * 15), steep, ALL) == (0, 1)
    assert Rich().plan(draft([0.0005] * 15), flat, ALL) == (0, 1)
    assert Rich().plan(draft([0.5] * 15), flat, ALL)[0] > 5
    assert Rich().plan(draft([0.95] * 15), curve_of(lambda n: 1 + 0.3 * n), ALL)[0] > 5
    assert Rich().plan(NO_DRAFT, flat, ALL)[0] == 0
    assert Rich().plan(draft([0.99] * 15), None, ALL) == (0, 1)


def test_a_cheaper_size_is_padded_to() -> None:
    curve = CostCurve({1: 1.0, 2: 1.5, 3: 3.0, 4: 1.6, 5: 5.0, 8: 5.0, 16: 6.0})
    assert Rich().plan(draft([0.9, 0.8]), curve, ALL) == (2, 4)
    assert Rich().plan(draft([0.9]), curve, ALL) == (1, 2)


def test_noise_is_no_reason_to_pad() -> None:
    # A GPU: all sizes cost the same within what can be measured.
    curve = CostCurve({1: 1.0, 2: 0.99, 3: 1.01, 4: 0.985, 8: 0.99, 16: 0.98})
    assert Rich().plan(draft([0.9]), curve, ALL)[1] == 2
    assert Rich().plan(NO_DRAFT, curve, ALL) == (0, 1)
    k, size = Rich().plan(draft([0.9] * 15), curve, ALL)
    assert (k, size) == (15, 16)


def test_a_longer_blind_estimate_sends_no_more_than_the_draft() -> None:
    flat = curve_of(lambda n: 1 + 0.01 * n)
    assert Rich().plan(draft([0.9] * 15, length=3), flat, ALL) == (3, 4)


def test_questions_are_sent_where_their_rows_are_worth_it() -> None:
    policy = CostPolicy()
    questions = [Question(0, (i,), p) for i, p in enumerate((0.5, 0.2, 0.05))]
    flat, steep = curve_of(lambda n: 1 + 1e-6 * n), curve_of(lambda n: 0.4 + 0.6 * n)
    sizes = range(1, 17)
    assert policy.ask(questions, 3, 4, flat, sizes) == (3, 7)
    assert policy.ask(questions, 3, 4, steep, sizes) == (0, 4)
    # 0.5 and 0.2 pay for a row of 0.05, if 0.8 of a token known a pass ahead is what it saves there.
    assert policy.ask(questions, 3, 4, curve_of(lambda n: 0.95 + 0.05 * n), sizes) == (2, 6)
    # Padding is free, in the batch as it is and as far as the sizes go.
    assert policy.ask(questions, 3, 8, steep, (1, 8, 16)) == (3, 8)
    assert policy.ask(questions, 3, 5, steep, sizes) == (1, 5)
    assert policy.ask(questions, 6, 7, flat, range(1, 9)) == (1, 8)
    # No more than the stake; a change of size has its price.
    assert policy.ask(questions, 3, 4, curve_of(lambda n: 1.0 + 0.9 * (n > 4)), sizes) == (0, 4)
    switching = CostCurve({1: 1.0, 16: 1.0}, switch=0.9)
    switching.observe(4, 1.9)
    assert policy.ask(questions, 3, 4, switching, sizes) == (0, 4)
    assert make_policy("fixed").ask(questions, 3, 4, flat, sizes) == (0, 4)
    assert policy.ask(questions, 3, 4, None, sizes) == (0, 4)


def test_the_batch_holds_what_the_sizes_allow() -> None:
    flat = curve_of(lambda n: 1 + 0.01 * n)
    assert Rich().plan(draft([0.9] * 15), flat, (1,)) == (0, 1)
    assert Rich().plan(draft([0.9] * 15), flat, (1, 2, 3)) == (2, 3)
    assert Rich(63).plan(draft([0.99] * 80), flat, ALL)[0] <= 63


# --------------------------------------------------------------------------- cost: the account


class Machine:
    """Runs a policy on a text, with known costs: `guess()` gives (acceptance estimated, tokens right)."""

    def __init__(self, policy: Policy, cost: Cost, ask: float) -> None:
        self.policy, self.cost, self.ask = policy, cost, ask
        self.curve = curve_of(cost)
        self.seconds = 0.0
        self.tokens = self.asked = self.drafted = self.passes = 0
        self.since: int | None = None  # passes until the first draft

    def run(self, tokens: int, guess: Callable[[], tuple[list[float], int]]) -> float:
        """Time over plain decoding's time, for this stretch of text."""
        seconds, end, began = self.seconds, self.tokens + tokens, self.tokens
        self.since = None
        passes = 0
        while self.tokens < end:
            asking, k, size, right = 0.0, 0, 1, 0
            if self.policy.limit() > 0:
                self.asked += 1
                asking = self.ask
                acceptance, right = guess()
                k, size = self.policy.plan(draft(acceptance), self.curve, ALL)
            if k and self.since is None:
                self.since = passes
            emitted = 1 + min(k, right)
            spent = self.cost(size)
            self.policy.record(passed(emitted, k, emitted - 1, spent, asking, self.cost(1)))
            self.seconds += spent + asking
            self.tokens += emitted
            self.drafted += k
            passes += 1
        self.passes += passes
        return (self.seconds - seconds) / ((self.tokens - began) * self.cost(1))


def typical(n: int) -> float:
    return 2e-3 * (1 + 0.25 * (n - 1))


def right(p: float, seed: int = 0, most: int = 15) -> Iterator[int]:
    """How many guesses in a row are right, each with probability p."""
    rng = random.Random(seed)
    while True:
        n = 0
        while n < most and rng.random() < p:
            n += 1
        yield n


@pytest.mark.parametrize("ask", [5e-6, 40e-6])
@pytest.mark.parametrize("estimate", [None, 0.02, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("slope", [0.05, 0.25, 0.6])
def test_nothing_to_guess_costs_next_to_nothing(estimate: float | None, slope: float, ask: float) -> None:
    # Nothing is ever right, and the estimates, however wrong, never learn it. A few bad passes are the credit.
    machine = Machine(CostPolicy(), lambda n: 2e-3 * (1 + slope * (n - 1)), ask)
    guess = [] if estimate is None else [estimate] * 15
    ratio = machine.run(4000, lambda: (guess, 0))
    credit = 12 * 2e-3 * (1 + slope * 15)
    assert machine.seconds <= 1.02 * 4000 * 2e-3 + credit
    assert ratio < 1.05


@pytest.mark.parametrize("p", [0.05, 0.15, 0.25])
def test_too_optimistic_estimates_cost_next_to_nothing(p: float) -> None:
    hits = right(p)
    machine = Machine(CostPolicy(), typical, 20e-6)
    assert machine.run(6000, lambda: ([0.7] * 15, next(hits))) < 1.025
    assert machine.drafted > 0


def test_good_guesses_pay() -> None:
    hits = right(0.9)
    machine = Machine(CostPolicy(), typical, 20e-6)
    assert machine.run(4000, lambda: ([0.9] * 15, next(hits))) < 0.75


@pytest.mark.parametrize("ask", [5e-6, 40e-6, 200e-6])
@pytest.mark.parametrize("before", [None, 0.6, 0.95])
def test_drafting_resumes_when_the_text_gets_better(before: float | None, ask: float) -> None:
    # What went wrong in 4000 tokens may not lock the next 2000 out.
    machine = Machine(CostPolicy(), typical, ask)
    bad = [] if before is None else [before] * 15
    machine.run(4000, lambda: (bad, 0))
    hits = right(0.9)
    ratio = machine.run(2000, lambda: ([0.9] * 15, next(hits)))
    assert machine.since is not None
    assert machine.since < 500
    assert ratio < 0.9


def test_a_loss_stops_drafting_and_time_heals_it() -> None:
    policy, curve = CostPolicy(), curve_of(typical)
    good = draft([0.95] * 15)
    assert policy.plan(good, curve, ALL)[0] > 0
    for _ in range(10):
        policy.record(passed(1, 15, 0, typical(16), 0.0, typical(1)))
    assert policy.plan(good, curve, ALL)[0] == 0
    for _ in range(20_000):
        policy.record(passed(1, 0, 0, typical(1), 0.0, typical(1)))
    assert policy.plan(good, curve, ALL)[0] > 0


def test_old_gains_buy_no_new_losses() -> None:
    hits = right(0.97)
    machine = Machine(CostPolicy(), typical, 20e-6)
    assert machine.run(20_000, lambda: ([0.97] * 15, next(hits))) < 0.7
    assert machine.run(4000, lambda: ([0.6] * 15, 0)) < 1.2


@pytest.mark.parametrize("slope", [0.05, 0.25, 0.6])
@pytest.mark.parametrize("p", [0.6, 0.9, 0.99])
def test_a_short_text_loses_little_whatever_others_gained(slope: float, p: float) -> None:
    # Every text is a confident copy that is wrong: a draft of 15 refused costs up to nine plain passes.
    def cost(n: int) -> float:
        return 2e-3 * (1 + slope * (n - 1))

    hits = right(0.97)
    machine = Machine(CostPolicy(), cost, 0.0)
    machine.run(20_000, lambda: ([0.97] * 15, next(hits)))
    for _ in range(20):
        machine.policy.begin()
        lost = (machine.run(64, lambda: ([p] * 15, 0)) - 1) * 64
        # START and CREDIT, what fades and is allowed meanwhile, and the last draft beyond the funds.
        assert lost < 1 + 1 + 1 + slope


def test_stakes_grow_with_what_was_saved() -> None:
    policy, curve, sure = CostPolicy(), curve_of(typical), draft([0.99] * 15)
    lengths = []
    for _ in range(8):
        k, size = policy.plan(sure, curve, ALL)
        lengths.append(k)
        policy.record(passed(1 + k, k, k, typical(size), 0.0, typical(1)))
    assert lengths == sorted(lengths)
    assert 1 <= lengths[0] < 4
    assert lengths[-1] == 15


def test_the_cheapest_draft_that_can_pay_is_always_within_the_stake() -> None:
    # A mixture of experts: two tokens cost twice what one does, and eight hardly more.
    steep = CostCurve({1: 1.0, 2: 2.5, 4: 3.0, 8: 3.6, 16: 5.4})
    k, size = CostPolicy().plan(draft([0.99] * 15), steep, ALL)
    assert (k, size) == (3, 4)


@pytest.mark.parametrize("ask", [1e-6, 20e-6, 100e-6, 2e-3])
def test_the_drafter_is_asked_less_where_it_has_nothing(ask: float) -> None:
    machine = Machine(CostPolicy(), typical, ask)
    machine.run(2000, lambda: ([], 0))
    assert machine.asked >= 2000 / 150  # yet often enough to notice a change
    assert machine.asked * ask <= max(0.01, 0.07 * ask / 2e-3) * machine.seconds
    # An answer that is used ends the skipping.
    hits = right(0.95)
    machine.run(400, lambda: ([0.95] * 15, next(hits)))
    machine.asked = machine.passes = 0
    machine.run(400, lambda: ([0.95] * 15, next(hits)))
    if ask < 1e-3:
        assert machine.asked >= 0.9 * machine.passes


@pytest.mark.parametrize(("true", "believed", "p"), [(0.6, 0.1, 0.5), (0.9, 0.3, 0.7)])
def test_a_wrong_curve_is_found_out(true: float, believed: float, p: float) -> None:
    # Measured at a short context, say, where batches were cheaper; only passes with a draft tell of it.
    def cost(n: int) -> float:
        return 2e-3 * (1 + true * (n - 1))

    policy, curve, hits = CostPolicy(), curve_of(lambda n: 2e-3 * (1 + believed * (n - 1))), right(p)
    tokens, seconds = 0, 0.0
    while tokens < 4000:
        k, size, asking = 0, 1, 0.0
        if policy.limit():
            asking = 20e-6
            k, size = policy.plan(draft([p] * 15), curve, ALL)
        emitted = 1 + min(k, next(hits))
        booked = curve.undisturbed(size, cost(size))
        policy.record(passed(emitted, k, emitted - 1, booked, asking, curve.seconds(1)))
        curve.observe(size, cost(size))
        tokens += emitted
        seconds += cost(size) + asking
    assert seconds / (tokens * cost(1)) < 1.03
    assert curve.level == pytest.approx(cost(1), rel=0.1)


def test_interruptions_are_not_booked_to_drafts() -> None:
    # One pass in five is interrupted, for as long as up to three passes take: drafts pay as if there were none.
    drafted = []
    for share in (0.0, 0.2):
        policy, curve, hits, noise = (
            CostPolicy(),
            CostCurve({n: typical(n) for n in ALL}),
            right(0.85),
            random.Random(1),
        )
        tokens = sent = 0
        while tokens < 2000:
            k, size = policy.plan(draft([0.85] * 15), curve, ALL) if policy.limit() else (0, 1)
            spent = typical(size) + (noise.uniform(0, 3 * typical(1)) if noise.random() < share else 0.0)
            emitted = 1 + min(k, next(hits))
            policy.record(passed(emitted, k, emitted - 1, curve.undisturbed(size, spent), 0.0, curve.seconds(1)))
            curve.observe(size, spent)
            tokens, sent = tokens + emitted, sent + k
        drafted.append(sent)
    assert drafted[1] > 0.8 * drafted[0] > 0


def test_a_pass_of_no_time_breaks_nothing() -> None:
    policy, curve = CostPolicy(), curve_of(typical)
    for done in (passed(1, 0, 0, 0.0, 0.0, 0.0), passed(1, 0, 0, 0.0, 1e-6, 0.0), passed(3, 2, 2, 0.0, 0.0, 0.0)):
        policy.record(done)
    for _ in range(200):
        if policy.limit():
            break
        policy.record(passed(1, 0, 0, 1e-3, 0.0, 1e-3))
    assert policy.limit() > 0
    k, size = policy.plan(draft([0.9] * 15), curve, ALL)
    assert size >= 1 + k
