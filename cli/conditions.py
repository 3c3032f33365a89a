"""`Conditions`: the model file, the machine, the settings and the load of a measurement, which its report names."""

from __future__ import annotations

import re
import time
from functools import cached_property
from typing import Any

import ngramspec
from ngramspec import machine
from ngramspec.cpu.cores import CpuLoad, logical_cores, read_cpu_seconds
from ngramspec.drafting import find_uncompiled_modules
from ngramspec.llama.devices import build
from ngramspec.llama.target import Target

from .console import pluralize

NO_MEMORY = "no memory"

BUSY = 0.1  # share of the cores from which on other programs disturb a measurement


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
        return self.cores > max(CpuLoad.QUIET, BUSY * logical_cores())

    def __str__(self) -> str:
        return f"other programs used {self.cores:.1f} of {logical_cores()} cores"


class Conditions:
    """Conditions of a measurement that begins now.

    Args:
        target: Model that is measured.
        file: Name of the model for the user.
        exact: Value of --exact.
        memory: Memory that drafts come from.
    """

    def __init__(self, target: Target, file: str, exact: str, memory: str = NO_MEMORY) -> None:
        self._weights, self._context, self._file = target.weights, target.n_ctx, file
        self.exact, self.memory, self.load = exact, memory, Load()

    @property
    def _settings(self) -> str:
        return f"{pluralize(self._weights.present.threads, 'thread')}; --exact {self.exact}; {self.load}; {self.memory}"

    @property
    def lines(self) -> list[str]:
        """One line about the model, one about the machine, and one about settings and load."""
        weights = self._weights
        return [
            f"{self._file}: {weights.description}, {weights.size_bytes / 2**20:,.0f} MiB, context {self._context}",
            f"{machine.name()}; {self._backend}",
            self._settings,
        ]

    @property
    def origin(self) -> str:
        """All conditions in one line, with the build."""
        version, _, features = build().partition(";")
        enabled = " ".join(dict.fromkeys(re.findall(r"(\w+) = [1-9]", features)))
        build_text = f"{version} ({enabled})" if enabled else version
        own = f"ngramspec {ngramspec.__version__}" + (", its core not compiled" if find_uncompiled_modules() else "")
        model = f"{self._file} ({self._weights.description})"
        return "; ".join([model, machine.name(), self._backend, build_text, own, self._settings])

    @property
    def _backend(self) -> str:
        """Kinds of GPU that the model uses, or "CPU"."""
        gpus = dict.fromkeys(device.name.rstrip("0123456789") for device in self._weights.plan.gpus)
        return ", ".join(gpus) if self._weights.on_gpu else "CPU"

    def to_json(self, command: str) -> dict[str, Any]:
        """Return the conditions as JSON, with the command that repeats the measurement."""
        return {
            "model_file": self._file,
            "threads": self._weights.present.threads,
            "exact": self.exact,
            "memory": self.memory,
            "other_cores": self.load.cores,
            "cores": logical_cores(),
            "command": command,
        }
