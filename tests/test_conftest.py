"""Tests of the test suite's own hooks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FILE = """
def test_failing() -> None:
    number = 7
    assert number == 8

def test_interrupted() -> None:
    raise KeyboardInterrupt
"""


@pytest.mark.exhaustive
def test_pytest_after_ctrl_c_prints_failures_without_tracebacks(tmp_path: Path) -> None:
    file = tmp_path / "test_file.py"
    file.write_text(FILE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "conftest", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, text=True, check=False)
    assert done.returncode == 2, done.stdout
    assert "FAILED test_file.py::test_failing" in done.stdout
    assert "number = 7" not in done.stdout
    assert done.stdout.count("\n") < 12
