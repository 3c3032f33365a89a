"""Tests of the results to share, of bench and replay, which must equal those of --json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ngramspec_cli.show import Output, command_line
from support.cli_runner import DEMO, run
from support.pages import Page, markdown_table, read_svg_words

from ngramspec.instruments.reports.report import SIZES
from ngramspec.loading.settings import LoadSettings

SHORT = ("-t", "1", "-c", "512", "-n", "16", "--repeat", "1")


def files(folder: Path) -> tuple[list[str], dict[str, Path]]:
    """Return options that write one file of each format, and the files."""
    named = {kind: folder / f"out.{kind}" for kind in ("svg", "html", "json")}
    return [word for kind, path in named.items() for word in (f"--{kind}", str(path))], named


def ratio(summary: dict[str, Any]) -> str:
    return f"{summary['ratio']:.2f}x" if summary["gain"] else "-"


def test_bench_shared_formats_equal_its_json(env: dict[str, str], tmp_path: Path) -> None:
    options, written = files(tmp_path)
    texts = {"json": '{"name": "a", "value": 1}, ' * 8, "qa": "What is it? It is what it is. " * 8}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": k, "category": k, "text": text}) for k, text in texts.items()))
    fixed = ("--prompts", prompts, "--policy", "fixed", "--draft-max", "3")
    done = run(env, "bench", *SHORT, *fixed, "--markdown", *options).ok()
    found = json.loads(written["json"].read_text())
    headings, *rows = markdown_table(done.out)
    cells = [dict(zip(headings, row, strict=True)) for row in rows]
    names = ["json", "qa", "overall"]
    assert [row["category"] for row in cells] == [s["category"] for s in found["summaries"]] == names
    for row, figures in zip(cells, found["summaries"], strict=True):
        assert float(row["plain t/s"]) == pytest.approx(figures["plain"], rel=0.01)
        assert float(row["drafted t/s"]) == pytest.approx(figures["drafted"], rel=0.01)
        assert (row["ratio"], row["gain"]) == (ratio(figures), "not clear" if figures["gain"] else "-")
        assert row["same text"] == f"{figures['identical']} of {figures['prompts']}"
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

    drawing = read_svg_words(written["svg"].read_text("utf-8"))
    assert {f"{ratio(s)}, not clear" for s in found["summaries"] if s["gain"]} <= set(drawing)

    page = Page(written["html"].read_text("utf-8"))
    lines = list(filter(None, page.words.splitlines()))
    assert lines[2] == headline.strip("*")
    assert found["machine"] in lines[-1]
    gains, _, positions, costs = page.tables
    assert gains == [headings, *rows]
    assert [[float(c) for c in row[1:] if c != "-"] for row in positions[1:]] == [
        [pytest.approx(rate, abs=0.0051) for rate in s["acceptance_by_position"] if rate is not None]
        for s in found["summaries"]
    ]
    shown = {n: f"{cost:.2f}" for n, cost in found["pass_costs"]["fixed"]["ratios"].items() if int(n) in SIZES}
    assert costs == [["tokens", "measured"], *map(list, shown.items())]
    assert {kind for kind, _ in page.spans[3:]} >= {"refused"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json", "out.svg", "prompts.jsonl"]


def test_replay_shared_formats_equal_its_json_and_omit_texts(env: dict[str, str], tmp_path: Path) -> None:
    options, written = files(tmp_path)
    talks = tmp_path / "talks.jsonl"
    word = "zebra giraffe crocodile "
    talk = {"prompt": f"Repeat: {word * 4}", "response": word * 6, "category": "<copy>"}
    talks.write_text("\n".join([json.dumps(talk), json.dumps({**talk, "category": "b|c"})]))
    curves = ("--curve", "flat", "--curve", "cpu-1.5b-q4_0")
    done = run(env, "replay", talks, "--vocab", DEMO, *curves, "--markdown", *options).ok()
    found: dict[str, Any] = json.loads(written["json"].read_text())
    headings, *rows = markdown_table(done.out)
    for row in (dict(zip(headings, row, strict=True)) for row in rows):
        name = row["curve"]
        figures = found["results"][f"mixture@{name}"][row["category"]]
        assert row["gain"] == f"{figures['speedup'][name]:.3f}x"
    assert {row[1] for row in rows} == {"<copy>", "b|c", "overall"}
    assert "`ngramspec replay talks.jsonl --vocab demo.gguf --curve flat" in done.out
    page = Page(written["html"].read_text("utf-8"))
    assert page.words.count("Speed-up on the curve ") == 2
    for kind in ("svg", "html"):
        assert "zebra" not in written[kind].read_text("utf-8")
    texts = tmp_path / "texts.html"
    run(env, "replay", talks, "--vocab", DEMO, "--curve", "flat", "--html", texts, "--include-text").ok()
    shown = Page(texts.read_text("utf-8"))
    assert "zebra giraffe" in "".join(text for kind, text in shown.spans[3:] if kind == "kept")
    assert {"<copy>: line 1", "b|c: line 2"} <= set(shown.words.splitlines())
    assert "--html" in run(env, "replay", talks, "--vocab", DEMO, "--include-text").error_message
    whole = found["results"]["mixture@flat"]["overall"]["speedup"]["flat"]
    assert f"{whole:.3f}x" in read_svg_words(written["svg"].read_text("utf-8"))
    headline = f"{whole:.2f} times as fast with drafts as without, simulated with the cost curve flat"
    assert found["headline"].startswith(headline)
    assert f"**{found['headline']}**" in done.out
    assert f"`{found['command']}`" in done.out


def test_command_line_contains_only_names_of_files(tmp_path: Path) -> None:
    model = tmp_path / "a model.gguf"
    model.touch()
    own = {"-n": 16, "--limit": None, "--category": ["a", "b c"], "--strict": True, "--memory": False}
    line = command_line("bench", [str(model), None], own, Output(svg="x.svg"))
    assert line == "ngramspec bench 'a model.gguf' -n 16 --category a --category 'b c' --strict --svg x.svg"
    adapters = LoadSettings(lora=((str(model), 1.0), ("a,b", 1.0)), lora_scaled=(("c", 0.5),))
    line = command_line("bench", [], {}, adapters)
    assert line == "ngramspec bench --lora 'a model.gguf' --lora '\"a,b\"' --lora-scaled c:0.5"
