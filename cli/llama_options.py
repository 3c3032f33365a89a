"""Options of llama.cpp's programs that change nothing here or are not supported: the rows of `llama_options.toml`.

A row has the flags, the placeholder or the choices of a value if there is one, and the reason for users.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional, TypeVar

from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import option, options

from .console import note

T = TypeVar("T")

_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

REASONS = {flag: reason for flags, reason in _ROWS["unsupported"].items() for flag in flags.split()}
"""Reasons why options are rejected, by flag."""


def _with_rows(group: type[T]) -> type[T]:
    """Make a class a dataclass whose fields are the options without effect, so that command lines can be pasted."""
    for words, reason in (_ROWS["always"] | _ROWS["no_effect"]).items():
        flags = [word for word in words.split() if word.startswith("-")]
        name = next(flag for flag in flags if flag.startswith("--")).removeprefix("--").replace("-", "_")
        values = [word.split("|") for word in words.split() if not word.startswith("-")]
        hint: Any = bool
        if values:
            hint = Optional[str if len(values[0]) == 1 else Literal[tuple(values[0])]]  # noqa: UP045 - made at run time
        group.__annotations__[name] = hint
        setattr(group, name, option(None if values else False, *flags, help=reason, is_hidden=True))
    return dataclass(frozen=True, slots=True)(group)


@_with_rows
class NoEffect:
    """Options of llama-server that are accepted and change nothing; cli/README.md lists them."""

    def report(self) -> None:
        """Print a note for each given option that users could expect to have an effect."""
        silent = {word for words in _ROWS["always"] for word in words.split()}
        for name, spec in options(self).items():
            flag = f"--{name.replace('_', '-')}"
            if getattr(self, name) and flag not in silent:
                note(f"{flag} has no effect: {spec.help}")


SHORT = {
    flag
    for group in (LoadSettings, NoEffect)
    for spec in options(group).values()
    for flag in spec.flags
    if len(flag) > 2 and not flag.startswith("--")
}
"""Short options of several letters, which some commands lack."""
