"""The compiled modules of `ngramspec.drafting` as plain Python, whether they were compiled or not."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from ngramspec import drafting

FOLDER = Path(str(drafting.__file__)).parent
NAMES = (
    "price",
    "token_index",
    "mixture.history",
    "mixture.odds",
    "mixture.correction",
    "mixture.sightings",
    "mixture.answers",
    "mixture.pointers",
    "mixture.guesser",
    "mixture.side_guesses",
    "mixture.secondary",
    "mixture.drafter",
    "suffix_automaton",
)
"""In an order in which each comes after those that it imports."""


@cache
def plain_modules() -> dict[str, ModuleType]:
    """Copies of the modules by their short names; each imports the copies, nobody else sees them."""
    copies: dict[str, ModuleType] = {}
    for name in NAMES:
        full = f"ngramspec.drafting.{name}"
        spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name.replace('.', '/')}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        siblings = {f"ngramspec.drafting.{other}": copy for other, copy in copies.items()}
        with mock.patch.dict(sys.modules, siblings):
            spec.loader.exec_module(module)
        copies[name] = module
    return {name.split(".")[-1]: copy for name, copy in copies.items()}


def both(installed: ModuleType) -> pytest.MarkDecorator:
    """Runs a test with the module that is installed, and, where all tests run, with its plain copy too.

    That the two do the same is what `tests/drafting/test_compiled.py` proves in every run.
    """
    plain = plain_modules()[installed.__name__.rpartition(".")[2]]
    params = [installed, pytest.param(plain, marks=pytest.mark.exhaustive)]
    return pytest.mark.parametrize("module", params, ids=["installed", "plain"])
