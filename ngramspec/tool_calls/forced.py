"""Calls that are forced by a grammar, for `tool_choice` "required" and a named tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ngramspec.errors import GrammarError
from ngramspec.tool_calls.deltas import Tool
from ngramspec.tool_calls.families import family_of
from ngramspec.tool_calls.hermes import HERMES
from ngramspec.tool_calls.json_text import quote
from ngramspec.tool_calls.thoughts import thoughts_first

SchemaRules = Callable[[Mapping[str, Mapping[str, Any]]], str]
"""GBNF rules for JSON schemas, by the names of the rules: `ngramspec.llama.json_schema.schema_rules`."""


def forced_grammar(
    tools: Sequence[Tool],
    choice: str,
    parallel: bool,
    schema_rules: SchemaRules,
    *,
    template: str | None = None,
    opening: str = "",
    instead: Mapping[str, Any] | None = None,
) -> str:
    """A GBNF grammar of answers that call a tool, which `parser_for` reads.

    Thoughts may come first where the template knows them, and must end before the call.

    Args:
        tools: that may be called.
        choice: "required", or the name of the tool that must be called.
        parallel: whether there may be several calls.
        schema_rules: makes rules of parameters.
        template, opening: as for `parser_for`.
        instead: a JSON schema, of which an answer may be that calls no tool.

    Raises:
        ValueError: no tool of that name.
        GrammarError: parameters that cannot be a grammar; the message names the tool.
    """
    chosen = [tool for tool in tools if choice in {"required", tool.name}]
    if not chosen:
        raise ValueError(
            f"tool_choice {choice!r} is not one of the tools"
            if tools
            else "tool_choice asks for a tool, but there are none"
        )
    form = family_of(template) or HERMES
    rules, names = [], []
    for number, tool in enumerate(chosen):
        before, after = form.write(tool.name)
        names.append(f"call-{number}")
        try:
            rules.append(schema_rules({f"arguments-{number}": {"type": "object", **tool.parameters}}))
        except GrammarError as error:
            raise GrammarError(f"the parameters of the tool {tool.name!r}: {error}") from error
        rules.append(f"call-{number} ::= {quote(before)} arguments-{number} {quote(after)}")
    begin, between, end = form.around
    more = f" ({quote(between)} call)*" if parallel and between is not None else ""
    other = [] if instead is None else ["turn ::= answer | instead", schema_rules({"instead": instead})]
    return "\n".join(
        [
            *thoughts_first("turn" if other else "answer", template, opening),
            f"answer ::= {quote(begin)} call{more} {quote(end)}",
            f"call ::= {' | '.join(names)}",
            *dict.fromkeys("\n".join([*other, *rules]).splitlines()),
        ]
    )
