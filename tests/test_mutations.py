"""Tests that the test suite finds errors: each fault in `support/mutations.toml` fails the test that it names."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.mutations import FAULTS, ROOT

SECONDS = 600.0
"""Maximum duration of a child process, however busy the machine is."""


def run_tests(names: Sequence[str], folder: Path, **variables: str) -> tuple[int, str]:
    """Return pytest's exit code and output for these tests, run with the default options in a child process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *filter(None, [env.get("PYTHONPATH")])])
    options = ["-n0", "-x", "-rfE", "-m", "not exhaustive", "-p", "no:cacheprovider", "-p", "support.mutations"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "pytest", *options, f"--basetemp={folder}", *names],
        cwd=ROOT,
        env=env | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{' '.join(names)} did not end in {SECONDS:.0f} s")
    return process.returncode, output


SOURCES = {"MUTATION_SOURCES": "1"}
"""Variables of a child process that runs the sources of compiled modules."""


def test_mutations_change_one_place_and_name_tests_that_exist() -> None:
    """Changed lines and renamed tests are noticed here, because the other tests of this file are exhaustive."""
    for name, fault in FAULTS.items():
        assert (ROOT / fault.file).read_text("utf-8").count(fault.old) == 1, name
        file, _, test = fault.caught_by.partition("::")
        assert f"\ndef {test.partition('[')[0]}(" in (ROOT / "tests" / file).read_text("utf-8"), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_mutation_with_fault_fails_its_test(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    variables = {"MUTATION": name, **(SOURCES if fault.is_compiled else {})}
    test = f"tests/{fault.caught_by}"
    code, output = run_tests([test], tmp_path / "tmp", **variables)
    assert code == 1, output
    assert re.search(rf"^FAILED {re.escape(test)}", output, re.MULTILINE), output  # not an earlier error
    assert "of processor time" not in output


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_compiled", [False, True])
def test_mutation_tests_without_fault_pass(is_compiled: bool, tmp_path: Path) -> None:
    """The sources of compiled modules also pass the other tests of drafters, which usually run what was compiled."""
    names = {f"tests/{fault.caught_by}" for fault in FAULTS.values() if fault.is_compiled == is_compiled}
    more = ["tests/drafting", "tests/decoding/test_branches.py"] if is_compiled else []
    code, output = run_tests([*sorted(names), *more], tmp_path / "tmp", **(SOURCES if is_compiled else {}))
    assert code == 0, output
