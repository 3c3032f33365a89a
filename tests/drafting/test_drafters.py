"""The contract of drafters: every drafter in `DRAFTERS` keeps the rules of `ngramspec.drafting.draft`.

The tests take the name of a drafter, so a new one is tested as soon as it is registered. `test_recipes.py` runs those
for all drafters on the drafter of the recipe in `ngramspec/README.md`.
"""

from __future__ import annotations

import doctest
import random
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.all_drafters import make_any
from support.mock_target import MockTarget, rows_to

from ngramspec.drafting import DEFAULT, DRAFTERS, make_drafter, predictor
from ngramspec.drafting.baselines import suffix
from ngramspec.drafting.draft import Ask, Chooser, Draft, Drafter, MarginalCost
from ngramspec.drafting.draft_model import agreement
from ngramspec.drafting.mixture.drafter import MixtureDrafter

ALL = [*DRAFTERS, "model", "hybrid"]
LOOP_DRAFTERS = ["mixture", "ngram", "suffix", "nasd"]
"""Drafters that draft `LOOP` from its text alone, for as long as `propose` allows. Add a new one if it does too."""
WORDS = 4
LOOP = [1, 2, 3, 0] * 20
SEEDS, LIMITS = st.integers(0, 10**6), st.integers(1, 15)
PRICES = st.sampled_from([None, MarginalCost(1.2, [0.1] * 20)])


def made(name: str) -> Drafter:
    rng = random.Random(7)
    known = [rng.randrange(WORDS) for _ in range(200)] if name == "memory" else ()
    return make_any(name, lambda: MockTarget(WORDS, peak=1.5), known)


def picker(rng: random.Random) -> Chooser:
    """Return a chooser that ignores the weights."""
    return lambda _, weights: rng.choice(list(weights))


def likeliest(_: int, weights: Mapping[int, float]) -> int:
    return max(weights, key=lambda token: weights[token])


def practised(name: str, seed: int, *, wrong: bool = False) -> Drafter:
    """Return a drafter after drafts of every kind in a random text, or in one in which it was always wrong."""
    rng = random.Random(seed)
    drafter = made(name)
    text = [rng.randrange(WORDS) for _ in range(60)]
    drafter.begin(text)
    for turn in range(9):
        draft = drafter.propose(Ask(4, picker(rng) if turn % 3 else None, fixed_length=turn % 3 == 2))
        tokens = [rng.randrange(WORDS) for _ in range(rng.randrange(1, 4))]
        if wrong and draft.tokens:
            tokens[0] = (draft.tokens[0] + 1) % WORDS
        if drafter.wants_logits:
            rows = np.array([[rng.gauss(0, 2) for _ in range(WORDS)] for _ in range(1 + len(draft))], np.float32)
            drafter.observe_logits([text[-1], *draft.tokens], rows)
        drafter.accept(tokens)
        text += tokens
    return drafter


def read_loop(name: str) -> Drafter:
    """Return a drafter that has a guess, after some passes of a target that continues `LOOP` with certainty."""
    drafter = made(name)
    drafter.begin(LOOP)
    last = LOOP[-1]
    for _ in range(8):
        evaluated = [last, *drafter.propose(Ask(3)).tokens]
        answers = [(token + 1) % WORDS for token in evaluated]
        accepted = next((i for i, token in enumerate(evaluated[1:]) if token != answers[i]), len(evaluated) - 1)
        if drafter.wants_logits:
            drafter.observe_logits(evaluated, rows_to(answers, WORDS), accepted)
        drafter.accept(answers[: accepted + 1])
        last = answers[accepted]
    assert drafter.propose(Ask(3)), "a drafter should have a guess in a loop"
    return drafter


def test_make_drafter_by_name_checks_name_and_memory() -> None:
    for name in ALL:
        assert made(name).name == name
    assert isinstance(make_drafter(DEFAULT), MixtureDrafter)
    assert make_drafter("ngram", memory=False).name == "ngram"
    assert [name for name in DRAFTERS if made(name).wants_logits] == ["recycle", "nasd", "lookahead"]
    for name, memory, message in (
        ("psychic", None, r"'psychic'; choose one of: .*mixture.*ngram"),
        ("ngram", True, r"'ngram' does not use earlier answers.*mixture"),
        ("memory", None, "requires a memory"),
    ):
        with pytest.raises(ValueError, match=message):
            make_drafter(name, memory=memory)


@pytest.mark.parametrize("module", [predictor, suffix, agreement])
def test_docstring_examples_pass(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 2) == (0, True)


def test_draft_head_truncates_every_field() -> None:
    draft = Draft((1, 2, 3), ({1: 1.0}, {2: 1.0}, {3: 1.0}), (3, 3, 2), (5, 4, 3), (0.9, 0.8, 0.7), "ngram")
    assert draft.head(2) == Draft((1, 2), ({1: 1.0}, {2: 1.0}), (3, 3), (5, 4), (0.9, 0.8), "ngram")
    assert draft.head(3) is draft.head(9) is draft
    assert len(draft.head(0)) == 0


# --------------------------------------------------------------------------- drafts


@pytest.mark.parametrize("name", ALL)
@given(seed=SEEDS, limit=LIMITS, price=PRICES, wrong=st.booleans(), fixed_length=st.booleans())
def test_propose_with_chooser_reports_true_q_of_all_drawn_tokens(
    name: str, seed: int, limit: int, price: MarginalCost | None, wrong: bool, fixed_length: bool
) -> None:
    """If a drawn token could be removed from the draft, q would not be the distribution of the draft's tokens."""
    rng = random.Random(seed)
    drafter = practised(name, seed, wrong=wrong)
    drawn: list[tuple[int, int]] = []
    laws: list[dict[int, float]] = []

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        whole = sum(weights.values())
        laws.append({token: weight / whole for token, weight in weights.items()})
        drawn.append((offset, rng.choice(list(weights))))
        return drawn[-1][1]

    draft = drafter.propose(Ask(limit, choose, fixed_length=fixed_length, price=price))
    assert len(draft) <= limit
    if name != "hybrid":  # "hybrid" draws from two sources at a position.
        assert list(enumerate(draft.tokens)) == drawn
    for (at, token), q in zip(enumerate(draft.tokens), draft.q, strict=True):
        assert any(pick == (at, token) and dict(q) == pytest.approx(law) for pick, law in zip(drawn, laws, strict=True))
        assert sum(q.values()) == pytest.approx(1)
        assert min(q.values()) > 0
    assert all(len(entries) in (0, len(draft)) for entries in (draft.match_lengths, draft.context_counts))
    assert all(0 < p < 1 for p in draft.acceptance_probs)
    assert len(draft.acceptance_probs) >= len(draft) if fixed_length else len(draft.acceptance_probs) == len(draft)
    assert draft.source == name or (name == "hybrid" and draft.source == "model") or not draft


@pytest.mark.parametrize("name", ALL)
@given(seed=SEEDS, limit=LIMITS, price=PRICES)
def test_propose_with_fixed_length_ignores_drawn_tokens(
    name: str, seed: int, limit: int, price: MarginalCost | None
) -> None:
    """For rejection sampling, the estimates that determine the length must not depend on the drawn tokens."""
    drafter = practised(name, seed)
    choosers = [likeliest, lambda _, w: min(w, key=lambda token: w[token]), *[picker(random.Random(seed))] * 8]
    drafts = [drafter.propose(Ask(limit, choose, fixed_length=True, price=price)) for choose in choosers]
    assert len({(draft.source, draft.acceptance_probs) for draft in drafts}) == 1
    if name not in ("mixture", "memory", "hybrid"):  # Their most likely chain limits the length.
        assert all(len(draft.acceptance_probs) == (limit if draft else 0) for draft in drafts)


@pytest.mark.parametrize("name", [name for name in ALL if name != "hybrid"])  # A price changes its guesses.
@given(seed=SEEDS, drawn=st.booleans())
def test_propose_with_price_ends_draft_when_extension_cannot_pay(name: str, seed: int, drawn: bool) -> None:
    drafter = practised(name, seed)
    choose = likeliest if drawn else None
    whole = drafter.propose(Ask(15, choose))
    for worth, slopes in ((1.0, [0.02] * 64), (1.5, [0.1] * 64), (1.0, [0.4] * 64), (3.0, [0.01] * 3 + [9.0] * 61)):
        draft = drafter.propose(Ask(15, choose, price=MarginalCost(worth, slopes)))
        reach = np.cumprod(draft.acceptance_probs)
        floor = worth * np.array(slopes[1 : len(draft) + 1])
        assert draft.tokens == whole.tokens[: len(draft)]
        assert (reach[:-1] >= floor[:-1]).all()
        assert len(draft) == len(whole) or reach[-1] < floor[-1]


@pytest.mark.parametrize("name", ALL)
def test_propose_rejects_choice_outside_distribution(name: str) -> None:
    drafter = read_loop(name)
    with pytest.raises(ValueError, match=r"9.* not "):
        drafter.propose(Ask(3, lambda *_: 9))


# --------------------------------------------------------------------------- learning


@pytest.mark.parametrize("name", ALL)
@given(seed=SEEDS, limit=LIMITS, how=st.sampled_from(["greedy", "coupled", "blind"]), cut=st.integers(0, 15))
def test_accept_returns_correct_count_and_propose_is_repeatable(
    name: str, seed: int, limit: int, how: str, cut: int
) -> None:
    def propose(drafter: Drafter) -> tuple[Any, ...]:
        choose = None if how == "greedy" else picker(random.Random(seed))
        draft = drafter.propose(Ask(limit, choose, fixed_length=how == "blind"))
        return draft.tokens, draft.q, draft.match_lengths, draft.context_counts, draft.acceptance_probs

    asked, once = practised(name, seed), practised(name, seed)
    asked.propose(Ask(limit))
    asked.propose(Ask(20, likeliest, fixed_length=True))
    draft, other = propose(asked), propose(once)
    assert draft == other
    tokens = draft[0]
    right = min(cut, len(tokens))
    wrong = [(token + 1) % WORDS for token in tokens[right : right + 1]]
    for drafter in (asked, once):
        assert drafter.accept([*tokens[:right], *wrong, *wrong]) == right
        assert drafter.accept([1, 2, 3]) == 0  # It has not proposed a draft.
    assert propose(asked) == propose(once)


def kinds(drafter: Drafter, limit: int) -> list[Draft]:
    """Return a draft of every kind."""
    options: list[dict[str, Any]] = [{}, {"choose": likeliest}, {"choose": likeliest, "fixed_length": True}]
    return [drafter.propose(Ask(limit, **each)) for each in options]


@pytest.mark.parametrize("name", [name for name in ALL if name != "hybrid"])  # Its model guesses in any text.
def test_propose_without_known_context_returns_empty_draft(name: str) -> None:
    drafter = made(name)
    # The prompts have no line break of `LineTokenizer`.
    for prompt in ([], *([] if name in ("lookahead", "model") else [[7], [7, 8], [7, 8, 10]])):
        drafter.begin(prompt)
        assert [(draft.tokens, draft.q, draft.acceptance_probs) for draft in kinds(drafter, 5)] == [((), (), ())] * 3
        assert drafter.accept([]) == 0
    if name in LOOP_DRAFTERS:
        drafter.accept([5])
        assert not drafter.propose(Ask(2))
        drafter.accept([7, 8, 10])
        assert drafter.propose(Ask(2)).tokens[:1] == (5,)


@pytest.mark.parametrize("name", LOOP_DRAFTERS)
def test_begin_of_next_text_forgets_tokens_and_keeps_estimates(name: str) -> None:
    drafter = made(name)
    drafter.begin(LOOP)
    first = drafter.propose(Ask(3))
    assert first.tokens == (1, 2, 3)
    text = list(LOOP)
    for _ in range(40):
        draft = drafter.propose(Ask(3))
        assert draft.tokens == tuple(text[-4 : -4 + len(draft)])
        text += draft.tokens
        assert drafter.accept(draft.tokens) == len(draft) > 0
    drafter.begin([4, 5, 6])
    assert not any(kinds(drafter, 5))
    drafter.begin(LOOP)
    for draft in kinds(drafter, 3):
        assert draft.tokens == first.tokens
        assert draft.acceptance_probs[0] > first.acceptance_probs[0]
    for limit in (1, 2, 15):
        assert drafter.propose(Ask(limit)).tokens == tuple(LOOP[:limit])


@pytest.mark.parametrize("name", LOOP_DRAFTERS)
def test_propose_after_wrong_drafts_shortens_draft(name: str) -> None:
    rng = random.Random(1)
    drafter = made(name)
    drafter.begin([rng.randrange(WORDS) for _ in range(300)])
    for _ in range(300):
        drafter.accept([(drafter.propose(Ask(4)).tokens[0] + 1) % WORDS])
    draft = drafter.propose(Ask(15))
    assert draft.acceptance_probs[0] < 0.2
    assert len(draft) <= 3
