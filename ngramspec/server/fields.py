"""`Fields`: the fields of a JSON object, each checked when it is read.

Null means what a field's absence means. Whatever is not asked for is not looked at, since clients send much that other
servers know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ngramspec.server.errors import ApiError, bad_field

_MOST = 2**31 - 1
_SHOWN = 60

_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


class Fields:
    """A JSON object of a request.

    Args:
        data: the object.
        path: what its fields' names begin with in errors: "messages[0]."

    Raises:
        ApiError: by all methods that read a field, if it has another type or value; by `needed_...` if it is missing.
    """

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self.data = data
        self.path = path

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def name(self, *names: str) -> str:
        """The first of several names of one field that is there; the first of all if none is."""
        return next((name for name in names if name in self), names[0])

    # ------------------------------------------------------------------ errors, to be raised

    def wrong(self, name: str, must: str) -> ApiError:
        """The error that a field is not what it must be."""
        return bad_field(self.path + name, f"{self.path}{name} is {shown(self.data.get(name))}, but must be {must}")

    def refused(self, name: str, problem: str) -> ApiError:
        """The error that a field of the right type still cannot be."""
        return bad_field(self.path + name, f"{self.path}{name}: {problem}")

    def missing(self, name: str) -> ApiError:
        """The error that a field is not there."""
        return bad_field(self.path + name, f"{self.path}{name} is missing")

    # ------------------------------------------------------------------ values

    def flag(self, name: str, default: bool = False) -> bool:
        value: bool | None = self._typed(name, bool)
        return default if value is None else value

    def text(self, name: str) -> str | None:
        value: str | None = self._typed(name, str)
        return value

    def needed_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.missing(name)
        return value

    def needed_name(self, name: str) -> str:
        """A text that is not empty."""
        value = self.needed_text(name)
        if not value:
            raise self.refused(name, "must not be empty")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self.data.get(name)
        if value is None:
            return default
        if value not in allowed:
            raise self.wrong(name, f"one of {', '.join(allowed)}")
        return str(value)

    def needed_choice(self, name: str, allowed: Sequence[str]) -> str:
        self.needed_text(name)
        return self.choice(name, allowed, "")

    def whole(self, name: str, default: int | None = None, *, least: int = 0, most: int = _MOST) -> int | None:
        """A whole number. 5.0 is one: JavaScript does not tell them apart."""
        value = self.data.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limits = f"at least {least}" if most == _MOST else f"from {least} to {most}"
            raise self.wrong(name, f"a whole number, {limits}")
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.data.get(name)
        if value is None:
            return None
        try:
            if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # a whole number beyond all floats
            pass
        raise self.wrong(name, "a finite number")

    def texts(self, name: str) -> list[str]:
        """A list of texts, of which one may stand alone."""
        value = self.data.get(name)
        if value is None:
            return []
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.wrong(name, "text or a list of texts")
        return found

    def parts(self, name: str, read: Callable[[Fields], str]) -> list[str]:
        """The texts of a field that holds one, or a list of objects, each of which `read` makes a text of."""
        value = self.data.get(name)
        return [value] if isinstance(value, str) else [read(part) for part in self.objects(name)]

    def object(self, name: str) -> Fields | None:
        value = self._typed(name, dict)
        return None if value is None else Fields(value, f"{self.path}{name}.")

    def needed_object(self, name: str) -> Fields:
        value = self.object(name)
        if value is None:
            raise self.missing(name)
        return value

    def list(self, name: str) -> list[Any]:
        value: list[Any] | None = self._typed(name, list)
        return [] if value is None else value

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of a list."""
        for i, item in enumerate(self.list(name)):
            if not isinstance(item, dict):
                raise bad_field(f"{self.path}{name}", f"{self.path}{name}[{i}] is {shown(item)}, but must be an object")
            yield Fields(item, f"{self.path}{name}[{i}].")

    def needed(self, name: str) -> Any:
        """Any value but null."""
        if name not in self:
            raise self.missing(name)
        return self.data[name]

    def _typed(self, name: str, kind: type) -> Any:
        value = self.data.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, _KINDS[kind])
        return value


def shown(value: Any) -> str:
    """A value as an error message may show it: short, or only its type."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else "a long text"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**_SHOWN):
        return repr(value)
    return {int: "a very large number"}.get(type(value)) or _KINDS[type(value)]
