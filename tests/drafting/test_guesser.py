"""`Guesser`: what it copies, how it goes on after an edit, and what it makes of memory, compiled and as plain Python.

Texts are random with fixed seeds: what one test finds, it finds in every run.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.uncompiled import plain_modules

from ngramspec.drafting import token_index
from ngramspec.drafting.mixture import guesser
from ngramspec.drafting.price import TokenPrice
from ngramspec.drafting.token_index import SEAM, TokenIndex

PLAIN = plain_modules()
BOTH = pytest.mark.parametrize("module", [guesser, PLAIN["guesser"]], ids=["installed", "plain"])

POSITIONS, CANDIDATES = 64, 10
FREE = array("d", bytes(8 * (POSITIONS + 1)))
"""What a token costs where none costs anything."""


@pytest.mark.parametrize("other", ["odds", "correction"])
def test_constants_that_stand_in_two_modules_agree(other: str) -> None:
    """The compiler wants each module to have its own; with other numbers one would write past the other's arrays."""
    ours, theirs = vars(PLAIN["guesser"]), vars(PLAIN[other])
    both = {name for name in ours.keys() & theirs.keys() if name.isupper()}
    assert len(both) >= 3
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}


def guess(g: Any, limit: int, worth: float = 0.0, slopes: array[float] = FREE) -> tuple[int, ...]:
    g.guess(limit, 0.0, TokenPrice(worth, slopes))
    tokens: tuple[int, ...] = g.chain()[0]
    return tokens


def begun(module: ModuleType, prompt: Sequence[int], memory: Sequence[TokenIndex] = ()) -> Any:
    g = module.Guesser()
    g.memory = list(memory)
    g.begin(prompt)
    return g


def remembered(module: ModuleType, *texts: Sequence[int]) -> TokenIndex:
    """An index of the class that `module` was compiled against."""
    kind = (PLAIN["token_index"] if module is PLAIN["guesser"] else token_index).TokenIndex
    index: TokenIndex = kind()
    for text in texts:
        index.extend(text)
        index.append(SEAM)
    return index


def noise(length: int, seed: int, vocabulary: int = 1000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(length)]


# --------------------------------------------------------------------------- the request itself


@BOTH
def test_it_copies_a_repeated_span(module: ModuleType) -> None:
    source = list(range(100, 300))
    g = begun(module, [*source, *range(500, 600), *source[40:46]])
    assert guess(g, 63) == tuple(source[46 : 46 + 63])
    tokens, lengths, chances = g.chain()
    assert lengths[:3] == (6, 7, 8)
    assert max(lengths) == 32
    assert all(0 < p < 1 for p in chances)
    assert len(tokens) == len(lengths) == len(chances) == g.pending == 63
    assert g.accept([*source[46:50], 7]) == 4
    assert g.pending == 0
    assert g.text()[-5:] == [*source[46:50], 7]


@BOTH
def test_the_longer_match_and_the_latest_one_win(module: ModuleType) -> None:
    # After 1 2 3: once 4, and thrice 5 after a mere 2 3; after 6 7: first 8, lately 9.
    g = begun(module, [1, 2, 3, 4, 10, 2, 3, 5, 11, 2, 3, 5, 12, 2, 3, 5, 13, 1, 2, 3])
    assert guess(g, 1) == (4,)
    g = begun(module, [6, 7, 8, 10, 6, 7, 9, 11, 6, 7])
    assert guess(g, 1) == (9,)


@BOTH
@pytest.mark.parametrize("edit", ["substitution", "insertion", "deletion"])
def test_a_copy_goes_on_after_an_edit(module: ModuleType, edit: str) -> None:
    # Of 30 symbols at random, the one token of the copy that is known after an edit had some 26 others after it:
    # only who remembers the place knows what comes next.
    rng = random.Random(1)
    source = noise(800, 9, 30)
    g = begun(module, [*source, 1, 2, 3])
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
    assert right > 8  # 1.4 by chance


@BOTH
def test_it_learns_what_it_may_trust(module: ModuleType) -> None:
    g = begun(module, noise(1000, 2, 20))
    chances = array("d")
    for token in noise(1000, 3, 20):
        guess(g, 1)
        chances.append(g.chances[0])
        g.accept([token])
    assert chances[0] > 0.14
    assert sum(chances[-200:]) / 200 < 0.75 * chances[0]  # a guess is right with 0.05
    g.begin([1, 2, 3] * 20)
    for _ in range(300):
        g.accept(guess(g, 1))
    guess(g, 10)
    assert min(g.chances[:10]) > 0.9


@BOTH
def test_begin_forgets_the_text_and_keeps_what_was_learnt(module: ModuleType) -> None:
    g = begun(module, [1, 2, 3] * 20)
    guess(g, 3)
    first = g.chances[0]
    for _ in range(50):
        g.accept(guess(g, 3))
    g.begin([4, 5, 6])
    assert guess(g, 5) == ()
    assert g.text() == [4, 5, 6]
    g.begin([1, 2, 3] * 20)
    guess(g, 3)
    assert g.chances[0] > first


@BOTH
def test_asking_twice_changes_nothing(module: ModuleType) -> None:
    g = begun(module, noise(500, 3, 5))
    for token in noise(60, 4, 5):
        guess(g, 9)
        before = g.chain()
        guess(g, 30)
        assert guess(g, 9) == before[0]
        assert g.chain() == before
        g.accept([token])


@BOTH
def test_a_chain_ends_where_no_more_can_pay(module: ModuleType) -> None:
    g = begun(module, [*noise(300, 5, 6), 1, 2])
    guess(g, 40)
    chances = g.chain()[2]
    reach = np.cumprod(chances)
    for worth, slope in ((1.0, 0.1), (2.0, 0.1), (1.0, 0.02), (1.5, 0.5)):
        slopes = array("d", [slope] * 41)
        length = len(guess(g, 40, worth, slopes))
        # It ends with the first token whose chance is below the floor, that one included.
        assert all(reach[: length - 1] >= worth * slope)
        assert length == 40 or reach[length - 1] < worth * slope
    assert g.guess(40, 0.3, TokenPrice(0.0, FREE)) == next(i for i, r in enumerate(reach, 1) if r < 0.3)


# --------------------------------------------------------------------------- memory


@BOTH
def test_it_goes_on_as_memory_does(module: ModuleType) -> None:
    text = list(range(100, 200))
    g = begun(module, [1, 2, 3, *text[10:13]], [remembered(module, noise(50, 6), text, noise(50, 7))])
    assert guess(g, 20) == tuple(text[13:33])
    g.memory = []
    assert guess(g, 20) == ()


@BOTH
def test_the_context_comes_before_memory(module: ModuleType) -> None:
    g = begun(module, [7, 8, 9, 1, 20, 21, 22, 7, 8, 9], [remembered(module, [7, 8, 9, 2, 30, 31])])
    assert guess(g, 1) == (1,)
    assert set(g.law(0)) == {1, 2}


@BOTH
def test_the_latest_memory_comes_first(module: ModuleType) -> None:
    old, new = remembered(module, [7, 8, 9, 1]), remembered(module, [7, 8, 9, 2])
    assert guess(begun(module, [7, 8, 9], [old, new]), 1) == (2,)
    assert guess(begun(module, [7, 8, 9], [new, old]), 1) == (1,)


def recalled(module: ModuleType, truth: Callable[[int], int]) -> tuple[float, float]:
    """Chances of the first guess from memory at the start and after 150 of them; `truth` says what came instead."""
    chains = [noise(8, 100 + i, 10**6) for i in range(151)]
    g = begun(module, [1, 2, 3], [remembered(module, *chains)])
    chances = []
    for chain in chains:
        g.accept(chain[:5])
        tokens = guess(g, 1)
        assert tokens == (chain[5],)
        chances.append(g.chances[0])
        g.accept([truth(chain[5])])
    return chances[0], chances[-1]


@BOTH
def test_memory_that_is_wrong_is_muted(module: ModuleType) -> None:
    first, last = recalled(module, lambda token: token + 1)
    assert first > 0.3
    assert last < 0.05
    assert last < 0.15 * first
    first, last = recalled(module, lambda token: token)
    assert last > 0.9


@BOTH
def test_memory_may_grow_while_it_is_used(module: ModuleType) -> None:
    live = remembered(module)
    g = begun(module, [1, 2, 3], [live])
    assert guess(g, 5) == ()
    for i in range(6):  # past several of its sizes
        text = noise(700 * (i + 1), 20 + i, 10**6)
        live.extend(text)
        live.append(SEAM)
        g.begin(text[300:304])
        assert guess(g, 30) == tuple(text[304:334])


@BOTH
def test_a_seam_is_nobodys_guess(module: ModuleType) -> None:
    # Neither at the end of a text, nor where a damaged file leads to one.
    index = remembered(module, [5, 6, 7])
    g = begun(module, [5, 6, 7], [index])
    assert guess(g, 5) == ()
    for i in range(len(index.heads)):
        index.heads[i] = 3
    assert index.tokens[3] == SEAM
    assert guess(g, 5) == ()


# --------------------------------------------------------------------------- the ends of what it may be given


@BOTH
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5])
def test_short_contexts(module: ModuleType, length: int, memory: bool) -> None:
    index = remembered(module, [5] * 20)
    for token in (5, 0, -1, 2**31 - 1):
        g = begun(module, [token] * length, [index] if memory else [])
        tokens = guess(g, 10)
        assert set(tokens) <= {token}
        assert len(tokens) == (10 if length > 1 else 0)
        assert g.accept([token]) == (length > 1)
        assert g.text() == [token] * (length + 1)


@BOTH
def test_limits_are_kept(module: ModuleType) -> None:
    g = begun(module, [1, 2, 3] * 50)
    for limit in (-1, 0, 1, 63, 64, 65, 10**6):
        expected = max(0, min(limit, POSITIONS))
        assert len(guess(g, limit)) == expected
        assert len(guess(g, limit, slopes=array("d", bytes(8 * 11)))) == min(expected, 10)
        assert g.accept([1]) == (expected > 0)
        g.accept([2, 3])
    assert guess(g, 5, slopes=array("d")) == ()


@BOTH
def test_the_history_grows_under_a_full_chain(module: ModuleType) -> None:
    text = [*noise(4094, 8, 50), 900, 901]
    text[100:102] = [900, 901]
    for end in (4094, 4095, 4096):  # the room for tokens is 4096 at first
        g = begun(module, text[:end])
        for at in range(end, 4096):
            guess(g, 63)
            g.accept([text[at]])
        tokens = guess(g, 63)
        assert tokens[:20] == tuple(text[102:122])
        assert g.accept([*tokens, 3]) == 63
        assert g.text() == [*text, *tokens, 3]
        assert guess(g, 63) != ()


@BOTH
@settings(max_examples=60, deadline=None, derandomize=True)
@given(prompt=st.lists(st.integers(0, 4), max_size=60), picks=st.lists(st.integers(0, 9), max_size=20))
def test_a_law_is_one_whatever_is_taken(module: ModuleType, prompt: list[int], picks: list[int]) -> None:
    g = begun(module, prompt, [remembered(module, prompt[::-1])])
    taken = []
    for at, pick in enumerate(picks):
        best = g.look(at)
        if best < 0:
            break
        law = g.law(at)
        assert 1 <= len(law) <= CANDIDATES
        assert sum(law.values()) == pytest.approx(1)
        assert min(law.values()) > 0
        assert max(law.values()) == list(law.values())[best]
        g.take(at, pick % len(law))
        taken.append(list(law)[pick % len(law)])
    assert list(g.chain()[0]) == taken
    assert g.accept([*taken, 0]) == len(taken)
    assert g.text() == [*prompt, *taken, 0]


# --------------------------------------------------------------------------- one behaviour


@pytest.mark.parametrize(("vocabulary", "seed"), [(3, 1), (8, 2), (60, 3)])
def test_compiled_and_plain_agree(vocabulary: int, seed: int) -> None:
    rng = random.Random(seed)

    def stretch() -> list[int]:
        """Something new, or a copy of something old with an edit."""
        if len(text) < 50 or rng.random() < 0.3:
            return [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 30))]
        start = rng.randrange(len(text) - 30)
        copy = text[start : start + 30]
        copy[rng.randrange(len(copy))] = rng.randrange(vocabulary)
        return copy

    both = [guesser.Guesser(), PLAIN["guesser"].Guesser()]
    indexes = [remembered(guesser), remembered(PLAIN["guesser"])]
    text: list[int] = []
    for _ in range(4):
        for g, index in zip(both, indexes, strict=True):
            index.extend(text)
            index.append(SEAM)
            g.memory = [index]
        text = []
        for _ in range(6):
            text += stretch()
        for g in both:
            g.begin(text)
        for _ in range(12):
            truth = stretch()
            text += truth
            while truth:
                limit = rng.randrange(12)
                one, other = ((guess(g, limit, 1.0, array("d", [0.02] * 64)), g.chain()) for g in both)
                assert one[0] == other[0]
                assert one[1][1] == other[1][1]
                assert one[1][2] == pytest.approx(other[1][2], rel=1e-9)
                part = truth[: rng.randrange(1, 6)]
                del truth[: len(part)]
                assert len({g.accept(part) for g in both}) == 1
    assert both[0].text() == both[1].text() == text


# --------------------------------------------------------------------------- tokens of others


@BOTH
def test_a_chain_goes_on_behind_a_token_of_another(module: ModuleType) -> None:
    g = begun(module, [1, 2, 3, 4, 9, 5, 6, 7, 8, 9, 1, 2])
    assert guess(g, 2)[0] == 3
    g.pending = 0
    for at, token in enumerate([3, 5]):  # the text went on with 3 4 there, and with 6 7 8 behind 5
        g.look(at)
        g.put(at, token)
    assert g.guess(6, 0.0, TokenPrice(0.0, FREE), 2) == 6
    tokens, _, chances = g.chain()
    assert tokens[:5] == (3, 5, 6, 7, 8)
    assert chances[0] > 0.0 == chances[1]
    assert g.accept([3, 5, 6, 40]) == 3
    assert g.text()[-4:] == [3, 5, 6, 40]


@BOTH
def test_a_token_put_that_is_the_guess_is_the_guess(module: ModuleType) -> None:
    text = noise(20, 3) * 3
    alone, put = begun(module, text), begun(module, text)
    guess(alone, 6)
    for at, token in enumerate(alone.chain()[0]):
        put.look(at)
        put.put(at, token)
    assert put.chain() == alone.chain()


@BOTH
def test_a_token_put_where_nothing_is_known_teaches_nothing_wrong(module: ModuleType) -> None:
    g = begun(module, [1, 2, 3])
    assert g.look(0) < 0
    g.put(0, 50)
    assert g.accept([50, 51]) == 1
    assert g.text() == [1, 2, 3, 50, 51]
