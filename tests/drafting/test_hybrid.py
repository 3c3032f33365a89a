"""Tests of n-grams and a model that guess one chain: the source of each guess, its cost and its gain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.decoder_loop import CLOCK, make_decoder, milliseconds, pass_seconds
from support.mock_shared import MockShared
from support.mock_target import Blurred, MockTarget, plain_generate

from ngramspec.drafting.draft import Ask, MarginalCost
from ngramspec.drafting.draft_model.agreement import CONSENSUS, MODEL, NGRAMS, AgreementModel
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.mixture.drafter import MixtureDrafter, TextIndexSet
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats

N = 40


def draft_model(n_vocab: int = N, *, slow: float = 0.0, **options: Any) -> MockTarget:
    """Return a draft model whose passes take `slow` seconds, whatever their size."""
    return Blurred(n_vocab, **{"blur": 0.0, "seconds": lambda _: slow, "clock": CLOCK, "peak": 6.0, **options})


def target(n_vocab: int = N, **options: Any) -> MockTarget:
    return MockTarget(n_vocab, **{"peak": 6.0, "seconds": pass_seconds, "clock": CLOCK, **options})


def hybrid(model: MockTarget) -> HybridDrafter:
    return HybridDrafter(ModelDrafter(model, clock=milliseconds))


def count(mock: MockTarget, drafter: Any, prompt: Sequence[int], n: int, **options: Any) -> Stats:
    stats = Stats()
    for step in make_decoder(mock, drafter=drafter).generate(prompt, max_tokens=n, **options):
        stats.add(step)
    return stats


# --------------------------------------------------------------------------- calls of the model


def test_hybrid_skips_expensive_model_and_unneeded_calls() -> None:
    """A guess that costs ten plain passes never pays, and n-grams copy a repetitive text at no cost."""
    expensive, cheap = draft_model(slow=10e-3), draft_model(slow=0.3e-3)
    drafted = count(target(), hybrid(expensive), [1, 2, 3] * 20, 120)
    alone = count(target(), MixtureDrafter(), [1, 2, 3] * 20, 120)
    assert expensive.passes == 0
    assert drafted.tokens_per_pass == alone.tokens_per_pass
    prompt = plain_generate(target(), [1, 2], 400, Sampling())
    stats = count(target(), hybrid(cheap), prompt, 100)
    assert stats.tokens_per_pass > 5
    assert cheap.passes <= stats.passes / 2


def test_hybrid_with_repeated_request_does_not_call_model() -> None:
    model = draft_model(slow=0.02e-3)
    mock, drafter = target(), HybridDrafter(ModelDrafter(model, clock=milliseconds), TextIndexSet())
    count(mock, drafter, [1, 2], 60)
    passes = model.passes
    stats = count(mock, drafter, [1, 2], 60)
    assert passes > 0
    assert model.passes == passes
    assert stats.accepted == stats.drafted > 50


def test_hybrid_without_possible_gain_does_not_call_model() -> None:
    """Further tokens are cheap, but the first one costs either nothing or more than all could gain."""
    asked = []
    for first in (0.0, 30.0):
        model = draft_model(slow=0.01e-3)
        drafter = hybrid(model)
        drafter.begin([*range(30)])
        drafter.accept([31])
        costs = [0.0, *(first + 0.01 * length for length in range(1, 12))]
        drafter.propose(Ask(10, price=MarginalCost(1.0, [0.01] * 12, seconds=1.0, costs=lambda costs=costs: costs)))
        asked.append(model.passes > 0)
    assert asked == [True, False]


def test_hybrid_without_n_gram_match_drafts_with_cheap_model() -> None:
    wide = 4000
    mock, prompt = target(wide, peak=9.0), [*range(30)]
    drafted = count(mock, hybrid(draft_model(wide, slow=0.02e-3, peak=9.0)), prompt, 60)
    alone = count(mock, MixtureDrafter(), prompt, 60)
    assert alone.tokens_per_pass < 1.2
    assert drafted.tokens_per_pass > 4


class Scripted(MockTarget):
    """Model that only knows the successors of a few tokens."""

    def row(self, context: Sequence[int]) -> Any:
        row = np.zeros(self.n_vocab, np.float32)
        row[[then for token, then in pairwise((5, 6, 7, 8, 20, 21)) if token == context[-1]]] = 9.0
        return row


def test_hybrid_combines_n_grams_and_model_in_one_draft() -> None:
    # In the prompt, 6 7 8 follows 5, and then a different token each time. The model knows that 20 21 follows 8. In the
    # prompt, 22 23 24 follows 21, which the model does not know.
    prompt = [token for other in range(9, 17) for token in (5, 6, 7, 8, other, other + 10, 22, 23, 24)] + [30, 31, 5]
    model = Scripted(N)
    drafter = hybrid(model)
    drafter.begin(prompt)
    price = MarginalCost(1.5, [0.05] * 20)
    assert drafter.propose(Ask(12, price=price)).tokens[:8] == (6, 7, 8, 20, 21, 22, 23, 24)
    assert model.batches[0] == 3, "the first pass reads the end of the text and the guesses 6 7"


@pytest.mark.parametrize(
    ("prompt", "slow", "source"), [([*range(30)], 0.01e-3, "model"), ([31, 33, 35] * 9, 1e-3, "hybrid")]
)
def test_hybrid_with_fixed_length_drafts_with_the_better_of_both(prompt: list[int], slow: float, source: str) -> None:
    drafter = hybrid(draft_model(slow=slow))
    drafter.begin(prompt)
    for token in (31, 33, 35):
        drafter.accept([token])
    price = MarginalCost(1.0, [0.05] * 10, seconds=1.0)
    draft = drafter.propose(Ask(6, lambda _, q: max(q, key=q.__getitem__), fixed_length=True, price=price))
    assert (draft.source, len(draft) > 0) == (source, True)


@pytest.mark.parametrize(("stake", "asked"), [(0.2, False), (20.0, True)])
def test_hybrid_calls_lagging_model_within_loss_budget(stake: float, asked: bool) -> None:
    """The model is behind by more than a batch, after a text that n-grams copied."""
    model = draft_model(seconds=lambda n: 0.05e-3 * n)
    drafter = hybrid(model)
    drafter.begin([*range(30)])
    for token in range(30, 40):
        drafter.accept([token])
    drafter.propose(Ask(4, price=MarginalCost(1.0, [0.05] * 10, seconds=1.0)))  # The mock's clock counts passes.
    text = [31, 32, 33, 34] * 40
    for at in range(0, 160, 4):
        drafter.accept(text[at : at + 4])
    drafter.accept([8])
    assert (before := model.passes) > 0
    draft = drafter.propose(Ask(4, price=MarginalCost(1.0, [0.05] * 10, seconds=1.0, loss_budget=stake)))
    assert (model.passes > before) == asked
    assert not asked or draft.tokens[0] == int(model.row([*range(40), *text, 8]).argmax())


def test_hybrid_model_with_bad_logits_is_disabled_for_one_draft() -> None:
    model = MockTarget(N, peak=6.0, broken=lambda _: True)
    drafter = hybrid(model)
    drafter.begin([*range(30)])
    for n_calls in (1, 2):
        drafter.accept([30 + n_calls])
        assert not drafter.propose(Ask(6, price=MarginalCost(1.0, [0.05] * 10)))
        assert len(model.batches) == n_calls


@pytest.mark.parametrize("replays", [False, True])
def test_hybrid_model_answers_follow_text_and_chain(replays: bool) -> None:
    """After any reading, refusal or replacement, the model's cache contains the text and the chain before the guess."""
    model = draft_model(blur=2.0, replays=replays)
    drafter = hybrid(model)
    rng = random.Random(5)
    text = [rng.randrange(6) for _ in range(60)]
    drafter.begin(text)
    asked = replaced = 0
    for _ in range(60):
        draft = drafter.propose(Ask(8, price=MarginalCost(1.2, [0.1] * 10)))
        chain = [guess.token for guess in drafter._chain]
        for at, (_, _, guess, answer, better) in drafter._observations:
            assert answer == int(model.row([*text, *chain[:at]]).argmax())
            assert chain[at] == better
            asked += 1
            replaced += better != guess >= 0
        assert draft.tokens == tuple(chain[: len(draft)])
        emitted = [*draft.tokens[: rng.randrange(len(draft) + 1)], rng.randrange(6)]
        drafter.accept(emitted)
        text += emitted
    assert asked > 60
    assert replaced > 10


def test_hybrid_with_unreadable_text_drafts_with_n_grams() -> None:
    for model in (draft_model(20), draft_model(n_ctx=16)):
        drafter = hybrid(model)
        drafter.begin([31, 32, 33, 34] * 8 + [31])
        assert drafter.propose(Ask(3)).tokens == (32, 33, 34)
        assert model.passes == 0


def test_hybrid_beside_uses_next_sequence_and_shares_learning() -> None:
    small = MockShared(3, n_vocab=N, peak=6.0, clock=CLOCK)
    first = HybridDrafter(ModelDrafter(small.sequences[0], clock=milliseconds, shared_model=small))
    drafters = [first, first.clone_for_sequence(), first.clone_for_sequence()]
    assert [drafter.model.model for drafter in drafters] == small.sequences
    assert all(drafter.model.times is first.model.times for drafter in drafters)
    prompt = [1, 2, 3, 4] * 3
    drafts = set()
    for drafter in (*drafters, first.fresh_copy(), first):
        drafter.begin(prompt)
        drafts.add(drafter.propose(Ask(6)).tokens)
    assert len(drafts) == 1
    for _ in range(30):  # Failures of one drafter lower the others' chances.
        first.begin(prompt)
        first.propose(Ask(6))
        first.accept([0])
    drafters[1].begin(prompt)
    unlikely = drafters[1].propose(Ask(6)).acceptance_probs[0]
    with pytest.raises(ValueError, match="no free sequence"):
        first.clone_for_sequence()
    other = hybrid(MockTarget(N, peak=6.0, clock=CLOCK))
    other.begin(prompt)
    assert unlikely < other.propose(Ask(6)).acceptance_probs[0]


# --------------------------------------------------------------------------- gain of a call


def test_second_opinion_learns_gain_and_partly_forgets_at_new_text() -> None:
    """A model that failed is expected to fail again, but is still tried in a new text."""
    for p in (0.0, 0.2, 0.6, 0.99):
        guess = 5 if p else -1
        good, bad = AgreementModel(), AgreementModel()
        for _ in range(300):
            good.learn((p, 0.9, guess, 7, 7), 7)
            bad.learn((p, 0.9, guess, 7, 7), 5)
        for opinion, sign in ((good, 1), (bad, -1)):
            for prospects in (opinion.prospects(p), opinion.prospects()):
                assert prospects.agreement.value < 0.1
                share, right = max(prospects.disagreements)
                assert share > 0.8
                assert sign * (right - 0.5) > 0.3
                assert sum(share for share, _ in prospects.disagreements) == pytest.approx(1)
        failed = max(bad.prospects(p).disagreements)[1]
        bad.begin()
        assert failed < max(bad.prospects(p).disagreements)[1] < max(AgreementModel().prospects(p).disagreements)[1]


def test_second_opinion_probabilities_converge_to_observed_rates() -> None:
    """The model overestimates and the n-grams underestimate their chances."""
    opinion = AgreementModel()
    rng = random.Random(1)
    for _ in range(4000):
        same = rng.random() < 0.5
        token = 1 if rng.random() < (0.9 if same else 0.2) else 2 if rng.random() < 0.75 else 3
        opinion.learn((0.5, 0.9, 1 if same else 2, 1, 1), token)
    for case, chance in ((CONSENSUS, 0.9), (MODEL, 0.2), (NGRAMS, 0.6)):
        assert opinion.estimate(case, 0.5, 0.9) == pytest.approx(chance, abs=0.08)
