"""`Body`: base of the pydantic models of requests, with the types and limits of their fields.

A null field is treated as a missing one. Unknown fields are ignored, because clients send many that other servers
support. An invalid value raises an `ApiError` that names its field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    StrictBool,
    StrictStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ngramspec.server.json_text import ApiError, bad_field
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


class FieldError(ValueError):
    """An invalid value in a validator: the message after the name of its field, and the path of the field in it."""

    def __init__(self, problem: str, *path: str | int, status: int = 400) -> None:
        super().__init__(problem)
        self.problem, self.path, self.status = problem, path, status


class Body(BaseModel):
    """The JSON object of a request, or an object in it."""

    model_config = ConfigDict(allow_inf_nan=False, protected_namespaces=())
    __hash__ = object.__hash__  # otherwise pydantic would copy default values that are bodies for each request

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        return {name: value for name, value in data.items() if value is not None}

    def require(self, *names: str) -> None:
        """Raise a FieldError if a field is missing, which only some values of the others require."""
        for name in names:
            if name not in self.model_fields_set:
                raise FieldError("is missing", name)


B = TypeVar("B", bound=Body)

Tokens = tuple[Any, ...]  # a list of token ids and texts, which need the vocabulary

Text = StrictStr
Name = Annotated[StrictStr, Field(min_length=1)]
Flag = StrictBool
Number = Annotated[float, Strict()]
Items = Annotated[tuple[T, ...], Field(max_length=MAX_ITEMS)]


def parse(model: type[B], data: Any) -> B:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _to_api_error(error) from None


def _to_api_error(error: ValidationError) -> ApiError:
    path = list[str | int]()
    cause: Exception | None = error
    while isinstance(cause, ValidationError):  # a field that another model has read has the error of that model
        details = cause.errors(include_url=False)[0]
        path += details["loc"]
        context = details.get("ctx", {})
        cause = context.get("error")
    status, value = 400, describe_value(details["input"])
    if isinstance(cause, FieldError):
        problem, status = cause.problem, cause.status
        path += cause.path
    else:
        expected = context.get("expected", "").replace(" or ", ", ").replace("'", "")
        problem = _PROBLEMS[details["type"]].format(**context | {"value": value, "expected": expected})
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    # An item of a list has no name.
    param = name.rpartition("[")[0] if isinstance(path[-1], int) else name
    separator = " " if problem.startswith(("is missing", "must ")) else ": "
    return ApiError(status, f"{name}{separator}{problem}", param=param, is_final=status >= 500)


# --------------------------------------------------------------------------- types of fields


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
        for count, maximum, noun in (
            (len(strings), max_strings, "strings"),
            (sum(map(len, strings)), max_characters, "characters"),
        ):
            if count > maximum:
                raise FieldError(count_problem(count, maximum, noun))
        return tuple(strings)

    return PlainValidator(check)


def refuse(problem: str) -> AfterValidator:
    """Return the validator of a field that is not supported, and must have a value like false."""

    def check(value: Any) -> Any:
        if value:
            raise FieldError(problem)
        return value

    return AfterValidator(check)


def tagged(tag: str, models: Mapping[str, type[Body]], default: type[Body]) -> PlainValidator:
    # In pydantic's tagged unions, the location of an error contains the tag.

    def read(value: Any) -> Body:
        kind = value.get(tag) if isinstance(value, dict) else None
        return models.get(kind if isinstance(kind, str) else "", default).model_validate(value)

    return PlainValidator(read)


class TextPart(Body):
    text: Text


class Refusal(TextPart):
    text: Text = Field(validation_alias="refusal")


class _OtherPart(Body):
    type: Name

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
    text: Text


class _PromptObject(Body):
    """llama-server's object for prompts with images, of which only texts are supported."""

    content: Items[_PromptPart] = ()
    prompt_string: Text = ""
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


def count_problem(count: int, maximum: int, noun: str) -> str:
    return f"must have at most {maximum:,} {noun}, got {count:,}"


def check_count(name: str, count: int, maximum: int, noun: str) -> None:
    """Raise an ApiError for a field with more than `maximum` items."""
    if count > maximum:
        raise bad_field(name, f"{name} {count_problem(count, maximum, noun)}")


def check_json(text: str) -> str:
    """Return JSON in a string of a request; raise a FieldError if it has too many values to be parsed."""
    count = sum(map(text.count, ",[{"))
    if count > MAX_VALUES:
        raise FieldError(count_problem(count, MAX_VALUES, "JSON values"))
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
