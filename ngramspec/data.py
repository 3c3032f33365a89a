"""Version, names of users' classes, errors that a user can cause and fix, and dataclasses as checked JSON objects.

The message of such an error is one line with the problem and the solution. Defects of ngramspec itself raise ordinary
Python exceptions, which are shown with a traceback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__version__ = "0.1.0"

CLASS_FORM = "FILE.py:Class"  # how a user's class is named

Data = TypeVar("Data", bound="DataclassInstance")


class NGramSpecError(Exception):
    """Base class of errors whose message is shown to the user without a traceback."""


class ModelError(NGramSpecError):
    """The requested model cannot be used."""


class TargetError(NGramSpecError):
    """llama.cpp failed during an evaluation."""


class PromptError(NGramSpecError):
    """The prompt cannot be continued: it is empty, or does not fit in the context."""


class ShutdownError(NGramSpecError):
    """The server is shutting down."""


class UserCodeError(NGramSpecError):
    """A user's class cannot be loaded, or its code raised an error."""


class GrammarError(NGramSpecError):
    """A grammar or JSON schema is invalid, or allows no token."""


def is_user_class(name: str) -> bool:
    """Return True if a name means a file, and not one of ngramspec's own classes."""
    return ".py" in name


def get_reason(error: Exception) -> str:
    """Return the message of an error, without the number and the file that the text of an OSError contains."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def encode(value: Any) -> Any:
    """Return the JSON value of a dataclass, a mapping, a sequence, text, a number, a truth value or None.

    Fields with their default value are omitted. Numbers that JSON lacks are the strings "inf", "-inf" and "nan". Half a
    surrogate pair, which JSON can contain but UTF-8 cannot, becomes a question mark.
    """
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
    """Return the dataclass of a value that `encode` returned; raise a ValueError of one line if a field is wrong."""
    from pydantic import ValidationError  # every module imports this one, and most do not need pydantic

    try:
        value: Data = _adapter(kind).validate_python(encode(data))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))) from error
    return value


@cache
def _adapter(kind: type[Any]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
