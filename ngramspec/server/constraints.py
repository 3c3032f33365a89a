"""The fields that constrain the text: a grammar, a JSON schema, a format, and vLLM's constraints.

Every constraint becomes a grammar for llguidance. These requests have the same effect:

    {"json_schema": {"type": "integer"}}                                                    llama-server
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {...}}}}          OpenAI
    {"guided_json": {"type": "integer"}}, {"structured_outputs": {"json": {...}}}           vLLM

JSON is no grammar yet, because that of a chat also depends on the tools and on the reasoning before the answer. A
request can have one constraint. It is never ignored: the status is 400 if the server cannot satisfy it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, Strict, model_validator

from ngramspec.data import GrammarError
from ngramspec.grammars.json_schema import json_rule
from ngramspec.grammars.lark import MAX_SIZE, Lark, choice_grammar, lark, pattern_grammar
from ngramspec.grammars.worker import worker
from ngramspec.server.body import Body, FieldError, Flag, Name, Text, check_json, describe_value, texts
from ngramspec.server.errors import bad_field
from ngramspec.server.limits import MAX_CHOICES

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """Another constraint, which applies from the first token on."""

    field: str  # name of the field that asks for it
    kind: str
    value: Any

    def make_grammar(self) -> str:
        """Return the grammar; raise an ApiError if it is not supported."""
        match self.kind:
            case "json_schema":
                return JsonFormat(self.value, self.field).make_grammar()
            case "choice":
                return run_in_worker(self.field, choice_grammar, self.value)
            case "regex":
                return run_in_worker(self.field, pattern_grammar, self.value)
            case "structural_tag":
                raise bad_field(self.field, f"{self.field}: is not supported; use a grammar (GBNF) instead")
        return str(self.value)


def run_in_worker(field: str, make: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Return the grammar or expression that a function makes, within the worker's limits; raise errors as ApiErrors."""
    try:
        return worker.call(make, *arguments, **keywords)
    except (GrammarError, RecursionError) as error:
        raise bad_field(field, f"{field}: {error}") from error


# --------------------------------------------------------------------------- the fields


def _read_schema(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        check_json(value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise FieldError("is text that is not JSON") from None
    if not isinstance(value, dict):
        raise FieldError(f"must be an object, got {describe_value(value)}")
    return value


def _check_not_empty(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise FieldError("must not be empty")
    return value


Schema = Annotated[dict[str, Any], Strict()]


class _Guided(Body):
    """vLLM's constraints."""

    guided_json: Annotated[dict[str, Any] | None, PlainValidator(_read_schema)] = None
    guided_choice: Annotated[tuple[str, ...], texts(MAX_CHOICES, MAX_SIZE), AfterValidator(_check_not_empty)] = ()
    guided_grammar: Name = ""
    guided_regex: Name = ""
    guided_json_object: Flag = False
    guided_structural_tag: Any = None


class _StructuredOutputs(_Guided):
    model_config = ConfigDict(alias_generator=lambda name: name.removeprefix("guided_"))


class Constraints(_Guided):
    """The constraints of all APIs, which endpoints combine with their own field."""

    grammar: Text = ""  # "" means no grammar, as in llama-server
    json_schema: Schema | None = None
    structured_outputs: _StructuredOutputs | None = None

    def read_constraint(self, own: JsonFormat | None = None) -> JsonFormat | TextGrammar | None:
        """Return the only constraint of the text; `own` is the JSON in an API's own field."""
        found: dict[str, JsonFormat | TextGrammar] = {} if own is None else {own.field: own}
        if self.grammar:
            found["grammar"] = TextGrammar("grammar", "grammar", self.grammar)
        if self.json_schema is not None:
            found["json_schema"] = TextGrammar("json_schema", "json_schema", self.json_schema)
        sources: dict[str, _Guided] = {"guided_": self}
        if self.structured_outputs is not None:
            sources["structured_outputs."] = self.structured_outputs
        for prefix, source in sources.items():
            for kind in ("json", "choice", "grammar", "regex", "json_object", "structural_tag"):
                field, value = prefix + kind, getattr(source, f"guided_{kind}")
                if kind == "json" and value is not None:
                    found[field] = JsonFormat(value, field)
                elif kind == "json_object" and value:
                    found[field] = JsonFormat({}, field)
                elif value:
                    found[field] = TextGrammar(field, kind, value)
        first = next(iter(found), "")
        for field in list(found)[1:]:
            raise bad_field(field, f"{field} cannot be combined with {first}")
        return found.get(first)


class _SchemaWrapper(Body):
    json_form: Schema = Field({}, alias="schema")
    strict: Flag = False


class ResponseFormat(_SchemaWrapper):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _SchemaWrapper | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.type == "json_schema" and "json_form" not in self.model_fields_set:
            self.require("json_schema")
        return self

    def read(self) -> JsonFormat | None:
        """Return the JSON that the text must be; `None` means any text."""
        if self.type == "text":
            return None
        inner = (self.json_schema if self.type == "json_schema" else None) or self
        return JsonFormat(inner.json_form, "response_format", inner.strict)
