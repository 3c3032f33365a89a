"""Tests of `Guesser`: its copies, their continuation after an edit, and its use of memory.

The texts are random with fixed seeds, so every run gives the same results.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec import drafting
from ngramspec.drafting.draft import MarginalCost
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.drafting.mixture.history import History
from ngramspec.drafting.mixture.pointers import Pointers
from ngramspec.drafting.token_index import SEAM, TokenIndex

POSITIONS, CANDIDATES = 64, 10
FREE = array("d", bytes(8 * (POSITIONS + 1)))
"""Slopes of a price of 0 per token."""


def test_drafting_constants_in_several_modules_agree() -> None:
    """The compiler requires these constants in each module; with different ones, writes could exceed an array."""
    folder = Path(str(drafting.__file__)).parents[1]
    # Branches are a leaf, which may have been deleted.
    paths = [*(folder / "drafting" / "mixture").glob("*.py"), *(folder / "decoding").glob("branches.py")]
    declared = re.compile(r"^([A-Z_]+) = cython\.declare\([\w.]+, (.*?)\)(?:  #.*)?$", re.MULTILINE)
    found = {path.stem: dict(declared.findall(path.read_text("utf-8"))) for path in paths}
    ours, mixer, counts = (found[name] for name in ("position_scorer", "chance_mixer", "context_counts"))
    shared = ours.keys() & mixer.keys()
    assert len(shared) >= 6
    assert {name: ours[name] for name in shared} == {name: mixer[name] for name in shared}
    assert (int(ours["VIEWS"]), ours["CONTEXT_SOURCES"]) == (int(mixer["EXPERTS"]) + 1, counts["SOURCES"])
    users = {
        "CANDIDATES": ("position_scorer", "guesser", "context_counts", "branches"),
        "POSITIONS": ("position_scorer", "guesser", "branches"),
        "POINTERS": ("position_scorer", "pointers"),
        "FACTS": ("chance_mixer", "pointers", "answers"),
        "ORDERS": ("history", "context_counts", "pointers", "answers"),
    }
    for name, modules in users.items():
        assert len({found[module][name] for module in modules if module in found}) == 1, name


def guess(g: Any, limit: int, worth: float = 0.0, slopes: array[float] = FREE) -> tuple[int, ...]:
    g.guess(limit, 0.0, MarginalCost(worth, slopes))
    tokens: tuple[int, ...] = g.chain()[0]
    return tokens


def begun(prompt: Sequence[int], memory: Sequence[TokenIndex] = ()) -> Any:
    g = Guesser()
    g.memory = list(memory)
    g.begin(prompt)
    return g


def remembered(*texts: Sequence[int]) -> TokenIndex:
    index = TokenIndex()
    for text in texts:
        index.extend(text)
        index.append(SEAM)
    return index


def noise(length: int, seed: int, vocabulary: int = 1000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(length)]


# --------------------------------------------------------------------------- the request itself


def test_guesser_with_repeated_span_copies_it() -> None:
    source = list(range(100, 300))
    g = begun([*source, *range(500, 600), *source[40:46]])
    assert guess(g, 63) == tuple(source[46 : 46 + 63])
    tokens, lengths, chances = g.chain()
    assert lengths[:3] == (6, 7, 8)
    assert max(lengths) == 32
    assert all(0 < p < 1 for p in chances)
    assert len(tokens) == len(lengths) == len(chances) == g.pending == 63
    assert g.accept([*source[46:50], 7]) == 4
    assert g.pending == 0
    assert g.text()[-5:] == [*source[46:50], 7]


def test_guesser_prefers_longer_and_latest_match() -> None:
    # 4 follows 1 2 3 once, and 5 follows the shorter 2 3 three times. After 6 7, 8 came first and 9 recently.
    g = begun([1, 2, 3, 4, 10, 2, 3, 5, 11, 2, 3, 5, 12, 2, 3, 5, 13, 1, 2, 3])
    assert guess(g, 1) == (4,)
    g = begun([6, 7, 8, 10, 6, 7, 9, 11, 6, 7])
    assert guess(g, 1) == (9,)


@pytest.mark.parametrize("edit", ["substitution", "insertion", "deletion"])
def test_guesser_after_edit_continues_copy(edit: str) -> None:
    # With 30 random symbols, about 26 continuations are known for the only token of the copy after an edit. So only a
    # drafter that remembers the position knows the next token.
    rng = random.Random(1)
    source = noise(800, 9, 30)
    g = begun([*source, 1, 2, 3])
    right = tried = 0
    for at in range(0, 780, 20):
        span = source[at : at + 20]
        if edit == "insertion":
            span.insert(10, rng.randrange(30))
        elif edit == "substitution":
            span[10] = (span[10] + 1 + rng.randrange(29)) % 30
        else:
            del span[10]
        for i, token in enumerate(span):
            tokens = guess(g, 1)
            if at and i == (12 if edit == "insertion" else 11):
                tried += 1
                right += tokens == (token,)
            g.accept([token])
    assert tried == 38
    assert right > 8  # 1.4 expected by chance


def test_guesser_ends_chain_below_minimum_probability() -> None:
    g = begun([*noise(300, 5, 6), 1, 2])
    guess(g, 40)
    reach = np.cumprod(g.chain()[2])
    for least in (0.3, 0.1, 0.01):
        assert g.guess(40, least, MarginalCost(0.0, FREE)) == next(i for i, r in enumerate(reach, 1) if r < least)


# --------------------------------------------------------------------------- memory


def test_guesser_with_memory_continues_remembered_text() -> None:
    text = list(range(100, 200))
    g = begun([1, 2, 3, *text[10:13]], [remembered(noise(50, 6), text, noise(50, 7))])
    assert guess(g, 20) == tuple(text[13:33])
    g.memory = []
    assert guess(g, 20) == ()


def test_guesser_prefers_context_then_latest_memory() -> None:
    g = begun([7, 8, 9, 1, 20, 21, 22, 7, 8, 9], [remembered([7, 8, 9, 2, 30, 31])])
    assert guess(g, 1) == (1,)
    assert set(g.distribution(0)) == {1, 2}
    old, new = remembered([7, 8, 9, 1]), remembered([7, 8, 9, 2])
    assert guess(begun([7, 8, 9], [old, new]), 1) == (2,)
    assert guess(begun([7, 8, 9], [new, old]), 1) == (1,)


def recalled(truth: Callable[[int], int]) -> tuple[float, float]:
    """Return the chances of the first and the last of 151 guesses from memory; `truth` gives the emitted token."""
    chains = [noise(8, 100 + i, 10**6) for i in range(151)]
    g = begun([1, 2, 3], [remembered(*chains)])
    chances = []
    for chain in chains:
        g.accept(chain[:5])
        tokens = guess(g, 1)
        assert tokens == (chain[5],)
        chances.append(g.acceptance_probs[0])
        g.accept([truth(chain[5])])
    return chances[0], chances[-1]


def test_guesser_with_wrong_memory_lowers_probability() -> None:
    first, last = recalled(lambda token: token + 1)
    assert first > 0.3
    assert last < 0.05
    assert last < 0.15 * first
    first, last = recalled(lambda token: token)
    assert last > 0.9


def test_guesser_never_proposes_seam() -> None:
    # A seam is never a guess, neither at the end of a text nor if a damaged file points to it.
    index = remembered([5, 6, 7])
    g = begun([5, 6, 7], [index])
    assert guess(g, 5) == ()
    for i in range(len(index.heads)):
        index.heads[i] = 3
    assert index.tokens[3] == SEAM
    assert guess(g, 5) == ()


# --------------------------------------------------------------------------- extreme arguments


def test_guesser_with_short_context_returns_only_known_tokens() -> None:
    index = remembered([5] * 20)
    for token, length, memory in product((5, 0, -1, 2**31 - 1), range(6), ([], [index])):
        g = begun([token] * length, memory)
        tokens = guess(g, 10)
        assert set(tokens) <= {token}
        assert len(tokens) == (10 if length > 1 else 0)
        assert g.accept([token]) == (length > 1)
        assert g.text() == [token] * (length + 1)


def test_guesser_keeps_within_limit_and_price_length() -> None:
    g = begun([1, 2, 3] * 50)
    for limit in (-1, 0, 1, 63, 64, 65, 10**6):
        expected = max(0, min(limit, POSITIONS))
        assert len(guess(g, limit)) == expected
        assert len(guess(g, limit, slopes=array("d", bytes(8 * 11)))) == min(expected, 10)
        assert g.accept([1]) == (expected > 0)
        g.accept([2, 3])
    assert guess(g, 5, slopes=array("d")) == ()


@given(prompt=st.lists(st.integers(0, 4), max_size=60), picks=st.lists(st.integers(0, 9), max_size=20))
def test_guesser_distribution_sums_to_one_after_any_choice(prompt: list[int], picks: list[int]) -> None:
    g = begun(prompt, [remembered(prompt[::-1])])
    taken = []
    for at, pick in enumerate(picks):
        best = g.score_position(at)
        if best < 0:
            break
        law = g.distribution(at)
        assert 1 <= len(law) <= CANDIDATES
        assert sum(law.values()) == pytest.approx(1)
        assert min(law.values()) > 0
        assert max(law.values()) == list(law.values())[best]
        g.take_candidate(at, pick % len(law))
        taken.append(list(law)[pick % len(law)])
    assert list(g.chain()[0]) == taken
    assert g.accept([*taken, 0]) == len(taken)
    assert g.text() == [*prompt, *taken, 0]


def test_guesser_put_of_foreign_token_continues_chain() -> None:
    g = begun([1, 2, 3, 4, 9, 5, 6, 7, 8, 9, 1, 2])
    assert guess(g, 2)[0] == 3
    g.pending = 0
    for at, token in enumerate([3, 5]):  # In the text, 3 4 came at this position, and 6 7 8 after 5.
        g.score_position(at)
        g.set_guess(at, token)
    assert g.guess(6, 0.0, MarginalCost(0.0, FREE), 2) == 6
    tokens, _, chances = g.chain()
    assert tokens[:5] == (3, 5, 6, 7, 8)
    assert chances[0] > 0.0 == chances[1]
    assert g.accept([3, 5, 6, 40]) == 3
    assert g.text()[-4:] == [3, 5, 6, 40]
    g = begun([1, 2, 3])
    assert g.score_position(0) < 0  # There is no guess at this position.
    g.set_guess(0, 50)
    assert g.accept([50, 51]) == 1
    assert g.text() == [1, 2, 3, 50, 51]


# --------------------------------------------------------------------------- positions kept between tokens


def copies_in_turns(rng: random.Random) -> list[int]:
    """Return alternating copies of two texts, with some tokens replaced, omitted and inserted."""
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
    """Return the places sorted by confirmations; of several at one position, only the first remains."""
    ranked = sorted(places, key=lambda p: (-p.confirmed, p.missed, -p.at))
    return [p for n, p in enumerate(ranked) if all(p.at != q.at for q in ranked[:n])]


def latest(text: list[int], order: int) -> int:
    """Return the position after the previous occurrence of the last `order` tokens, or -1 without one."""
    places = (e for e in range(len(text) - 1, order - 1, -1) if text[e - order : e] == text[len(text) - order :])
    return next(places, -1)


def follow(places: list[Place], text: list[int], token: int, history: History) -> list[Place]:
    """Return the places after one more token, by their definition."""
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


def walked(*tokens: int) -> tuple[Pointers, History]:
    pointers, history = Pointers(POSITIONS * CANDIDATES), History()
    walk(pointers, history, *tokens)
    return pointers, history


def walk(pointers: Pointers, history: History, *tokens: int) -> None:
    for token in tokens:
        pointers.add(history, token)
        history.add(token)


def said(pointers: Pointers, history: History) -> list[int]:
    """Return the predictions of the places, strongest first."""
    spoken = pointers.find_predictions(history, history.size, 0)
    tokens = [token for token in pointers.tokens if token >= 0]
    assert bool(tokens) == spoken
    return tokens


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 20))])
def test_pointers_look_returns_tokens_of_reference_definition(seed: int) -> None:
    text: list[int] = []
    pointers, history = Pointers(POSITIONS * CANDIDATES), History()
    places: list[Place] = []
    count = 0
    for token in copies_in_turns(random.Random(seed)):
        found = [e for p in places if (e := history.near(len(text), p.at)) >= 0]
        assert said(pointers, history) == [text[e] for e in found]
        count += len(found)
        places = follow(places, text, token, history)
        pointers.add(history, token)
        history.add(token)
        text.append(token)
    assert count > 300


def test_pointers_follow_chain_until_tokens_disagree() -> None:
    pointers, history = walked(1, 2, 3, 4, 5, 6, 7, 1, 2, 3)
    for at, token in enumerate((4, 5, 6)):
        assert pointers.find_predictions(history, history.size + at, at)
        assert pointers.tokens[0] == token
        history.tokens[history.size + at] = token
        pointers.advance(token)
    pointers.find_predictions(history, history.size + 3, 3)
    history.tokens[history.size + 3] = 99
    pointers.advance(99)
    assert not pointers.find_predictions(history, history.size + 4, 4)
    assert said(pointers, history)[0] == 4
    pointers.begin()
    assert not said(pointers, history)


def test_pointers_estimate_learns_from_outcomes() -> None:
    pointers, history = walked(1, 2, 3, 4, 5, 6, 7, 1, 2, 3)
    pointers.find_predictions(history, history.size, 0)
    assert pointers.estimate(0, 4, 0.4, 3) == pytest.approx(0.4)
    for _ in range(50):
        pointers.estimate(0, 4, 0.4, 3)
        pointers.correction.learn(0, True)
        pointers.estimate(1, 5, 0.4, 3)
        pointers.correction.learn(1, False)
    assert pointers.estimate(0, 4, 0.4, 3) > 0.8
    assert pointers.estimate(1, 5, 0.4, 3) < 0.15


def test_guesser_includes_pointers_as_candidates() -> None:
    guesser = Guesser()
    assert any(any(array) for name, array in guesser.global_weights.items() if name.startswith("pointers"))
    guesser.begin([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    guesser.accept([3, 4])
    guesser.score_position(0)
    guesser.accept([77])
    guesser.guess(1, 0.0, MarginalCost(1.0, FREE))
    assert 6 in guesser.distribution(0)
