"""What a text must be like, out of the fields of a request: grammars and schemas, under all their names.

None is dropped in silence: what cannot be kept is a 400.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ngramspec.errors import GrammarError
from ngramspec.llama.json_schema import pattern_grammar, schema_grammar
from ngramspec.llama.json_values import one_of
from ngramspec.server.call import Fields, bad_field, shown

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_FORMATS = ("text", "json_object", "json_schema")

_NO_LIMIT_OF_THOUGHTS = (-1,), "thoughts have no limit of their own: max_tokens counts them too"

_UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "adaptive_target": ((-1,), "there is no adaptive-p sampler here"),
    "allowed_token_ids": (([],), "use grammar, or logit_bias"),
    "grammar_lazy": ((False,), "a grammar holds from the first token on; tools have tool_choice"),
    "include_stop_str_in_output": ((False,), "a text ends before its stop string"),
    "length_penalty": ((0, 1), "there is no beam search here"),
    "min_keep": ((0, 1), "a sampler keeps one token at least"),
    "prompt_logprobs": ((), "a prompt's tokens have no logprobs here"),
    "reasoning_budget_tokens": _NO_LIMIT_OF_THOUGHTS,
    "reasoning_format": (("auto", "deepseek"), "thoughts come as reasoning_content"),
    "thinking_budget_tokens": _NO_LIMIT_OF_THOUGHTS,
    "truncate_prompt_tokens": ((-1,), "nothing is left out of a prompt"),
    "use_beam_search": ((False,), "there is no beam search here"),
}
"""vLLM's and llama-server's fields that would change a text, their values that do not, and what to do instead."""

_SCHEMAS = ("json", "json_object")
_GUIDED = ("json", "choice", "grammar", "regex", "json_object", "structural_tag")


def read_grammar(given: Fields, schemas: bool = True) -> str | None:
    """The grammar that a request asks for, but for a `response_format`; None: none.

    `schemas`: whether vLLM's `guided_json` counts; else `guided_schema` reads it, for answers with thoughts before.
    """
    for name, (agreeing, instead) in _UNSUPPORTED.items():
        if name in given and given.data[name] not in agreeing:
            raise given.refused(name, f"is not supported; {instead}")
    grammar = given.text("grammar") or None  # llama-server's way to say "none" is ""
    if "json_schema" in given:
        if "grammar" in given:
            raise bad_field("json_schema", "json_schema and grammar exclude each other")
        grammar = grammar_of(given.data["json_schema"], "json_schema")
    for kind, (where, name) in _guided(given).items():
        if kind in _SCHEMAS and not schemas:
            continue
        if grammar is not None:
            raise where.refused(name, "goes with no other constraint of the text")
        grammar = _guided_grammar(where, name, kind)
    return grammar


def _guided(given: Fields) -> dict[str, tuple[Fields, str]]:
    """vLLM's constraints by kind: `guided_json` and such, or the same within `structured_outputs`."""
    found = {kind: (given, f"guided_{kind}") for kind in _GUIDED if f"guided_{kind}" in given}
    if (within := given.object("structured_outputs")) is not None:
        for kind in _GUIDED:
            if kind in within and within.data[kind] is not False:
                if kind in found:
                    raise within.refused(kind, f"stands beside guided_{kind}")
                found[kind] = within, kind
    return found


def _guided_grammar(where: Fields, name: str, kind: str) -> str:
    if kind == "grammar":
        return where.needed_name(name)
    if kind == "choice":
        texts = where.texts(name)
        if not texts:
            raise where.wrong(name, "a list of texts")
        return f"root ::= {one_of(texts)}"
    if kind == "regex":
        try:
            return pattern_grammar(where.needed_name(name))
        except GrammarError as error:
            raise where.refused(name, str(error)) from error
    if kind in ("json", "json_object"):
        return grammar_of(_guided_schema(where, name, kind), where.path + name)
    raise where.refused(name, "is not supported; use a grammar (GBNF) instead")


def _guided_schema(where: Fields, name: str, kind: str) -> Mapping[str, Any]:
    if kind == "json_object":
        return ANY_OBJECT
    schema = where.data[name]
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise where.refused(name, "is text that is not JSON") from None
    if not isinstance(schema, dict):
        raise where.wrong(name, "an object")
    return schema or ANY_OBJECT


def guided_schema(given: Fields) -> Mapping[str, Any] | None:
    """The JSON schema that vLLM's fields ask for, all of which must be kept; None: none."""
    found = None
    for kind, (where, name) in _guided(given).items():
        if kind in _SCHEMAS:
            if found is not None:
                raise where.refused(name, "goes with no other constraint of the text")
            found = _guided_schema(where, name, kind)
            grammar_of(found, where.path + name)  # an error names this field
    return found


def read_format(given: Fields) -> tuple[Mapping[str, Any] | None, bool]:
    """The JSON schema of `response_format`, or of vLLM's `guided_json`, and whether all of it must be kept.

    Where there is none, the text is free.
    """
    asked, guided = given.object("response_format"), guided_schema(given)
    if guided is not None:
        if asked is not None and asked.data.get("type") != "text":
            raise given.refused("response_format", "goes with no other constraint of the text")
        return guided, True
    kind = "text" if asked is None else asked.choice("type", _FORMATS, "text")
    if asked is None or kind == "text":
        return None, True
    wrapped = asked.object("json_schema") if kind == "json_schema" else None
    if kind == "json_schema" and wrapped is None and "schema" not in asked:
        raise bad_field("response_format.json_schema", "response_format.json_schema is missing")
    form = wrapped or asked
    schema = form.object("schema")
    return ANY_OBJECT if schema is None or not schema.data else schema.data, form.flag("strict")


def grammar_of(schema: Any, name: str, strict: bool = True) -> str:
    """The grammar of a JSON schema; `name`: the field that holds it; `strict` as in `schema_grammar`."""
    if not isinstance(schema, dict):
        raise bad_field(name, f"{name} is {shown(schema)}, but must be an object")
    try:
        return schema_grammar(json.dumps(schema), strict=strict, trimmed=True)
    except (GrammarError, RecursionError) as error:
        raise bad_field(name, f"{name}: {error}") from error
