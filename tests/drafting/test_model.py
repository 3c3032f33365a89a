"""A model that drafts: its guesses, its cache beside the text, its laws, and when it is left alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.decoder_loop import CLOCK, cheap, drive, milliseconds, unmeasured
from support.laws import Path, check_law, law_of_text
from support.mock_target import Clock, MockTarget, plain_generate

from ngramspec.cost.given import GivenCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Stats
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.model import PROBES, ModelDrafter
from ngramspec.drafting.price import TokenPrice
from ngramspec.sampling.entropy import normalised_entropy
from ngramspec.sampling.settings import Sampling

PROMPT = [3, 1, 4, 1, 5]


class Blurred(MockTarget):
    """A mock whose logits are moved a little: right most of the time."""

    def __init__(self, blur: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._blur = blur

    def row(self, context: Sequence[int]) -> Any:
        rng = np.random.default_rng((7, *context[-2:]))
        return super().row(context) + (self._blur * rng.standard_normal(self.n_vocab)).astype(np.float32)


def greedy_text(mock: MockTarget, context: Sequence[int], n: int) -> list[int]:
    out = list(context)
    for _ in range(n):
        out.append(int(mock.row(out).argmax()))
    return out[len(context) :]


def decoder_on(target: MockTarget, drafter: ModelDrafter, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        target, drafter=drafter, curve=GivenCurve({1: 1.0, 64: 2.0}), **{"policy": "fixed", "draft_max": 4, **options}
    )


# --------------------------------------------------------------------------- guesses


def test_it_drafts_what_the_model_would_write() -> None:
    model = MockTarget(40, peak=8.0)
    drafter = ModelDrafter(model)
    drafter.begin(PROMPT)
    draft = drafter.propose(6)
    assert draft.tokens == tuple(greedy_text(model, PROMPT, 6))
    assert (draft.source, draft.q, len(draft.chances)) == ("model", (), 6)
    # The last guess is not evaluated: nobody asked what follows it.
    assert model.tokens == [*PROMPT, *draft.tokens[:-1]]


def test_the_entropy_of_the_first_law_can_be_asked_for_after_the_draft() -> None:
    model = MockTarget(40, peak=2.0)
    drafter = ModelDrafter(model, n_vocab=30)
    drafter.begin(PROMPT)
    draft = drafter.propose(4).head(2)
    assert draft.entropy is not None
    assert draft.entropy() == pytest.approx(normalised_entropy(model.row(PROMPT)[:30]))


def test_a_guess_is_as_sure_as_the_model_at_first_and_is_then_what_came_of_such_guesses() -> None:
    model = MockTarget(40, peak=2.0)
    drafter = ModelDrafter(model)
    drafter.begin(PROMPT)
    row = model.row(PROMPT)
    p = float(np.exp(row.max()) / np.exp(row).sum())
    first = drafter.propose(1).chances[0]
    assert first == pytest.approx(p, abs=0.01)  # linear between points of the map
    for _ in range(80):
        assert drafter.accept([(drafter.propose(1).tokens[0] + 1) % 40]) == 0
        drafter.begin(PROMPT)
    assert drafter.propose(1).chances[0] < 0.7 * first


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize(("drafted", "right"), [(n, k) for n in range(1, 6) for k in range(n + 1)])
def test_the_cache_goes_back_by_every_length(drafted: int, right: int, replays: bool) -> None:
    """After any refusal the next draft is that of a model that never saw the refused tokens."""
    model = MockTarget(40, peak=8.0, replays=replays)
    drafter = ModelDrafter(model)
    drafter.begin(PROMPT)
    text = list(PROMPT)
    for _ in range(3):
        guesses = drafter.propose(drafted).tokens
        own = (greedy_text(model, [*text, *guesses[:right]], 1)[0] + (right < drafted)) % 40
        emitted = [*guesses[:right], own]
        assert drafter.accept(emitted) == right
        text += emitted
        assert drafter.propose(3).tokens == tuple(greedy_text(model, text, 3))
        assert model.tokens[: len(text)] == text
        drafter.accept([own])
        text.append(own)


def test_what_was_refused_is_taken_back_and_nothing_is_evaluated_twice() -> None:
    model = MockTarget(40, peak=8.0)
    drafter = ModelDrafter(model)
    drafter.begin(PROMPT)
    guesses = drafter.propose(4).tokens
    model.batches.clear()
    model.prefilled.clear()
    drafter.accept([*guesses, 7])
    drafter.propose(2)
    # The last guess and the target's token together, without the logits between them; then the first new guess.
    assert (model.prefilled, model.batches) == ([2], [1])
    model.batches.clear()
    drafter.accept([9])
    drafter.propose(1)
    assert model.batches == [1]


def test_the_next_text_keeps_what_it_has_in_common_with_the_last() -> None:
    model = MockTarget(40)
    drafter = ModelDrafter(model)
    for prompt, new in (([1, 2, 3, 4, 5, 6], 6), ([1, 2, 3, 9, 9], 2), ([8], 1)):
        drafter.begin(prompt)
        model.prefilled.clear()
        model.batches.clear()
        assert drafter.propose(1).tokens == tuple(greedy_text(model, prompt, 1))
        assert sum(model.prefilled) + sum(model.batches) == new


def test_a_full_context_and_a_foreign_token_end_the_drafts() -> None:
    drafter = ModelDrafter(MockTarget(40, n_ctx=8, slack=0))
    drafter.begin(PROMPT)
    assert [len(drafter.propose(9)), drafter.accept([1, 2]), len(drafter.propose(9))] == [4, 0, 2]
    drafter.accept([3, 4])
    assert len(drafter.propose(9)) == 0
    drafter = ModelDrafter(MockTarget(40))
    drafter.begin([1, 40])
    assert len(drafter.propose(4)) == 0
    drafter.begin([1, 2])
    drafter.accept([3, 99])
    assert len(drafter.propose(4)) == 0
    drafter.begin([])
    assert len(drafter.propose(4)) == 0


def test_only_tokens_that_the_target_knows_are_drafted() -> None:
    drafter = ModelDrafter(MockTarget(60, peak=8.0), n_vocab=20)
    drafter.begin([3, 1, 4])
    tokens = [token for _ in range(20) for token in (*drafter.propose(8).tokens, drafter.accept([5]))]
    assert max(tokens) < 20
    law = drafter.propose(1, lambda _, weights: max(weights, key=lambda t: weights[t])).q[0]
    assert max(law) < 20


def test_a_model_that_cannot_go_back_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot draft: what it has evaluated cannot be taken back"):
        ModelDrafter(MockTarget(8, fail_rollback=True))


def test_broken_logits_end_a_draft() -> None:
    class Broken(MockTarget):
        def row(self, context: Sequence[int]) -> Any:
            return super().row(context) * (np.nan if len(context) > 6 else 1.0)

    drafter = ModelDrafter(Broken(40))
    drafter.begin(PROMPT)
    assert len(drafter.propose(9)) == 2
    assert len(drafter.propose(9, lambda _, weights: next(iter(weights)))) == 2


# --------------------------------------------------------------------------- drawn drafts


def test_q_is_the_law_at_the_targets_temperature() -> None:
    model = MockTarget(400, peak=1.0)
    drafter = ModelDrafter(model)
    for temperature, min_p in ((0.5, 0.0), (1.0, 0.0), (2.0, 0.2)):
        drafter.follow(Sampling(temperature, min_p=min_p))
        drafter.begin(PROMPT)
        draft = drafter.propose(1, lambda _, weights: max(weights, key=lambda t: weights[t]))
        row = model.row(PROMPT).astype(np.float64)
        full = np.exp((row - row.max()) / temperature)
        law = draft.q[0]
        assert sum(law.values()) == pytest.approx(1)
        order = np.argsort(-row)
        assert sorted(law, key=lambda t: -law[t]) == order[: len(law)].tolist()
        assert len(law) == 32 or len(law) == (np.exp(row - row.max()) >= max(min_p, 0.01**temperature)).sum()
        for token, p in law.items():
            assert p / law[int(order[0])] == pytest.approx(full[token], rel=1e-5)
    with pytest.raises(ValueError, match="not among"):
        drafter.propose(3, lambda offset, weights: 399 if 399 not in weights else 0)


def test_a_blind_estimate_does_not_look_at_the_draw() -> None:
    rng = random.Random(5)
    drafter = ModelDrafter(MockTarget(30, peak=1.5))
    drafter.begin(PROMPT)

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        return rng.choice(list(weights))

    for _ in range(60):
        drafter.accept([*drafter.propose(4, choose, blind=True).tokens[: rng.randrange(4)], rng.randrange(30)])
    seen, lengths = set(), set()
    for _ in range(30):
        draft = drafter.propose(5, choose, blind=True)
        assert len(draft.chances) == 5 >= len(draft) == len(draft.q)
        assert all(token in q for token, q in zip(draft.tokens, draft.q, strict=True))
        seen.add(draft.chances)
        lengths.add(len(draft))
    assert len(seen) == 1
    assert len(lengths) > 1  # a draft may end by what was drawn before


# --------------------------------------------------------------------------- texts and laws


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 4}, {"temperature": 1.3, "min_p": 0.05}])
@pytest.mark.parametrize("blur", [0.0, 2.0, 30.0])
def test_texts_are_those_of_plain_decoding(blur: float, settings: dict[str, Any], replays: bool) -> None:
    sampling = Sampling(**settings)
    expected = plain_generate(MockTarget(60, peak=6.0), PROMPT, 120, sampling)
    drafter = ModelDrafter(Blurred(blur, 60, peak=6.0, replays=replays))
    decoder = decoder_on(MockTarget(60, peak=6.0), drafter)
    for _ in range(2):  # the second time with what the first left in the cache
        emitted, steps = drive(decoder, PROMPT, max_tokens=120, sampling=sampling)
        assert emitted == expected
    accepted, drafted = (sum(counts) for counts in zip(*((s.accepted, len(s.drafted)) for s in steps), strict=True))
    assert accepted == drafted if not blur else 0 < accepted < drafted
    assert steps[1].source == "model"


class Coin(MockTarget):
    """Four tokens with the same law whatever came before."""

    def __init__(self, law: Sequence[float], **options: Any) -> None:
        super().__init__(4, **options)
        self._law = np.log(law).astype(np.float32)

    def row(self, context: Sequence[int]) -> Any:
        return self._law.copy()


@pytest.mark.parametrize("policy", ["fixed", "cost"])
@pytest.mark.parametrize("verify", ["rejection", "coupled"])
def test_sampling_keeps_the_law(verify: str, policy: str) -> None:
    """1,500 texts of three tokens; the chance of a false alarm is `support.laws.ALARM` each, and the seeds are fixed.

    The model is sure of what is unlikely: were a drawn token looked at before it stays in a draft, its law would show.
    """
    target = MockTarget(4, peak=1.0, seconds=cheap, clock=CLOCK)
    drafter = ModelDrafter(Coin([0.7, 0.1, 0.15, 0.05]), clock=milliseconds)
    decoder = unmeasured(target, drafter=drafter, policy=policy, draft_max=4)
    sample: Counter[Path] = Counter()
    stats = Stats()
    for seed in range(1500):
        tokens: list[int] = []
        sampling = Sampling(1.0, seed=seed, top_k=0, top_p=1.0, min_p=0.0)
        for step in decoder.generate([3, 1, 2], max_tokens=4, sampling=sampling, verify=verify):
            stats.add(step)
            tokens += step.tokens
        sample[tuple(tokens[:3])] += 1
    assert stats.drafted > 500
    assert 0.2 < (stats.acceptance_rate or 0) < 0.9
    check_law(sample, law_of_text(target, [3, 1, 2], Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0), 3))


def test_rejection_accepts_as_often_as_the_laws_overlap() -> None:
    """alpha = sum of min(p, q) (Leviathan et al. 2023, corollary 3.6); five standard deviations of 4,000 drafts."""
    p, q = [0.4, 0.3, 0.2, 0.1], [0.7, 0.1, 0.15, 0.05]
    decoder = decoder_on(Coin(p), ModelDrafter(Coin(q)), draft_max=1)
    stats = Stats()
    sampling = Sampling(1.0, seed=3, top_k=0, top_p=1.0, min_p=0.0)
    for step in decoder.generate([3, 1, 2], max_tokens=4000, sampling=sampling, verify="rejection"):
        stats.add(step)
    alpha = sum(map(min, p, q))
    tested = stats.tested_at[0]
    assert abs((stats.acceptance_rate or 0) - alpha) < 5 * (alpha * (1 - alpha) / tested) ** 0.5


# --------------------------------------------------------------------------- what it costs


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
    """A text under the cost policy, where a pass of the target takes 1, one of the draft model `token`, and
    each token more in it that part of `token`.

    Returns the counters, the draft model, and the seconds of decoding.
    """
    clock = Clock(tick=1e-6)

    class Timed(Blurred):
        def prefill(self, tokens: Sequence[int], **options: Any) -> Any:
            row = super().prefill(tokens, **options)
            clock.now += token * (1 + each * (self.prefilled[-1] - 1))
            return row

    model = Timed(blur, 60, peak=6.0, seconds=lambda n: token * (1 + each * (n - 1)), clock=clock)
    target = MockTarget(60, peak=6.0, seconds=lambda n: 1 + slope * (n - 1), clock=clock)
    drafter = ModelDrafter(model, clock=clock.perf_counter)
    curve = GivenCurve({1: 1.0, 64: 1 + 63 * slope})
    decoder = SpeculativeDecoder(target, drafter=drafter, curve=curve, clock=clock.perf_counter, **options)
    stats = Stats()
    began = clock.now
    for step in decoder.generate(prompt, max_tokens=max_tokens):
        stats.add(step)
    return stats, model, clock.now - began


def test_a_fast_model_that_is_right_pays() -> None:
    stats, _, seconds = run_timed(0.05, blur=0.5, slope=0.05)
    assert stats.tokens_per_pass > 2.5
    assert seconds < 0.6 * 400
    assert stats.seconds + stats.draft_seconds + stats.prefill_seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("token", "blur", "slope"),
    [(1.0, 0.0, 0.0), (0.9, 0.0, 0.3), (0.05, 60.0, 0.05), (0.4, 60.0, 0.2), (0.5, 3.0, 0.4), (0.2, 3.0, 0.2)],
)
def test_a_model_that_does_not_pay_is_soon_left_alone(token: float, blur: float, slope: float) -> None:
    """As slow as the target, or nearly always wrong: what it costs is some three passes and 1 %, at any length."""
    for length in (50, 400):
        _, _, seconds = run_timed(token, blur=blur, slope=slope, max_tokens=length)
        assert seconds < length + 3 + 0.01 * length


def test_a_probe_is_rare_and_finds_a_model_that_pays_again() -> None:
    clock = Clock(tick=0.0)
    model = Blurred(0.0, 60, peak=6.0, seconds=lambda n: 0.1, clock=clock)
    drafter = ModelDrafter(model, clock=clock.perf_counter)
    price = TokenPrice(1.0, [0.1] * 64, 1.0)
    drafter.begin(PROMPT)
    text = list(PROMPT)

    def follow(passes: int, wrong: int) -> list[bool]:
        asked = []
        for _ in range(passes):
            asked.append(len(drafter.propose(8, price=price)) > 0)
            token = (greedy_text(model, text, 1)[0] + wrong) % 60
            drafter.accept([token])
            text.append(token)
        return asked

    poor = follow(1200, wrong=1)
    assert all(poor[:5])
    assert 0 < sum(poor[500:]) * 0.1 <= PROBES * 700 + 1
    assert sum(follow(1000, wrong=0)[-300:]) == 300


def test_a_long_prompt_is_read_once_that_can_have_paid_for_itself() -> None:
    prompt = [i % 7 for i in range(400)]
    short, model, _ = run_timed(0.1, blur=0.5, slope=0.05, each=1.0, prompt=prompt, max_tokens=10)
    assert len(model.tokens) < 50
    assert short.drafted == 0
    long, model, _ = run_timed(0.1, blur=0.5, slope=0.05, each=1.0, prompt=prompt, max_tokens=300)
    assert len(model.tokens) > 400
    assert long.tokens_per_pass > 1.5
    assert long.prefill_seconds > 0.1 * 400  # reading it counts as that


def test_a_prompt_is_read_at_once_where_earlier_texts_were_long_enough_to_pay_for_it() -> None:
    clock = Clock(tick=1e-6)

    class Timed(MockTarget):
        def prefill(self, tokens: Sequence[int], **options: Any) -> Any:
            row = super().prefill(tokens, **options)
            clock.now += 0.1 * self.prefilled[-1]
            return row

    model = Timed(40, peak=8.0, seconds=lambda size: 0.1 * size, clock=clock)
    drafter = ModelDrafter(model, clock=clock.perf_counter)
    price = TokenPrice(1.0, [0.1] * 10, seconds=1.0)
    prompt = [i % 7 for i in range(400)]
    read = []
    for text in (3, 200, 3):
        drafter.begin(prompt)
        drafter.propose(4, price=price)
        read.append(len(model.tokens) >= 400)
        for _ in range(text):
            drafter.accept([1])
        model.clear()
    assert read == [False, False, True]


def test_reading_is_not_held_against_drafts() -> None:
    drafter = ModelDrafter(MockTarget(40))
    drafter.begin(PROMPT)
    drafter.propose(3)
    assert drafter.read_seconds > 0
    drafter.accept([1])
    drafter.propose(3)
    assert drafter.read_seconds == 0


def test_a_draft_ends_where_the_next_guess_is_not_worth_its_time() -> None:
    model = MockTarget(40, peak=8.0)
    lengths = []
    for seconds in (0.0, 0.02, 0.3):
        clock = Clock(tick=0.0)
        timed_model = MockTarget(40, peak=8.0, seconds=lambda n, s=seconds: s, clock=clock)
        drafter = ModelDrafter(timed_model, clock=clock.perf_counter)
        drafter.begin(PROMPT)
        drafter.propose(1)
        for token in greedy_text(model, PROMPT, 4):
            drafter.accept([token])
            draft = drafter.propose(12, price=TokenPrice(1.0, [0.05] * 20, 1.0))
        lengths.append(len(draft))
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) == 3
    assert isinstance(draft, Draft)
    assert list(itertools.islice(draft.tokens, 1)) == greedy_text(model, [*PROMPT, *greedy_text(model, PROMPT, 4)], 1)
