"""`Body`: base of the pydantic models of requests, with the types and limits of their fields.

A null field is treated as a missing one. Unknown fields are ignored, because clients send many that other servers
support. An invalid value raises an `ApiError` that names its field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ngramspec.server.json_text import ApiError
from ngramspec.server.limits import MAX_CHARACTERS, MAX_ITEMS, MAX_STRINGS, MAX_VALUES

_MAX_INTEGER = 2**31 - 1
_MAX_QUOTED = 60  # maximum number of characters or digits of a value in an error message

T = TypeVar("T")

_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}

_PROBLEMS = {
    "missing": "is missing",
    "bool_type": "must be true or false, got {value}",
    "string_type": "must be a string, got {value}",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "float_type": "must be a finite number, got {value}",
    "finite_number": "must be a finite number, got {value}",
    "list_type": "must be a list, got {value}",
    "tuple_type": "must be a list, got {value}",
    "dict_type": "must be an object, got {value}",
    "model_type": "must be an object, got {value}",
    "literal_error": "must be one of {expected}, got {value}",
    "too_long": "must have at most {max_length:,} items, got {actual_length:,}",
}
"""Messages by pydantic's type of the error, after the name of the field."""


class FieldError(ApiError, ValueError):
    """An invalid field. A validator names only the part of the path within its value, which may be empty."""

    def __init__(self, problem: str, *path: str | int, status: int = 400) -> None:
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
        is_item = bool(path) and isinstance(path[-1], int)  # an item of a list has no name
        separator = " " if problem.startswith(("is missing", "must ", "cannot ", "requires ")) else ": "
        param = name.rpartition("[")[0] if is_item else name
        super().__init__(status, f"{name}{separator}{problem}", param=param, is_final=status >= 500)
        self.problem, self.path = problem, path


class Body(BaseModel):
    """The JSON object of a request, or an object in it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())
    list_field: ClassVar[str] = ""  # field that contains the JSON of a request if it is a list
    __hash__ = object.__hash__  # otherwise pydantic would copy default values that are bodies for each request

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        return {name: value for name, value in data.items() if value is not None}

    def require(self, name: str) -> None:
        """Raise a FieldError if a field is missing, which only some values of the others require."""
        if name not in self.model_fields_set:
            raise FieldError("is missing", name)


B = TypeVar("B", bound=Body)

Items = Annotated[tuple[T, ...], Field(max_length=MAX_ITEMS, strict=False)]
Tokens = Annotated[tuple[Any, ...], Field(strict=False)]  # a list of token ids and texts, which need the vocabulary
Name = Annotated[str, Field(min_length=1)]


def parse(model: type[B], data: Any) -> B:
    cause: Exception | None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        cause = error
    path = list[str | int]()
    while isinstance(cause, ValidationError):  # a field that another model has read has the error of that model
        details = cause.errors(include_url=False)[0]
        path += details["loc"]
        context = details.get("ctx", {})
        cause = context.get("error")
    if isinstance(cause, FieldError):
        raise FieldError(cause.problem, *path, *cause.path, status=cause.status)
    expected = context.get("expected", "").replace(" or ", ", ").replace("'", "")
    values = context | {"value": describe_value(details["input"]), "expected": expected}
    raise FieldError(_PROBLEMS[details["type"]].format(**values), *path)


def whole(minimum: int = 0, maximum: int = _MAX_INTEGER) -> PlainValidator:
    """Return the validator of a whole number. 5.0 is accepted, because JavaScript does not distinguish it from 5."""
    limits = f"of at least {minimum}" if maximum == _MAX_INTEGER else f"from {minimum} to {maximum}"

    def check(value: Any) -> int:
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(number, bool) or not isinstance(number, int) or not minimum <= number <= maximum:
            raise FieldError(f"must be a whole number {limits}, got {describe_value(value)}")
        return number

    return PlainValidator(check)


def texts(max_strings: int = MAX_STRINGS, max_characters: int = MAX_CHARACTERS) -> PlainValidator:
    """Return the validator of a list of strings, which may also be one string; `max_characters` is for all together."""

    def check(value: Any) -> tuple[str, ...]:
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
            raise FieldError(f"must be a string or a list of strings, got {describe_value(value)}")
        check_count(len(strings), max_strings, "strings")
        check_count(sum(map(len, strings)), max_characters, "characters")
        return tuple(strings)

    return PlainValidator(check)


def refuse(problem: str, *harmless: Any) -> AfterValidator:
    """Return the validator of a field that is not supported, except for some values, by default those like false."""

    def check(value: Any) -> Any:
        if value not in harmless if harmless else value:
            raise FieldError(problem)
        return value

    return AfterValidator(check)


class Typed(Body):
    type: Name


def tagged(tag: str, models: Mapping[str, type[Body]], other: type[Body] | str) -> PlainValidator:
    """Return the validator of an object with a model for its tag; `other` is that of other tags, or why not."""
    # In pydantic's tagged unions, the location of an error contains the tag.

    def read(value: Any) -> Body:
        kind = value.get(tag) if isinstance(value, dict) else None
        model = models.get(kind if isinstance(kind, str) else "", other)
        if not isinstance(model, str):
            return model.model_validate(value)
        raise FieldError(model.format(Typed.model_validate(value).type), tag)

    return PlainValidator(read)


class TextPart(Body):
    text: str


class Refusal(TextPart):
    text: str = Field(validation_alias="refusal")


class _OtherPart(Typed):
    @model_validator(mode="after")
    def _reject(self) -> _OtherPart:
        if self.type in ("image", "image_url", "input_image"):  # the status is llama-server's
            raise FieldError("image input is not supported; this model accepts only text", "type", status=500)
        raise FieldError(f"unsupported content type {self.type!r}; this model accepts only text", "type")


def parts(models: Mapping[str, type[Body]]) -> PlainValidator:
    """Return the validator of a content: a text, or a list of parts, each with a model for its type."""
    items: TypeAdapter[tuple[Any, ...]] = TypeAdapter(Items[Annotated[Any, tagged("type", models, _OtherPart)]])

    def read(value: Any) -> tuple[Any, ...]:
        return (TextPart(text=value),) if isinstance(value, str) else items.validate_python(value)

    return PlainValidator(read)


TEXT_PARTS: Mapping[str, type[Body]] = dict.fromkeys(("text", "input_text", "output_text"), TextPart)

Content = Annotated[tuple[TextPart, ...], parts(TEXT_PARTS)]


def join_parts(parts: Iterable[TextPart]) -> str:
    """Return the texts of parts, one per line."""
    return "\n".join([part.text for part in parts])


class Prompts(NamedTuple):
    """The prompts in a field, each a text or a list of token ids and texts."""

    values: list[str | list[Any]]
    is_list: bool  # False if the field contains one prompt


class _PromptPart(Body):
    type: Literal["text"]
    text: str


class _PromptObject(Body):
    """llama-server's object for prompts with images, of which only texts are supported."""

    content: Items[_PromptPart] = ()
    prompt_string: str = ""
    multimodal_data: Any = None

    @model_validator(mode="after")
    def _check(self) -> _PromptObject:
        if "content" in self.model_fields_set:
            self.prompt_string = "".join([part.text for part in self.content])
        elif self.multimodal_data is not None:
            raise FieldError("is not supported; the server accepts only text", "multimodal_data")
        else:
            self.require("prompt_string")
        return self


def _read_prompts(value: Any) -> Prompts:
    def read(prompt: Any) -> Any:
        prompt = _PromptObject.model_validate(prompt).prompt_string if isinstance(prompt, dict) else prompt
        if not isinstance(prompt, str | list):
            raise FieldError(f"must contain strings, token ids or lists of them, got {describe_value(prompt)}")
        return prompt

    is_list = isinstance(value, list) and (
        any(isinstance(item, list | dict) for item in value) or all(isinstance(item, str) for item in value)
    )
    return Prompts([read(prompt) for prompt in value] if is_list else [read(value)], is_list)


PromptField = Annotated[Prompts, PlainValidator(_read_prompts)]


def check_count(count: int, maximum: int, noun: str, *path: str) -> None:
    """Raise a FieldError for a field with more than `maximum` items."""
    if count > maximum:
        raise FieldError(f"must have at most {maximum:,} {noun}, got {count:,}", *path)


def check_json(text: str) -> str:
    """Return JSON in a string of a request; raise a FieldError if it has too many values to be parsed."""
    check_count(sum(map(text.count, ",[{")), MAX_VALUES, "JSON values")
    return text


def describe_value(value: Any) -> str:
    """Return a short text of a value for an error message; only the type if the value is long."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_QUOTED else "a long string"
    if isinstance(value, int | float):
        return repr(value) if abs(value) < 10**_MAX_QUOTED or isinstance(value, float) else "a very large number"
    return _KINDS[type(value)]
