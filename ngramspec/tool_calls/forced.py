"""Grammars of answers: forced calls, for `tool_choice` "required" and a named tool, and thoughts before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ngramspec.errors import GrammarError
from ngramspec.tool_calls.deltas import Tool
from ngramspec.tool_calls.families import HERMES, family_of, opened, thought_tags
from ngramspec.tool_calls.json_text import quote

SchemaRules = Callable[..., str]
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
    instead_strict: bool = True,
) -> str:
    """A GBNF grammar of answers that call a tool, which `parser_for` reads.

    Thoughts may come first where the template knows them, and must end before the call.

    Args:
        tools: that may be called.
        choice: "required", or the name of the tool that must be called.
        parallel: whether there may be several calls; of a named tool there is one.
        schema_rules: makes rules of parameters.
        template, opening: as for `parser_for`.
        instead: a JSON schema, of which an answer may be that calls no tool; `instead_strict`: refuse what no grammar
            can say of it.

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
    family = family_of(template) or HERMES
    rules, names = [], []
    for number, tool in enumerate(chosen):
        before, after = family.write(tool.name)
        names.append(f"call-{number}")
        try:
            rules.append(
                schema_rules({f"arguments-{number}": {"type": "object", **tool.parameters}}, strict=tool.strict)
            )
        except GrammarError as error:
            raise GrammarError(f"the parameters of the tool {tool.name!r}: {error}") from error
        rules.append(f"call-{number} ::= {quote(before)} arguments-{number} {quote(after)}")
    begin, between, end = family.around
    more = f" ({quote(between)} call)*" if parallel and choice == "required" and between is not None else ""
    other = []
    if instead is not None:
        rules_instead = schema_rules({"instead": instead}, strict=instead_strict, trimmed=True)
        other = ["turn ::= answer | instead", rules_instead]
    return "\n".join(
        [
            *thoughts_first("turn" if other else "answer", template, opening),
            f"answer ::= {quote(begin)} call{more} {quote(end)}",
            f"call ::= {' | '.join(names)}",
            *dict.fromkeys("\n".join([*other, *rules]).splitlines()),
        ]
    )


def thoughts_first(rest: str, template: str | None, opening: str) -> list[str]:
    """GBNF rules whose root is the rule `rest`, with thoughts before it where the model thinks.

    Where the prompt has opened thoughts, they must end first; where the template knows tags, there may be thoughts.
    """
    tags = thought_tags(template)
    begun = opened(tags, opening)
    if begun is not None:
        return [f"root ::= thoughts [ \\n]* {rest}", *_up_to("thoughts", tags[begun])]
    rules, choices = [], []
    for number, (start, end) in enumerate(tags.items()):
        choices.append(f"{quote(start)} thoughts-{number}")
        rules += _up_to(f"thoughts-{number}", end)
    return [f"root ::= (({' | '.join(choices)}) [ \\n]*)? {rest}" if choices else f"root ::= {rest}", *rules]


def _up_to(name: str, end: str) -> list[str]:
    """Rules of any text up to the first occurrence of `end`, which is read: one for each length of it that has come."""
    rules = []
    known = "".join(sorted(set(end)))
    for done in range(len(end)):
        choices = []
        for character in known:
            text = end[:done] + character
            begun = next(n for n in range(len(text), -1, -1) if end.startswith(text[len(text) - n :]) or n == 0)
            after = f" {name}-{begun}" if begun < len(end) else ""
            choices.append(f"{quote(character)}{after if begun else f' {name}-0'}")
        choices.append(f"[^{''.join(map(_in_class, known))}] {name}-0")
        rules.append(f"{name}-{done} ::= {' | '.join(choices)}")
    return [f"{name} ::= {name}-0", *rules]


def _in_class(character: str) -> str:
    return f"\\x{ord(character):02X}" if ord(character) < 256 else character
