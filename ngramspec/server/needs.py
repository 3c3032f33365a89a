"""Fields that a dialect cannot do without, and the error of a field that has the right type and still cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ngramspec.server.errors import ApiError, bad_field
from ngramspec.server.fields import Fields


def wrong(given: Fields, name: str, problem: str) -> ApiError:
    """The error of a field; to be raised. The message is its path and the problem."""
    return bad_field(given.path + name, f"{given.path}{name}: {problem}")


def needed_name(given: Fields, name: str) -> str:
    """A text that is there and not empty."""
    value = given.needed_text(name)
    if not value:
        raise wrong(given, name, "must not be empty")
    return value


def needed_choice(given: Fields, name: str, allowed: Sequence[str]) -> str:
    """One of several words."""
    given.needed_text(name)
    return given.choice(name, allowed, "")


def needed_object(given: Fields, name: str) -> dict[str, Any]:
    """An object, as it stands."""
    value = given.object(name)
    if value is None:
        raise given.missing(name)
    return dict(value.data)


def needed_there(given: Fields, name: str) -> Any:
    """Any value but null."""
    if name not in given:
        raise given.missing(name)
    return given.data[name]
