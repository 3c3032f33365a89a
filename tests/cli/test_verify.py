"""Tests of `ngramspec verify` as a user runs it: the table, JSON, exit codes, and the report on a broken build."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures.files import architecture
from support.cli_runner import DEMO, run
from support.mock_target import Clock
from support.signals import by_signal, signal_after

import ngramspec.acceptance.verifier
from ngramspec.instruments.selfcheck.check import SelfCheck

SHORT = ["verify", "-t", "1", "-c", "512", "-n", "12", "--time-limit", "60"]
NAMES = ["rollback", "greedy", "same seed"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the time only when the check reads the clock, so that no check is skipped."""
    monkeypatch.setitem(SelfCheck.__init__.__kwdefaults__ or {}, "clock", Clock(5e-4).perf_counter)


def results(out: str) -> dict[str, str]:
    """Return the results of the table by check."""
    lines = [line for line in out.splitlines() if line.startswith(tuple(NAMES))]
    return {name: line[len(name) :].split()[0] for name in NAMES for line in lines if line.startswith(f"{name} ")}


SLOW = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("demo", "qwen35")]


@pytest.mark.parametrize("model", ["tiny", *SLOW])
def test_verify_of_correct_build_passes(
    env: dict[str, str], prompts: Path, tiny: Path, tmp_path: Path, model: str
) -> None:
    file = tmp_path / "found.json"
    path = {"tiny": tiny, "demo": DEMO}.get(model) or architecture(model)
    done = run(env, *SHORT, path, "--exact", "off", "--prompts", prompts, "--json", file).ok()
    assert list(results(done.out)) == NAMES
    assert set(results(done.out).values()) <= {"passed", "explained"}
    assert done.out.splitlines()[-1].startswith("all checks passed")
    assert "…" not in done.out
    assert "default mode; drafter mixture, drafts always verified; up to 12 tokens per text, seed 0" in done.out

    found = json.loads(file.read_text())
    assert (found["complete"], found["verdict"]) == (True, done.out.splitlines()[-1])
    assert [check["name"] for check in found["checks"]] == NAMES
    assert (found["settings"]["exact"], found["settings"]["drafter"]) == (False, "mixture")
    assert {text["category"] for text in found["texts"]} == {"code", "notes[b]"}
    assert found["rollbacks"]
    assert all(found[key] for key in ("ngramspec", "date", "machine", "build", "model", "load", "selection"))
    lines, conditions = done.out.splitlines(), found["conditions"]
    assert conditions["command"].startswith(f"ngramspec verify {path.name} --prompts prompts.jsonl -n 12 ")
    load = f"other programs used {conditions['other_cores']:.1f} of {conditions['cores']} cores"
    assert {conditions["command"], f"1 thread; --exact off; {load}; no memory"} <= set(lines)


def test_verify_in_exact_mode_finds_no_differences(env: dict[str, str], prompts: Path, tiny: Path) -> None:
    options = ["--exact", "on", "--json", "-", "-md", tiny, "--drafter", "model", "-s", "7"]
    found = run(env, *SHORT, tiny, "--prompts", prompts, *options).json
    assert {check["status"] for check in found["checks"]} == {"passed"}
    assert found["verdict"] == "all checks passed"
    assert found["settings"] | {"exact": True, "seed": 7, "drafter": "model"} == found["settings"]
    assert not any(text["difference"] for text in found["texts"])


def careless(rows: Any, draft: Sequence[int], tokens: list[int]) -> bool:
    """Accept every draft, as a replacement of `append_most_likely`."""
    tokens += [*draft, int(np.argmax(rows[-1]))]
    return False


@pytest.mark.parametrize("exact", ["off", pytest.param("on", marks=pytest.mark.exhaustive)])
def test_verify_of_broken_build_names_failed_check(
    env: dict[str, str], prompts: Path, tiny: Path, tmp_path: Path, exact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngramspec.acceptance.verifier, "append_most_likely", careless)
    file = tmp_path / "found.json"
    done = run(env, *SHORT, tiny, "--exact", exact, "--prompts", prompts, "--json", file)
    assert done.code == 1
    assert done.error_message.startswith("check failed: greedy (texts with an unexplained difference: ")
    assert [results(done.out)[name] for name in NAMES[:2]] == ["passed", "failed"]
    assert done.out.splitlines()[-1] == "FAILED: greedy"
    assert "equal tokens, plain decoding has" in done.out
    difference = next(text["difference"] for text in json.loads(file.read_text())["texts"] if text["difference"])
    assert difference["needed"] is None
    assert difference["plain_logit"] > difference["drafted_logit"]


@by_signal
def test_verify_when_interrupted_reports_partial_results(
    env: dict[str, str], prompts: Path, tiny: Path, tmp_path: Path, number: int, code: int
) -> None:
    file = tmp_path / "part.json"
    with signal_after(number):
        done = run(env, *SHORT, tiny, "--exact", "off", "--prompts", prompts, "--json", file)
    assert done.code == code, done.err
    assert results(done.out)["rollback"] == "passed"
    assert done.out.splitlines()[-1] == "INCOMPLETE: no check failed so far"
    assert json.loads(file.read_text())["complete"] is False
