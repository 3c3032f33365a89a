"""Deliberate faults of the product (`mutations.toml`), and a plugin that makes one of them (`-p support.mutations`).

A fault replaces a text in a source file. It runs in a child process of `test_mutations.py`, which finds the fault's
name in the environment variable `MUTATION`. With `MUTATION_SOURCES`, compiled modules run from their sources.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """A fault: `old` occurs once in the file, and becomes `new`; `caught_by` is pytest's name of the failing test."""

    file: str
    old: str
    new: str
    caught_by: str

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("cli/", "ngramspec_cli/").replace("/", ".")

    @property
    def is_compiled(self) -> bool:
        """True if the fault is in a compiled module, which is replaced by its source."""
        spec = find_spec(self.module)
        return spec is not None and not str(spec.origin).endswith(".py")


FAULTS = {
    name: Fault(**fields)
    for name, fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}


class Sources(MetaPathFinder):
    """Finder of the module with a fault; with `whole`, it also prefers all sources to compiled modules."""

    def __init__(self, fault: Fault | None, *, whole: bool) -> None:
        self._fault, self._whole = fault, whole

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        fault = self._fault if self._fault is not None and self._fault.module == name else None

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                source = self.get_data(self.path).decode()
                return self.source_to_code(source.replace(fault.old, fault.new) if fault else source, self.path)

        for folder in path or () if fault or (self._whole and name.startswith("ngramspec.")) else ():
            if spec := FileFinder(folder, (Loader, SOURCE_SUFFIXES)).find_spec(name):
                return spec
        return None


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Make the fault of this process before any test is imported."""
    fault = FAULTS.get(os.environ.get("MUTATION", ""))
    sys.meta_path.insert(0, Sources(fault, whole="MUTATION_SOURCES" in os.environ))
