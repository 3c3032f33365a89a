"""Delete each leaf in a copy: its modules, the leaves that need it, its registrations and the tests that import it.

What is left must import, show its help and pass the tests of the loop; the core must also pass its tests.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.imports import ROOT, find_modules, find_names, resolve
from test_leaves import LEAVES, REGISTRATIONS, find_leaf

COPIED = ("ngramspec", "cli", "prompts", "tests", "examples", "tools", "pyproject.toml", "README.md")

LOOP = ("tests/decoding/test_loop.py", "tests/decoding/test_text.py")

ROOMS = ("decoding", "acceptance", "sampling", "policies", "cost", "cpu", "drafting")

CHECK = """
import importlib, os, pkgutil, sys
import ngramspec, ngramspec_cli
from ngramspec_cli.app import COMMANDS, import_command
assert ngramspec.__file__.startswith(os.getcwd()), ngramspec.__file__
for name in ngramspec.__all__:
    getattr(ngramspec, name)
for command in COMMANDS:
    import_command(command)
for package in (ngramspec, ngramspec_cli):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
"""
"""Import every module that is left, every public name and every command."""


def find_dependents(leaf: str) -> set[str]:
    """Return a leaf and all leaves that need it, directly or through others."""
    found = {leaf}
    while more := {name for name, (_, needs) in LEAVES.items() if found.intersection(needs)} - found:
        found |= more
    return found


class Unregister(ast.NodeTransformer):
    """Remove the imports and the entries of tables that name a module of `gone`."""

    def __init__(self, module: str, gone: set[str]) -> None:
        self._module, self._gone = module, gone
        self._names: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        kept = []
        for alias in node.names:
            statement = ast.unparse(ast.ImportFrom(node.module, [alias], node.level))
            if self._is_gone(*find_names(self._module, statement)[0]):
                self._names.add(alias.asname or alias.name)
            else:
                kept.append(alias)
        node.names = kept
        return node if kept else ast.Pass()

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        node.elts = [item for item in node.elts if not self._uses(item)]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        entries = [
            (key, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if not (key and self._registers(key)) and not self._registers(value)
        ]
        node.keys, node.values = [key for key, _ in entries], [value for _, value in entries]
        return node

    def _is_gone(self, *names: str) -> bool:
        return any(resolve(name, dict.fromkeys(self._gone, ROOT)) in self._gone for name in names)

    def _uses(self, node: ast.expr) -> bool:
        return any(isinstance(part, ast.Name) and part.id in self._names for part in ast.walk(node))

    def _registers(self, node: ast.expr) -> bool:
        if self._uses(node):
            return True
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            return False
        word = node.value.replace("-", "_")
        return bool({word, f"ngramspec.{word}", f"ngramspec_cli.{word}"} & self._gone)


def delete_leaves(root: Path, leaves: set[str]) -> None:
    """Delete leaves in a copy of the repository."""
    known = find_modules(root)
    gone = {module for module in known if find_leaf(module) in leaves}
    for module in gone:
        for path in known[module].parent.glob(f"{known[module].stem}.*"):
            path.unlink()
    for module in {*REGISTRATIONS} - gone:
        tree = Unregister(module, gone).visit(ast.parse(known[module].read_text("utf-8")))
        known[module].write_text(ast.unparse(ast.fix_missing_locations(tree)), "utf-8")
    delete_tests(root / "tests", gone, known)


def delete_tests(tests: Path, gone: set[str], known: dict[str, Path]) -> None:
    """Delete the tests that import what is gone, or a helper that does."""
    files = {".".join(path.relative_to(tests).with_suffix("").parts): path for path in tests.rglob("*.py")}
    everything = {**known, **files}
    is_complete = False
    while not is_complete:
        is_complete = True
        for name, path in list(files.items()):
            imported = {resolve(used, everything) for used in find_names(name, path.read_text("utf-8"))[0]}
            if imported & gone:
                path.unlink()
                del files[name]
                gone, is_complete = {*gone, name}, False


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy of the repository."""
    path = os.pathsep.join([str(root), str(root / "packages")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def run_tests(root: Path, *paths: str) -> str:
    """Run tests in a copy; return what pytest prints, with one line for each error."""
    return run(root, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--tb=line", *paths).stdout


def check_program(root: Path) -> None:
    """Fail if a module, a public name or a command of a copy cannot be imported, or if there is no help."""
    for arguments in (("-c", CHECK), ("-m", "ngramspec_cli.app", "--help")):
        done = run(root, *arguments)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    (tmp_path / "packages").mkdir()
    for package, folder in (("ngramspec_cli", "cli"), ("ngramspec_prompts", "prompts")):
        (tmp_path / "packages" / package).symlink_to(tmp_path / folder)
    return tmp_path


@pytest.mark.exhaustive
@pytest.mark.parametrize("leaf", LEAVES)
def test_program_without_a_leaf_imports_shows_help_and_decodes(leaf: str, copy: Path) -> None:
    delete_leaves(copy, find_dependents(leaf))
    check_program(copy)
    paths = [path for path in LOOP if (copy / path).exists()]
    out = run_tests(copy, *paths)
    assert "failed" not in out, out
    assert re.search(r"\d+ passed", out), out


@pytest.mark.exhaustive
def test_core_without_leaves_passes_its_tests(copy: Path) -> None:
    delete_leaves(copy, set(LEAVES))
    check_program(copy)
    out = run_tests(copy, *(f"tests/{room}" for room in ROOMS))
    # Failed tests ask for a leaf: a request with a grammar or a trace, or a policy by its name.
    errors = re.findall(r"^\S+:\d+: (?!\w*Warning).*$", out, re.MULTILINE)
    asked = r"/leaves\.py:\d+: AttributeError: there is no leaf |: ValueError: unknown policy "
    assert [error for error in errors if not re.search(asked, error)] == []
    n_failed = int((re.search(r"(\d+) failed", out) or [0, 0])[1])
    assert n_failed == len(errors)
    assert int(re.search(r"(\d+) passed", out)[1]) > 460
