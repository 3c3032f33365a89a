"""JSON schemas as grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llama_cpp.llama_grammar import SchemaConverter

from ngramspec.errors import GrammarError


def schema_rules(schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """GBNF rules of JSON that fits schemas, by the names that the rules shall have."""
    lines: dict[str, None] = {}
    for name, schema in schemas.items():
        converter = SchemaConverter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        try:
            loaded = converter.resolve_refs(json.loads(json.dumps(schema)), name)
            converter.visit(loaded, name)
        except Exception as error:
            raise GrammarError(f"the JSON schema cannot be turned into a grammar: {error}") from error
        lines |= dict.fromkeys(converter.format_grammar().splitlines())
    return "\n".join(lines)
