"""Description of a setting in addition to its type and default (`Option`), from which the command line is made.

top_k: int = option(40, help="Keep the k most likely tokens; 0: off.", allowed=allow_integers(0))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")

KEY = "option"
"""Key of the `Option` in the metadata of a dataclass field."""


class Allowed(NamedTuple):
    """The values that a setting may have."""

    accepts: Callable[[Any], bool]  # predicate for allowed values
    description: str  # description of the values, which follows "must be"
    minimum: float | None = None  # minimum in the command line's help, if it shows one
    maximum: float | None = None  # maximum in the command line's help, if it shows one


@dataclass(frozen=True, slots=True)
class Option:
    """Description of a setting, except its type and default."""

    flags: tuple[str, ...]  # names on the command line; if empty, the name of the field, such as --no-mmap
    help: str  # short help text, which includes the value that turns the setting off
    allowed: Allowed | None = None  # allowed values; `None` if the class with the field checks them
    metavar: str | None = None  # placeholder of the value in the help; `None` means the name of its type
    # Function that returns the value of a text, or of a list of texts if the option is `repeatable`. It may raise a
    # ValueError. With `None` the command line converts the text according to the type.
    parse: Callable[[Any], Any] | None = None
    repeatable: bool = False  # whether the flag may be given more than once
    is_hidden: bool = False  # whether the help omits the option
    sampler: str | None = None  # sampler that this setting turns on, without which it has no effect
    changes_logits: bool = False  # whether the setting can change which token is the most likely
    needs_sampling: bool = False  # whether the setting chooses among tokens, and so contradicts temperature 0

    def read(self, value: Any) -> Any:
        """Return the value of a command line argument, or of one text in its place; see `parse`."""
        if self.parse is None:
            return value
        return self.parse([value] if self.repeatable and isinstance(value, str) else value)


def option(default: T, *flags: str, help: str, **details: Any) -> T:
    """Return a dataclass field with an `Option`; the return type is that of the value, as with `dataclasses.field`."""
    return field(default=default, metadata={KEY: Option(flags, help, **details)})


def options(settings: Any) -> dict[str, Option]:
    """Return the options of a dataclass, or of an instance of one, by the names of their fields."""
    return {f.name: resolve_flags(f.name, f.metadata[KEY]) for f in fields(settings) if KEY in f.metadata}


def resolve_flags(name: str, setting: Option) -> Option:
    """Return the option of a field; without other flags, the name of the field is its flag."""
    return setting if setting.flags else replace(setting, flags=(f"--{name.replace('_', '-')}",))


# --------------------------------------------------------------------------- ranges
# Every comparison with nan is false, so nan is in no range.
#
# The command line checks the ranges of `allow_int_range` and `allow_range` itself, and its help shows them. The class
# of the settings checks the others, whose message also gives the meaning of 0 or -1, such as `COUNT` and `WINDOW`.

_LARGEST = float(np.finfo(np.float32).max)  # settings of llama.cpp are 32-bit floats


def allow_integers(minimum: int, maximum: int = 2**31 - 1, description: str | None = None) -> Allowed:
    """Return the whole numbers from `minimum` to `maximum`."""
    return Allowed(
        lambda x: isinstance(x, int) and minimum <= x <= maximum, description or f"a whole number of at least {minimum}"
    )


def allow_int_range(minimum: int, maximum: int) -> Allowed:
    """Return the whole numbers in a range that the command line's help shows."""
    return Allowed(
        lambda x: isinstance(x, int) and minimum <= x <= maximum, f"from {minimum} to {maximum}", minimum, maximum
    )


def allow_range(minimum: float, maximum: float | None = None) -> Allowed:
    """Return the numbers in a range that the command line's help shows."""
    description = f"at least {minimum:g}" if maximum is None else f"from {minimum:g} to {maximum:g}"
    return Allowed(lambda x: minimum <= x and (maximum is None or x <= maximum), description, minimum, maximum)


def allow_choices(*values: str) -> Allowed:
    """Return the given values as the only allowed ones."""
    return Allowed(lambda x: x in values, f"one of: {', '.join(values)}")


FINITE = Allowed(lambda x: -_LARGEST <= x <= _LARGEST, "finite, in 32 bits")
NOT_NEGATIVE = Allowed(lambda x: 0 <= x <= _LARGEST, "finite and at least 0, in 32 bits")
FACTOR = Allowed(lambda x: 1e-30 < x <= _LARGEST, "finite and above 0 (1: off), in 32 bits")
BASE = Allowed(lambda x: 1 <= x <= _LARGEST, "finite and at least 1, in 32 bits")
SHARE = Allowed(lambda x: 0 <= x <= 1, "between 0 and 1")
RELATIVE = Allowed(lambda x: 0 <= x <= 1, "between 0 (off) and 1")
MASS = Allowed(lambda x: 0 < x <= 1, "above 0 and at most 1 (1: off)")
COUNT = allow_integers(0, description="a whole number of at least 0 (0: off)")
WINDOW = allow_integers(-1, description="a whole number of at least -1 (0: off, -1: the whole context)")
