"""The name of this machine, the settings of a model runner (`Settings`), and those that `tune` found and stored."""

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

from ngramspec.data import NGramSpecError, decode
from ngramspec.storage import cache_folder, read_cache, write_whole


@cache
def name() -> str:
    """Return the processor and system, which distinguish the measurements of different machines."""
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
MAX_THREADS = 512
MIN_UBATCH, MAX_UBATCH = 64, 4096  # range of the tokens in a micro-batch of a prompt


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a runner."""

    threads: int  # CPU threads of a pass over one token
    threads_batch: int  # CPU threads of a pass over several tokens: a prompt or a draft
    flash_attn: Flash = "auto"  # flash attention
    micro_batch: int | None = None  # tokens of a prompt per pass; `None` means the runner's default
    mmap: bool = True  # whether the weights stay in the mapped file if possible
    repack: bool = True  # whether weights may be reordered for faster CPU kernels
    cache_types: tuple[str, str] = ("f16", "f16")  # element types of the K and the V cache

    def changes(self, base: Settings) -> dict[str, Any]:
        """Return the fields that differ from `base`, with their values.

        If one number of threads differs, both are returned, because `threads` sets the default of `threads_batch`.
        """
        own = asdict(self)
        changes = {name: value for name, value in own.items() if value != getattr(base, name)}
        if changes.keys() & {"threads", "threads_batch"}:
            changes = {"threads": self.threads, "threads_batch": self.threads_batch} | changes
        return changes


_FLAGS = {"threads": "-t", "threads_batch": "-tb", "flash_attn": "-fa", "micro_batch": "-ub"}


def flags(changes: Mapping[str, Any]) -> str:
    """Return llama.cpp's command line options for these changes (see `Settings.changes`)."""
    words: list[str] = []
    for name, value in changes.items():
        if name == "cache_types":
            words += ["-ctk", value[0], "-ctv", value[1]]
        else:
            words += [_FLAGS[name], str(value)] if name in _FLAGS else [f"--no-{name}"]
    return " ".join(words)


# --------------------------------------------------------------------------- measures

MIN_PREFILL = 64  # minimum size of a pass that counts as prefill, which computes logits only after its last token


class Measure(NamedTuple):
    """A pass whose time is measured."""

    size: int  # tokens of the pass; from MIN_PREFILL on the pass is a prefill, and its time is divided by its tokens
    deep: bool = False  # whether the pass follows a long context instead of a nearly empty one

    @property
    def is_prefill(self) -> bool:
        return self.size >= MIN_PREFILL

    def label(self, depth: int) -> str:
        """Return the name of the measure in a report, where the long context has `depth` tokens."""
        name = f"prefill {self.size}" if self.is_prefill else f"T({self.size})"
        return f"{name} at {depth}" if self.deep else name


SINGLE, DRAFTS, READING, LONG_READING = Measure(1), (Measure(4), Measure(8)), Measure(MIN_PREFILL), Measure(1024)
DEEP = (Measure(1, deep=True), Measure(4, deep=True), Measure(MIN_PREFILL, deep=True))


# --------------------------------------------------------------------------- kept settings

_THREADS = range(1, MAX_THREADS + 1)
_TUNABLE: Mapping[str, Sequence[Any]] = {
    **{"threads": _THREADS, "threads_batch": _THREADS, "micro_batch": range(MIN_UBATCH, MAX_UBATCH + 1)},
    **{"mmap": (False,), "repack": (False,), "flash_attn": ("on", "off")},
}
"""The values that a tuning can find; a stored file with other values is ignored."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The stored result of a tuning, which is applied when the model is loaded."""

    changes: Mapping[str, Any]  # the faster settings (see `Settings.changes`)
    ratio: float  # time with the changes / time without them
    date: str  # the day, as in 2026-11-22


def tuning_path(key: str) -> Path:
    """Return the path of the result for a model, build and machine, which `key` identifies."""
    return cache_folder("tuned") / f"{key}.json"


def load_tuned(path: Path) -> Tuned | None:
    """Return the stored result; `None` if nothing is stored, or the file is invalid."""
    with suppress(ValueError, KeyError):
        tuned = decode(Tuned, json.loads(read_cache(path) or ""))
        if all(
            type(value) is type(_TUNABLE[name][0]) and value in _TUNABLE[name] for name, value in tuned.changes.items()
        ):
            return replace(tuned, date=tuned.date[:10])
    return None


def save_tuned(path: Path, tuned: Tuned) -> None:
    """Write the result to a file; raise an NGramSpecError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(tuned)))
    except OSError as error:
        raise NGramSpecError(f"cannot save the settings in {path}: {error.strerror or error}") from error
