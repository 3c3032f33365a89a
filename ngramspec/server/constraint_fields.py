"""The fields that constrain the text: a grammar, a JSON schema, a format, and vLLM's constraints.

Every constraint becomes a grammar for llguidance. These requests have the same effect:

    {"json_schema": {"type": "integer"}}                                                    llama-server
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {...}}}}          OpenAI
    {"guided_json": {"type": "integer"}}, {"structured_outputs": {"json": {...}}}           vLLM

There are two ways to the grammar. `read_grammar` returns it at once, for text completions. Chats call
`read_json_format` or `read_response_format`, which return a `JsonFormat`: the JSON that the answer must be, because the
grammar also depends on the tools and on the reasoning before the answer. A request can have one constraint. It is never
ignored: the status is 400 if the server cannot satisfy it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ngramspec.data import GrammarError
from ngramspec.grammars.json_schema import json_rule
from ngramspec.grammars.lark import MAX_SIZE, Lark, choice_grammar, lark, pattern_grammar
from ngramspec.grammars.worker import worker
from ngramspec.server.errors import bad_field
from ngramspec.server.fields import Fields

T = TypeVar("T")

_FORMATS = ("text", "json_object", "json_schema")

_UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "adaptive_target": ((-1,), "adaptive-p sampling is not available"),
    "allowed_token_ids": (([],), "use grammar or logit_bias"),
    "grammar_lazy": ((False,), "a grammar applies from the first token on; for tools, use tool_choice"),
    "include_stop_str_in_output": ((False,), "stop strings are never included"),
    "length_penalty": ((0, 1), "beam search is not available"),
    "min_keep": ((0, 1), "samplers keep at least one token"),
    "prompt_logprobs": ((), "prompt tokens have no logprobs; use echo with logprobs in /v1/completions"),
    "reasoning_format": (("auto", "deepseek"), "reasoning is returned as reasoning_content"),
    "truncate_prompt_tokens": ((-1,), "prompts are never truncated"),
    "use_beam_search": ((False,), "beam search is not available"),
}
"""Unsupported fields of vLLM and llama-server that change a text, their values without effect, and an alternative."""

MAX_CHOICES = 100_000
"""Maximum number of strings in `guided_choice`."""

_SCHEMAS = ("json", "json_object")
_GUIDED_KINDS = ("json", "choice", "grammar", "regex", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The JSON that an answer must be."""

    schema: Mapping[str, Any]  # {} means any object
    field: str  # name of the field that asks for it
    strict: bool = True  # reject unsupported parts of the schema instead of ignoring them

    def make_rule(self) -> str:
        """Return the grammar expression of this JSON; raise an ApiError if the schema is not supported."""
        return run_in_worker(self.field, json_rule, self.schema, strict=self.strict)

    def make_grammar(self) -> Lark:
        """Return the grammar of texts that are this JSON; it raises the same errors as `make_rule`."""
        return lark(f"start: {self.make_rule()}")


def run_in_worker(field: str, make: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Return the grammar or expression that a function makes, within the worker's limits; raise errors as ApiErrors."""
    try:
        return worker.call(make, *arguments, **keywords)
    except (GrammarError, RecursionError) as error:
        raise bad_field(field, f"{field}: {error}") from error


def read_grammar(fields: Fields, schemas: bool = True) -> str | None:
    """Return the grammar of a request, except that of a `response_format`; `None` if there is no grammar.

    Without `schemas`, `guided_json` is left to `read_json_format`, for answers with reasoning.
    """
    for name, (harmless_values, advice) in _UNSUPPORTED.items():
        if name in fields and fields.data[name] not in harmless_values:
            raise fields.field_error(name, f"is not supported; {advice}")
    grammar = fields.string("grammar") or None  # "" means no grammar, as in llama-server
    if "json_schema" in fields:
        if "grammar" in fields:
            raise bad_field("json_schema", "json_schema and grammar exclude each other")
        grammar = JsonFormat(fields.require_object("json_schema").data, "json_schema").make_grammar()
    for kind, (source, name) in _read_guided(fields).items():
        if kind in _SCHEMAS and not schemas:
            continue
        if grammar is not None:
            raise source.field_error(name, "goes with no other constraint of the text")
        grammar = _make_guided_grammar(source, name, kind)
    return grammar


def _read_guided(fields: Fields) -> dict[str, tuple[Fields, str]]:
    """Return vLLM's constraints by kind, from `guided_json` and so on, or from `structured_outputs`."""
    constraints: dict[str, tuple[Fields, str]] = {}
    for source, prefix in ((fields, "guided_"), (fields.object("structured_outputs") or Fields({}), "")):
        for kind in _GUIDED_KINDS:
            name = prefix + kind
            if name in source and source.data[name] is not False:
                if kind in constraints:
                    raise source.field_error(name, f"cannot be combined with guided_{kind}")
                constraints[kind] = source, name
    return constraints


def _make_guided_grammar(source: Fields, name: str, kind: str) -> str:
    if kind == "grammar":
        return source.require_name(name)
    if kind == "choice":
        texts = source.string_list(name, max_strings=MAX_CHOICES, max_characters=MAX_SIZE)
        if not texts:
            raise source.value_error(name, "a list of texts")
        return run_in_worker(source.path + name, choice_grammar, texts)
    if kind == "regex":
        return run_in_worker(source.path + name, pattern_grammar, source.require_name(name))
    if kind in _SCHEMAS:
        return _read_guided_format(source, name, kind).make_grammar()
    raise source.field_error(name, "is not supported; use a grammar (GBNF) instead")


def _read_guided_format(source: Fields, name: str, kind: str) -> JsonFormat:
    schema = {} if kind == "json_object" else source.data[name]
    if isinstance(schema, str):
        source.check_json(name, schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise source.field_error(name, "is text that is not JSON") from None
    if not isinstance(schema, dict):
        raise source.value_error(name, "an object")
    return JsonFormat(schema, source.path + name)


def read_json_format(fields: Fields, own: JsonFormat | None = None) -> JsonFormat | None:
    """Return the JSON that the answer must be, from an API's own field or one of vLLM's; `None` means any text."""
    for kind, (source, name) in _read_guided(fields).items():
        if kind in _SCHEMAS:
            if own is not None:
                raise source.field_error(name, "goes with no other constraint of the text")
            own = _read_guided_format(source, name, kind)
    return own


def read_response_format(fields: Fields) -> JsonFormat | None:
    """Return the JSON that the answer must be, from `response_format` or one of vLLM's fields."""
    format = fields.object("response_format")
    kind = "text" if format is None else format.choice("type", _FORMATS, "text")
    if format is None or kind == "text":
        return read_json_format(fields)
    wrapper = format.object("json_schema") if kind == "json_schema" else None
    if kind == "json_schema" and wrapper is None and "schema" not in format:
        raise bad_field("response_format.json_schema", "response_format.json_schema is missing")
    inner = wrapper or format
    schema = inner.object("schema")
    return read_json_format(
        fields, JsonFormat({} if schema is None else schema.data, "response_format", inner.boolean("strict"))
    )
