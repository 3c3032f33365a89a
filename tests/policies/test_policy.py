"""Tests of the plans of the cost policy against brute force and hindsight, with all kinds of costs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoder_loop import drive, make_decoder, make_model
from support.mock_shared import MockShared
from support.passes import UnlimitedPolicy, draft, known, make_step, propose, values_of
from support.simulation import Decoding, Machine

from ngramspec.cost.fixed_curves import find_curves
from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.traced import TracedCostPolicy

ALL = range(1, 65)
CHANCES = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=15)
COSTS = st.lists(st.floats(1.0, 20.0), min_size=16, max_size=16)
ALLOWED = st.sampled_from([tuple(range(1, 17)), (1, 2, 4, 8, 16), (2, 3, 5, 8), (3, 9)])


def times_of(costs: Sequence[float], plain: int) -> PassTimes:
    """Return the times of passes of which a plain one has `plain` tokens; no pass costs less than a plain one."""
    return known({n: max(costs[plain - 1], cost) for n, cost in enumerate(costs, 1)}).for_plain(plain)


@given(CHANCES, COSTS, ALLOWED, st.floats(0.5, 4.0))
def test_cost_policy_plan_maximises_expected_value(
    chances: list[float], costs: list[float], sizes: tuple[int, ...], throughput: float
) -> None:
    policy, times = UnlimitedPolicy(), times_of(costs, sizes[0])
    for _ in range(100):  # These passes of 10 tokens reach the throughput.
        policy.record(make_step(10, 9, 9, 10 / throughput, 0.0))
    price = policy.price(times, sizes)
    k, size = policy.plan(draft(chances), times, sizes)
    assert size in [n for n in sizes if n > k]
    assert times.ratio(size) <= 1.05 * min(times.ratio(n) for n in sizes if n > k), "padding must save more than noise"
    rate = max(1.0, throughput)
    padded = [cost for _, cost in times.optimal_batches(sizes)[1:]]
    values = values_of(chances[: sizes[-1] - 1], padded, rate)
    assert policy.numbers[-1] == pytest.approx(values)
    assert values[k] == pytest.approx(max(values))
    assert price is not None
    assert (price.rate, price.slopes) == (pytest.approx(rate), times.slopes(sizes))


@given(CHANCES, COSTS, ALLOWED, st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 4.0)), max_size=5))
def test_cost_policy_price_keeps_every_profitable_draft_length(
    chances: list[float], costs: list[float], sizes: tuple[int, ...], passes: list[tuple[int, float]]
) -> None:
    policy, times = UnlimitedPolicy(), times_of(costs, sizes[0])
    for emitted, spent in passes:
        policy.record(make_step(emitted, 0, 0, spent, 0.0))
    proposed = propose(draft(chances), sizes[-1] - 1, policy.price(times, sizes))
    expected = accumulate(accumulate(chances[: sizes[-1] - 1], mul, initial=1.0))
    padded = times.optimal_batches(sizes)[1:]
    values = [tokens - policy.rate * cost for tokens, (_, cost) in zip(expected, padded, strict=False)]
    assert max(values[: len(proposed) + 1]) >= max(values) - 1e-9


FLAT, STEEP = {1: 1.0, 64: 1.06}, {1: 1.0, 64: 64.0}
BENT = {1: 1.0, 2: 1.6, 16: 4.0, 64: 16.0}
PADDED = {1: 1.0, 2: 1.5, 3: 3.0, 4: 1.6, 5: 5.0, 8: 5.0, 16: 6.0}
NOISY = {1: 1.0, 2: 0.99, 3: 1.01, 4: 0.985, 8: 0.99, 16: 0.98}  # a GPU, within the precision of measurements
SURE = draft([0.9] * 15)


@pytest.mark.parametrize(
    ("points", "proposal", "sizes", "planned"),
    [
        (STEEP, draft([0.99] * 15), ALL, (0, 1)),
        (FLAT, draft([0.0005] * 15), ALL, (0, 1)),
        (FLAT, SURE, ALL, (15, 16)),
        (FLAT, NO_DRAFT, ALL, (0, 1)),
        (None, SURE, ALL, (0, 1)),
        # An uncertain token before a copy is left to plain decoding, if batches are expensive.
        (BENT, draft([0.6, *[0.97] * 30]), ALL, (0, 1)),
        (BENT, draft([0.97] * 30), ALL, (15, 16)),
        # The policy pads to a cheaper size, but not because of noise.
        (PADDED, draft([0.9, 0.8]), ALL, (2, 4)),
        (PADDED, draft([0.9]), ALL, (1, 2)),
        (NOISY, draft([0.9, 0.9]), ALL, (2, 3)),
        (NOISY, NO_DRAFT, ALL, (0, 1)),
        (NOISY, SURE, ALL, (15, 16)),
        # The batch has at most the largest allowed size, and no more tokens than the draft.
        (FLAT, SURE, (1,), (0, 1)),
        (FLAT, SURE, (1, 2, 3), (2, 3)),
        (FLAT, draft([0.99] * 80), ALL, (63, 64)),
        (FLAT, draft([0.9] * 15, length=3), ALL, (3, 4)),
    ],
)
def test_cost_policy_plan_returns_expected_lengths(
    points: dict[int, float] | None, proposal: Draft, sizes: Sequence[int], planned: tuple[int, int]
) -> None:
    times = known(points).for_plain(sizes[0]) if points else None
    assert UnlimitedPolicy().plan(proposal, times, sizes) == planned


def test_cost_policy_draft_length_grows_with_savings() -> None:
    policy, times, lengths = CostPolicy(), known({1: 1.0, 64: 16.75}), []
    for _ in range(8):
        k, size = policy.plan(draft([0.99] * 15), times, ALL)
        lengths.append(k)
        policy.record(make_step(1 + k, k, k, times.ratio(size), 0.0))
    assert lengths == sorted(lengths)
    assert 1 <= lengths[0] < 4
    assert lengths[-1] == 15


def test_cost_policy_without_savings_allows_cheapest_profitable_draft() -> None:
    # In a mixture of experts, two tokens cost much more than one, and further tokens add little.
    experts = known({1: 1.0, 2: 2.5, 4: 3.0, 8: 3.6, 16: 5.4})
    assert CostPolicy().plan(draft([0.99] * 15), experts, ALL) == (3, 4)


def test_cost_policy_does_not_wait_for_a_later_draft_that_is_out_of_reach() -> None:
    """Six tokens seem cheaper than four, but only a draft of three makes them reachable."""
    prior = {1: 1.0, 2: 1.48, 3: 2.17, 4: 2.56, 6: 2.11, 8: 2.63, 16: 4.54}
    decoding = Decoding(Machine(lambda n: 1.0 + 0.4 * (n - 1)), PassTimes(prior))
    certain = draft([0.97] * 40)
    while len(decoding.ends) <= 40:
        decoding.step(lambda: (certain, 40))
    assert decoding.passes < 20


# --------------------------------------------------------------------------- rollbacks that evaluate tokens again


def worth_with_restore(k: int, chances: Sequence[float], t: PassTimes, restore: RestoreCost) -> float:
    """Return expected tokens less seconds, summed over every possible refusal; a second is worth a token."""
    value = 0.0
    for accepted in range(k + 1):
        seconds = t.ratio(restore.recompute + 1 + k) + (restore.save if k else 0.0)
        if accepted < k:
            seconds += restore.load + t.ratio(restore.recompute + accepted + 2) - t.ratio(1)
        p = math.prod(chances[:accepted]) * (1 - chances[accepted] if accepted < k else 1.0)
        value += p * (1 + accepted - seconds)
    return value


@pytest.mark.parametrize("seed", range(30))
def test_cost_policy_with_restore_cost_plans_optimal_length(seed: int) -> None:
    rng = random.Random(seed)
    chances = [rng.random() ** 0.3 for _ in range(6)]
    t = known({1: 1.0, 64: 1 + 63 * rng.choice((0.02, 0.1, 0.4))})
    again = rng.choice((0, 0, 3, 20))
    restore = RestoreCost(rng.choice((0.0, 0.1, 0.5)), rng.choice((0.0, 0.1)), again)
    values = [worth_with_restore(k, chances, t, restore) for k in range(7)]
    best, policy = values.index(max(values)), UnlimitedPolicy()
    assert policy.plan(draft(chances), t, ALL, restore) == (best, 1 + best)
    assert policy.numbers[-1] == pytest.approx(values)


def test_cost_policy_with_restore_tokens_keeps_batch_within_maximum() -> None:
    k, size = UnlimitedPolicy().plan(draft([0.99] * 60), known({1: 1.0, 64: 1.63}), ALL, RestoreCost(0.0, 0.0, 40))
    assert 40 + size == 40 + 1 + k <= 64


# --------------------------------------------------------------------------- texts that share a pass


def test_price_with_several_texts_divides_loss_budget() -> None:
    times = known(dict.fromkeys(ALL, 1.0))  # A pass of four texts costs as much as one.
    alone, shared = (CostPolicy(texts=texts).price(times, ALL) for texts in (1, 4))
    assert alone
    assert shared
    assert 0 < shared.loss_budget == pytest.approx(alone.loss_budget / 4)


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=2, max_size=4),
    st.floats(0.05, 1.5),
    st.floats(0.0, 0.2),
)
def test_plan_batch_with_shared_cache_finds_best_lengths(chances: list[list[float]], slope: float, bend: float) -> None:
    n = len(chances)
    times = known({n: 1 + slope * (n - 1) * (1 + bend * n) for n in ALL}).for_plain(n)
    planned = UnlimitedPolicy(texts=n).plan_batch(
        [draft(of) for of in chances], times, ALL, lambda lengths: [sum(lengths)]
    )

    def value(lengths: Sequence[int]) -> float:
        tokens = sum(math.prod(of[: i + 1]) for of, length in zip(chances, lengths, strict=True) for i in range(length))
        return tokens - n * times.ratio(n + sum(lengths))

    best = max(map(value, product(*(range(len(of) + 1) for of in chances))))
    assert value([length for length, _ in planned]) == pytest.approx(best)
    assert all(size == 1 + length for length, size in planned)


def test_plan_batch_with_separate_caches_pads_to_one_batch() -> None:
    """Reading the weights costs 1 and a token 0.05, so a second batch for a longer draft costs as much as 20 tokens."""
    shared = MockShared(4, split=True)
    planned = UnlimitedPolicy(texts=4).plan_batch(
        [draft([0.9] * length) for length in (2, 3, 1, 0)],
        known({n: 1 + 0.05 * (n - 1) for n in ALL}),
        ALL,
        lambda shape: shared.batches(shape, shared.sequences),
    )
    sizes = {size for _, size in planned}
    assert len(sizes) == 1 < sizes.pop()
    assert planned[3][0] == 0


# --------------------------------------------------------------------------- recurring sizes: a change of size costs


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2, 3))])
def test_cost_policy_with_switch_cost_uses_few_sizes_and_is_near_best_fixed_ones(seed: int) -> None:
    """Compare with hindsight, in which every pass is plain or has one other size, whichever is better for it.

    The drafts are calibrated. Good and bad ones come in runs, as in texts.
    """
    rng, copying, guesses = random.Random(seed), False, []
    for _ in range(3000):
        copying = copying != (rng.random() < 0.1)
        p = rng.choice([0.6, 0.7])
        length = 0 if rng.random() < 0.3 else rng.randrange(1, 21) if copying else rng.randrange(10)
        right = next((i for i in range(length) if rng.random() >= p), length)
        guesses.append((draft([p] * length), right))
    costs, best = find_curves("cuda-4090-8b-q4_0")["cuda-4090-8b-q4_0"].ratio, 0.0
    for size, least in product((8, 12, 16, 20, 32), (0.0, 0.5, 1.0, 1.5, 2.0)):
        tokens, seconds, last = 0, 0.0, 1
        for guess, right in guesses:
            expected = sum(guess.acceptance_probs[0] ** i for i in range(1, min(size, 1 + len(guess))))
            k, n = (min(size - 1, len(guess)), size) if expected > least else (0, 1)
            seconds += costs(n) + (0.3 if n != last else 0.0)
            tokens, last = tokens + 1 + min(k, right), n
        best = max(best, tokens / seconds)
    knowing, ignorant = (
        Decoding(Machine(costs, changes=(0.3, 0.0)), known({n: costs(n) for n in ALL}, switch)) for switch in (0.3, 0.0)
    )
    for decoding in (knowing, ignorant):
        for guess in guesses:
            decoding.step(lambda guess=guess: guess)  # type: ignore[misc]
    assert knowing.speed > max(0.97 * best, 1.04 * ignorant.speed)
    few = knowing.machine.sizes
    assert sum(n for _, n in few.most_common(3)) > 0.9 * few.total()
    assert len(ignorant.machine.sizes) > 8


def test_cost_policy_with_switch_cost_prefers_what_recurs_within_its_limits() -> None:
    policy, times = UnlimitedPolicy(), known({1: 1.0, 4: 1.5, 8: 1.6}, switch=0.3)
    good, fair, short = draft([0.9] * 7), draft([0.5] * 7), draft([0.9] * 3)

    def decode(proposal: Draft, passes: int) -> int:
        """Return the size of the last pass; each emits a token."""
        for _ in range(passes):
            k, size = policy.plan(proposal, times, ALL) if policy.limit() else (0, 1)
            times.begin_pass(size)
            policy.record(make_step(1, k, 0, 1.0, 0.0))
        return size

    assert decode(fair, 1) == 1, "changes of size cost more than this draft saves"
    assert decode(good, 300) == 8
    assert decode(short, 1) == 8, "padded to what recurs"
    times.begin_pass(1)
    assert decode(fair, 1) == 8, "the size that pays is used again"
    assert decode(draft([0.01]), 300) == 1
    assert decode(fair, 1) == 1, "it no longer recurs"
    expensive = known({1: 1.0, 2: 1.4, 3: 1.5, 4: 3.5, 64: 64.0}, switch=0.65)
    assert CostPolicy().plan(draft([0.999] * 2), expensive, ALL) == (0, 1), "the changes may lose all savings"


def test_cost_policy_with_restore_keeps_draft_within_its_stake() -> None:
    curve, certain = known({1: 1.0, 64: 16.75}), draft([0.95] * 15)
    assert CostPolicy().plan(certain, curve, ALL, RestoreCost(0.1, 0.1))[0] == 1, "always allowed, and the cheapest"
    assert UnlimitedPolicy().plan(certain, curve, ALL, RestoreCost(0.1, 0.1))[0] > 10


@pytest.mark.parametrize(("policy", "longest"), [(CostPolicy(), 1), (UnlimitedPolicy(texts=2), 15)])
def test_cost_policy_with_two_texts_keeps_drafts_within_its_stake(policy: CostPolicy, longest: int) -> None:
    times = known({1: 1.0, 64: 16.75}).for_plain(2)
    plans = policy.for_n_sequences(2).plan_batch([draft([0.95] * 15)] * 2, times, ALL, lambda shape: [sum(shape)])
    assert plans == [(longest, 1 + longest)] * 2


def test_cost_policy_drafts_nothing_where_one_pass_may_lose_all_savings() -> None:
    curve, certain = known({1: 1.0, 2: 1.9, 64: 60.0}), draft([0.99] * 7)
    assert CostPolicy().plan(certain, curve, ALL) == (0, 1)
    assert CostPolicy().plan(certain, curve, ALL, RestoreCost(0.0, 0.0)) == (0, 1)
    shared = known({1: 1.0, 2: 1.1, 3: 1.7, 8: 3.8, 64: 64.0}).for_plain(2)
    assert CostPolicy(texts=2).plan_batch([certain] * 2, shared, ALL, lambda shape: [sum(shape)]) == [(0, 1)] * 2


@pytest.mark.parametrize(
    ("cost", "least", "most"), [(1.0, 100, 100), (1.05, 2, 6), (1.1, 1, 3), (1.25, 0, 1), (1.4, 0, 0)]
)
def test_cost_policy_without_draft_keeps_size_while_cheaper_than_switch(cost: float, least: int, most: int) -> None:
    policy, curve = CostPolicy(), known({1: 1.0, 2: 1.0, 8: cost, 64: 8.0}, switch=0.3)
    assert policy.plan(NO_DRAFT, curve, ALL) == (0, 1), "no size recurs yet"
    n = 0
    while n < 300 or curve.last != 8:  # until the size of good drafts is the recurring one
        k, size = policy.plan(draft([0.95] * 7), curve, ALL) if policy.limit() else (0, 1)
        curve.observe(size, 1.0)
        policy.record(make_step(1 + k, k, k, curve.ratio(size), 0.0))
        n += 1
    assert policy.plan(NO_DRAFT, curve, ALL, RestoreCost(0.1, 0.1)) == (0, 1), "padding would be evaluated again"
    assert policy.plan(draft([0.9] * 3), curve, (1, 2, 4))[1] <= 4, "the recurring size is not allowed"
    kept = 0
    while policy.limit() and kept < 100 and policy.plan(NO_DRAFT, curve, ALL) == (0, 8):
        curve.observe(8, cost)
        policy.record(make_step(1, 0, 0, cost, 0.0))
        kept += 1
    assert least <= kept <= most


# --------------------------------------------------------------------------- traced numbers

EXAMPLE = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.6, 5: 2.1, 64: 40.0}
"""The times of the example in `ngramspec.policies.cost`."""
STOPPED = "the drafter stopped: P(2) is below lambda times the lowest mean cost of further tokens, 0.7"


def explain(
    chances: list[float], times: dict[int, float] = EXAMPLE, n_drafted: int | None = None, passes: int = 1
) -> tuple[int, dict[str, Any]]:
    """Return the length that a new policy plans for a draft, and the details of its record; all drafts are refused."""
    policy, curve = TracedCostPolicy(CostPolicy()), known(times)
    for _ in range(passes):
        policy.begin()
        policy.limit()
        policy.price(curve, ALL)
        planned, _ = policy.plan(draft(chances), curve, ALL)
        step = make_step(1, planned if n_drafted is None else n_drafted, 0, cost=9.0, draft_cost=0.0)
        policy.record(step)
    return planned, dict(step.policy_details)


def test_traced_request_has_the_drafts_of_an_untraced_one_and_explains_them() -> None:
    decoder = make_decoder(make_model(16), slope=0.1, drafter="mixture", policy="cost")
    policy, prompt = decoder.policy, [1, 2, 3, 4] * 8
    text, traced = drive(decoder, prompt, max_tokens=150, return_decisions=True)
    assert isinstance(decoder.loop.policy, TracedCostPolicy)
    assert all(step.policy_details["reason"] for step in traced[1:])
    assert len({len(step.drafted) for step in traced}) > 2
    drive(decoder, prompt, max_tokens=9)
    assert decoder.loop.policy is policy, "untraced requests run without the wrapper"
    decoder = make_decoder(make_model(16), slope=0.1, drafter="mixture", policy="cost")
    plain_text, plain = drive(decoder, prompt, max_tokens=150)
    assert (plain_text, [step.drafted for step in plain]) == (text, [step.drafted for step in traced])
    assert not any(step.policy_details for step in plain)


@pytest.mark.parametrize("chances", [[0.8, 0.8, 0.8, 0.8], [0.3, 0.99, 0.99, 0.99], [0.9, 0.2, 0.6, 0.1]])
def test_details_are_the_numbers_of_the_formulas(chances: list[float]) -> None:
    planned, details = explain(chances)
    assert (details["lambda"], details["loss budget"], details["cap"]) == (1.0, 1.0, 1 + CostPolicy.STAKE)
    costs = [EXAMPLE[n] for n in range(1, 6)]
    numbers = [[details[f"{name}({k + (name == 'T')})"] for k in range(5)] for name in "PTV"]
    assert numbers[0] == pytest.approx(list(accumulate(chances, mul, initial=1.0)))
    assert numbers[1] == costs
    assert numbers[2] == pytest.approx(values_of(chances, costs, 1.0, details["cap"]))
    assert planned == max((k for k in range(5) if costs[k] <= details["cap"]), key=lambda k: numbers[2][k])


@pytest.mark.parametrize(
    ("chances", "times", "length", "reason"),
    [
        ([], EXAMPLE, 0, "the drafter had no guess"),
        ([0.8, 0.8, 0.8], EXAMPLE, 2, "T(4) is above the cap"),
        ([0.8, 0.02, 0.02], EXAMPLE, 1, "V is lower for longer drafts"),
        ([0.8, 0.7], EXAMPLE, 2, "the drafter had no further guess"),
        ([0.8, 0.2], {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.8, 64: 60.0}, 2, STOPPED),
        ([0.99] * 63, {1: 1.0, 64: 1.0}, 63, "the limit of the policy"),
    ],
)
def test_reason_names_what_decided(chances: list[float], times: dict[int, float], length: int, reason: str) -> None:
    planned, details = explain(chances, times)
    assert (planned, details["reason"][: len(reason)]) == (length, reason)


@pytest.mark.parametrize(
    ("seen", "planned", "reason"),
    [
        ((), 1, "a probe of a batch size that was not seen recently"),
        ((2, 3), 5, "larger batches are not allowed, or not before smaller ones were seen"),
    ],
)
def test_reason_names_probes_and_sizes_out_of_reach(seen: tuple[int, ...], planned: int, reason: str) -> None:
    times = PassTimes({n: 1 + 0.02 * (n - 1) for n in ALL})
    for size in (*seen, *seen, *seen):
        times.observe(1, 1.0)
        times.observe(size, times.ratio(size))
    policy = TracedCostPolicy(CostPolicy())
    policy.begin()
    policy.limit()
    assert policy.plan(draft([0.98] * 12), times, ALL)[0] == planned
    policy.record(step := make_step(1, planned, 0, cost=1.0, draft_cost=0.0))
    assert step.policy_details["reason"] == reason


def test_reason_names_a_cut_after_the_plan_and_a_budget_that_is_used_up() -> None:
    planned, details = explain([0.9, 0.9], n_drafted=1)
    assert planned == 2
    assert details["reason"].endswith("; cut where the text ends or the grammar forbids a token")
    assert explain([0.9] * 4, n_drafted=4, passes=4)[1]["reason"] == "the loss budget is used up"
