"""`ngramspec replay` as a user runs it: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import DEMO, Done, run, run_signalled
from support.vocabulary_files import write_vocabulary

from ngramspec.cost.given import CURVES
from ngramspec.drafting import DEFAULT, REMEMBERING

LIST = "".join(f"- item {i} of the list is called name_{i}\n" for i in range(12))
CODE = "".join(f"def get_{n}(self):\n    return self.{n}\n\n" for n in ("width", "height", "depth", "weight"))


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


def failed(done: Done, *words: str, code: int = 1) -> None:
    assert (done.code, done.raw) == (code, b""), done.err
    for word in words:
        assert word in done.complaint


def document(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.raw)
    return found


# --------------------------------------------------------------------------- what comes out


def test_the_report(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(env, "replay", talks, "--curve", "cpu-1.5b-q4_0", "--curve", "flat", "--json", out)
    assert done.code == 0, done.err
    for words in ("Curve cpu-1.5b-q4_0: measured", "Curve flat: ", "copy-", "calibration error", "overall", "macro"):
        assert words in done.out
    assert "demo model" in done.err
    found = json.loads(out.read_text())
    assert found["complete"]
    assert found["transcripts"] == 4
    assert found["categories"] == {"talks": 1, "copy": 1, "code": 2}
    assert set(found["results"]) == {f"{DEFAULT}@cpu-1.5b-q4_0", f"{DEFAULT}@flat"}
    for name in ("cpu-1.5b-q4_0", "flat"):
        rows = found["results"][f"{DEFAULT}@{name}"]
        assert list(rows) == ["talks", "copy", "code", "overall", "macro"]
        for row in rows.values():
            assert {"tokens", "passes", "tokens_per_pass", "acceptance", "no_draft_share", "speedup"} <= set(row)
            assert set(row["speedup"]) == {"cpu-1.5b-q4_0", "flat"}
        assert rows["overall"]["tokens"] == found["decode_tokens"]
        assert rows["copy"]["speedup"][name] > 1.2
        assert rows["copy"]["speedup"][name] < found["oracle"]["copy"][name]["oracle_copy1"]
    assert f"{found['results'][f'{DEFAULT}@flat']['copy']['speedup']['flat']:.3f}x" in done.out


def test_stdin_and_json_on_stdout(env: dict[str, str], talks: Path) -> None:
    done = run(env, "replay", "-", "--curve", "flat", "--json", "-", "--no-oracle", stdin=talks.read_bytes())
    found = document(done)
    assert found["categories"] == {"stdin": 1, "copy": 1, "code": 2}
    assert found["oracle"] is None


def test_without_a_curve_it_says_so(env: dict[str, str], talks: Path) -> None:
    done = run(env, "replay", talks, "--json", "-")
    assert list(document(done)["curves"]) == ["flat"]
    assert "flat" in done.err


def test_files_limits_and_drafting_options(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.txt"
    pairs.write_text(f"=== prompt\n{LIST}=== response\n{LIST}")
    mine = tmp_path / "mine.json"
    mine.write_text('{"1": 1.0, "4": 1.5, "5": 3.0}')
    options = ["--limit", "1", "--policy", "fixed", "--draft-max", "3", "--drafter", "ngram", "--curve", mine]
    found = document(run(env, "replay", talks, pairs, *options, "--json", "-"))
    assert found["categories"] == {"talks": 1, "copy": 1, "code": 1, "pairs": 1}
    assert found["results"]["ngram@mine"]["overall"]["max_draft"] == 3
    assert found["curves"]["mine"]["64"] == pytest.approx(3.0 + 59 * 1.5)


def test_a_curve_in_a_file_may_charge_changes_of_size(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"free": {"1": 1.0, "64": 2.0}, "charged": {"1": 1.0, "64": 2.0, "switch": 0.3}}')
    done = run(env, "replay", talks, "--curve", mine, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert done.code == 0, done.err
    assert "charged" in (tmp_path / "out.html").read_text("utf-8")
    assert done.out.count("; a change of size: 0.30\n") == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["curves"]["charged"]["switch"] == 0.3
    assert "switch" not in found["curves"]["free"]
    free, charged = (found["results"][f"{DEFAULT}@{name}"]["overall"]["speedup"] for name in ("free", "charged"))
    assert 1.0 < charged["charged"] < free["free"]
    assert charged["charged"] > free["charged"], "who knows of the charge changes less"


def test_names_from_a_file_cannot_command_the_terminal(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(talk("a", "hello hello", category="[/red]\x1b[31m"))
    done = run(env, "replay", path)
    assert done.code == 0, done.err
    assert "[/red]\u241b[31m" in done.out
    assert "\x1b" not in done.out


def test_memory(env: dict[str, str], talks: Path) -> None:
    done = run(env, "replay", talks, "--memory", "on", "--json", "-")
    if DEFAULT in REMEMBERING:
        assert document(done)["settings"]["memory"] == "on"
    else:
        failed(done, "cannot remember", code=2)


def test_vocabularies(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    whole = write_vocabulary(tmp_path / "whole.gguf")
    bare = write_vocabulary(tmp_path / "bare.gguf", template=False, chatml=False)
    by_default = document(run(env, "replay", talks, "--json", "-"))
    for vocabulary in (DEMO, whole):
        found = document(run(env, "replay", talks, "--vocab", vocabulary, "--json", "-"))
        assert found["prompt_tokens"] == by_default["prompt_tokens"]
    done = run(env, "replay", talks, "--vocab", bare, "--json", "-")
    assert document(done)["prompt_tokens"] > by_default["prompt_tokens"]
    assert "no chat template" in done.err


def test_the_measured_curve_of_a_model(env: dict[str, str], talks: Path) -> None:
    found = document(run(env, "replay", talks, "--model", DEMO, "-c", "1024", "-t", "1", "--json", "-"))
    assert list(found["curves"]) == ["measured"]
    assert found["vocabulary"] == found["model"] == str(DEMO)


def test_timed(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--model", DEMO, "--timed", "-c", "1024", "-t", "1", "--curve", "flat", "--json", out]
    done = run(env, "replay", talks, *options)
    assert done.code == 0, done.err
    assert "what was accepted is the record's word, not the model's" in done.out
    assert "measured: " in done.out
    found = json.loads(out.read_text())
    assert found["timed"]["measured"] > 0
    assert set(found["results"]) == {f"{DEFAULT}@timed", f"{DEFAULT}@flat"}
    rows = found["results"][f"{DEFAULT}@timed"]
    assert rows["overall"]["tokens"] == found["decode_tokens"]
    assert all(row["measured_speedup"] > 0 for row in rows.values())


def test_timed_leaves_out_what_does_not_fit(env: dict[str, str], talks: Path) -> None:
    done = run(env, "replay", talks, "--model", DEMO, "--timed", "-c", "128", "-t", "1", "--json", "-")
    assert 0 < document(done)["transcripts"] < 4
    assert "too long for a context of 128 tokens" in done.err
    failed(run(env, "replay", talks, "--model", DEMO, "--timed", "-c", "16"), "no conversation fits", "--ctx-size")


# --------------------------------------------------------------------------- what is wrong


def test_broken_lines_are_named_and_counted(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [talk("a", "hello hello"), "{", talk("b", ""), '{"messages": 3, "response": "x"}', talk("c", "good day")]
    path.write_text("\n".join(lines))
    done = run(env, "replay", path, "--json", "-")
    found = document(done)
    assert found["transcripts"] == 2
    assert found["skipped"] == {"broken": 2, "empty": 1}
    assert "log.jsonl, line 2: not valid JSON" in done.err
    assert "log.jsonl, line 4: messages is not a list" in done.err
    assert "skipped: 2 broken, 1 without a response; conversations left: 2" in done.err
    failed(run(env, "replay", path, "--strict"), "log.jsonl, line 2: not valid JSON")


def test_many_broken_lines_are_not_all_named(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("{\n" * 50 + talk("a", "hello hello"))
    done = run(env, "replay", path, "--json", "-")
    assert document(done)["skipped"]["broken"] == 50
    assert done.err.count("not valid JSON") == 10
    assert "50 broken" in done.err


def test_nothing_to_replay(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("{\n" + talk("b", ""))
    failed(run(env, "replay", path), "no conversation to replay", "1 broken, 1 without a response")
    path.write_text("")
    failed(run(env, "replay", path), "no conversation to replay", "log.jsonl")
    failed(run(env, "replay", "-"), "no conversation to replay")


def test_files_that_cannot_be_read(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    failed(run(env, "replay", talks, tmp_path / "gone.jsonl"), "gone.jsonl", "No such file")
    failed(run(env, "replay", tmp_path), str(tmp_path), "directory")
    failed(run(env, "replay", talks, "--vocab", tmp_path / "gone.gguf"), "gone.gguf")
    failed(run(env, "replay", talks, "--vocab", talks), "talks.jsonl", "looks like a text file")
    failed(run(env, "replay", talks, "--model", tmp_path / "gone.gguf"), "gone.gguf")
    failed(run(env, "replay", talks, "--json", tmp_path / "gone" / "out.json"), "cannot write")


def test_wrong_options(env: dict[str, str], talks: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"1": 1.0, "2": -1.0}')
    flat = tmp_path / "flat.json"
    flat.write_text('{"1": 1.0}')
    for options, words in (
        (["--curve", "round"], ("no curve 'round'", *CURVES)),
        (["--curve", bad], ("bad.json", "a batch of 2 costs -1.0")),
        (["--curve", "flat", "--curve", flat], ("another curve called flat",)),
        (["--drafter", "psychic"], ("'psychic'", "ngram")),
        (["--policy", "psychic"], ("'psychic'", "cost")),
        (["--memory", "maybe"], ("--memory",)),
        (["--limit", "0"], ("--limit",)),
        (["--draft-max", "64"], ("--draft-max",)),
        (["--timed"], ("--timed", "--model")),
        (["--timed", "--model", DEMO, "--vocab", DEMO], ("--timed", "--vocab")),
        (["-t", "2"], ("--model",)),
    ):
        failed(run(env, "replay", talks, *options), *words, code=2)
    failed(run(env, "replay"), "FILE", code=2)


def test_chatml_takes_any_role(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "tool", "content": "4"}], "response": "four is 4"}))
    assert document(run(env, "replay", path, "--json", "-"))["transcripts"] == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(env: dict[str, str], talks: Path, tmp_path: Path, number: int, code: int) -> None:
    """The signal comes in the second conversation: the first one's figures are not lost."""
    out = tmp_path / "out.json"
    done = run_signalled(env, "generation", number, "replay", talks, "--json", out)
    assert done.code == code
    assert "INCOMPLETE: stopped after 1 of 4 conversations" in done.out
    found = json.loads(out.read_text())
    assert (found["complete"], found["transcripts"]) == (False, 1)
    assert found["results"][f"{DEFAULT}@flat"]["overall"]["tokens"] == found["decode_tokens"] > 0


def test_interrupted_before_anything_was_replayed(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(talk("Write getters", CODE))
    done = run_signalled(env, "generation", signal.SIGINT, "replay", path, "--json", "-")
    assert done.code == 130
    found = json.loads(done.raw)
    assert (found["complete"], found["transcripts"], found["oracle"]) == (False, 0, {})
    assert run_signalled(env, "generation", signal.SIGINT, "replay", path).code == 130
