"""Grammars of forced tool calls in the forms of all families, and the marks in them as names of control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ngramspec.chat.families import FAMILIES, answer_grammar
from ngramspec.chat.stream import Tool
from ngramspec.grammars.lark import Lark

THINK = "<think></think>"

MARKS = sorted(
    {
        mark
        for family in FAMILIES
        for text in [*family.starts, *family.call, *family.around, *family.markers[0], THINK]
        if text
        for mark in re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", text)
    }
)
"""Marks around calls and reasoning. Models have some of them as control tokens, and here all are."""

TOOLS = (
    Tool("weather", parameters={"properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}),
    Tool("time", parameters={"properties": {"zone": {"type": "integer"}}, "required": ["zone"]}),
)


def forced_calls(controls: Mapping[str, int]) -> Iterator[Lark]:
    """Yield three grammars of each family: without reasoning, with it, and after its opening tag in the prompt."""
    for family in FAMILIES:
        for choice, tags, opening in (("required", "", ""), (TOOLS[0].name, THINK, ""), ("required", THINK, "<think>")):
            template = " ".join(family.markers[0]) + tags
            yield answer_grammar(TOOLS, choice=choice, template=template, opening=opening, controls=controls)
