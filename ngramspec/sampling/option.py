"""`Option`: all that is known of a setting beside its type and default; the command line is made of it.

top_k: int = option(40, help="Keep the k most likely tokens; 0: off.", allowed=whole(0))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")

KEY = "option"
"""Where the metadata of a dataclass field has its `Option`."""


class Allowed(NamedTuple):
    """The values that a setting may have."""

    holds: Callable[[Any], bool]  # whether a value is one of them
    words: str  # their description, to follow "must be"
    least: float | None = None  # the range that the command line's help shows; None: it shows none
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """Description of a setting, except its type and default."""

    flags: tuple[str, ...]  # its names on the command line; none: the field's own, as --no-mmap
    help: str  # a line on it, which says what value turns it off
    allowed: Allowed | None = None  # its values; None: whoever holds the setting checks it
    metavar: str | None = None  # what stands for the value in the help; None: the name of its type
    # Makes the value of what the command line was given: a text, or a list of texts where it is `repeatable`. Raises
    # ValueError. None: the command line's own reading of the type will do.
    parse: Callable[[Any], Any] | None = None
    repeatable: bool = False  # whether the flag may be given more than once
    is_hidden: bool = False  # True if the help omits the option
    sampler: str | None = None  # the sampler that this setting turns on, and that does nothing without it
    moves: bool = False  # whether it can change which token is the most likely
    draws: bool = False  # whether it chooses among tokens, and so contradicts temperature 0

    def read(self, given: Any) -> Any:
        """The value of what was given on a command line, or as one text in its place. Raises ValueError."""
        if self.parse is None:
            return given
        return self.parse([given] if self.repeatable and isinstance(given, str) else given)


def option(default: T, *flags: str, help: str, **known: Any) -> T:
    """A dataclass field with this default that carries an `Option`; typed as the value, as `dataclasses.field` is."""
    return field(default=default, metadata={KEY: Option(flags, help, **known)})


def options(settings: Any) -> dict[str, Option]:
    """The options of a dataclass, or of an instance of one, by the names of their fields."""
    return {f.name: named(f.name, f.metadata[KEY]) for f in fields(settings) if KEY in f.metadata}


def named(name: str, known: Option) -> Option:
    """The option of the field `name`, of which that is the flag if no others were given."""
    return known if known.flags else replace(known, flags=(f"--{name.replace('_', '-')}",))


# --------------------------------------------------------------------------- ranges
# Written so that a nan, for which every comparison is false, fails them all.

_LARGEST = float(np.finfo(np.float32).max)  # llama.cpp's settings are floats of 32 bits


def whole(least: int, most: int = 2**31 - 1, words: str | None = None) -> Allowed:
    """Whole numbers from `least` to `most`."""
    return Allowed(lambda x: isinstance(x, int) and least <= x <= most, words or f"a whole number of at least {least}")


def between(least: int, most: int) -> Allowed:
    """Whole numbers in a range that the command line's help shows."""
    return Allowed(lambda x: isinstance(x, int) and least <= x <= most, f"from {least} to {most}", least, most)


def within(least: float, most: float | None = None) -> Allowed:
    """Numbers in a range that the command line's help shows."""
    words = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
    return Allowed(lambda x: least <= x and (most is None or x <= most), words, least, most)


def one_of(*values: str) -> Allowed:
    """These values."""
    return Allowed(lambda x: x in values, f"one of: {', '.join(values)}")


FINITE = Allowed(lambda x: -_LARGEST <= x <= _LARGEST, "finite, in 32 bits")
NOT_NEGATIVE = Allowed(lambda x: 0 <= x <= _LARGEST, "finite and at least 0, in 32 bits")
FACTOR = Allowed(lambda x: 1e-30 < x <= _LARGEST, "finite and above 0 (1: off), in 32 bits")
BASE = Allowed(lambda x: 1 <= x <= _LARGEST, "finite and at least 1, in 32 bits")
SHARE = Allowed(lambda x: 0 <= x <= 1, "between 0 and 1")
RELATIVE = Allowed(lambda x: 0 <= x <= 1, "between 0 (off) and 1")
MASS = Allowed(lambda x: 0 < x <= 1, "above 0 and at most 1 (1: off)")
COUNT = whole(0, words="a whole number of at least 0 (0: off)")
WINDOW = whole(-1, words="a whole number of at least -1 (0: off, -1: the whole context)")
