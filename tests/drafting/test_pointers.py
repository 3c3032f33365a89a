"""Places kept from one token to the next: which they are, what they say, and what they change."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
from support.uncompiled import plain_modules

from ngramspec.drafting.mixture.drafter import MemoryDrafter
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.drafting.mixture.history import History
from ngramspec.drafting.mixture.pointers import Pointers
from ngramspec.drafting.price import TokenPrice

FREE = TokenPrice(1.0, [0.0] * 65)
CELLS = 640


def copying(rng: random.Random) -> list[int]:
    """Copies of two texts in turns, with some tokens replaced, left out and put in."""
    sources = [[rng.randrange(50) for _ in range(60)] for _ in range(2)]
    text: list[int] = []
    for _ in range(8):
        for token in rng.choice(sources)[rng.randrange(20) : rng.randrange(40, 60)]:
            kind = rng.random()
            text += [token] if kind > 0.1 else [] if kind < 0.03 else [rng.randrange(50, 90)] * (1 + (kind < 0.06))
    return text


@dataclass
class Place:
    at: int
    confirmed: float = 0.0
    missed: int = 0

    def follow(self, said: int, token: int) -> Place | None:
        if said == token:
            return Place(self.at + 1, self.confirmed * 0.9 + 1, 0)
        return Place(self.at + 1, self.confirmed * 0.9, self.missed + 1) if self.missed < 6 else None


def in_order(places: list[Place]) -> list[Place]:
    """The most often confirmed first; of two at one place the first alone."""
    ranked = sorted(places, key=lambda p: (-p.confirmed, p.missed, -p.at))
    return [p for n, p in enumerate(ranked) if all(p.at != q.at for q in ranked[:n])]


def latest(text: list[int], order: int) -> int:
    """The place behind which the last `order` tokens stood last, before the end; -1 if nowhere."""
    places = (e for e in range(len(text) - 1, order - 1, -1) if text[e - order : e] == text[len(text) - order :])
    return next(places, -1)


def follow(places: list[Place], text: list[int], token: int, history: History) -> list[Place]:
    """The places after one more token, by their definition."""
    moved = [Place(history.near(len(text), p.at), p.confirmed, p.missed) for p in places]
    places = in_order([p for q in moved if q.at >= 0 and (p := q.follow(text[q.at], token))])
    for order in (2, 4):
        at = latest(text, order)
        if at < 0 or any(p.at == at + 1 for p in places) or (len(places) == 3 and places[2].confirmed >= 1):
            continue
        new = Place(at).follow(text[at], token)
        assert new
        places = in_order([*places[:2], new])
    return places


@pytest.mark.parametrize("seed", range(3))
def test_places_are_those_of_the_definition(seed: int) -> None:
    text: list[int] = []
    pointers, history = Pointers(CELLS), History()
    places: list[Place] = []
    said = 0
    for token in copying(random.Random(seed)):
        pointers.look(history, len(text), 0)
        found = [e for p in places if (e := history.near(len(text), p.at)) >= 0]
        assert [t for t in pointers.tokens if t >= 0] == [text[e] for e in found]
        said += len(found)
        places = follow(places, text, token, history)
        pointers.add(history, token)
        history.add(token)
        text.append(token)
    assert said > 300


def walk(pointers: Pointers, history: History, tokens: list[int]) -> None:
    for token in tokens:
        pointers.add(history, token)
        history.add(token)


def test_a_place_goes_on_behind_a_token_that_was_replaced() -> None:
    """No context of the text holds what comes after a token that is new."""
    pointers, history = Pointers(CELLS), History()
    walk(pointers, history, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 77])
    assert pointers.look(history, history.size, 0)
    assert pointers.tokens[0] == 6
    walk(pointers, history, [6])
    pointers.look(history, history.size, 0)
    assert pointers.tokens[0] == 7


def test_a_place_is_given_up_after_misses_in_a_row() -> None:
    pointers, history = Pointers(CELLS), History()
    walk(pointers, history, [*range(40), 1, 2, 3, 4])
    for n in range(7):
        assert pointers.look(history, history.size, 0), n
        walk(pointers, history, [500 + n])
    assert not pointers.look(history, history.size, 0)


def test_a_chain_is_followed_while_the_places_agree_and_the_text_is_not_moved() -> None:
    pointers, history = Pointers(CELLS), History()
    walk(pointers, history, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    for at, token in enumerate((4, 5, 6)):
        assert pointers.look(history, history.size + at, at)
        assert pointers.tokens[0] == token
        history.tokens[history.size + at] = token
        pointers.take(token)
    pointers.look(history, history.size + 3, 3)
    history.tokens[history.size + 3] = 99
    pointers.take(99)
    assert not pointers.look(history, history.size + 4, 4)
    assert pointers.look(history, history.size, 0)
    assert pointers.tokens[0] == 4
    pointers.begin()
    assert not pointers.look(history, history.size, 0)


def test_two_places_at_once_say_two_things() -> None:
    pointers, history = Pointers(CELLS), History()
    walk(pointers, history, [1, 2, 3, 4, 5, 50, 9, 2, 3, 4, 6, 60, 9, 1, 2, 3, 4])
    pointers.look(history, history.size, 0)
    assert {5, 6} <= set(pointers.tokens)


def test_candidates_are_judged_by_how_such_places_fared() -> None:
    pointers, history = Pointers(CELLS), History()
    walk(pointers, history, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    pointers.look(history, history.size, 0)
    assert pointers.judge(0, 4, 0.4, 3) == pytest.approx(0.4)
    for _ in range(50):
        pointers.judge(0, 4, 0.4, 3)
        pointers.learn(0, True)
        pointers.judge(1, 5, 0.4, 3)
        pointers.learn(1, False)
    assert pointers.judge(0, 4, 0.4, 3) > 0.8
    assert pointers.judge(1, 5, 0.4, 3) < 0.15


def test_a_replaced_token_leaves_a_candidate_to_the_guesser() -> None:
    guesser = Guesser()
    guesser.begin([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    guesser.accept([3, 4])
    guesser.look(0)
    guesser.accept([77])
    guesser.guess(1, 0.0, FREE)
    assert 6 in guesser.law(0)


def test_the_start_that_is_shipped_knows_them() -> None:
    guesser = Guesser()
    assert any(any(array) for name, array in guesser.shared().items() if name.startswith("pointers"))


def test_a_memory_alone_follows_no_place_of_the_request() -> None:
    drafter = MemoryDrafter(True)
    drafter.begin([1, 2, 3, 4, 1, 2])
    drafter.accept([3])
    assert not drafter.propose(4, price=FREE).tokens


@pytest.mark.parametrize("seed", range(3))
def test_compiled_and_plain_agree(seed: int) -> None:
    text = copying(random.Random(seed))
    plain = plain_modules()["guesser"].Guesser
    for guesser in (one := Guesser(), other := plain()):
        guesser.begin(text[:40])
    for token, following in pairwise(text[40:]):
        for guesser in (one, other):
            guesser.guess(5, 0.0, FREE)
        assert one.chain()[0] == other.chain()[0]
        assert one.chain()[2] == pytest.approx(other.chain()[2], rel=1e-12)
        assert one.accept([token, following][: 1 + token % 2]) == other.accept([token, following][: 1 + token % 2])
