"""Tests of a draft model: its guesses, its cache during a text, its distributions, and the limits of its use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.mock_target import Blurred, Clock, MockTarget

from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Ask, MarginalCost
from ngramspec.drafting.draft_model.model import POSITIONS, PRIOR, PROBES, RARE, WIDEST, ModelDrafter, model_guess
from ngramspec.sampling.distribution import entropy_ratio
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats

PROMPT = [3, 1, 4, 1, 5]


def greedy_text(mock: MockTarget, context: Sequence[int], n: int) -> list[int]:
    out = list(context)
    for _ in range(n):
        out.append(int(mock.row(out).argmax()))
    return out[len(context) :]


def likeliest(_: int, law: Mapping[int, float]) -> int:
    return max(law, key=law.__getitem__)


# --------------------------------------------------------------------------- guesses


def test_model_drafter_drafts_greedy_text_and_reports_entropy() -> None:
    model = MockTarget(40, peak=8.0)
    drafter = ModelDrafter(model, n_vocab=39)
    drafter.begin(PROMPT)
    draft = drafter.propose(Ask(6))
    assert draft.tokens == tuple(greedy_text(model, PROMPT, 6))
    assert (draft.source, draft.q, len(draft.acceptance_probs)) == ("model", (), 6)
    # The model does not evaluate the last guess, since no guess follows it.
    assert model.tokens == [*PROMPT, *draft.tokens[:-1]]
    entropy = draft.entropy
    assert entropy is not None
    assert entropy() == pytest.approx(entropy_ratio(model.row(PROMPT)[:39]))


def test_model_drafter_estimate_starts_at_model_and_learns() -> None:
    model = MockTarget(40, peak=2.0)
    drafter = ModelDrafter(model)
    drafter.begin(PROMPT)
    row = model.row(PROMPT)
    p = float(np.exp(row.max()) / np.exp(row).sum())
    first = drafter.propose(Ask(1)).acceptance_probs[0]
    assert first == pytest.approx(p, abs=0.01)  # The map is linear between its points.
    for _ in range(80):
        assert drafter.accept([(drafter.propose(Ask(1)).tokens[0] + 1) % 40]) == 0
        drafter.begin(PROMPT)
    assert drafter.propose(Ask(1)).acceptance_probs[0] < 0.7 * first


@pytest.mark.parametrize("replays", [False, True])
def test_model_drafter_after_any_rejection_drafts_from_correct_cache(replays: bool) -> None:
    """After any refusal, the next draft is the same as that of a model that never saw the refused tokens."""
    model = MockTarget(40, peak=8.0, replays=replays)
    drafter = ModelDrafter(model)
    drafter.begin(PROMPT)
    text = list(PROMPT)
    for drafted, right in [(n, k) for n in range(1, 6) for k in range(n + 1)] * 3:
        guesses = drafter.propose(Ask(drafted)).tokens
        own = (greedy_text(model, [*text, *guesses[:right]], 1)[0] + (right < drafted)) % 40
        text += [*guesses[:right], own]
        assert drafter.accept([*guesses[:right], own]) == right
        assert drafter.propose(Ask(3)).tokens == tuple(greedy_text(model, text, 3))
        assert model.tokens[: len(text)] == text
        drafter.accept([own])
        text.append(own)


def test_model_drafter_after_draft_evaluates_only_new_tokens() -> None:
    model = MockTarget(40, peak=8.0)
    drafter = ModelDrafter(model)
    drafter.begin(PROMPT)
    guesses = drafter.propose(Ask(4)).tokens
    assert drafter.prefill_seconds > 0, "no draft is to blame for reading the prompt"
    model.batches.clear()
    model.prefill_sizes.clear()
    drafter.accept([*guesses, 7])
    drafter.propose(Ask(2))
    # One prefill evaluates the last guess and the target's token, without logits in between; then one guess follows.
    assert (model.prefill_sizes, model.batches) == ([2], [1])
    model.batches.clear()
    drafter.accept([9])
    drafter.propose(Ask(1))
    assert model.batches == [1]
    assert drafter.prefill_seconds == 0


def test_model_drafter_next_text_reuses_common_prefix() -> None:
    model = MockTarget(40)
    drafter = ModelDrafter(model)
    for prompt, new in (([1, 2, 3, 4, 5, 6], 6), ([1, 2, 3, 9, 9], 2), ([8], 1)):
        drafter.begin(prompt)
        model.prefill_sizes.clear()
        model.batches.clear()
        assert drafter.propose(Ask(1)).tokens == tuple(greedy_text(model, prompt, 1))
        assert sum(model.prefill_sizes) + sum(model.batches) == new


def test_model_drafter_with_full_context_or_unknown_token_stops() -> None:
    drafter = ModelDrafter(MockTarget(40, n_ctx=8, slack=0))
    drafter.begin(PROMPT)
    assert [len(drafter.propose(Ask(9))), drafter.accept([1, 2]), len(drafter.propose(Ask(9)))] == [4, 0, 2]
    drafter.accept([3, 4])
    assert len(drafter.propose(Ask(9))) == 0
    drafter = ModelDrafter(MockTarget(40))
    drafter.begin([1, 40])
    assert len(drafter.propose(Ask(4))) == 0
    drafter.begin([1, 2])
    drafter.accept([3, 99])
    assert len(drafter.propose(Ask(4))) == 0
    drafter.begin([])
    assert len(drafter.propose(Ask(4))) == 0


def test_model_drafter_drafts_only_tokens_of_target() -> None:
    drafter = ModelDrafter(MockTarget(60, peak=8.0), n_vocab=20)
    drafter.begin([3, 1, 4])
    tokens = [token for _ in range(20) for token in (*drafter.propose(Ask(8)).tokens, drafter.accept([5]))]
    assert max(tokens) < 20
    assert max(drafter.propose(Ask(1, likeliest)).q[0]) < 20


def test_model_drafter_rejects_model_without_rollback() -> None:
    with pytest.raises(ValueError, match="cannot be used as a draft model: its state cannot be rolled back"):
        ModelDrafter(MockTarget(8, fail_rollback=True))


def test_model_drafter_with_bad_logits_ends_draft() -> None:
    drafter = ModelDrafter(MockTarget(40, broken=lambda context: len(context) > 6))
    drafter.begin(PROMPT)
    assert len(drafter.propose(Ask(9))) == 2
    assert len(drafter.propose(Ask(9, likeliest))) == 2
    for row in ([-math.inf] * 4, [0.0, math.nan, 0.0, 0.0]):
        assert model_guess(np.array(row), 0, None, Sampling()) is None


def test_model_drafter_q_equals_distribution_at_target_temperature() -> None:
    model = MockTarget(400, peak=1.0)
    drafter = ModelDrafter(model)
    for temperature, min_p in ((0.2, 0.0), (0.5, 0.0), (1.0, 0.0), (2.0, 0.2), (1.0, 0.4)):
        drafter.set_sampling(Sampling(temperature, min_p=min_p))
        drafter.begin(PROMPT)
        law = drafter.propose(Ask(1, likeliest)).q[0]
        row = model.row(PROMPT).astype(np.float64)
        full = np.exp((row - row.max()) / temperature)
        order = np.argsort(-row)
        assert sorted(law, key=lambda t: -law[t]) == order[: len(law)].tolist()
        assert len(law) == WIDEST or len(law) == (np.exp(row - row.max()) >= max(min_p, RARE**temperature)).sum()
        for token, p in law.items():
            assert p / law[int(order[0])] == pytest.approx(full[token], rel=1e-5)


# --------------------------------------------------------------------------- gain of its guesses


def drafter_of(token: float = 0.1) -> ModelDrafter:
    """Return a drafter whose model takes `token` seconds for a token."""
    drafter = ModelDrafter(MockTarget(40))
    drafter.times.observe(1, token)
    return drafter


def test_model_drafter_rate_is_separate_by_position_up_to_the_last() -> None:
    drafter = drafter_of()
    for _ in range(100):
        drafter.learn(1, False)
        drafter.learn(POSITIONS + 3, True)
    assert drafter.rate(0) == pytest.approx(PRIOR)
    assert drafter.rate(1) < 0.1
    assert drafter.rate(POSITIONS - 1) == drafter.rate(99) > 0.95


def test_model_drafter_pass_cost_includes_last_token_of_text_in_first_call() -> None:
    drafter, price = drafter_of(), MarginalCost(1.0, [0.1] * 10, seconds=1.0)
    drafter.begin(PROMPT)
    drafter.open(price)
    for n_tokens in (3, 2):
        assert drafter.pass_cost(2, price) == pytest.approx(drafter.times.level * drafter.times.ratio(n_tokens))
        drafter.read_chain([5, 9], 0)


def test_model_drafter_passes_of_one_draft_share_half_of_the_loss_budget() -> None:
    clock = Clock(tick=0.0)
    drafter = ModelDrafter(MockTarget(40, seconds=lambda n: 0.1, clock=clock), clock=clock.perf_counter)
    drafter.begin(PROMPT[:1])
    prices = [MarginalCost(1.0, [0.1] * 10, seconds=1.0, loss_budget=budget) for budget in (0.39, 0.41)]
    drafter.open(prices[0])
    drafter.read_chain([], 0)
    assert [drafter.pass_cost(1, price) for price in prices] == [math.inf, pytest.approx(0.1)]


@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_model_drafter_gain_equals_gain_of_best_length(seconds: float) -> None:
    each = 0.3 + 0.1 / seconds
    by_length = [sum(PRIOR**j - 1.2 * each for j in range(1, k + 1)) for k in range(10)]
    price = MarginalCost(1.2, [0.3] * 10, seconds)
    assert drafter_of().gain(9, price) == pytest.approx(max(by_length))
    assert drafter_of().gain(1, price) == pytest.approx(by_length[1])
    assert drafter_of().gain(9, MarginalCost(1.2, [0.8] * 10, seconds)) == 0.0


@pytest.mark.parametrize(
    ("price", "length", "least", "token"),
    [
        # A further guess must be correct with probability 0.4; it is with 0.8.
        (MarginalCost(1.0, [0.3] * 10, 1.0), 3, 0.5, 0.1),
        # Without known seconds, only the target's price counts.
        (MarginalCost(1.0, [0.5] * 10), 1, 0.5, 1e9),
        # Very unlikely guesses end a draft at any price.
        (None, 1, 0.05, 0.1),
        (MarginalCost(0.0, [0.0] * 10), 1, 0.05, 0.1),
        (MarginalCost(0.0, [0.0] * 10, 1.0), 1, 0.05, 0.1),
        # The budget allows the loss of two guesses, but not of three.
        (MarginalCost(1.0, [0.0] * 10, 1.0, loss_budget=0.35), 2, 0.125, 0.1),
        (MarginalCost(1.0, [0.0] * 10, 1.0, loss_budget=0.35), 3, 1.01, 0.1),
    ],
)
def test_model_drafter_continues_draft_while_next_token_pays(
    price: MarginalCost | None, length: int, least: float, token: float
) -> None:
    assert drafter_of(token).should_continue(least * 1.001, length, price) == (least < 1)
    assert not drafter_of(token).should_continue(least * 0.999, length, price)


# --------------------------------------------------------------------------- its cost


def run_timed(
    token: float,
    *,
    blur: float,
    slope: float,
    each: float = 0.1,
    max_tokens: int = 400,
    prompt: Sequence[int] = PROMPT,
    **options: Any,
) -> tuple[Stats, Blurred, float]:
    """Return the counters of a text on a mock clock, the draft model, and the seconds of decoding.

    A pass of the target takes 1 and `slope` for each further token, one of the draft model `token` and `each * token`.
    """
    clock = Clock(tick=1e-6)
    model = Blurred(60, blur=blur, peak=6.0, seconds=lambda n: token * (1 + each * (n - 1)), clock=clock)
    target = MockTarget(60, peak=6.0, seconds=lambda n: 1 + slope * (n - 1), clock=clock)
    drafter = ModelDrafter(model, clock=clock.perf_counter)
    times = make_fixed_curve({1: 1.0, 64: 1 + 63 * slope})
    decoder = SpeculativeDecoder(target, drafter=drafter, times=times, clock=clock.perf_counter, **options)
    stats = Stats()
    began = clock.now
    for step in decoder.generate(prompt, max_tokens=max_tokens):
        stats.add(step)
    return stats, model, clock.now - began


def test_model_drafter_with_fast_model_increases_speed() -> None:
    stats, _, seconds = run_timed(0.05, blur=0.5, slope=0.05)
    assert stats.tokens_per_pass > 2.5
    assert seconds < 0.6 * 400
    assert stats.seconds + stats.draft_seconds + stats.prefill_seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("token", "blur", "slope"),
    [(1.0, 0.0, 0.0), (0.9, 0.0, 0.3), (0.05, 60.0, 0.05), (0.4, 60.0, 0.2), (0.5, 3.0, 0.4), (0.2, 3.0, 0.2)],
)
def test_model_drafter_without_gain_limits_loss(token: float, blur: float, slope: float) -> None:
    """A model that is as slow as the target or nearly always wrong costs about three passes and 1 %, at any length."""
    for length in (50, 400):
        _, _, seconds = run_timed(token, blur=blur, slope=slope, max_tokens=length)
        assert seconds < length + 3 + 0.01 * length


def test_model_drafter_probes_rarely_and_resumes_when_it_pays() -> None:
    clock = Clock(tick=0.0)
    model = MockTarget(60, peak=6.0, seconds=lambda n: 0.1, clock=clock)
    drafter = ModelDrafter(model, clock=clock.perf_counter)
    price = MarginalCost(1.0, [0.1] * 64, 1.0)
    drafter.begin(PROMPT)
    text = list(PROMPT)

    def follow(passes: int, wrong: int) -> list[bool]:
        asked = []
        for _ in range(passes):
            asked.append(len(drafter.propose(Ask(8, price=price))) > 0)
            token = (greedy_text(model, text, 1)[0] + wrong) % 60
            drafter.accept([token])
            text.append(token)
        return asked

    poor = follow(1200, wrong=1)
    assert all(poor[:5])
    assert 0 < sum(poor[500:]) * 0.1 <= PROBES * 700 + 1
    assert sum(follow(1000, wrong=0)[-300:]) == 300


def test_model_drafter_delays_long_prefill_until_it_pays() -> None:
    prompt = [i % 7 for i in range(400)]
    short, model, _ = run_timed(0.1, blur=0.5, slope=0.05, each=1.0, prompt=prompt, max_tokens=10)
    assert len(model.tokens) < 50
    assert short.drafted == 0
    long, model, _ = run_timed(0.1, blur=0.5, slope=0.05, each=1.0, prompt=prompt, max_tokens=300)
    assert len(model.tokens) > 400
    assert long.tokens_per_pass > 1.5
    assert long.decode_seconds - long.seconds - long.draft_seconds > 0.1 * 400  # No draft is charged for the prompt.


def test_model_drafter_after_long_text_prefills_prompt_immediately() -> None:
    clock = Clock(tick=1e-6)
    model = Blurred(60, blur=0.0, peak=6.0, seconds=lambda n: 0.1 * n, clock=clock)
    drafter = ModelDrafter(model, clock=clock.perf_counter)
    price = MarginalCost(1.0, [0.1] * 10, seconds=1.0)
    prompt = [i % 7 for i in range(400)]
    read = []
    for text in (3, 200, 3):
        drafter.begin(prompt)
        drafter.propose(Ask(4, price=price))
        read.append(len(model.tokens) >= 400)
        for _ in range(text):
            drafter.accept([1])
        model.clear()
    assert read == [False, False, True]
