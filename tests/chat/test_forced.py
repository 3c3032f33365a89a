"""Tests of forced calls: a grammar allows them, after optional reasoning, and the parser reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from ngramspec.chat.families import FAMILIES, AnswerParser, answer_grammar, family_of
from ngramspec.chat.stream import Tool
from ngramspec.llama.vocabulary import Vocabulary

DAYS = {"type": "integer", "minimum": 1, "maximum": 7}
PROPERTIES = {"city": {"type": "string", "maxLength": 20}, "days": DAYS}
WEATHER = Tool("weather", "", {"type": "object", "properties": PROPERTIES, "required": ["city", "days"]})
CLOCK = Tool("clock")
CALL = ("weather", '{"city": "Rome", "days": 3}')
TEMPLATES = {family.name: " ".join(family.markers[0]) for family in FAMILIES}
THINKING = "<tool_call><think>"


def fits(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    """Return True if a grammar allows the complete text."""
    end = next(token for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token))
    tokens = [*vocabulary.tokenize(text, add_bos=False), end]
    return vocabulary.grammar(grammar).count_allowed(tokens) == len(tokens)


def read(template: str, text: str, opening: str = "") -> tuple[str, str, list[tuple[str, object]]]:
    parser = AnswerParser(template, [WEATHER, CLOCK], opening=opening)
    deltas = [*parser.push(text), *parser.finish()]
    calls = [(delta.name, "") for delta in deltas if delta.kind == "call"]
    for delta in deltas:
        if delta.kind == "arguments":
            calls[delta.call] = (calls[delta.call][0], calls[delta.call][1] + delta.text)
    said = ("".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("text", "reasoning"))
    return (*said, [(name, json.loads(arguments)) for name, arguments in calls])  # type: ignore[return-value]


def written(template: str, calls: Sequence[tuple[str, str]]) -> str:
    family = family_of(template)
    assert family is not None
    return family.write(calls)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answer_grammar_of_each_family_allows_calls_that_parser_reads(name: str, demo_vocabulary: Vocabulary) -> None:
    template = TEMPLATES[name]
    family = family_of(template)
    assert family is not None
    assert family.name == name
    one, two = [CALL], [CALL, ("clock", "{}")]
    for parallel in (False, True):
        grammar = answer_grammar([WEATHER, CLOCK], choice="required", parallel=parallel, template=template)
        assert fits(demo_vocabulary, grammar, written(template, one))
        assert not fits(demo_vocabulary, grammar, written(template, [("weather", '{"city": "Rome", "days": 8}')]))
        assert not fits(demo_vocabulary, grammar, "Hello")
        several = parallel and family.around[1] is not None
        assert fits(demo_vocabulary, grammar, written(template, two)) == several
    for calls in (one, two) if family.around[1] is not None else (one,):
        said = read(template, written(template, calls))
        assert said == ("", "", [(name, json.loads(text)) for name, text in calls])


def test_answer_grammar_allows_reasoning_only_before_the_call(demo_vocabulary: Vocabulary) -> None:
    for opening, before, allowed in (
        ("", "", True),
        ("", "<think>\na </thin <</think>\n\n", True),
        ("", "a", False),
        ("", "<think>a", False),
        ("<think>\n", "a </t </</think>\n", True),
        ("<think>\n", "", False),
        ("<think>\n", "</think>a", False),
        ("<think>\n\n</think>\n\n", "", True),
    ):
        grammar = answer_grammar([CLOCK], choice="required", parallel=False, template=THINKING, opening=opening)
        text = before + written(THINKING, [("clock", "{}")])
        assert fits(demo_vocabulary, grammar, text) == allowed
        if allowed:
            content, thoughts, calls = read(THINKING, text, opening)
            assert (content, calls) == ("", [("clock", {})])
            assert thoughts in before
