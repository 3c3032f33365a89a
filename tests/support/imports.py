"""The imports among the modules of both packages, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Container, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOREIGN = ("llama_", "ggml_")
"""Prefixes of the names in llama.cpp's C API."""


def find_modules(root: Path) -> dict[str, Path]:
    """Return the files of both packages by module name, including `__init__`, such as "ngramspec.cost.__init__"."""
    found = {}
    for package, folder in (("ngramspec", "ngramspec"), ("ngramspec_cli", "cli")):
        for path in sorted((root / folder).rglob("*.py")):
            found[".".join([package, *path.relative_to(root / folder).with_suffix("").parts])] = path
    return found


@cache
def find_names(module: str, source: str) -> tuple[set[str], set[str]]:
    """Return the full names that a module imports, and the names of llama.cpp's C API that it uses.

    Names in strings do not count.
    """
    imported, names = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            imported |= {f"{base.removeprefix('cython.cimports.')}.{alias.name}" for alias in node.names}
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return imported, {name for name in names if name.startswith(FOREIGN)}


def resolve(name: str, known: Container[str]) -> str | None:
    """Return the module with this full name or the module that contains it; `None` if it belongs to another package."""
    while name:
        for candidate in (name, f"{name}.__init__"):
            if candidate in known:
                return candidate
        name = name.rpartition(".")[0]
    return None


def find_imports(module: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of both packages that a module imports."""
    names, _ = find_names(module, path.read_text("utf-8"))
    return {target for name in names if (target := resolve(name, known))} - {module}
