"""Tests of the tour: its files, classes and functions exist, and it begins with the six files of the README."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOM = Path(__file__).parents[1] / "ngramspec"
TOUR, README = ((ROOM / name).read_text("utf-8") for name in ("TOUR.md", "README.md"))


def paths(text: str) -> list[str]:
    """Return the targets of its links, in order."""
    return re.findall(r"\]\(([^)#]+)\)", text)


def defined() -> set[str]:
    """Return the classes and functions in the linked files; methods appear as "method" and as "Class.method"."""
    names = set()
    for path in {ROOM / path for path in paths(TOUR) if path.endswith(".py")}:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("text", [TOUR, README], ids=["tour", "readme"])
def test_tour_and_readme_link_only_existing_files(text: str) -> None:
    assert [path for path in paths(text) if not (ROOM / path).exists()] == []


def test_tour_names_only_classes_and_functions_of_linked_files() -> None:
    inherited = {"tokenize", "piece"}  # of `Vocabulary`, from `ngramspec.tokens`
    named = re.findall(r"`([A-Z]\w+(?:\.\w+\(\))?|\w+\(\))`", TOUR)
    assert len(named) > 25
    assert {name.removesuffix("()") for name in named} - inherited - defined() == set()


def test_tour_is_short_and_starts_with_six_files_of_readme() -> None:
    assert len(TOUR.splitlines()) <= 150
    six = paths(README)[:6]
    assert set(six) == set(paths(TOUR)[:6])
    assert sum(len((ROOM / path).read_text("utf-8").splitlines()) for path in six) <= 1700
