"""The chains of `TokenIndex`, compiled and as plain Python."""

from __future__ import annotations

import importlib.util
import random
from array import array
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ngramspec.drafting import token_index

SOURCE = Path(__file__).parents[2] / "ngramspec" / "drafting" / "token_index.py"


def plain() -> ModuleType:
    """The module as plain Python, whether it was compiled or not."""
    spec = importlib.util.spec_from_file_location("plain_token_index", SOURCE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BOTH = pytest.mark.parametrize("module", [token_index, plain()], ids=["installed", "plain"])


def text(length: int, seed: int = 0, vocabulary: int = 7) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(-1, vocabulary) for _ in range(length)]


def occurrences(index: token_index.TokenIndex, context: list[int], module: ModuleType) -> list[int]:
    """Positions after `context` on its chain, as the drafter walks it."""
    at = index.heads[module.slot(*context, len(index.heads) - 1)]
    found = []
    while at != module.NOWHERE:
        if list(index.tokens[at - 3 : at]) == context:
            found.append(at)
        at = index.links[at]
    return found


@BOTH
def test_a_chain_visits_every_occurrence_from_the_last_back(module: ModuleType) -> None:
    tokens = text(5000)
    index = module.TokenIndex()
    index.extend(tokens)
    assert index.size == len(tokens)
    contexts = [tokens[i - 3 : i] for i in range(3, len(tokens), 97) if min(tokens[i - 3 : i]) >= 0]
    for context in contexts:
        expected = [i for i in range(3, len(tokens)) if tokens[i - 3 : i] == context and tokens[i] >= 0]
        assert occurrences(index, context, module) == expected[::-1]


@BOTH
def test_no_chain_touches_a_seam(module: ModuleType) -> None:
    index = module.TokenIndex()
    index.extend(text(3000, seed=1))
    entered = {head for head in index.heads if head >= 0} | {link for link in index.links[: index.size] if link >= 0}
    assert entered
    assert all(min(index.tokens[i - 3 : i + 1]) >= 0 for i in entered)


def test_compiled_and_plain_agree() -> None:
    tokens = text(20_000, seed=2, vocabulary=100_000)
    one, other = token_index.TokenIndex(), plain().TokenIndex()
    one.extend(tokens)
    other.extend(tokens)
    for name in ("tokens", "links", "heads"):
        a, b = (list(getattr(index, name)) for index in (one, other))
        assert a == b
    whole = token_index.TokenIndex.build(array("i", tokens), 1 << 12)
    again = plain().TokenIndex.build(array("i", tokens), 1 << 12)
    assert list(whole.links) == list(again.links)
    assert list(whole.heads) == list(again.heads)


@BOTH
def test_built_at_once_and_token_by_token_find_the_same(module: ModuleType) -> None:
    tokens = text(3000, seed=3)
    grown = module.TokenIndex()
    grown.extend(tokens)
    for chains in (1, 64, 8192):
        built = module.TokenIndex.build(array("i", tokens), chains)
        for context in ([1, 2, 3], [0, 0, 0], [6, 5, 4], [5, 5, 5]):
            assert occurrences(built, context, module) == occurrences(grown, context, module)


@BOTH
@pytest.mark.parametrize("length", [0, 2, 1000])
def test_an_index_over_arrays_grows(module: ModuleType, length: int) -> None:
    # numpy's arrays, as a mapped file gives them; the length is no power of two.
    tokens = text(length + 2000, seed=4)
    built = module.TokenIndex.build(array("i", tokens[:length]), 16)
    arrays = [np.array(list(a), np.int32).data for a in (built.tokens, built.links, built.heads)]
    index = module.TokenIndex.over(*arrays, length)
    index.extend(tokens[length:])
    assert list(index.tokens[: index.size]) == tokens
    expected = [i for i in range(3, len(tokens)) if tokens[i - 3 : i] == [1, 2, 3] and tokens[i] >= 0]
    assert occurrences(index, [1, 2, 3], module) == expected[::-1]


@BOTH
def test_arrays_that_make_no_index(module: ModuleType) -> None:
    ints = array("i", [0] * 8)
    with pytest.raises(ValueError, match="9 of 8 tokens"):
        module.TokenIndex.over(ints, ints, ints, 9)
    with pytest.raises(ValueError, match="power of two"):
        module.TokenIndex.over(ints, ints, ints[:6], 8)
