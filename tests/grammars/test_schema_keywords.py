"""Tests of the table of JSON Schema keywords in the server's README, which compares ngramspec, llama-server and OpenAI.

`tools/schemas.py` measured the support by llama-server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.json_texts import is_allowed, is_valid, random_text
from support.schema_keywords import KEYWORDS

from ngramspec.data import GrammarError
from ngramspec.grammars.json_schema import schema_grammar

README = Path(__file__).parents[2] / "ngramspec/server/README.md"


def ours(schema: Mapping[str, Any], good: str, bad: str) -> str:
    try:
        grammar = schema_grammar(json.dumps(schema))
    except GrammarError:
        return "refused"
    rng = random.Random(1)
    texts = [text for _ in range(10) if (text := random_text(grammar, rng)) is not None]
    return _verdict(
        is_allowed(grammar, good), is_allowed(grammar, bad) or not all(is_valid(schema, text) for text in texts)
    )


def _verdict(takes_good: bool, takes_bad: bool) -> str:
    if not takes_good:
        return "too strict"
    return "ignored" if takes_bad else "kept"


def _worst(found: list[str]) -> str:
    order = ("refused", "ignored", "too strict", "kept")
    return min(found, key=order.index)


def test_readme_keyword_table_equals_schema_support() -> None:
    lines = ["| keyword | ngramspec, `strict` | llama-server | OpenAI's subset |", "|---|---|---|---|"]
    for keyword, (llama_server, openai, examples) in KEYWORDS.items():
        for schema, good, bad in examples:
            assert is_valid(schema, good), (keyword, good)
            assert not is_valid(schema, bad), (keyword, bad)
        mine = _worst([ours(*example) for example in examples])
        lines.append(f"| {keyword} | {mine} | {llama_server} | {openai} |")
    table = "\n".join(lines)
    assert table in README.read_text("utf-8"), f"the table in {README} must be:\n{table}"
