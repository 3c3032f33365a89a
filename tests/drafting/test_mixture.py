"""`MixtureDrafter` behind the protocol of `ngramspec.drafting.draft`: limits, laws, lengths, memory."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memories import a_text, new_store
from support.mock_target import Clock, MockTarget, plain_generate
from support.uncompiled import plain_modules

from ngramspec.cost.curve import CostCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DEFAULT, DRAFTERS, make_drafter
from ngramspec.drafting.draft import Chooser
from ngramspec.drafting.mixture import drafter as mixture
from ngramspec.drafting.mixture.drafter import LONGEST, MixtureDrafter
from ngramspec.drafting.price import TokenPrice
from ngramspec.drafting.recall import Recall
from ngramspec.memory import Memory
from ngramspec.sampling.settings import Sampling

PLAIN = plain_modules()["drafter"]
BOTH = pytest.mark.parametrize("module", [mixture, PLAIN], ids=["installed", "plain"])
LOOP = [1, 2, 3, 4] * 20


def picker(rng: random.Random) -> Chooser:
    """A choice that has nothing to do with the weights."""
    return lambda _offset, weights: rng.choice(list(weights))


def likeliest(_offset: int, weights: Mapping[int, float]) -> int:
    return max(weights, key=lambda token: weights[token])


def practised(seed: int, vocabulary: int = 4, **options: Any) -> MixtureDrafter:
    """A drafter that has seen some noise and was asked for drafts of every kind."""
    rng = random.Random(seed)
    drafter = MixtureDrafter(**options)
    drafter.begin([rng.randrange(vocabulary) for _ in range(100)])
    for i in range(60):
        drafter.propose(4, picker(rng) if i % 3 else None, blind=i % 3 == 2)
        drafter.accept([rng.randrange(vocabulary) for _ in range(rng.randrange(1, 4))])
    return drafter


# --------------------------------------------------------------------------- the protocol


def test_it_is_the_default() -> None:
    drafter = make_drafter(DEFAULT)
    assert isinstance(drafter, MixtureDrafter)
    assert drafter.name == "mixture"
    assert DRAFTERS["mixture"] is MixtureDrafter


def test_what_make_drafter_refuses() -> None:
    with pytest.raises(ValueError, match=r"'psychic'; choose one of: .*mixture.*ngram"):
        make_drafter("psychic")
    with pytest.raises(ValueError, match=r"'ngram' cannot remember.*mixture"):
        make_drafter("ngram", memory=True)
    for none in (None, False):
        assert make_drafter("ngram", memory=none).name == "ngram"


@BOTH
@pytest.mark.parametrize("kind", ["greedy", "coupled", "blind"])
def test_every_field_has_its_entries(module: Any, kind: str) -> None:
    drafter = module.MixtureDrafter()
    choose = None if kind == "greedy" else likeliest
    drafter.begin(LOOP)
    for limit in (1, 2, 7, 63, 64, 10**6):
        draft = drafter.propose(limit, choose, blind=kind == "blind")
        expected = min(limit, LONGEST)
        assert draft.tokens == tuple((LOOP * 2)[:expected])
        assert len(draft.match) == len(draft.chances) == expected
        assert draft.support == ()
        assert all(0 < p < 1 for p in draft.chances)
        assert len(draft.q) == (0 if choose is None else expected)
        assert draft.source == "mixture"
        head = draft.head(min(2, expected))
        assert len(head.q) == (0 if choose is None else len(head))
        assert drafter.accept(draft.tokens[:1]) == 1
        drafter.accept((2, 3, 4))


@BOTH
def test_nothing_known_is_an_empty_draft(module: Any) -> None:
    drafter = module.MixtureDrafter()
    for prompt in ([], [1], [1, 2], [1, 2, 3]):
        drafter.begin(prompt)
        for options in ({}, {"choose": likeliest}, {"choose": likeliest, "blind": True}):
            draft = drafter.propose(5, **options)
            assert (draft.tokens, draft.q, draft.chances) == ((), (), ())
        assert drafter.accept([]) == 0
        assert drafter.accept([9]) == 0
    drafter.accept([1, 2, 3])
    assert drafter.propose(2).tokens == (9, 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), limit=st.integers(1, 20), blind=st.booleans())
def test_q_is_the_law_that_the_token_was_picked_from(seed: int, limit: int, blind: bool) -> None:
    rng = random.Random(seed)
    drafter = practised(seed)
    asked: list[tuple[int, dict[int, float]]] = []

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        asked.append((offset, dict(weights)))
        return rng.choice(list(weights))

    draft = drafter.propose(limit, choose, blind=blind)
    assert len(draft) <= limit
    assert [offset for offset, _ in asked] == list(range(len(draft)))
    for token, q, (_, weights) in zip(draft.tokens, draft.q, asked, strict=True):
        assert q == weights
        assert sum(q.values()) == pytest.approx(1)
        assert min(q.values()) > 0
        assert token in q


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), limit=st.integers(1, 15), cheap=st.booleans())
def test_a_blind_estimate_does_not_look_at_the_draw(seed: int, limit: int, cheap: bool) -> None:
    # Rejection sampling: whatever is drawn, the estimates that decide on the length are the same.
    rng = random.Random(seed)
    drafter = practised(seed)
    price = None if cheap else TokenPrice(1.2, [0.1] * 20)
    seen = {drafter.propose(limit, picker(rng), blind=True, price=price).chances for _ in range(12)}
    assert len(seen) == 1


def test_a_draft_never_ends_before_the_token_that_made_it_end() -> None:
    # If a draw could take itself out of the draft, q would not be the law of what is in it.
    rng = random.Random(3)
    for seed in range(30):
        drafter = practised(seed)
        drawn: list[int] = []

        def choose(offset: int, weights: Mapping[int, float]) -> int:
            drawn.append(rng.choice(list(weights)))  # noqa: B023
            return drawn[-1]  # noqa: B023

        for options in ({}, {"blind": True}, {"price": TokenPrice(1.5, [0.3] * 16)}):
            drawn.clear()
            draft = drafter.propose(15, choose, **options)
            assert draft.tokens == tuple(drawn) != ()


def test_a_blind_length_depends_on_no_draw() -> None:
    # The least likely draws and the likeliest ones: how many are drawn is settled before.
    for seed in range(30):
        drafter = practised(seed)
        lengths = {
            len(drafter.propose(8, choose, blind=True, price=TokenPrice(1.2, [0.08] * 20)).chances)
            for choose in (likeliest, lambda _, w: min(w, key=lambda t: w[t]), picker(random.Random(seed)))
        }
        assert len(lengths) == 1


# --------------------------------------------------------------------------- what time is worth


@pytest.mark.parametrize("choose", [None, likeliest])
def test_a_price_ends_a_draft(choose: Chooser | None) -> None:
    drafter = practised(7)
    whole = drafter.propose(40, choose)
    for worth, slope in ((1.0, 0.02), (1.5, 0.1), (1.0, 0.4), (3.0, 0.5)):
        # An array or any other sequence.
        draft = drafter.propose(40, choose, price=TokenPrice(worth, [slope] * 64))
        reach = np.cumprod(draft.chances)
        assert draft.tokens == whole.tokens[: len(draft)]
        assert all(reach[:-1] >= worth * slope)
        assert len(draft) == len(whole) or reach[-1] < worth * slope


def test_the_slope_of_each_length_counts() -> None:
    drafter = MixtureDrafter()
    drafter.begin(LOOP)
    for _ in range(30):
        drafter.accept(drafter.propose(8).tokens)
    cheap, dear = 0.01, 10.0
    for longest in (1, 3, 8):
        slopes = [cheap] * longest + [dear] * 20
        assert len(drafter.propose(20, price=TokenPrice(1.0, slopes))) == longest
    # No slope is known for more tokens than there are.
    assert len(drafter.propose(20, price=TokenPrice(1.0, [cheap] * 6))) == 5


# --------------------------------------------------------------------------- what it learns


def test_accept_counts_what_was_right() -> None:
    drafter = MixtureDrafter()
    for choose, blind in ((None, False), (likeliest, False), (likeliest, True)):
        drafter.begin(LOOP)
        assert drafter.propose(6, choose, blind=blind).tokens == (1, 2, 3, 4, 1, 2)
        assert drafter.accept([1, 2, 9]) == 2
        assert drafter.accept([1, 2, 3]) == 0  # it was not asked
        drafter.begin(LOOP)
        drafter.propose(2, choose, blind=blind)
        assert drafter.accept([1, 2, 3, 4]) == 2


@pytest.mark.parametrize("blind", [False, True])
def test_estimates_of_drawn_tokens_are_calibrated(blind: bool) -> None:
    # Drawn from q, the token of a fair coin is right half the time, whatever the mixture thinks of it.
    rng = random.Random(0)
    drafter = MixtureDrafter()
    drafter.begin([rng.randrange(2) for _ in range(200)])

    def draw(_offset: int, weights: Mapping[int, float]) -> int:
        return rng.choices(list(weights), list(weights.values()))[0]

    predicted = right = count = 0.0
    for step in range(3000):
        draft = drafter.propose(1, draw, blind=blind)
        token = rng.randrange(2)
        if step >= 1000:
            count += 1
            predicted += draft.chances[0]
            right += draft.tokens[0] == token
        drafter.accept([token])
    assert predicted / count == pytest.approx(right / count, abs=0.04)
    assert right / count == pytest.approx(0.5, abs=0.05)


# --------------------------------------------------------------------------- memory

TEXT = random.Random(5).sample(range(10, 10**5), 60)


def test_memory_of_earlier_requests() -> None:
    drafter = make_drafter("mixture", memory=True)
    forgetful = make_drafter("mixture")
    for d in (drafter, forgetful):
        d.begin([1, 2, 3])
        d.accept(TEXT)
        d.begin([4, 5, 6, *TEXT[20:23]])
    assert drafter.propose(5).tokens == tuple(TEXT[23:28])
    assert forgetful.propose(5).tokens == ()


def test_what_a_request_repeats_is_remembered_once() -> None:
    drafter = MixtureDrafter(memory=True)
    drafter.begin([1, 2, 3])
    drafter.accept(TEXT)
    talk = [1, 2, 3, *TEXT]
    for turn in range(5):  # a conversation: each prompt is all that was said before, and a question
        talk = [*talk, 7, turn]
        drafter.begin(talk)
        drafter.accept([8, turn])
        talk = [*talk, 8, turn]
    drafter.begin([9])
    (index,) = drafter._guesser.memory
    tokens = list(index.tokens[: index.size])
    assert [t for t in tokens if t >= 0] == talk
    assert tokens.count(TEXT[30]) == 1


def test_a_memory_is_looked_up_and_left_alone() -> None:
    memory = Memory()
    drafter = make_drafter("mixture", memory=memory)
    drafter.begin(TEXT)
    drafter.accept([1, 2])
    drafter.begin(TEXT[20:23])
    assert drafter.propose(5).tokens == ()  # its owner did not say to remember
    memory.remember(TEXT)
    assert drafter.propose(5).tokens == tuple(TEXT[23:28])
    drafter.begin([])
    assert memory.indexes[-1].size == len(TEXT) + 1


def test_what_others_added_to_a_memory_is_drafted_from_in_the_next_text(tmp_path: Path) -> None:
    text = random.Random(5).sample(range(200), 60)
    store = new_store(tmp_path)
    first = MixtureDrafter(Memory(store.read(), store=store))
    for drafter in (first, first.beside()):
        store.update(lambda _: [a_text("new", text)])
        drafter.begin(text[20:23])
        assert drafter.propose(5).tokens == tuple(text[23:28])
        store.clear()
        drafter.begin(text[20:23])
        assert drafter.propose(5).tokens == ()


# --------------------------------------------------------------------------- through the loop


@pytest.mark.parametrize("policy", ["fixed", "heuristic", "cost"])
def test_output_is_plain_output_with_memory(policy: str) -> None:
    # One drafter for greedy and sampled requests in turn, with and without drafts that are right.
    rng = random.Random(policy)
    drafter = make_drafter("mixture", memory=True)
    accepted = 0
    clock = Clock()
    decoder = SpeculativeDecoder(
        MockTarget(24, peak=5.0, seconds=lambda n: 1 + 0.1 * (n - 1), clock=clock),
        drafter=drafter,
        policy=policy,
        curve=CostCurve({1: 1.0, 11: 2.0}),
        clock=clock.perf_counter,
    )
    for request in range(30):
        sampling = Sampling(0.8 if request % 2 else 0.0, seed=request)
        prompt = [rng.randrange(24) for _ in range(rng.randrange(1, 30))]
        steps = list(decoder.generate(prompt, max_tokens=40, sampling=sampling))
        plain = plain_generate(MockTarget(24, peak=5.0), prompt, 40, sampling)
        assert [t for s in steps for t in s.tokens] == plain
        accepted += sum(s.accepted for s in steps)
    assert accepted > 200


def test_compiled_and_plain_draft_the_same() -> None:
    ours, theirs = MixtureDrafter(), PLAIN.MixtureDrafter()
    rng = random.Random(11)
    for _ in range(5):
        prompt = [rng.randrange(12) for _ in range(80)]
        for drafter in (ours, theirs):
            drafter.begin(prompt)
        for step in range(80):
            limit, seed = rng.randrange(1, 12), rng.random()
            options = {"blind": step % 3 == 2, "price": TokenPrice(1.1, [0.05] * 20) if step % 2 else None}
            one, other = (
                d.propose(limit, picker(random.Random(seed)) if step % 3 else None, **options) for d in (ours, theirs)
            )
            assert one.tokens == other.tokens
            assert one.match == other.match
            assert one.chances == pytest.approx(other.chances, rel=1e-9)
            truth = [*one.tokens[: rng.randrange(len(one) + 1)], rng.randrange(12)]
            assert ours.accept(truth) == theirs.accept(truth)


def test_the_memory_drafter_knows_its_memory_alone() -> None:
    memory = Memory()
    memory.hear(range(20))
    drafter = make_drafter("memory", memory=memory)
    drafter.begin([100, 101, 102, 103] * 5)
    assert not drafter.propose(4).tokens
    drafter.begin([5, 6, 7])
    assert drafter.propose(3).tokens[:2] == (8, 9)
    with pytest.raises(ValueError, match="there is none"):
        make_drafter("memory")


@BOTH
def test_drafters_beside_each_other_learn_together(module: Any) -> None:
    """What one learns of its text the other knows; contexts stay apart."""
    chance = random.Random(3)
    text = [chance.randrange(40) for _ in range(25)] * 12
    first = module.MixtureDrafter()
    second, stranger = first.beside(), module.MixtureDrafter()
    for drafter in (first, second, stranger):
        drafter.begin(text[:60])
    before = second.propose(8).chances
    second.accept(())
    for token in text[60:]:
        first.propose(8)
        first.accept((token,))
    after, alone = second.propose(8), stranger.propose(8)
    assert after.tokens == alone.tokens
    assert alone.chances == before
    assert all(ours > theirs for ours, theirs in zip(after.chances, alone.chances, strict=True))


def test_one_that_remembers_by_itself_drafts_alone() -> None:
    with pytest.raises(ValueError, match="one text at a time"):
        MixtureDrafter(memory=True).beside()


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngramspec.drafting.recall.MOST", 100)
    memory = Recall()
    drafter = MixtureDrafter(memory)
    drafter.begin([1, 2, 3])
    for number in range(50):
        memory.hear([number, 1, 2, 3, 4, 5, 6, 7, 8])
        assert memory.indexes[-1].size <= 110
        assert drafter.propose(4).tokens == (4, 5, 6, 7)
