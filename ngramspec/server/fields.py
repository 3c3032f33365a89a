"""`Fields`: the JSON object of a request, with methods that read a field of a type.

    fields = Fields({"n": 2, "messages": [{"role": "user"}]})
    fields.integer("n", minimum=1)                    # 2
    fields.boolean("stream")                          # False, the default
    [message] = fields.objects("messages")
    message.require_string("content")                # ApiError: messages[0].content is missing

A field is checked when it is read; an invalid value raises an `ApiError` that names the field. A null field is treated
as a missing one. Unknown fields are ignored, because clients send many that other servers support.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ngramspec.server.errors import ApiError, bad_field

MAX_VALUES = 400_000
"""Maximum number of values in JSON, because Python keeps its lock, and the other requests wait, while it is parsed."""

MAX_ITEMS = 10_000
"""Maximum number of objects in a list: messages, parts of a message, tools."""

MAX_STRINGS = 1024
"""Maximum number of strings in a list, such as stop strings."""

MAX_CHARACTERS = 16_384
"""Maximum number of characters of such a list."""

_MAX_INTEGER = 2**31 - 1
_MAX_QUOTED = 60  # maximum number of characters or digits of a value in an error message

T = TypeVar("T")

_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}

LIST_FIELD = "adapters"
"""Field that contains the request of an endpoint whose JSON is a list."""


class Fields:
    """A JSON object of a request; `path` is the prefix of the fields' names in error messages, such as "messages[0].".

    All methods that read a field raise an ApiError if it has another type or value; those named `require_...` also
    raise it for a missing field.
    """

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self.data = data
        self.path = path

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def name(self, *names: str) -> str:
        """Return the first of several names of a field that the request contains, or the first name if none is."""
        return next((name for name in names if name in self), names[0])

    def value_error(self, name: str, values: str) -> ApiError:
        """Return the error for a field with another type or value than the description `values` allows."""
        value = describe_value(self.data.get(name))
        return bad_field(self.path + name, f"{self.path}{name} must be {values}, got {value}")

    def field_error(self, name: str, problem: str) -> ApiError:
        """Return the error for a field that has a valid type but an invalid value."""
        return bad_field(self.path + name, f"{self.path}{name}: {problem}")

    def image_error(self) -> ApiError:
        """Return the error for an image in a message, with llama-server's status."""
        problem = "image input is not supported; this model accepts only text"
        return ApiError(500, f"{self.path}type: {problem}", param=f"{self.path}type", is_final=True)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._read(name, bool)
        return default if value is None else value

    def string(self, name: str) -> str | None:
        """Return a string; `None` if the field is missing."""
        return self._read(name, str)

    def require_string(self, name: str) -> str:
        """Return a string, which may be empty."""
        self.require(name)
        return self.string(name) or ""

    def require_name(self, name: str) -> str:
        """Return a string that is not empty."""
        value = self.require_string(name)
        if not value:
            raise self.field_error(name, "must not be empty")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """Return one of several strings."""
        value = self.data.get(name)
        if value is not None and value not in choices:
            raise self.value_error(name, f"one of {', '.join(choices)}")
        return default if value is None else str(value)

    def require_choice(self, name: str, choices: Sequence[str]) -> str:
        """Return one of several strings."""
        self.require_string(name)
        return self.choice(name, choices, "")

    def integer(
        self, name: str, default: int | None = None, *, minimum: int = 0, maximum: int = _MAX_INTEGER
    ) -> int | None:
        """Return a whole number. 5.0 is accepted, because JavaScript does not distinguish it from 5."""
        value = self.data.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            limits = f"of at least {minimum}" if maximum == _MAX_INTEGER else f"from {minimum} to {maximum}"
            raise self.value_error(name, f"a whole number {limits}")
        return value

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        value = self.data.get(name)
        if value is None:
            return None
        try:
            if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # a whole number that exceeds the range of floats
            pass
        raise self.value_error(name, "a finite number")

    def string_list(
        self, name: str, *, max_strings: int = MAX_STRINGS, max_characters: int = MAX_CHARACTERS
    ) -> list[str]:
        """Return a list of strings, which may also be given as one string; `max_characters` is for all together."""
        value = self.data.get(name)
        if value is None:
            return []
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
            raise self.value_error(name, "a string or a list of strings")
        self.check_count(name, len(strings), max_strings, "strings")
        self.check_count(name, sum(map(len, strings)), max_characters, "characters")
        return strings

    def check_count(self, name: str, count: int, maximum: int, noun: str) -> None:
        """Raise an ApiError for a field with more than `maximum` items."""
        if count > maximum:
            raise bad_field(self.path + name, f"{self.path}{name} must have at most {maximum:,} {noun}, got {count:,}")

    def check_json(self, name: str, text: str) -> None:
        """Raise an ApiError for JSON in a string of a request that has too many values to be parsed."""
        self.check_count(name, sum(map(text.count, ",[{")), MAX_VALUES, "JSON values")

    def parts(self, name: str, read: Callable[[Fields], str]) -> list[str]:
        """Return the texts of a field that is a string, or a list of objects from which `read` gets the texts."""
        value = self.data.get(name)
        return [value] if isinstance(value, str) else [read(part) for part in self.objects(name)]

    def object(self, name: str) -> Fields | None:
        """Return an object; `None` if the field is missing."""
        value = self._read(name, dict)
        return None if value is None else Fields(value, f"{self.path}{name}.")

    def require_object(self, name: str) -> Fields:
        """Return an object."""
        self.require(name)
        return self.object(name) or Fields({})

    def list(self, name: str) -> list[Any]:
        """Return a list; an empty one if the field is missing."""
        return self._read(name, list) or []

    def objects(self, name: str) -> Iterator[Fields]:
        """Yield the objects of a list."""
        items = self.list(name)
        self.check_count(name, len(items), MAX_ITEMS, "items")
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                place = f"{self.path}{name}[{i}]"
                raise bad_field(self.path + name, f"{place} must be an object, got {describe_value(item)}")
            yield Fields(item, f"{self.path}{name}[{i}].")

    def require(self, name: str) -> Any:
        """Return a value of any type except null."""
        if name not in self:
            raise bad_field(self.path + name, f"{self.path}{name} is missing")
        return self.data[name]

    def _read(self, name: str, kind: type[T]) -> T | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.value_error(name, _KINDS[kind])
        return value


def describe_value(value: Any) -> str:
    """Return a short text of a value for an error message; only the type if the value is long."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_QUOTED else "a long string"
    if isinstance(value, int | float):
        return repr(value) if abs(value) < 10**_MAX_QUOTED or isinstance(value, float) else "a very large number"
    return _KINDS[type(value)]
