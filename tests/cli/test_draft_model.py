"""`-md`: a model that drafts, as a user names it."""

from __future__ import annotations

import json
from pathlib import Path

from support.cli_runner import DEMO, run
from support.tiny_models import write_model

PROMPT = "def value_0(self):\n    return self._value_0\n\n\ndef value_1("
SMALL = ("-t", "1", "-c", "512", "--exact", "on")
TWIN = ("-md", str(DEMO), "-td", "1")
ALONE = (*TWIN, "--drafter", "model")


def test_a_model_that_drafts_for_itself_is_always_right(env: dict[str, str]) -> None:
    said = []
    for drafts in (("--no-draft",), (*ALONE, "--policy", "fixed"), TWIN):
        done = run(env, "complete", str(DEMO), *SMALL, "-s", "3", "-n", "40", "--json", *drafts, stdin=PROMPT.encode())
        assert done.code == 0, done.err
        said.append(json.loads(done.out))
    plain, drafted, both = said
    assert drafted["text"] == both["text"] == plain["text"]
    assert both["drafted"] > 0
    assert drafted["accepted"] == drafted["drafted"] > 20
    assert drafted["target_passes"] < 0.5 * plain["target_passes"]


def test_chat_answers_the_same(env: dict[str, str]) -> None:
    answers = [
        run(env, "chat", str(DEMO), *SMALL, "--temp", "0", "-n", "12", *drafts, stdin=b"hello\nand again\n").out
        for drafts in ((), (*TWIN, "--policy", "fixed"))
    ]
    assert answers[0] == answers[1] != ""


def test_verify_and_bench_draft_with_it(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(PROMPT)
    more = ("--prompts", str(tmp_path), "-t", "1", "-c", "512", "-n", "8", "--json", "-", *ALONE)
    verified = run(env, "verify", str(DEMO), *more, "--seconds", "1")
    assert verified.code == 0, verified.err
    assert json.loads(verified.out)["settings"]["drafter"] == "model"
    bench = run(env, "bench", str(DEMO), *more, "--repeat", "1", "--policy", "all")
    assert bench.code == 0, bench.err
    found = json.loads(bench.out)
    assert found["settings"]["drafter"] == "model"
    fixed = [one for one in found["runs"] if one["policy"] == "fixed"]
    assert all(one["accepted"] == one["drafted"] > 0 for one in fixed)


def test_bad_input_is_a_line(env: dict[str, str], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", "llama")
    complete = ("complete", str(DEMO), "-t", "1", "-c", "256", "-n", "4", "--temp", "0")
    for arguments, said in (
        ((*complete, "-md", str(tmp_path / "gone.gguf")), "gone.gguf"),
        ((*complete, "-md", str(other)), "their vocabularies differ, at token"),
        ((*complete, "-td", "2"), "name it with -md"),
        ((*complete, "-ngld", "2"), "name it with -md"),
        ((*complete, "--drafter", "model"), "name it with -md"),
        ((*complete, "-md", str(DEMO), "--no-draft"), "leave out --no-draft"),
        ((*complete, "-md", str(DEMO), "--drafter", "ngram"), "leave out --drafter"),
        ((*complete, "-md", str(DEMO), "--beams", "2"), "leave out --draft-model"),
        (("serve", str(DEMO), "-md", str(DEMO)), "No such option: -m"),
        (("verify", str(DEMO), "-md", str(DEMO), "--drafter", "ngram"), "leave out --drafter"),
    ):
        done = run(env, *arguments, stdin=PROMPT.encode())
        assert done.code != 0
        assert done.out == ""
        assert said in done.complaint
