"""Children: how they end is told, and they import what this process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ngramspec import child

WITHOUT_CORE = "from ngramspec import child; child.confine(); "


def run(script: str, patience: float = 60) -> child.Ended:
    ended = child.run([sys.executable, "-P", "-c", script], patience)
    assert ended is not None
    return ended


@pytest.mark.parametrize(
    ("script", "code", "died"),
    [
        ("import sys; sys.stderr.write('é'); raise SystemExit(3)", 3, False),
        (WITHOUT_CORE + "import os; os.abort()", -6, True),
        ("import os; os.kill(os.getpid(), 9)", -9, False),
    ],
)
def test_how_a_child_ends(script: str, code: int, died: bool) -> None:
    ended = run(script)
    assert (ended.code, ended.died) == (code, died)
    assert ("é" in ended.said) == (code == 3)


def test_one_that_hangs_or_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("import time; time.sleep(600)", 0.2)
    assert child.run(["/nonexistent/python"], 60) is None
    assert child.run([""], 60) is None
    # A frozen application would start a copy of itself.
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert child.run([sys.executable, "-c", ""], 60) is None


def test_it_imports_from_where_this_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"only_{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "there"))
    monkeypatch.chdir(tmp_path / "here")
    script = "import only_there\ntry:\n import only_here\nexcept ImportError:\n pass\nelse:\n raise SystemExit(3)"
    assert run(script).code == 0
