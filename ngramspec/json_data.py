"""Dataclasses as JSON objects and back, checked against their annotations.

Fields with their default value are omitted. Numbers that JSON lacks are the strings "inf", "-inf" and "nan". Half a
surrogate pair, which JSON can contain but UTF-8 cannot, becomes a question mark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Data = TypeVar("Data", bound="DataclassInstance")


def encode(value: Any) -> Any:
    """Return the JSON value of a dataclass, a mapping, a sequence, text, a number, a truth value or None."""
    if is_dataclass(value):
        pairs = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: encode(part) for f, part in pairs if part != _default(f)}
    if isinstance(value, Mapping):
        return {str(name): encode(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [encode(part) for part in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(kind: type[Data], data: Any) -> Data:
    """Return the dataclass of a value that `encode` returned; unknown keys are ignored.

    It raises a ValueError of one line if a field is missing, or has another type than its annotation.
    """
    try:
        value: Data = _adapter(kind).validate_python(encode(data))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))) from error
    return value


_adapter = cache(TypeAdapter)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
