"""What this machine is, how a model runs on it (`Settings`), and which settings are kept as the fastest.

`ngramspec.instruments.tuning` finds the fastest. One small file per model, build and machine keeps them.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from ngramspec.errors import NGramSpecError
from ngramspec.json_data import decode
from ngramspec.storage import cache_folder, recall, write_whole


@cache
def name() -> str:
    """The processor and system, to tell one machine's measurements from another's."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Hardware")):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {psutil.cpu_count() or 1} threads, {platform.system()} {platform.machine()}"


# --------------------------------------------------------------------------- settings

Flash = Literal["auto", "on", "off"]

MOST_THREADS = 512

LEAST_MICRO, MOST_MICRO = 64, 4096  # tokens that can be asked for in a micro-batch of a prompt


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a runner."""

    threads: int  # CPU threads of a pass over one token
    threads_batch: int  # of a pass over more: prompts, and drafts that are checked
    flash_attn: Flash = "auto"  # flash attention
    micro_batch: int | None = None  # tokens of a prompt per pass; None: the runner's default under these settings
    mmap: bool = True  # whether the weights stay in the mapped file where they can
    repack: bool = True  # whether weights may be put into the order that CPU kernels like
    cache_types: tuple[str, str] = ("f16", "f16")  # element types of the K and the V cache

    def changes(self, base: Settings) -> dict[str, Any]:
        """The fields in which these differ from `base`; both numbers of threads where one does, as it sets the other's
        default."""
        own = asdict(self)
        found = {name: value for name, value in own.items() if value != getattr(base, name)}
        if found.keys() & {"threads", "threads_batch"}:
            found = {"threads": self.threads, "threads_batch": self.threads_batch} | found
        return found


_FLAGS = {"threads": "-t", "threads_batch": "-tb", "flash_attn": "-fa", "micro_batch": "-ub"}


def flags(changes: Mapping[str, Any]) -> str:
    """The options of the command line that make these changes (see `Settings.changes`), as llama.cpp names them."""
    words: list[str] = []
    for name, value in changes.items():
        if name == "cache_types":
            words += ["-ctk", value[0], "-ctv", value[1]]
        else:
            words += [_FLAGS[name], str(value)] if name in _FLAGS else [f"--no-{name}"]
    return " ".join(words)


# --------------------------------------------------------------------------- what is timed

LEAST_READ = 64  # from so many tokens on, a pass reads a prompt: logits are computed after its last token only


class Measure(NamedTuple):
    """A time to take."""

    size: int  # tokens of the pass. From LEAST_READ on they are a prompt, and the time is that of one of them.
    deep: bool = False  # whether after a long context, and not after next to nothing

    @property
    def reads(self) -> bool:
        return self.size >= LEAST_READ

    def named(self, depth: int) -> str:
        """Its name in a report; `depth`: tokens of the long context."""
        name = f"prefill {self.size}" if self.reads else f"T({self.size})"
        return f"{name} at {depth}" if self.deep else name


SINGLE, DRAFTS, READING, LONG_READING = Measure(1), (Measure(4), Measure(8)), Measure(LEAST_READ), Measure(1024)
DEEP = (Measure(1, deep=True), Measure(4, deep=True), Measure(LEAST_READ, deep=True))


# --------------------------------------------------------------------------- kept settings

_THREADS = range(1, MOST_THREADS + 1)
_FOUND: Mapping[str, Sequence[Any]] = {
    **{"threads": _THREADS, "threads_batch": _THREADS, "micro_batch": range(LEAST_MICRO, MOST_MICRO + 1)},
    **{"mmap": (False,), "repack": (False,), "flash_attn": ("on", "off")},
}
"""The values that a tuning finds."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome of a tuning, as it is kept."""

    changes: Mapping[str, Any]  # the settings that were found faster (see `Settings.changes`); empty: none is
    ratio: float | None  # their time / that of the settings without them, where something was found
    date: str  # the day, as in 2026-11-22
    applied: bool  # whether they are to be used


def path_of(key: str) -> Path:
    """The file of a model, build and machine, of which `key` is the name; in the cache folder."""
    return cache_folder("tuned") / f"{key}.json"


def recalled(path: Path) -> Tuned | None:
    """What was kept; None where nothing was, or nothing that makes sense."""
    with suppress(ValueError, KeyError):
        kept = decode(Tuned, json.loads(recall(path) or ""))
        if all(type(value) is type(_FOUND[name][0]) and value in _FOUND[name] for name, value in kept.changes.items()):
            return replace(kept, date=kept.date[:10])
    return None


def keep(path: Path, kept: Tuned) -> None:
    """Write the file. Raises NGramSpecError: the settings are to be used, and the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(kept)))
    except OSError as error:
        if kept.applied:
            raise NGramSpecError(f"cannot save the settings in {path}: {error.strerror or error}") from error
