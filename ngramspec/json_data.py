"""Dataclasses as JSON objects and back, checked against their annotations.

A field that has its default value is left out. Numbers that JSON lacks are the strings "inf", "-inf" and "nan". Half a
surrogate pair, which JSON can spell and no text can hold, becomes a question mark.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Data = TypeVar("Data", bound="DataclassInstance")


def encode(value: Any) -> Any:
    """What `json.dumps` takes, for a dataclass, a mapping, a sequence, text, a number, a truth value or None."""
    if is_dataclass(value):
        named = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: encode(part) for f, part in named if part != _default(f)}
    if isinstance(value, Mapping):
        return {str(name): encode(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [encode(part) for part in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(kind: type[Data], data: Any) -> Data:
    """The dataclass that `encode` wrote; keys that it does not know are ignored.

    Raises:
        ValueError: a field is missing, or is not what its annotation says.
    """
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    hints, values = _hints(kind), {}
    for field in fields(kind):
        if field.name in data:
            values[field.name] = _checked(hints[field.name], data[field.name], field.name)
        elif _default(field) is MISSING:
            raise ValueError(f"it has no {field.name!r}")
    return kind(**values)


def _default(field: Field[Any]) -> Any:
    """What a field has where nothing is said; MISSING if it must be said."""
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _checked(hint: Any, data: Any, name: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    found: Any = _WRONG
    if hint is Any:
        found = data
    elif origin in (Union, UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        found = None if data is None else _checked(inner, data, name)
    elif origin is Literal:
        found = data if data in arguments else _WRONG
    elif origin is tuple and isinstance(data, list):
        parts = [arguments[0]] * len(data) if arguments[-1] is ... else arguments
        if len(parts) == len(data):
            found = tuple(_checked(part, value, name) for part, value in zip(parts, data, strict=True))
    elif origin is Mapping and isinstance(data, dict):
        found = {arguments[0](key): _checked(arguments[1], part, name) for key, part in data.items()}
    elif isinstance(hint, type) and is_dataclass(hint):
        found = decode(hint, data)
    elif hint is float:
        found = _number(data)
    elif hint is str and isinstance(data, str):
        found = encode(data)
    elif hint in (int, bool) and type(data) is hint:
        found = data
    if found is _WRONG:
        raise ValueError(f"{name!r} is {_short(data)}")
    return found


_WRONG = object()


def _number(data: Any) -> Any:
    if data in ("inf", "-inf", "nan"):
        return float(data)
    largest = sys.float_info.max
    return float(data) if type(data) in (int, float) and -largest <= data <= largest else _WRONG


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 40 else f"{text[:40]}..."
