"""The algorithms are tested where llama-cpp-python is not installed.

A child process, in which importing `llama_cpp` fails as it does there, collects every test of these rooms: so nothing
of it is loaded by them or by what they test. It then runs a part, since all of them take two minutes: of each room
what is quick, the loop itself first, and not the statistical tests, which draw from the same samplers thousands of
times. Tests of texts that are held to a grammar need llama.cpp's, and skip themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

ROOMS = (
    *("acceptance", "beams", "benchmark", "cost", "decoding", "drafting", "exactness", "memory", "models"),
    *("policies", "replay", "reports", "sampling", "selfcheck", "trace"),
)

QUICK = (
    *("test_backend.py", "acceptance/test_lossy.py", "acceptance/test_verifier.py", "benchmark/test_runs.py", "cost"),
    *("decoding/test_decoder.py", "decoding/test_speculation.py", "decoding/test_step.py", "decoding/test_text.py"),
    *("drafting/test_ngram.py", "drafting/test_recycle.py", "exactness", "replay", "sampling", "trace"),
    *(f"policies/test_{name}.py" for name in ("adaptive", "debt", "policy", "recurring")),
)

PYTEST = """
import sys
from importlib.abc import MetaPathFinder


class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "llama_cpp":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NotInstalled())
import pytest

code = pytest.main([*sys.argv[1:], "-p", "no:cacheprovider"])
sys.exit(code if "llama_cpp" not in sys.modules else "llama_cpp was imported")
"""


def pytest(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PYTEST, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout


def test_every_test_of_the_algorithms_is_collected() -> None:
    out = pytest("--collect-only", "-q", *(f"tests/{room}" for room in ROOMS))
    counts = {room: len(re.findall(rf"^tests/{room}/", out, re.MULTILINE)) for room in ROOMS}
    assert all(counts.values()), counts


def test_they_pass() -> None:
    out = pytest("-v", "-rs", *(f"tests/{name}" for name in QUICK))
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None
    assert int(passed[1]) > 1000
    skipped = re.findall(r"^SKIPPED \[\d+\] (.*)$", out, re.MULTILINE)
    assert all("could not import 'llama_cpp'" in reason for reason in skipped), skipped
