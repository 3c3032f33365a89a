"""The tests see what they are for: each of the faults in `support/mutations.toml` fails a test of the default run.

A fault is made in a copy of the packages, whose files are links to the real ones except the changed one. Where that is
one of the compiled core, the copy is without the core, so that plain Python runs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[1]
SECONDS = 600.0
"""After so long a run is taken to hang, whatever else the machine does."""


class Fault(NamedTuple):
    """A change of the product, and what must notice.

    Attributes:
        file: of the product.
        old, new: a text that is there once, and what takes its place.
        caught_by: pytest's name of a test.
    """

    file: str
    old: str
    new: str
    caught_by: str

    @property
    def compiled(self) -> bool:
        """Whether the file was compiled here."""
        path = ROOT / self.file
        return any(path.with_name(path.stem + suffix).exists() for suffix in EXTENSION_SUFFIXES)


FAULTS = {
    name: Fault(**fields)
    for name, fields in tomllib.loads((ROOT / "tests" / "support" / "mutations.toml").read_text("utf-8")).items()
}


def packages(folder: Path, *, core: bool) -> Path:
    """A folder in which tests run as in the repository, with packages of its own that are made of links.

    Args:
        folder: is made.
        core: whether the compiled core is in it.
    """
    left_out = shutil.ignore_patterns(*(() if core else (f"*{suffix}" for suffix in EXTENSION_SUFFIXES)))
    folder.mkdir()
    for entry in ROOT.iterdir():
        if entry.name in ("ngramspec", "cli"):
            shutil.copytree(entry, folder / entry.name, ignore=left_out, copy_function=os.symlink)
        else:
            (folder / entry.name).symlink_to(entry)
    for name in ("cli", "prompts"):
        (folder / f"ngramspec_{name}").symlink_to(name)
    return folder


def outcome(folder: Path, names: Sequence[str]) -> tuple[int, str]:
    """Pytest's exit code and what it says of these tests, as they are run by default."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-n0", "-x", "-rfE", "-m", "not exhaustive", "-p", "no:cacheprovider", f"--basetemp={folder}.tmp"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "pytest", *options, *names],
        cwd=folder,
        env=env | {"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{' '.join(names)} did not end in {SECONDS:.0f} s")
    return process.returncode, said


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    text = (ROOT / fault.file).read_text("utf-8")
    assert text.count(fault.old) == 1, f"{fault.file} has changed, and this fault must be made in another way"
    folder = packages(tmp_path / "copy", core=not fault.compiled)
    changed = folder / fault.file
    changed.unlink()
    changed.write_text(text.replace(fault.old, fault.new), "utf-8")
    code, said = outcome(folder, [fault.caught_by])
    assert code == 1, said
    assert re.search(rf"^FAILED {re.escape(fault.caught_by)}", said, re.MULTILINE), said  # no error on the way to it
    assert "of processor time" not in said


@pytest.mark.parametrize("core", [True, False])
def test_without_a_fault_the_same_tests_pass(core: bool, tmp_path: Path) -> None:
    names = sorted({fault.caught_by for fault in FAULTS.values() if fault.compiled != core})
    if not names:
        pytest.skip("nothing was compiled here")
    code, said = outcome(packages(tmp_path / "copy", core=core), names)
    assert code == 0, said
