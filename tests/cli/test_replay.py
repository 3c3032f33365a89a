"""Tests of `ngramspec replay` as a user runs it: its output, its files and its errors."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import DEMO, run
from support.model_files import write_vocabulary
from support.pages import Page, markdown_table, read_svg_words, report_files
from support.signals import by_signal, signal_after

from ngramspec.drafting import DEFAULT

LIST = "".join(f"- item {i} of the list is called name_{i}\n" for i in range(12))
CODE = "".join(f"def get_{n}(self):\n    return self.{n}\n\n" for n in ("width", "height", "depth", "weight"))
ON_MODEL = ["-t", "1", "-c", "1024", "--model"]


def talk(question: str, answer: str, **more: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": question}], "response": answer, **more})


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    lines = [
        talk("Hello", "Hi"),
        talk("Repeat:\n" + LIST, LIST, category="copy"),
        talk("Write getters", CODE, category="code"),
        talk("Shorter:\n" + CODE, CODE[:60], category="code"),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_replay_with_two_curves_prints_report_and_writes_json(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(env, "replay", talks, "--curve", "cpu-1.5b-q4_0", "--curve", "flat", "--json", out).ok()
    assert all(words in done.out for words in ("on the curve cpu-1.5b-q4_0: measured", "on the curve flat: "))
    assert "demo model" in done.err
    found = json.loads(out.read_text())
    assert (found["complete"], found["transcripts"]) == (True, 4)
    assert found["categories"] == {"talks": 1, "copy": 1, "code": 2}
    assert set(found["results"]) == {f"{DEFAULT}@cpu-1.5b-q4_0", f"{DEFAULT}@flat"}
    for name in ("cpu-1.5b-q4_0", "flat"):
        rows = found["results"][f"{DEFAULT}@{name}"]
        assert list(rows) == ["talks", "copy", "code", "overall"]
        for row in rows.values():
            assert {"tokens", "passes", "tokens_per_pass", "acceptance", "no_draft_share", "speedup"} <= set(row)
            assert set(row["speedup"]) == {"cpu-1.5b-q4_0", "flat"}
        assert rows["overall"]["tokens"] == found["decode_tokens"]
        assert rows["copy"]["speedup"][name] > 1.2
    assert f"{found['results'][f'{DEFAULT}@flat']['copy']['speedup']['flat']:.3f}x" in done.out


def test_replay_of_stdin_without_curve_uses_flat_curve(home: dict[str, str], talks: Path) -> None:
    done = run(home, "replay", "-", "--json", "-", "--memory", "on", stdin=talks.read_bytes())
    found = done.json
    assert found["categories"] == {"stdin": 1, "copy": 1, "code": 2}
    assert (found["settings"]["memory"], list(found["curves"])) == ("on", ["flat"])
    assert "using the cost curve flat: an upper bound" in done.err
    assert "simulated with the cost curve flat (an upper bound: " in found["headline"]


def test_replay_applies_limit_and_drafting_options(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    pairs, mine, out = tmp_path / "pairs.txt", tmp_path / "mine.json", tmp_path / "out.json"
    pairs.write_text(f"=== prompt\n{LIST}=== response\n{LIST}")
    mine.write_text('{"free": {"1": 1.0, "4": 1.5, "5": 3.0}, "charged": {"1": 1.0, "64": 2.0, "switch": 0.3}}')
    options = ["--limit", "1", "--policy", "fixed", "--draft-max", "3", "--drafter", "ngram", "--curve", mine]
    done = run(env, "replay", talks, pairs, *options, "--json", out, "--html", tmp_path / "out.html").ok()
    assert done.out.count(" A change of size: 0.30.\n") == 1
    assert "charged" in (tmp_path / "out.html").read_text("utf-8")
    found = json.loads(out.read_text())
    assert found["categories"] == {"talks": 1, "copy": 1, "code": 1, "pairs": 1}
    assert found["results"]["ngram@free"]["overall"]["max_draft"] == 3
    assert found["curves"]["free"]["64"] == pytest.approx(3.0 + 59 * 1.5)
    assert found["curves"]["charged"]["switch"] == 0.3
    assert "switch" not in found["curves"]["free"]


def test_replay_escapes_control_characters_in_names(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    # Many templates reject this role too, but ChatML, which applies here, accepts any role.
    said = {"messages": [{"role": "tool", "content": "4"}], "response": "four is 4", "category": "[/red]\x1b[31m"}
    path.write_text(json.dumps(said))
    done = run(env, "replay", path).ok()
    assert "[/red]\u241b[31m" in done.out
    assert "\x1b" not in done.out


def test_replay_with_vocab_uses_its_template_or_a_default(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    whole = write_vocabulary(tmp_path / "whole.gguf")
    bare = write_vocabulary(tmp_path / "bare.gguf", template=False, chatml=False)
    usual = run(env, "replay", talks, "--json", "-").json["prompt_tokens"]
    assert run(env, "replay", talks, "--vocab", whole, "--json", "-").json["prompt_tokens"] == usual
    done = run(env, "replay", talks, "--vocab", bare, "--json", "-")
    assert done.json["prompt_tokens"] > usual
    assert "no chat template" in done.err


def test_replay_with_model_measures_its_curve_and_uses_it_later(
    home: dict[str, str], talks: Path, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    found = run(home, "replay", talks, *ON_MODEL, tiny, "--json", "-").json
    assert list(found["curves"]) == ["measured"]
    assert found["vocabulary"] == found["model"] == str(tiny)
    measured = f"the cost curve measured ({tiny.name} on this machine, 1 thread; other programs used "
    assert measured in found["headline"]
    later = run(home, "replay", talks, "--vocab", tiny, "--json", out, "--markdown").ok()
    found = json.loads(out.read_text())
    assert (list(found["curves"]), found["model"]) == (["measured"], None)
    assert f"the cost curve measured ({tiny.name} on this machine)**" in later.out
    named = run(home, "replay", talks, "--vocab", tiny, "--curve", "flat", "--json", "-").json
    assert list(named["curves"]) == ["flat"]


def test_replay_with_broken_lines_names_ten_and_counts_all(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [talk("a", "hello hello"), "{", talk("b", ""), '{"messages": 3, "response": "x"}', talk("c", "good day")]
    path.write_text("\n".join([*lines, *["{"] * 50]))
    done = run(env, "replay", path, "--json", "-")
    found = done.json
    assert (found["transcripts"], found["skipped"]) == (2, {"broken": 52, "empty": 1})
    assert "log.jsonl, line 2: not valid JSON" in done.err
    assert "log.jsonl, line 4: messages is not a list" in done.err
    assert done.err.count("log.jsonl, line ") == 10
    assert "skipped: 52 broken, 1 without a response; conversations left: 2" in done.err
    run(env, "replay", path, "--strict").assert_failed("log.jsonl, line 2: not valid JSON")


def test_replay_rejects_invalid_models_and_curves(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    bad, flat = tmp_path / "bad.json", tmp_path / "flat.json"
    bad.write_text('{"1": 1.0, "2": -1.0}')
    flat.write_text('{"1": 1.0}')
    run(env, "replay", talks, "--vocab", talks).assert_failed("talks.jsonl", "looks like a text file")
    run(env, "replay", talks, "--curve", bad).assert_failed(
        "bad.json", "a batch of 2 must be finite and above 0, got -1.0", code=2
    )
    run(env, "replay", talks, "--curve", "flat", "--curve", flat).assert_failed("already a curve named flat", code=2)


@by_signal
def test_replay_when_interrupted_reports_partial_results(
    env: dict[str, str], talks: Path, tmp_path: Path, number: int, code: int
) -> None:
    """The signal arrives in the second conversation; the results of the first one are kept."""
    out = tmp_path / "out.json"
    with signal_after(number):
        done = run(env, "replay", talks, "--curve", "flat", "--json", out)
    assert done.code == code
    assert "INCOMPLETE: stopped after 1 of 4 conversations" in done.out
    found = json.loads(out.read_text())
    assert (found["complete"], found["transcripts"]) == (False, 1)
    assert found["results"][f"{DEFAULT}@flat"]["overall"]["tokens"] == found["decode_tokens"] > 0


def test_replay_when_interrupted_early_reports_no_conversations(env: dict[str, str], tmp_path: Path) -> None:
    path, out = tmp_path / "log.jsonl", tmp_path / "out.json"
    path.write_text(talk("Write getters", CODE))
    with signal_after(signal.SIGINT):
        done = run(env, "replay", path, "--json", out)
    assert (done.code, "stopped after 0 of 1 conversations" in done.out) == (130, True)
    found = json.loads(out.read_text())
    assert (found["complete"], found["transcripts"]) == (False, 0)


def test_replay_shared_formats_equal_its_json_and_omit_texts(env: dict[str, str], tmp_path: Path) -> None:
    options, written = report_files(tmp_path)
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
