"""The chains of `History` and its way over edits against brute force, compiled and as plain Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.uncompiled import plain_modules

from ngramspec.drafting.mixture import history

PLAIN = plain_modules()["history"]
BOTH = pytest.mark.parametrize("module", [history, PLAIN], ids=["installed", "plain"])

ORDERS, SMALLEST, GUESSES = 4, 4096, 64
REACH, STEPS, STEP = 25, 32, 8
ODD = (-1, 0, 1, 2**31 - 2, 2**31 - 1)
"""Token ids at the ends of what fits."""


def filled(module: ModuleType, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Any:
    """A history of `tokens`, with `guesses` behind its end."""
    h = module.History()
    for token in tokens:
        h.add(token)
    for i, token in enumerate(guesses):
        h.tokens[h.size + i] = token
    return h


def hashed(module: ModuleType, context: Sequence[int]) -> int:
    state = 0
    for token in reversed(context):
        state = module.mix(state, (token + 1) % 2**64)
    return state


def on_chain(module: ModuleType, h: Any, context: Sequence[int]) -> list[int]:
    """Positions that follow `context`, as its chain visits them."""
    order = len(context)
    at, found = h.heads[h.chain(hashed(module, context), order)], []
    while at != -1:
        if list(h.tokens[at - order : at]) == list(context):
            found.append(at)
        at = h.links[at * ORDERS + order - 1]
    return found


def after(tokens: Sequence[int], context: Sequence[int]) -> list[int]:
    """Positions that follow `context`, the latest first."""
    order = len(context)
    return [i for i in range(len(tokens) - 1, order - 1, -1) if list(tokens[i - order : i]) == list(context)]


@BOTH
@settings(max_examples=150, deadline=None, derandomize=True)
@given(tokens=st.lists(st.sampled_from(ODD), max_size=60))
def test_a_chain_visits_every_occurrence_from_the_latest_back(module: ModuleType, tokens: list[int]) -> None:
    h = filled(module, tokens)
    assert h.size == len(tokens)
    for order in range(1, ORDERS + 1):
        contexts = {tuple(tokens[i - order : i]) for i in range(order, len(tokens) + 1)} | {(7,) * order}
        for context in contexts:
            assert on_chain(module, h, context) == after(tokens, context)


@BOTH
@pytest.mark.parametrize("size", [SMALLEST - 1, SMALLEST, SMALLEST + 1, 2 * SMALLEST, 2 * SMALLEST + 1])
def test_it_grows_with_guesses_behind_its_end(module: ModuleType, size: int) -> None:
    rng = random.Random(size)
    tokens = [rng.randrange(20) for _ in range(size)]
    h = filled(module, tokens, guesses=[5] * GUESSES)
    for token in (6, 7, 8):  # the guesses were wrong
        h.add(token)
        tokens.append(token)
    assert list(h.tokens[: h.size]) == tokens
    assert len(h.tokens) >= h.size + GUESSES
    for order in range(1, ORDERS + 1):
        for end in (order, size // 2, size, h.size):
            context = tokens[end - order : end]
            assert on_chain(module, h, context) == after(tokens, context)
    # All that has a head or a link lies inside.
    assert max(h.heads) < h.size
    assert all(link < i // ORDERS for i, link in enumerate(h.links[: h.size * ORDERS]))


@BOTH
def test_cleared_it_is_as_new(module: ModuleType) -> None:
    rng = random.Random(1)
    h = filled(module, [rng.randrange(9) for _ in range(2 * SMALLEST + 5)])
    h.clear()
    assert h.size == 0
    assert set(h.heads) == {-1}
    tokens = [rng.randrange(3) for _ in range(500)]
    for token in tokens:
        h.add(token)
    for context in ([0], [1, 2], [2, 2, 1], [0, 1, 0, 2]):
        assert on_chain(module, h, context) == after(tokens, context)


def test_a_token_that_is_no_32_bit_number_is_refused() -> None:
    h = filled(history, [1, 2])
    for bad in (2**31, -(2**31) - 1):
        with pytest.raises(OverflowError):
            h.add(bad)
    h.add(3)
    assert list(h.tokens[: h.size]) == [1, 2, 3]


# --------------------------------------------------------------------------- near


def nearest(tokens: Sequence[int], size: int, end: int, place: int) -> tuple[int, int]:
    """(position, how), as `History.near` is documented; the latest of two that are equally near."""
    if not 1 <= place < size:
        return -1, 4
    if tokens[place - 1] == tokens[end - 1]:
        return place, 0
    if end >= 2:
        latest = after(tokens[:size], tokens[end - 2 : end])[:STEPS]
        around = [e for e in latest if abs(e - place) < REACH]
        if around:
            return min(around, key=lambda e: (abs(e - place), -e)), 1
    same = [e for e in range(1, size) if tokens[e - 1] == tokens[end - 1] and abs(e - place) <= STEP]
    if same:
        best = min(same, key=lambda e: (abs(e - place), -e))
        return best, 2 if best > place else 3
    return place, 4


@BOTH
@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_near_is_the_nearest(module: ModuleType, data: st.DataObject) -> None:
    n_vocab = data.draw(st.integers(2, 8))
    token = st.integers(0, n_vocab)
    tokens = data.draw(st.lists(token, min_size=1, max_size=90))
    guesses = data.draw(st.lists(token, max_size=GUESSES))
    h = filled(module, tokens, guesses)
    end = len(tokens) + data.draw(st.integers(0, len(guesses)))
    place = data.draw(st.integers(-1, len(tokens) + 2))
    assert (h.near(end, place), h.how) == nearest([*tokens, *guesses], len(tokens), end, place)


@BOTH
def test_near_goes_on_after_an_edit(module: ModuleType) -> None:
    source = list(range(100, 145))
    # The copy read up to source[9]; `place` is where it would go on: at source[10], or one further per token.
    for edited, place, goes_on, how in (
        (source[:10], 10, 10, 0),
        ([*source[:10], 7], 11, 11, 4),  # source[10] became 7
        ([*source[:10], 7, source[10]], 12, 11, 3),  # 7 was inserted
        ([*source[:10], source[11]], 11, 12, 2),  # source[10] was left out
        ([*source[:10], *source[36:38]], 12, 12, 4),  # too far away
        ([*source[:10], *source[20:22]], 12, 22, 1),  # a part was left out
    ):
        h = filled(module, [*source, *edited])
        assert (h.near(h.size, place), h.how) == (goes_on, how)


@BOTH
def test_near_looks_at_the_latest_only(module: ModuleType) -> None:
    # 40 later occurrences of the pair: the one next to the place is not among those looked at.
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13] + [0] * 30 + [3, 4, 0] * 40 + [3, 4]
    h = filled(module, text)
    assert (h.near(h.size, 13), h.how) == (13, 4)
    h = filled(module, [*text[: 43 + 3 * 20], 3, 4])
    assert (h.near(h.size, 13), h.how) == (4, 1)
