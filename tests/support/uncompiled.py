"""The compilable modules of the mixture and of branches as plain Python, whether they are compiled or not.

`drafting/test_compiled.py` tests that both versions give the same results.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

from ngramspec.decoding import branches

FOLDER = Path(str(branches.__file__)).parents[1]
NAMES = (
    "drafting.draft",
    "drafting.acceptance_estimator",
    "drafting.predictor",
    "drafting.token_index",
    "drafting.mixture.history",
    "drafting.mixture.chance_mixer",
    "drafting.mixture.context_counts",
    "drafting.mixture.answers",
    "drafting.mixture.pointers",
    "drafting.mixture.position_scorer",
    "drafting.mixture.guesser",
    "drafting.mixture.drafter",
    "decoding.branches",
)
"""Names of the modules, each after the modules that it imports."""


@cache
def plain_modules() -> dict[str, ModuleType]:
    """Return copies of the modules by their short names; only the copies import each other."""
    copies: dict[str, ModuleType] = {}
    for name in NAMES:
        full = f"ngramspec.{name}"
        spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name.replace('.', '/')}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        siblings = {f"ngramspec.{short_name}": copy for short_name, copy in copies.items()}
        with mock.patch.dict(sys.modules, siblings):
            spec.loader.exec_module(module)
        copies[name] = module
    return {name.split(".")[-1]: copy for name, copy in copies.items()}
