"""Tests that looking ahead in a grammar, going back and failing leave its state as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.forced_calls import MARKS, forced_calls
from support.json_texts import whole_schema
from support.vocabulary_files import write_vocabulary

from ngramspec.data import GrammarError
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.grammars.json_schema import schema_grammar
from ngramspec.llama.grammar import Grammar
from ngramspec.llama.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    """Return the demo model's vocabulary with the marks of all families as control tokens."""
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "marks.gguf", controls=MARKS)
    with Vocabulary(path) as opened:
        yield opened


def draw_gbnf(draw: st.DrawFn, vocabulary: Vocabulary) -> str:
    """Draw a grammar in GBNF with control tokens, excluded tokens, named plain tokens and a recursive rule."""
    first = vocabulary.controls[MARKS[0]]
    plain = vocabulary.tokenize("the", add_bos=False)[0]
    end = next(filter(vocabulary.is_eog, range(vocabulary.n_vocab)))
    tokens = [f"<[{first + i}]>" for i in range(3)] + [f"!<[{first}]>", f"<[{plain}]>", f"!<[{plain}]>", f"<[{end}]>"]
    texts = ['"a"', '"ab"', '"abc"', '"{\\"name\\": "', "[ab]", "[^a]", '"\\u00e9"', "[0-9]", '""', '("b" more)?']
    parts = st.recursive(
        st.sampled_from(tokens) | st.sampled_from(texts),
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=4).map(" ".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({' | '.join(options)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}"])).map(
                lambda pair: f"({pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=4,
    )
    root, more = (" ".join(draw(st.lists(parts, min_size=1, max_size=4))) for _ in range(2))
    return f"root ::= {root}\nmore ::= {more}"


def draw_grammar(draw: st.DrawFn, vocabulary: Vocabulary, calls: Sequence[str]) -> str:
    """Draw a grammar: GBNF, a JSON schema, or one of these forced calls."""
    kind = draw(st.sampled_from(["gbnf", "gbnf", "schema", "calls"]))
    if kind == "gbnf":
        return draw_gbnf(draw, vocabulary)
    if kind == "schema":
        return schema_grammar(json.dumps(whole_schema(random.Random(draw(st.integers(0, 10**6))))), strict=False)
    return draw(st.sampled_from(calls))


def advance(vocabulary: Vocabulary, text: str, tokens: list[int]) -> Grammar:
    """Return a grammar that has accepted these tokens and has never looked ahead."""
    grammar = vocabulary.grammar(text)
    for token in tokens:
        grammar.accept(token)
    return grammar


LOOKS: Mapping[str, Callable[[Grammar, int], Any]] = {
    "mask": lambda grammar, token: grammar.mask().tobytes(),
    "allows": lambda grammar, token: [grammar.allows(one) for one in (token, 1, *range(300, 310))],
    "count": lambda grammar, token: grammar.count_allowed([token, token, 300]),
    "forced": lambda grammar, token: grammar.find_forced_text(),
    "complete": lambda grammar, token: grammar.is_complete,
    "shape": lambda grammar, token: GrammarGuide(grammar).shape(Draft((token,)), 20),
}
"""Calls that look ahead, with a token that may come next."""


def look(name: str, grammar: Grammar, token: int) -> Any:
    """Return the result of a call, or the message of its error."""
    try:
        return LOOKS[name](grammar, token)
    except GrammarError as error:
        return str(error)


def find_allowed(grammar: Grammar) -> NDArray[np.bool_]:
    try:
        return grammar.mask()
    except GrammarError:
        return np.zeros(grammar.vocabulary.n_vocab, np.bool_)


@pytest.mark.parametrize("examples", [40, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_grammar_after_any_calls_matches_grammar_with_same_tokens(vocabulary: Vocabulary, examples: int) -> None:
    """Every call on a grammar that was used before equals that on one that only accepted the same tokens."""
    calls = list(forced_calls(vocabulary.controls))

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
    @given(st.composite(draw_grammar)(vocabulary, calls), st.integers(0, 999))
    def check(text: str, seed: int) -> None:
        rng = random.Random(seed)
        try:
            used = vocabulary.grammar(text)
        except GrammarError:
            return  # a random schema that contradicts itself
        tokens: list[int] = []
        for _ in range(8):
            mask = find_allowed(advance(vocabulary, text, tokens))
            token = int(rng.choice(np.flatnonzero(mask))) if mask.any() else 0
            for name in rng.sample([*LOOKS], 4):
                result = look(name, used, token)
                assert result == look(name, advance(vocabulary, text, tokens), token), (text, tokens, name)
                assert name != "allows" or result == mask[[token, 1, *range(300, 310)]].tolist(), (text, tokens)
                if name == "forced" and result:
                    pieces = [vocabulary.piece(one) for one in np.flatnonzero(mask)]
                    assert all(piece.startswith(result) or result.startswith(piece) for piece in pieces), (text, tokens)
            step = rng.choice(["accept", "accept", "roll back", "refuse"])
            if step == "accept" and mask.any():
                used.accept(token)
                tokens.append(token)
            elif step == "roll back" and tokens:
                count = rng.randint(1, len(tokens))
                used.rollback(count)
                del tokens[-count:]
            elif step == "refuse" and not mask.all() and not any(map(vocabulary.is_eog, tokens)):
                with pytest.raises(GrammarError):
                    used.accept(int(np.argmin(mask)))

    check()
