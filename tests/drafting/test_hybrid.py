"""N-grams and a model that guess one chain: who is asked, what it costs, and that the text stays the target's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoder_loop import CLOCK, cheap, drive, milliseconds, unmeasured
from support.laws import Path, check_law, law_of_text
from support.mock_shared import MockShared
from support.mock_target import MockTarget, plain_generate

from ngramspec.decoding.step import Stats
from ngramspec.drafting.asked_model import AskedModel
from ngramspec.drafting.hybrid import HybridDrafter
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.drafting.price import TokenPrice
from ngramspec.sampling.settings import Sampling

N = 40
OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Small(MockTarget):
    """A draft model of a mock target: right but for `blur`, and each token in its cache counts in its logits.

    Args:
        blur: scale of what moves the target's logits.
        slow: seconds of a pass, whatever its size.
    """

    def __init__(self, n_vocab: int = N, *, blur: float = 0.0, slow: float = 0.0, **options: Any) -> None:
        super().__init__(n_vocab, **{"seconds": lambda _: slow, "clock": CLOCK, "peak": 6.0, **options})
        self._blur = blur
        self._slow = slow

    def prefill(self, tokens: Sequence[int], **options: Any) -> Any:
        CLOCK.now += self._slow
        return super().prefill(tokens, **options)

    def row(self, context: Sequence[int]) -> Any:
        rng = np.random.default_rng((7, *context))
        return super().row(context) + (self._blur * rng.standard_normal(self.n_vocab)).astype(np.float32)


def target(n_vocab: int = N, **options: Any) -> MockTarget:
    return MockTarget(n_vocab, **{"peak": 6.0, "seconds": cheap, "clock": CLOCK, **options})


def hybrid(model: MockTarget) -> HybridDrafter:
    return HybridDrafter(AskedModel(model, clock=milliseconds))


def count(mock: MockTarget, drafter: Any, prompt: Sequence[int], n: int, **options: Any) -> Stats:
    stats = Stats()
    for step in unmeasured(mock, drafter=drafter).generate(prompt, max_tokens=n, **options):
        stats.add(step)
    return stats


def novel(n: int) -> list[int]:
    """A prompt in which nothing repeats."""
    return list(range(n))


# --------------------------------------------------------------------------- who is asked


def test_a_dear_model_is_left_alone() -> None:
    """Ten plain passes a guess: nothing that it adds is worth that."""
    model = Small(slow=10e-3)
    drafted = count(target(), hybrid(model), [1, 2, 3] * 20, 120)
    alone = count(target(), MixtureDrafter(), [1, 2, 3] * 20, 120)
    assert model.passes == 0
    assert drafted.tokens_per_pass == alone.tokens_per_pass


def test_guesses_that_no_pass_is_worth_are_not_asked_for() -> None:
    """However little each token more costs: the first of them costs more than all could bring, or does not."""
    asked = []
    for first in (0.0, 30.0):
        model = Small(slow=0.01e-3)
        drafter = hybrid(model)
        drafter.begin(novel(30))
        drafter.accept([31])
        costs = [0.0, *(first + 0.01 * length for length in range(1, 12))]
        drafter.propose(10, price=TokenPrice(1.0, [0.01] * 12, seconds=1.0, costs=lambda costs=costs: costs))
        asked.append(model.passes > 0)
    assert asked == [True, False]


def test_where_n_grams_have_nothing_a_cheap_model_guesses() -> None:
    wide = 4000
    mock, prompt = target(wide, peak=9.0), novel(30)
    drafted = count(mock, hybrid(Small(wide, slow=0.02e-3, peak=9.0)), prompt, 60)
    alone = count(mock, MixtureDrafter(), prompt, 60)
    assert alone.tokens_per_pass < 1.2
    assert drafted.tokens_per_pass > 4


def test_where_n_grams_are_sure_the_model_is_not_asked() -> None:
    """A text that goes round is copied for nothing."""
    model = Small(slow=0.3e-3)
    prompt = plain_generate(target(), [1, 2], 400, Sampling())
    stats = count(target(), hybrid(model), prompt, 100)
    assert stats.tokens_per_pass > 5
    assert model.passes <= stats.passes / 2


def script(*tokens: int) -> MockTarget:
    """A model that knows which of these tokens follows which, and nothing else."""
    follows = dict(pairwise(tokens))

    class Scripted(MockTarget):
        def row(self, context: Sequence[int]) -> Any:
            row = np.zeros(self.n_vocab, np.float32)
            if context[-1] in follows:
                row[follows[context[-1]]] = 9.0
            return row

    return Scripted(N)


def test_each_continues_the_chain_of_the_other() -> None:
    # After 5 the prompt goes on with 6 7 8, and behind that each time with another token; the model knows that 20 21
    # come now; and behind 21 the prompt goes on with 22 23 24, which the model does not know.
    prompt = [token for other in range(9, 17) for token in (5, 6, 7, 8, other, other + 10, 22, 23, 24)] + [30, 31, 5]
    drafter = hybrid(script(5, 6, 7, 8, 20, 21))
    drafter.begin(prompt)
    price = TokenPrice(1.5, [0.05] * 20)
    assert drafter.propose(12, price=price).tokens[:8] == (6, 7, 8, 20, 21, 22, 23, 24)


def test_a_model_that_is_far_behind_is_asked_again() -> None:
    """Behind by more than a batch, after a text that n-grams copied."""
    model = Small(slow=0.05e-3)
    drafter = hybrid(model)
    drafter.begin(novel(30))
    price = TokenPrice(1.0, [0.05] * 10, seconds=1.0)  # the mock's clock is in passes
    drafter.propose(4, price=price)
    text = [31, 32, 33, 34] * 40
    for at in range(0, 160, 4):
        drafter.accept(text[at : at + 4])
    drafter.accept([8])
    before = model.passes
    assert drafter.propose(4, price=price).tokens[0] == int(model.row([*novel(30), *text, 8]).argmax())
    assert model.passes > before


def test_what_it_has_to_catch_up_with_must_not_cost_more_than_may_be_lost() -> None:

    class Reader(Small):
        def prefill(self, tokens: Sequence[int], **options: Any) -> Any:
            rows = super().prefill(tokens, **options)
            CLOCK.now += 0.05e-3 * self.prefilled[-1]
            return rows

    for stake, asked in ((0.2, False), (20.0, True)):
        model = Reader(seconds=lambda n: 0.05e-3 * n)
        drafter = hybrid(model)
        drafter.begin(novel(30))
        for token in range(30, 40):
            drafter.accept([token])
        drafter.propose(4, price=TokenPrice(1.0, [0.05] * 10, seconds=1.0))
        for token in [31, 32, 33, 34] * 10:
            drafter.accept([token])
        drafter.accept([8])
        before = model.passes
        drafter.propose(4, price=TokenPrice(1.0, [0.05] * 10, seconds=1.0, stake=stake))
        assert (model.passes > before) == asked
        assert before


@pytest.mark.parametrize("replays", [False, True])
def test_the_models_answers_are_those_to_the_chain(replays: bool) -> None:
    """Whatever was read, refused or replaced before: its cache held the text and the chain up to the position."""
    model = Small(blur=2.0, replays=replays)
    drafter = hybrid(model)
    rng = random.Random(5)
    text = [rng.randrange(6) for _ in range(60)]
    drafter.begin(text)
    asked = replaced = 0
    for _ in range(60):
        draft = drafter.propose(8, price=TokenPrice(1.2, [0.1] * 10))
        chain = [guess.token for guess in drafter._chain]
        for one in drafter._asked_about:
            assert one.answer == int(model.row([*text, *chain[: one.at]]).argmax())
            assert chain[one.at] == one.better
            asked += 1
            replaced += one.better != one.guess >= 0
        assert draft.tokens == tuple(chain[: len(draft)])
        emitted = [*draft.tokens[: rng.randrange(len(draft) + 1)], rng.randrange(6)]
        drafter.accept(emitted)
        text += emitted
    assert asked > 60
    assert replaced > 10


def test_a_text_that_the_model_cannot_read_is_drafted_by_n_grams() -> None:
    for model in (Small(20), Small(n_ctx=16)):
        drafter = hybrid(model)
        drafter.begin([31, 32, 33, 34] * 8 + [31])
        assert drafter.propose(3).tokens == (32, 33, 34)
        assert model.passes == 0


def test_another_drafter_on_the_same_model_drafts_the_same() -> None:
    model, prompt = Small(), [1, 2, 3, 4] * 3
    first = hybrid(model)
    drafts = []
    for drafter in (first, first.anew(), first):
        drafter.begin(prompt)
        drafts.append(drafter.propose(6).tokens)
    assert drafts[0] == drafts[1] == drafts[2]


def test_a_drafter_beside_works_in_the_next_lane_and_knows_what_the_first_learnt() -> None:
    small = MockShared(3, n_vocab=N, peak=6.0, clock=CLOCK)
    first = HybridDrafter(AskedModel(small.lanes[0], clock=milliseconds, shared=small))
    drafters = [first, first.beside(), first.beside()]
    assert [drafter.model.model for drafter in drafters] == small.lanes
    assert all(drafter.model.pace is first.model.pace for drafter in drafters)
    prompt = [1, 2, 3, 4] * 3
    drafts = []
    for drafter in drafters:
        drafter.begin(prompt)
        drafts.append(drafter.propose(6).tokens)
    assert drafts[0] == drafts[1] == drafts[2]
    for _ in range(30):  # guesses that fail make the same guesses of the others unlikely
        first.begin(prompt)
        first.propose(6)
        first.accept([0])
    drafters[1].begin(prompt)
    unlikely = drafters[1].propose(6).chances[0]
    with pytest.raises(ValueError, match="no further lane"):
        first.beside()
    other = hybrid(MockTarget(N, peak=6.0, clock=CLOCK))
    other.begin(prompt)
    assert unlikely < other.propose(6).chances[0]


# --------------------------------------------------------------------------- the text is the target's


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    blur=st.sampled_from([0.0, 2.0, 8.0]),
    slow=st.sampled_from([0.0, 1e-4, 1e-3]),
    policy=st.sampled_from(["cost", "fixed", "threshold"]),
    temperature=st.sampled_from([0.0, 0.8]),
    peak=st.sampled_from([3.0, 8.0]),
)
def test_texts_are_those_of_plain_decoding(
    seed: int, blur: float, slow: float, policy: str, temperature: float, peak: float
) -> None:
    mock = target(12, peak=peak, seed=seed)
    prompt = [seed % 12, 3, 4] * 5
    sampling = Sampling(temperature=temperature, seed=seed)
    drafter = hybrid(Small(12, blur=blur, slow=slow, peak=peak, seed=seed))
    decoder = unmeasured(mock, drafter=drafter, policy=policy)
    for _ in range(2):
        emitted, _ = drive(decoder, prompt, max_tokens=40, sampling=sampling)
        assert emitted == plain_generate(mock, prompt, 40, sampling)


class Coin(MockTarget):
    """Tokens 0 and 2 with probability 0.45 each, 1 and 3 with 0.05 each, whatever came before."""

    def row(self, context: Sequence[int]) -> Any:
        return np.log([0.45, 0.05, 0.45, 0.05]).astype(np.float32)


@pytest.mark.parametrize(("slow", "by_model"), [(0.05e-3, True), (5e-3, False)])
def test_rejection_keeps_the_law(slow: float, by_model: bool) -> None:
    """With n-grams and a model that hold other things likely than the target; see `support.laws.ALARM` for the odds."""
    mock = Coin(4, seconds=cheap, clock=CLOCK)
    model = Small(4, slow=slow, peak=0.8)
    rng = random.Random(36)
    prompt = [int(rng.random() < 0.4) for _ in range(100)]
    drafter = hybrid(model)
    decoder = unmeasured(mock, drafter=drafter, draft_max=4)
    sample: Counter[Path] = Counter()
    stats = Stats()
    for seed in range(1000):
        tokens: list[int] = []
        sampling = Sampling(**{"temperature": 1.0, "seed": seed, **OPEN})
        for step in decoder.generate(prompt, max_tokens=4, sampling=sampling, verify="rejection"):
            stats.add(step)
            tokens += step.tokens
        sample[tuple(tokens[:3])] += 1
    assert stats.drafted > 50
    assert (model.passes > 200) == by_model
    check_law(sample, law_of_text(mock, prompt, Sampling(1.0, **OPEN), 3))


def test_a_blind_draft_is_chosen_before_it_is_drawn() -> None:
    """Whatever `choose` gives, the same source drafts, with the same estimates."""
    rng = random.Random(2)
    chances = set()
    for pick in (min, max, lambda weights: rng.choice(list(weights))):
        chooser: Callable[[int, Any], int] = lambda _, weights, pick=pick: pick(weights)  # noqa: E731
        drafter = hybrid(Small(8, peak=1.0))
        drafter.begin([1, 2, 3, 4] * 10)
        draft = drafter.propose(4, chooser, blind=True, price=TokenPrice(1.0, [0.1] * 6))
        assert len(draft.chances) == 4 >= len(draft)
        assert all(token in law for token, law in zip(draft.tokens, draft.q, strict=True))
        chances.add((draft.source, draft.chances))
    assert len(chances) == 1
