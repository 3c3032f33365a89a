"""`Conditions`: the model file, the machine, the settings and the load of a measurement, which its report names."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import ngramspec
from ngramspec.cpu.cores import CpuLoad, logical_cores, machine_name, read_cpu_seconds
from ngramspec.drafting import find_uncompiled_modules
from ngramspec.llama.devices import build
from ngramspec.llama.target import Target
from ngramspec.loading.load import model_tuning_path
from ngramspec.loading.settings import LoadSettings, load_tuned
from ngramspec.model_settings import flags

from .console import pluralize

NO_MEMORY = "no memory"


class Load:
    """The load by other programs, from now on to the first time that `cores` is read."""

    def __init__(self) -> None:
        self._start, self._began = read_cpu_seconds(), time.monotonic()

    @cached_property
    def cores(self) -> float:
        """Mean number of cores that other programs used."""
        now, seconds = read_cpu_seconds(), max(1e-3, time.monotonic() - self._began)
        used = now.others + now.low - self._start.others - self._start.low
        return min(float(logical_cores()), max(0.0, used / seconds))

    @property
    def is_high(self) -> bool:
        """True if other programs used enough cores to slow decoding down."""
        return self.cores > max(CpuLoad.QUIET, 0.1 * logical_cores())

    def __str__(self) -> str:
        return f"other programs used {self.cores:.1f} of {logical_cores()} cores"


class Conditions:
    """Conditions of a measurement that begins now, on the model that the user knows as `file`."""

    def __init__(self, target: Target, file: str, exact: str, memory: str = NO_MEMORY) -> None:
        self._target, self._file = target, file
        self._exact, self._memory, self.load = exact, memory, Load()
        self._context = target.n_ctx

    @property
    def lines(self) -> list[str]:
        """One line about the model, one about the machine, and one about settings and load."""
        weights = self._target.weights
        gpus = dict.fromkeys(device.name.rstrip("0123456789") for device in weights.plan.gpus)
        model = f"{self._file}: {weights.description}, {weights.size_bytes / 2**20:,.0f} MiB, context {self._context}"
        threads = pluralize(weights.n_threads, "thread")
        settings = f"{threads}; --exact {self._exact}; {self.load}; {self._memory}"
        return [model, f"{machine_name()}; {', '.join(gpus) if weights.on_gpu else 'CPU'}", settings]

    @property
    def origin(self) -> str:
        """All conditions in one line, with the build."""
        version, _, features = build().partition(";")
        enabled = " ".join(dict.fromkeys(re.findall(r"(\w+) = [1-9]", features)))
        build_text = f"{version} ({enabled})" if enabled else version
        own = f"ngramspec {ngramspec.__version__}" + (", its core not compiled" if find_uncompiled_modules() else "")
        model, (_, backend, settings) = f"{self._file} ({self._target.weights.description})", self.lines
        return "; ".join([model, backend, build_text, own, settings])

    def to_json(self, command: str, load: LoadSettings) -> dict[str, Any]:
        weights = self._target.weights
        return {
            "load": asdict(load),
            "conditions": {
                "model_file": self._file,
                "threads": weights.n_threads,
                "exact": self._exact,
                "memory": self._memory,
                "other_cores": self.load.cores,
                "cores": logical_cores(),
                "command": command,
            },
            **describe_program(),
            "devices": [asdict(device) for device in weights.devices],
            "placement": weights.plan.summary(weights.layers),
            "drafting_core": "plain Python" if find_uncompiled_modules() else "compiled",
            "model": {
                "path": str(weights.path),
                "name": weights.name,
                "architecture": weights.architecture,
                "description": weights.description,
                "size_bytes": weights.size_bytes,
                "parameters": weights.n_params,
                "can_rollback": self._target.sequences[0].can_rollback,
            },
        }


def describe_program() -> dict[str, str]:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"ngramspec": ngramspec.__version__, "date": date, "machine": machine_name(), "build": build()}


def exact_mode(sizes: Sequence[int] | None) -> str:
    return f"exact mode, in batches of {' '.join(str(n) for n in sizes or ()) or '1'}"


def load_settings(target: Target) -> dict[str, Any]:
    present = target.settings
    return {
        "context": target.n_ctx,
        "threads": present.threads,
        "threads_batch": present.threads_batch,
        "threads_now": target.governor.state._asdict(),
        "micro_batch": target.n_batch,
        "flash_attn": present.flash_attn,
        "cache_types": present.cache_types,
    }


def tuning_line(path: Path, load: LoadSettings) -> str:
    """Return what `ngramspec tune` saved for a model, and whether it is used."""
    tuned = load_tuned(model_tuning_path(path, load))
    if tuned is None:
        return "no; ngramspec tune finds the fastest settings"
    what = f"{flags(tuned.changes)}, {1 / tuned.ratio:.2f} times as fast where it matters ({tuned.date})"
    return f"{what}; {'ignored here' if load.ignore_tuned else 'ngramspec tune --reset deletes it'}"
