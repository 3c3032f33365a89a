"""`Setup`: what was measured on, as llama-bench names it, and in a line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ngramspec.version import __version__

COLUMNS = ("model", "size", "params", "backend", "threads")
"""llama-bench's headings of what was measured on."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model, loaded, and the machine that runs it.

    Attributes:
        name: the model's, for people.
        model: llama.cpp's words for architecture, size and quantisation.
        size_bytes, parameters: of the model.
        backend: what computes: CPU, or the kind of GPU.
        threads: on the CPU.
        machine: processor and system.
        build: of llama.cpp, with what it was built for, as `ngramspec.llama.devices.build` says it.
        compiled: whether the core of drafting is; it is slow where it is not.
    """

    name: str
    model: str
    size_bytes: int
    parameters: int
    backend: str
    threads: int
    machine: str
    build: str
    compiled: bool = True

    def cells(self) -> tuple[str, ...]:
        """Under `COLUMNS`."""
        size, unit = (self.size_bytes / 2**30, "GiB") if self.size_bytes >= 2**30 else (self.size_bytes / 2**20, "MiB")
        count, scale = (self.parameters / 1e9, "B") if self.parameters >= 1e9 else (self.parameters / 1e6, "M")
        return self.model, f"{size:.2f} {unit}", f"{count:.2f} {scale}", self.backend, str(self.threads)

    def line(self) -> str:
        """Model, machine, backend and build."""
        version = self.build.partition(";")[0]
        features = " ".join(dict.fromkeys(re.findall(r"(\w+) = [1-9]", self.build)))
        built = f"{version} ({features})" if features else version
        own = f"ngramspec {__version__}" + ("" if self.compiled else ", its core not compiled")
        return f"{self.name} ({self.model}); {self.machine}; {self.backend}; {built}; {own}"
