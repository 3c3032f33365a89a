"""Tests of `ngramspec bench` as a user runs it: tables, JSON, and every way to end early."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import DEMO, run
from support.pages import Page, markdown_table, read_svg_words, report_files
from support.signals import by_signal, signal_after

from ngramspec.policies import POLICIES

SMALL = ["bench", "-t", "1", "-c", "512", "-n", "12"]
FAST = [*SMALL, "--exact", "off", "--repeat", "1"]
CATEGORIES = ["code", "notes[b]", "overall"]


def test_bench_prints_table_of_categories_and_writes_json_file(
    env: dict[str, str], prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")
    done = run(env, *FAST, "--prompts", prompts, "--policy", "fixed", "--draft-max", "3", "--json", file).ok()
    lines = done.out.splitlines()
    for category in CATEGORIES:
        assert any(category in line.split() for line in lines), category
    assert "…" not in done.out
    assert "identical" in done.out
    assert "'not clear' if it may be noise" in done.out
    rows = lines[lines.index("") :]
    assert max(len(line) for line in rows if line.startswith(tuple(CATEGORIES))) <= 100
    setup = "1 thread; --exact off; other programs used "
    for words in ("demo.gguf: ", setup, "; no memory", "ngramspec bench "):
        assert any(words in line for line in lines[:8]), words
    assert "tuned: no; ngramspec tune finds the fastest settings" in lines
    assert lines[-1].startswith("no difference that these runs can show: 2 of at least 6 pairs; ")
    assert "using the small demo model" in done.err

    result = json.loads(file.read_text())
    assert (result["complete"], result["verdict"]) == (True, lines[-1])
    assert (result["settings"]["policies"], result["settings"]["sampling"]["temperature"]) == (["fixed"], 0)
    assert result["model"]["architecture"] == "llama"
    assert all(result[key] for key in ("ngramspec", "date", "machine", "build", "pass_costs", "selection"))
    assert [s["category"] for s in result["summaries"]] == CATEGORIES
    assert len(result["runs"]) == 2 * len(result["prefills"]) == 4
    assert all(entry["generated"] <= 12 for entry in result["runs"])
    assert len(result["summaries"][-1]["acceptance_by_position"]) <= 3
    assert [f.name for f in tmp_path.iterdir()] == ["result.json"]


def test_bench_without_drafts_shows_no_gain(env: dict[str, str], prompts: Path, tmp_path: Path) -> None:
    # After the prefill's token, no draft fits.
    page = tmp_path / "page.html"
    done = run(env, *FAST, "-n", "2", "--prompts", prompts, "--repeat", "6", "--html", page, "--markdown").ok()
    assert [cells[-2] for cells in markdown_table(done.out)[1:]] == ["-"] * 3
    for text in (done.out, page.read_text()):
        assert ("nothing was drafted" in text, "as fast" in text) == (True, False)


def test_bench_repeats_do_not_draft_from_earlier_answers(env: dict[str, str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("On the way home, my sister")
    done = run(env, *FAST, "-n", "40", "--repeat", "2", "--prompts", text, "--policy", "fixed", "--json", "-").ok()
    runs = [entry for entry in json.loads(done.out)["runs"] if entry["kind"] == "drafted"]
    assert [entry["repeat"] for entry in runs] == [0, 1]
    assert runs[0]["accepted"] == runs[1]["accepted"] < runs[0]["drafted"]


def test_bench_names_the_memory_that_it_used(env: dict[str, str], prompts: Path, tmp_path: Path) -> None:
    mine = env | {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    command = (*FAST, "-n", "4", "--prompts", prompts)
    empty = run(mine, *command, "--markdown").ok().out
    (tmp_path / "file.txt").write_text("one two three four five six seven eight nine ten " * 10)
    run(mine, "memory", "add", "--model", DEMO, tmp_path / "file.txt").ok()
    unused = run(mine, *command, "--no-memory", "--markdown").ok().out
    for shown in (empty, unused):
        assert ("; no memory;" in shown, shown.count(" --no-memory"), shown.count("memory")) == (True, 1, 2)
    (store,) = (tmp_path / "data").rglob("*.memory")
    run(mine, "memory", "save-answers", "on").ok()
    before = store.read_bytes()
    used = run(mine, *command, "--markdown").ok()
    assert all(words in used.out for words in ("; memory default, ", " --memory default"))
    assert used.out.count("memory") == 2
    assert re.search(r"also drafting from a memory of \d+ tokens; --no-memory disables it", used.err)
    assert run(mine, *command, "--json", "-").json["memory"]["name"] == "default"
    assert run(mine, *command, "--no-memory", "--json", "-").json["memory"] is None
    assert store.read_bytes() == before


def test_bench_with_exact_mode_and_sampling_writes_json_to_stdout(
    env: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "notes.txt"
    prompt.write_text("def add(a, b):\n    return a + b\n")
    done = run(env, *SMALL, tiny, "--prompts", prompt, "--exact", "on", "--temp", "0.8", "--json", "-").ok()
    result: dict[str, Any] = json.loads(done.out)
    assert result["settings"]["exact"] == "on"
    assert result["settings"]["sampling"]["seed"] > 0
    assert result["selection"]["prompts"] == str(prompt)
    kinds = [entry["kind"] for entry in result["runs"]]
    assert kinds == ["plain", "drafted", "default", "drafted", "default", "plain", "default", "plain", "drafted"]
    assert {entry["category"] for entry in result["runs"]} == {"notes"}
    assert result["summaries"][-1]["exact_price"] > 0
    assert (result["summaries"][-1]["identical"], result["differences"]) == (1, [])
    sizes = result["settings"]["exact_sizes"]
    assert all(int(n) in sizes for e in result["runs"] if e["kind"] != "default" for n in e["batches"])


def test_bench_with_all_policies_compares_them_on_same_prompts(
    env: dict[str, str], prompts: Path, tmp_path: Path
) -> None:
    file, names = tmp_path / "all.json", list(POLICIES)
    done = run(env, *FAST, "--policy", "all", "--draft-max", "3", "--prompts", prompts, "--json", file).ok()
    verdicts, result = done.out.splitlines()[-len(names) :], json.loads(file.read_text())
    assert [line.split(": ")[0] for line in verdicts] == names
    assert result["verdict"].splitlines() == verdicts
    assert [entry["policy"] for entry in result["runs"]] == [None, *names, *names, None]
    assert result["settings"]["policies"] == list(result["pass_costs"]) == names


def test_bench_with_too_long_prompts_skips_and_names_them(env: dict[str, str], tmp_path: Path) -> None:
    # The name looks like markup and emoji codes, and must be printed unchanged.
    (tmp_path / "long[b]:x:.txt").write_text("one two three four five six seven eight nine ten " * 40)
    (tmp_path / "short.txt").write_text("one two three")
    done = run(env, *FAST, "-c", "128", "--prompts", tmp_path, "--no-draft").ok()
    assert f"skipped {tmp_path.name}/long[b]:x:.txt: " in done.out
    assert "on 1 of 1 prompts" in done.out
    assert "drafting is off" in done.out
    only = run(env, *FAST, "-c", "128", "--prompts", tmp_path / "long[b]:x:.txt")
    assert only.code == 1, only.err
    assert ("all 1 prompts were skipped" in only.error_message, only.out) == (True, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_bench_with_full_disk_fails_and_still_prints_table(env: dict[str, str], prompts: Path) -> None:
    done = run(env, *FAST, "--prompts", prompts, "--json", "/dev/full")
    assert done.code == 1, done.err
    assert "cannot write /dev/full: No space left" in done.err
    assert "output identical on" in done.out
    assert Path("/dev/full").is_char_device()


@by_signal
def test_bench_when_interrupted_reports_partial_results(
    env: dict[str, str], prompts: Path, tmp_path: Path, number: int, code: int
) -> None:
    file = tmp_path / "part.json"
    with signal_after(number, steps=50):
        done = run(env, *FAST, "--repeat", "1000", "--prompts", prompts, "--json", file)
        assert done.code == code, done.err
    result = json.loads(file.read_text())
    assert (result["complete"], len(result["runs"]) > 0) == (False, True)
    assert f"INCOMPLETE: stopped after {len(result['runs'])} of " in done.out
    assert [f.name for f in tmp_path.iterdir()] == ["part.json"]


def test_bench_shared_formats_name_the_same_run(env: dict[str, str], tmp_path: Path) -> None:
    """The figures of a report are recorded in tests/instruments/benchmark/reports.json."""
    options, written = report_files(tmp_path)
    texts = {"json": '{"name": "a", "value": 1}, ' * 8, "qa": "What is it? It is what it is. " * 8}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": k, "category": k, "text": text}) for k, text in texts.items()))
    fixed = ("--prompts", prompts, "--policy", "fixed", "--draft-max", "3")
    done = run(env, *SMALL, "--repeat", "1", "-n", "16", *fixed, "--markdown", *options).ok()
    found = json.loads(written["json"].read_text())
    table = markdown_table(done.out)
    ratios = [f"{s['ratio']:.2f}x" if s["gain"] else "-" for s in found["summaries"]]
    assert [(row[0], row[-3]) for row in table[1:]] == [*zip(("json", "qa", "overall"), ratios, strict=True)]
    headline, *_, origin = done.out.strip().split("\n\n")
    assert headline == "**no difference that these runs can show: 2 of at least 6 pairs**"
    conditions = found["conditions"]
    assert (conditions["exact"], conditions["threads"], conditions["memory"]) == ("auto", 1, "no memory")
    load = f"other programs used {conditions['other_cores']:.1f} of {conditions['cores']} cores"
    facts = (found["machine"], found["build"].partition(";")[0], found["ngramspec"], found["model"]["description"])
    settings = (conditions["model_file"], "; CPU; ", "; 1 thread; --exact auto; ", load, "; no memory; ", "-n 16")
    assert all(words in origin for words in (*facts, *settings))
    assert f"`{conditions['command']}`" in origin
    assert "--policy fixed" in conditions["command"]
    assert {f"{r}, not clear" for r in ratios if r != "-"} <= {*read_svg_words(written["svg"].read_text("utf-8"))}
    page = Page(written["html"].read_text("utf-8"))
    assert headline.strip("*") in page.words.splitlines()
    assert (page.tables[0], "refused" in dict(page.spans[3:])) == (table, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json", "out.svg", "prompts.jsonl"]
