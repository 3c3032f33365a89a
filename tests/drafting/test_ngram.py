"""The n-gram drafter and its estimates of acceptance."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.drafting import make_drafter
from ngramspec.drafting.chances import HitRates, cell
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.ngram import NGramDrafter
from ngramspec.drafting.predictor import NGramPredictor
from ngramspec.drafting.price import TokenPrice

KEY = cell(3, 1.0, 4, 2)

# --------------------------------------------------------------------------- HitRates


def test_estimate_finds_the_rate() -> None:
    rng = random.Random(0)
    for rate in (0.0, 0.05, 0.5, 0.9, 1.0):
        model = HitRates()
        for _ in range(3000):
            model.learn(KEY, rng.random() < rate)
        assert model.estimate(KEY) == pytest.approx(rate, abs=0.12)  # four deviations of the last 200


def test_estimate_follows_a_change() -> None:
    model = HitRates()
    for _ in range(5000):
        model.learn(KEY, True)
    before = model.estimate(KEY)
    for _ in range(400):
        model.learn(KEY, False)
    assert before > 0.95
    assert model.estimate(KEY) < 0.2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 20), st.floats(0.01, 1), st.integers(1, 10**6), st.integers(0, 10**6), st.lists(st.booleans()))
def test_estimate_is_a_probability(match: int, share: float, support: int, streak: int, outcomes: list[bool]) -> None:
    model = HitRates()
    key = cell(match, share, support, streak)
    last = model.estimate(key)
    assert 0 < last < 1
    for accepted in outcomes:
        model.learn(key, accepted)
        estimate = model.estimate(key)
        assert 0 < estimate < 1
        assert (estimate > last) == accepted or estimate == pytest.approx(last, abs=0.01)
        last = estimate


def test_what_is_unknown_leans_on_its_group_and_the_prior() -> None:
    model = HitRates()
    priors = [model.estimate(cell(m, 1.0, 2, 0)) for m in range(8)]
    assert priors == sorted(priors)
    assert priors[-1] <= 0.6  # careful until something was seen
    other = cell(3, 0.4, 4, 0)
    cold = model.estimate(other)
    for _ in range(100):
        model.learn(KEY, True)
    assert model.estimate(other) > cold  # the same match length
    assert model.estimate(cell(2, 0.4, 4, 0)) == priors_of(2, 0.4)  # another one


def priors_of(match: int, share: float) -> float:
    return HitRates().estimate(cell(match, share, 4, 0))


def test_cells_tell_apart_what_matters() -> None:
    model = HitRates()
    for _ in range(300):
        model.learn(cell(3, 1.0, 5, 8), True)
        model.learn(cell(3, 0.3, 5, 0), False)
    assert model.estimate(cell(3, 1.0, 5, 8)) > 0.9
    assert model.estimate(cell(3, 0.3, 5, 0)) < 0.1
    assert len({cell(3, s, 5, 0) for s in (1.0, 0.8, 0.4, 0.1)}) == 4
    assert cell(3, 1.0, 1, 0) != cell(3, 1.0, 2, 0)
    assert len({cell(3, 1.0, 2, streak) for streak in range(1000)}) < 10


# --------------------------------------------------------------------------- NGramDrafter


def test_the_longest_context_wins_and_limits_hold() -> None:
    drafter = NGramDrafter()
    drafter.begin([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    for limit in range(1, 12):
        draft = drafter.propose(limit)
        assert draft.tokens == (4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6)[: len(draft)]
        assert len(draft) <= limit
        assert len(draft.chances) == len(draft.q) == len(draft.match) == len(draft.support) == len(draft)
        assert all(0 < p < 1 for p in draft.chances)
        assert draft.source == drafter.name == "ngram"
    assert make_drafter("ngram").name == "ngram"
    with pytest.raises(ValueError, match="ngram"):
        make_drafter("oracle")


def test_a_price_ends_a_draft() -> None:
    drafter = NGramDrafter()
    drafter.begin([1, 2, 3, 4] * 20)
    whole = drafter.propose(15)
    reach = [math.prod(whole.chances[: k + 1]) for k in range(len(whole))]
    for floor in (0.1, 0.25, 0.6):
        length = next((k for k, r in enumerate(reach, 1) if r < floor), len(whole))
        assert len(drafter.propose(15, price=TokenPrice(2.0, [floor / 2] * 16))) == length
    drafter.begin([1, 2, 3, 4] * 20)
    assert len(drafter.propose(15, price=TokenPrice(1.0, [0.0, 0.0, 9.0] + [0.0] * 13))) == 2


def test_nothing_known_is_an_empty_draft() -> None:
    drafter = NGramDrafter()
    assert len(drafter.propose(5)) == 0
    drafter.begin([1, 2, 3, 4])
    assert len(drafter.propose(5)) == 0
    assert len(drafter.propose(5, blind=True)) == 0
    drafter.accept([1])
    assert drafter.propose(5).tokens[:2] == (2, 3)


def test_begin_forgets_the_text_but_not_the_rates() -> None:
    drafter = NGramDrafter()
    drafter.begin([1, 2, 3] * 30)
    first = drafter.propose(3).chances
    for _ in range(40):
        drafter.accept(drafter.propose(3).tokens)
    drafter.begin([4, 5, 6])
    assert len(drafter.propose(3)) == 0
    drafter.begin([1, 2, 3] * 30)
    assert drafter.propose(3).chances > first


def test_a_predictor_may_be_passed_in() -> None:
    predictor = NGramPredictor(max_order=2)
    drafter = NGramDrafter(predictor)
    drafter.begin([1, 2, 3, 1])
    assert drafter.predictor is predictor
    assert set(drafter.propose(4).match) == {1}


def test_what_was_cut_is_learned_from_too() -> None:
    # The policy sent nothing, yet what the target emitted says that the guesses were right.
    drafter = NGramDrafter()
    drafter.begin([1, 2, 3, 4] * 20)
    before = drafter.propose(4).chances
    for i in range(200):
        drafter.propose(4)
        drafter.accept([(i % 4) + 1])
    assert drafter.propose(4).chances[0] > max(0.8, before[0])


def test_wrong_guesses_lower_the_estimate() -> None:
    rng = random.Random(1)
    drafter = NGramDrafter()
    drafter.begin([rng.randrange(4) for _ in range(300)])
    for _ in range(300):
        draft = drafter.propose(4)
        drafter.accept([(draft.tokens[0] + 1) % 4])
    assert drafter.propose(4).chances[0] < 0.2
    assert len(drafter.propose(15)) <= 3  # and the draft ends where it is hopeless


def test_accept_without_a_proposal_is_fine() -> None:
    drafter = NGramDrafter()
    drafter.begin([1, 2, 3])
    drafter.accept([1, 2, 3, 1])
    assert drafter.propose(2).tokens == (2, 3)
    drafter.accept([])
    assert drafter.propose(2).tokens == (2, 3)


def test_tokens_beyond_the_guesses_are_counted_too() -> None:
    drafter, reference = NGramDrafter(), NGramDrafter()
    drafter.begin([1, 2, 3, 9, 1, 2])
    drafter.propose(1)
    drafter.accept([3, 9, 1, 2, 3])
    reference.begin([1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 3])
    assert drafter.propose(4).tokens == reference.propose(4).tokens


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), limit=st.integers(1, 15))
def test_a_blind_estimate_does_not_look_at_the_draw(seed: int, limit: int) -> None:
    # Rejection sampling: whatever is drawn, the estimates that decide on the length are the same.
    rng = random.Random(seed)
    drafter = NGramDrafter()
    drafter.begin([rng.randrange(3) for _ in range(60)])
    for _ in range(30):
        drafter.propose(3)
        drafter.accept([rng.randrange(3) for _ in range(rng.randrange(1, 4))])
    seen = set()
    for _ in range(12):

        def choose(offset: int, counts: Mapping[int, int]) -> int:
            return rng.choice(list(counts))

        draft = drafter.propose(limit, choose, blind=True)
        assert len(draft.chances) == limit
        assert len(draft) <= limit
        seen.add(draft.chances)
    assert len(seen) == 1


def test_a_draft_never_ends_before_the_token_that_made_it_end() -> None:
    # If a draw could take itself out of the draft, q would not be the law of what is in it.
    rng = random.Random(3)
    drafter = NGramDrafter()
    drafter.begin([rng.randrange(3) for _ in range(100)])
    for _ in range(300):  # all wrong: hopeless at once
        drafter.accept([(drafter.propose(4).tokens[0] + 1) % 3])
    drawn: list[int] = []

    def choose(offset: int, counts: Mapping[int, int]) -> int:
        drawn.append(rng.choice(list(counts)))
        return drawn[-1]

    for _ in range(50):
        drawn.clear()
        assert drafter.propose(15, choose, blind=True).tokens == tuple(drawn) != ()


def test_head_cuts_every_field() -> None:
    draft = Draft((1, 2, 3), ({1: 1.0}, {2: 1.0}, {3: 1.0}), (3, 3, 2), (5, 4, 3), (0.9, 0.8, 0.7), "ngram")
    short = draft.head(2)
    assert short == Draft((1, 2), ({1: 1.0}, {2: 1.0}), (3, 3), (5, 4), (0.9, 0.8), "ngram")
    assert draft.head(3) is draft.head(9) is draft
    assert len(draft.head(0)) == 0
