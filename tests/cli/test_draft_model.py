"""Tests of draft models on the command line: another model with `-md`, the model's own layer with `--mtp`."""

from __future__ import annotations

from pathlib import Path

from architectures.files import write_model as write_with_head
from support.cli_runner import DEMO, run

PROMPT = b"def value_0(self):\n    return self._value_0\n\n\ndef value_1("
SMALL = ("-t", "1", "-c", "512", "-n", "40", "--json")


def test_bench_with_draft_model_accepts_its_drafts(env: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(PROMPT)
    options = ("--exact", "off", "--repeat", "1", "--policy", "all", "-md", tiny, "--drafter", "model", "--json", "-")
    found = run(env, "bench", tiny, *SMALL[:-1], "--prompts", tmp_path, *options).json
    assert found["settings"]["drafter"] == "model"
    fixed = [one for one in found["runs"] if one["policy"] == "fixed"]
    assert all(one["accepted"] == one["drafted"] > 0 for one in fixed)


def test_draft_model_that_is_unusable_fails_with_one_line(env: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    for command, model, words in (
        (["complete", tiny], tmp_path / "gone.gguf", "gone.gguf"),
        (["complete", tiny], DEMO, "their vocabularies differ at token"),
        (["serve", tiny, "--port", "0"], tmp_path / "gone.gguf", "gone.gguf"),
    ):
        run(env, *command, "-t", "1", "-c", "256", "-md", model, stdin=PROMPT).assert_failed(words)


def test_complete_mtp_drafts_with_nextn_layer(env: dict[str, str], tmp_path: Path) -> None:
    model = write_with_head(tmp_path / "head.gguf", "glm4moe", head=True)
    done = run(env, "complete", model, *SMALL, "--exact", "off", "--mtp", "--policy", "fixed", stdin=PROMPT)
    assert done.json["accepted"] > 0
