"""Tests of text on stdout together with notes on stderr: on one terminal, on two, and in files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")

SCRIPT = """
from ngramspec_cli.console import note, write_stdout
for text in ("one", "two\\n", "three", "", "four"):
    write_stdout(text)
    note("note")
    note("more")
"""


def shown(env: dict[str, str], stdout: str | Path) -> str:
    """Return the output of a terminal that is stderr and, for "terminal", also stdout."""
    terminal, end = pty.openpty()
    other = None
    if stdout == "other terminal":
        other, out = pty.openpty()
    else:
        out = os.dup(end) if stdout == "terminal" else os.open(stdout, os.O_WRONLY | os.O_CREAT)
    run = subprocess.Popen([sys.executable, "-c", SCRIPT], env=env | {"TERM": "dumb"}, stdout=out, stderr=end)
    os.close(end)
    os.close(out)
    found = b""
    try:
        while piece := os.read(terminal, 4096):
            found += piece
    except OSError:  # Linux reports the exit of the last writer so.
        pass
    assert run.wait() == 0
    for open_end in filter(None, (terminal, other)):
        os.close(open_end)
    return found.decode().replace("\r\n", "\n")


def test_note_after_partial_stdout_line_starts_new_line(env: dict[str, str], tmp_path: Path) -> None:
    notes = "note\nmore\n"
    assert shown(env, "terminal") == f"one\n{notes}two\n{notes}three\n{notes}{notes}four\n{notes}"
    assert shown(env, "other terminal") == notes * 5
    assert shown(env, tmp_path / "out") == notes * 5
    assert (tmp_path / "out").read_text() == "onetwo\nthreefour"
