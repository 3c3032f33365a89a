"""`ngramspec verify` as a user runs it: the table, JSON, exit codes, and what it says of a build that is broken."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from architectures.files import write_models
from support.cli_runner import run, run_signalled

VERIFY = ["verify", "-t", "1", "-c", "512"]
SHORT = [*VERIFY, "-n", "12", "--seconds", "3"]
NAMES = ["greedy", "same seed", "logprobs", "rollback", "reuse", "probe", "calibration", "law"]
OWN_TIME = """
import time
from ngramspec.selfcheck.check import SelfCheck
from ngramspec_cli.app import main

SelfCheck.__init__.__kwdefaults__["clock"] = time.process_time
"""
"""Start of a script whose checks count their own processor time: a busy machine leaves none of them out."""

PATIENT = [sys.executable, "-c", f"{OWN_TIME}\nmain()"]
MARKER = "running the small demo model"
"""Printed when the model is looked for: absent, nothing was loaded yet."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    for category, line in (("code", "x[{}] = x[{}] + 1"), ("notes[b]", "buy {} apples, and {} pears")):
        record = {"id": "1", "category": category, "text": "\n".join(line.format(k, k + 1) for k in range(8))}
        (folder / f"{category}.jsonl").write_text(json.dumps(record))
    return folder


def results(out: str) -> dict[str, str]:
    """Result by check, as the table has them."""
    lines = [line for line in out.splitlines() if line.startswith(tuple(NAMES))]
    return {name: line[len(name) :].split()[0] for name in NAMES for line in lines if line.startswith(f"{name} ")}


def test_both_modes_pass_on_the_demo_model(env: dict[str, str], prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run(env, *SHORT, "--exact", "off", "--seconds", "12", "--prompts", prompts, "--json", file, command=PATIENT)
    assert done.code == 0, done.err
    assert MARKER in done.err
    assert list(results(done.out)) == NAMES
    assert set(results(done.out).values()) <= {"passed", "explained"}
    assert done.out.splitlines()[-1].startswith("all that must hold does")
    assert "…" not in done.out
    assert "default mode; drafter mixture, drafts always sent; up to 12 tokens per text, seed 0" in done.out

    found = json.loads(file.read_text())
    assert found["complete"] is True
    assert found["verdict"] == done.out.splitlines()[-1]
    assert [check["name"] for check in found["checks"]] == NAMES
    assert found["settings"]["exact"] is False
    assert found["settings"]["drafter"] == "mixture"
    assert {text["category"] for text in found["texts"]} == {"code", "notes[b]"}
    assert {"greedy", "coupled", "match"} <= {text["setting"] for text in found["texts"]}
    assert sum(text["drafted"] for text in found["texts"]) > 0
    assert all(test["identical"] for test in found["rollbacks"])
    assert {state["kind"] for state in found["states"]} == {"reuse", "probe", "calibration"}
    assert sum(test["draws"] for test in found["laws"]) > 1000
    assert found["probe"]["max_difference"] >= 0
    for key in ("ngramspec", "date", "machine", "build", "model", "load", "selection"):
        assert found[key], key

    options = ["--exact", "on", "--json", "-", "--drafter", "suffix", "-s", "7"]
    exact = run(env, *SHORT, "--seconds", "6", "--prompts", prompts, *options, command=PATIENT)
    assert exact.code == 0, exact.err
    found = json.loads(exact.out)
    assert {check["status"] for check in found["checks"]} == {"passed"}
    assert found["verdict"] == "all that must hold does"
    assert found["settings"] | {"exact": True, "seed": 7, "drafter": "suffix"} == found["settings"]
    assert all(text["logprobs_identical"] and text["difference"] is None for text in found["texts"])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a recurrent state, of which llama.cpp keeps snapshots."""
    return write_models(tmp_path_factory.mktemp("models"), ["qwen35"])["qwen35"]


def test_a_recurrent_memory_passes(env: dict[str, str], hybrid: Path, prompts: Path) -> None:
    done = run(env, *SHORT, "--seconds", "10", "--prompts", prompts, hybrid, command=PATIENT)
    assert done.code == 0, done.err
    assert {results(done.out)[name] for name in ("rollback", "reuse", "probe", "calibration")} == {"passed"}


BELIEVING = f"""{OWN_TIME}
from ngramspec.llama.snapshots import Snapshots

Snapshots.takes_back = lambda self, depth: depth <= self.count
main()
"""
"""What llama.cpp says of snapshots, believed."""


def test_a_memory_that_goes_back_to_a_wrong_state_is_named(
    env: dict[str, str], hybrid: Path, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    # In exact mode prompts are reused by whole chunks, for which no snapshot reaches far enough.
    arguments = map(str, [*SHORT, "--seconds", 20, "--exact", "off", "--prompts", prompts, "--json", file, hybrid])
    done = run(env, command=[sys.executable, "-c", BELIEVING, *arguments])
    assert done.code == 1
    for name in ("rollback", "reuse", "probe", "calibration"):
        assert results(done.out)[name] == "failed"
        assert f"{name} (" in done.complaint
    states = json.loads(file.read_text())["states"]
    assert {state["kind"] for state in states if state["difference"] > state["bound"]} == {
        *("reuse", "probe", "calibration")
    }


BROKEN = f"""{OWN_TIME}
import sys
import ngramspec.acceptance.verifier
from ngramspec.acceptance.rules import Verdict

def careless(rows, draft, sampler, position, watch=None):
    tokens = (*draft, int(list(rows)[-1].argmax()))
    for token in tokens:
        sampler.accept(token)
    return Verdict(tokens, len(draft))

ngramspec.acceptance.verifier.verify_greedy = careless
main()
"""


@pytest.mark.parametrize("exact", [[], ["--exact", "on"]])
def test_what_must_hold_and_does_not_is_named(
    env: dict[str, str], prompts: Path, tmp_path: Path, exact: list[str]
) -> None:
    file = tmp_path / "found.json"
    arguments = map(str, [*SHORT, *exact, "--prompts", prompts, "--json", file])
    done = run(env, command=[sys.executable, "-c", BROKEN, *arguments])
    assert done.code == 1
    assert done.complaint.startswith("this must hold and does not: greedy (texts that differ unexplained: ")
    assert results(done.out)["greedy"] == "failed"
    assert results(done.out)["rollback"] == results(done.out)["law"] == "passed"
    assert done.out.splitlines()[-1] == "FAILED: greedy"
    assert "equal tokens plain has" in done.out
    found: dict[str, Any] = json.loads(file.read_text())
    difference = next(text["difference"] for text in found["texts"] if text["difference"])
    assert difference["needed"] is None
    assert difference["plain_logit"] > difference["drafted_logit"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_check_shows_what_it_has(
    env: dict[str, str], prompts: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    file = tmp_path / "part.json"
    done = run_signalled(env, "generation", number, *SHORT, "--prompts", prompts, "--json", file)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert results(done.out)["rollback"] == "passed"
    assert results(done.out)["law"] == "skipped"
    assert done.out.splitlines()[-1] == "INCOMPLETE: what was checked holds"
    assert json.loads(file.read_text())["complete"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--drafter", "magic"], 2, "unknown drafter 'magic'"),
        (["--drafter", "memory"], 2, "there is none"),
        (["--prompts", "/nowhere"], 1, "no such file or folder of prompts: /nowhere"),
        (["-n", "1"], 2, "--predict"),
        (["--seconds", "0"], 2, "--seconds"),
        (["--seed", "-1"], 2, "--seed"),
        (["--json", "/nowhere/x.json"], 1, "cannot write /nowhere/x.json"),
        (["-n", "510"], 2, "510 tokens leave no room for a prompt in a context of 512"),
    ],
)
def test_bad_usage_is_one_line(env: dict[str, str], arguments: list[str], code: int, words: str) -> None:
    done = run(env, *SHORT, *arguments)
    assert done.code == code
    assert words in done.complaint
    assert done.out == ""
    assert (MARKER in done.err) == (arguments[0] == "-n" and arguments[1] == "510")


def test_a_broken_model_file_is_one_line(env: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    done = run(env, *SHORT, broken)
    assert done.code == 1
    assert str(broken) in done.complaint
    assert done.out == ""
