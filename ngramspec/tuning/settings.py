"""`Settings`: what can be set of how a model runs on a machine without changing the model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

Flash = Literal["auto", "on", "off"]

MOST_THREADS = 512

LEAST_MICRO, MOST_MICRO = 64, 4096
"""Tokens that can be asked for in a micro-batch of a prompt."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a runner.

    Attributes:
        threads: CPU threads of a pass over one token.
        threads_batch: of a pass over more: prompts, and drafts that are checked.
        flash_attn: flash attention.
        micro_batch: tokens of a prompt per pass; None: the runner's default under these settings.
        mmap: whether the weights stay in the mapped file where they can.
        repack: whether weights may be put into the order that CPU kernels like.
        cache_types: element types of the K and the V cache.
    """

    threads: int
    threads_batch: int
    flash_attn: Flash = "auto"
    micro_batch: int | None = None
    mmap: bool = True
    repack: bool = True
    cache_types: tuple[str, str] = ("f16", "f16")

    def changes(self, base: Settings) -> dict[str, Any]:
        """The fields in which these differ from `base`, with their values here.

        Where one number of threads differs, both are told: the one is the other's default.
        """
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        found = {name: value for name, value in named.items() if value != getattr(base, name)}
        if found.keys() & {"threads", "threads_batch"}:
            found = {"threads": self.threads, "threads_batch": self.threads_batch} | found
        return found

    def flags(self, base: Settings) -> str:
        """The options of the command line that lead from `base` to these, as llama.cpp names them."""
        return flags(self.changes(base))


def flags(changes: dict[str, Any]) -> str:
    """The options of the command line that make these changes; see `Settings.changes`."""
    return " ".join(word for name, value in changes.items() for word in _words(name, value))


def _words(name: str, value: Any) -> tuple[str, ...]:
    match name:
        case "mmap" | "repack":
            return (f"--no-{name}",)
        case "cache_types":
            return "-ctk", value[0], "-ctv", value[1]
    return {"threads": "-t", "threads_batch": "-tb", "flash_attn": "-fa", "micro_batch": "-ub"}[name], str(value)
