"""`ngramspec bench` as a user runs it, on the demo model: tables, JSON, and every way to end early."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import COUNTED, PYTHONPATH

COMMAND = [sys.executable, "-m", "ngramspec_cli.app", "bench"]
SMALL = ["-t", "1", "-c", "2048"]
SHORT = [*SMALL, "--limit", "1", "-n", "16", "--repeat", "1"]
MARKER = "running the small demo model"
"""Printed when the model is looked for: absent, nothing was loaded yet."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in {"NGRAMSPEC_MODEL", "COLUMNS"}}
    return kept | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": PYTHONPATH}


def run(environment: dict[str, str], *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error, and nothing on stdout."""
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ngramspec: ")]
    return line


def test_table_of_all_categories_and_json_in_a_file(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")
    done = run(environment, *SHORT, "--policy", "fixed", "--draft-max", "3", "--json", file)
    categories = ["chat", "code-continuation", "code-edit", "json", "prose", "qa", "summarize", "translate"]
    lines = done.stdout.splitlines()
    for category in [*categories, "overall"]:
        assert any(category in line.split() for line in lines), category
    assert "…" not in done.stdout
    assert "identical" in done.stdout
    assert "tuned: no: ngramspec tune finds the settings that are fastest here" in lines
    assert lines[-1].startswith("median over categories")
    assert MARKER in done.stderr

    result = json.loads(file.read_text())
    assert result["complete"] is True
    assert result["verdict"] == lines[-1]
    assert result["selection"]["limit"] == 1
    assert result["settings"]["policies"] == ["fixed"]
    assert result["settings"]["sampling"]["temperature"] == 0
    assert result["model"]["architecture"] == "llama"
    assert result["model"]["size_bytes"] > 0
    for key in ("ngramspec", "date", "machine", "build", "cost_curve_seconds"):
        assert result[key], key
    assert [s["category"] for s in result["summaries"]] == [*categories, "overall"]
    assert len(result["runs"]) == 2 * len(categories) == 2 * len(result["prefills"])
    for entry in result["runs"]:
        assert entry["generated"] <= 16
        assert entry["seconds"] >= entry["pass_seconds"]
        assert sum(entry["batches"].values()) == entry["passes"]
        assert entry["kind"] == "drafted" or entry["drafted"] == 0
    assert sum(entry["drafted"] for entry in result["runs"]) > 0
    assert len(result["summaries"][-1]["acceptance_by_position"]) <= 3
    assert [f.name for f in tmp_path.iterdir()] == ["result.json"]


def test_json_on_stdout_with_exact_mode_and_a_random_seed(environment: dict[str, str], tmp_path: Path) -> None:
    prompt = tmp_path / "notes.txt"
    prompt.write_text("def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return")
    done = run(environment, *SMALL, "-n", "12", "--prompts", prompt, "--json", "-", "--exact", "on", "--temp", "0.8")
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["settings"]["exact"] == "on"
    assert result["settings"]["sampling"]["seed"] > 0
    assert result["selection"]["prompts"] == str(prompt)
    kinds = [entry["kind"] for entry in result["runs"]]
    assert kinds == ["plain", "drafted", "default", "drafted", "default", "plain", "default", "plain", "drafted"]
    assert {entry["category"] for entry in result["runs"]} == {"notes"}
    assert result["summaries"][-1]["exact_price"]["median"] > 0
    assert result["summaries"][-1]["identical"] == 1
    assert result["differences"] == []
    sizes = result["settings"]["exact_sizes"]
    assert all(int(n) in sizes for e in result["runs"] if e["kind"] != "default" for n in e["batches"])


def test_every_policy_on_the_same_prompts(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    names = ["fixed", "heuristic", "entropy", "threshold", "cost"]
    options = ["--policy", "all", "--draft-max", "3", "--category", "json", "--category", "qa", "--json", file]
    done = run(environment, *SHORT, *options)
    lines = done.stdout.splitlines()
    heading = ["category", "plain", *names]
    assert [line.split() for line in lines].count(heading) == 1
    assert [line.split() for line in lines].count(["category", *names]) == 2
    assert [len([line for line in lines if line.startswith(c)]) for c in ("json ", "qa ", "overall ")] == [3, 3, 3]
    assert [line.split(": ")[0] for line in lines[-5:]] == names

    result = json.loads(file.read_text())
    assert result["settings"]["policies"] == names
    assert result["verdict"].splitlines() == lines[-5:]
    assert [(s["policy"], s["category"]) for s in result["summaries"]] == [
        (name, category) for name in names for category in ("json", "qa", "overall")
    ]
    assert all(len(s["acceptance_by_position"]) <= 3 for s in result["summaries"])
    assert [entry["policy"] for entry in result["runs"]] == [None, *names, *names, None]
    assert list(result["cost_curve_seconds"]) == names


def test_prompts_that_are_too_long_are_named_and_the_rest_runs(environment: dict[str, str], tmp_path: Path) -> None:
    # A name that looks like markup and emoji codes, and must be taken as it is.
    (tmp_path / "long[b]:x:.txt").write_text("one two three four five six seven eight nine ten " * 40)
    (tmp_path / "short.txt").write_text("one two three")
    done = run(environment, "-t", "1", "-c", "128", "-n", "8", "--repeat", "1", "--prompts", tmp_path, "--no-draft")
    assert f"skipped {tmp_path.name}/long[b]:x:.txt: " in done.stdout
    assert "on 1 of 1 prompts" in done.stdout
    assert "drafting is off" in done.stdout

    only = run(environment, "-t", "1", "-c", "128", "-n", "8", "--prompts", tmp_path / "long[b]:x:.txt", code=1)
    assert "no prompt left of 1" in complaint(only)


def test_a_json_file_that_cannot_be_written_fails_before_the_model_runs(
    environment: dict[str, str], tmp_path: Path
) -> None:
    for target in (tmp_path / "missing" / "x.json", tmp_path):
        done = run(environment, *SHORT, "--json", target, code=1)
        assert str(target) in complaint(done)
        assert MARKER not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_the_table_is_shown(environment: dict[str, str]) -> None:
    done = run(environment, *SHORT, "--category", "qa", "--json", "/dev/full", code=1)
    assert "cannot write /dev/full: No space left" in done.stderr
    assert "median over categories" in done.stdout
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--policy", "magic"], 2, "unknown policy 'magic'"),
        (["--policy", "all", "--no-draft"], 2, "leave out --no-draft"),
        (["--drafter", "magic"], 2, "unknown drafter 'magic'"),
        (["--category", "poetry"], 2, "no category 'poetry'; there are: chat, "),
        (["--prompts", "/nowhere"], 1, "no such file or folder of prompts: /nowhere"),
        (["-n", "1"], 2, "--predict"),
        (["--temp", "-1"], 2, "temperature"),
    ],
)
def test_bad_usage_is_one_line(environment: dict[str, str], arguments: list[str], code: int, words: str) -> None:
    assert words in complaint(run(environment, *SHORT, *arguments, code=code))


def test_a_broken_prompts_file_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("category = ")
    assert "bad.toml is not valid TOML" in complaint(run(environment, *SHORT, "--prompts", tmp_path, code=1))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_bench_shows_what_it_has(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    file = tmp_path / "part.json"
    # From within: when the runs have begun, and how many end in half a second, is up to the machine.
    script = f"""{COUNTED}
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec_cli.app import main
count = counted(lambda step: step, 200)
generate = SpeculativeDecoder.generate
SpeculativeDecoder.generate = lambda *a, **o: (count(step) for step in generate(*a, **o))
main()
"""
    command = [sys.executable, "-c", script, "-", str(int(number))]
    options = ["--repeat", "1000", "-n", "64", "--category", "qa", "--json", str(file)]
    done = subprocess.run(
        [*command, "bench", *SMALL, *options], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "INCOMPLETE: stopped after " in done.stdout
    result = json.loads(file.read_text())
    assert result["complete"] is False
    assert len(result["runs"]) > 0
    assert f"stopped after {len(result['runs'])} of " in done.stdout
    assert [f.name for f in tmp_path.iterdir()] == ["part.json"]
