"""Tests that the algorithms and their tests run without llama-cpp-python.

In a child process, importing `llama_cpp` fails as if it were not installed. One process imports all modules of these
folders. In the exhaustive run, another one collects all their tests and runs those of some folders.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = (
    *("acceptance", "beams", "cost", "decoding", "drafting", "instruments", "memory", "models"),
    *("policies", "sampling"),
)

SOME = ("cost", "instruments/replay", "sampling")
"""Folders whose tests call no command of the command line, since every command loads llama.cpp."""

NOT_INSTALLED = """
import sys
from importlib.abc import MetaPathFinder


class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "llama_cpp":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NotInstalled())
"""

IMPORT = """
from importlib import import_module
from pathlib import Path

import ngramspec

folder = Path(ngramspec.__file__).parent
for room in sys.argv[1:]:
    for path in (folder / room).rglob("*.py"):
        import_module(".".join(["ngramspec", *path.relative_to(folder).with_suffix("").parts]))
        print(path)
"""

PYTEST = """
import pytest

code = pytest.main([*sys.argv[1:], "-n0", "-p", "no:cacheprovider"])
sys.exit(code if "llama_cpp" not in sys.modules else "llama_cpp was imported")
"""


def without_llama(script: str, *arguments: str) -> str:
    """Return the output of a script that runs without llama.cpp."""
    command = [sys.executable, "-c", NOT_INSTALLED + script, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout


def test_algorithm_modules_without_llama_cpp_are_importable() -> None:
    assert len(without_llama(IMPORT, *ROOMS).splitlines()) > 60


@pytest.mark.exhaustive
def test_algorithm_tests_without_llama_cpp_are_collected_and_pass() -> None:
    out = without_llama(PYTEST, "--collect-only", *(f"tests/{room}" for room in ROOMS))
    assert {room for room in ROOMS if re.search(rf"^tests/{room}/", out, re.MULTILINE)} == set(ROOMS)
    # The mock also passes the tests of the backend's contract.
    out = without_llama(PYTEST, "-rs", "tests/test_model_contract.py", *(f"tests/{room}" for room in SOME))
    assert int(re.search(r"(\d+) passed", out)[1]) > 200
    skipped = re.findall(r"^SKIPPED \[\d+\] (.*)$", out, re.MULTILINE)
    assert all("could not import 'llama_cpp'" in reason for reason in skipped), skipped
