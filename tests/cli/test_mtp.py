"""`--mtp`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from architectures.files import write_model
from support.cli_runner import DEMO, run
from support.tiny_models import write_model as write_tiny

OPTIONS = ["-t", "1", "-c", "256", "-n", "40", "--exact", "off", "--json", "--temp", "0"]


def test_the_model_drafts_for_itself(env: dict[str, str], tmp_path: Path) -> None:
    model = write_model(tmp_path / "head.gguf", "glm4moe", head=True)
    plain = run(env, "complete", model, "--no-draft", *OPTIONS, stdin=b"def f(x):")
    done = run(env, "complete", model, "--mtp", "--policy", "fixed", *OPTIONS, stdin=b"def f(x):")
    assert (plain.code, done.code) == (0, 0), done.err
    told = json.loads(done.out)
    assert told["text"] == json.loads(plain.out)["text"]
    assert told["accepted"] > 0
    assert "does not draft for itself" not in done.err


def test_a_model_without_such_a_layer_is_drafted_for_in_the_usual_way(env: dict[str, str], tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "llama.gguf", "llama")
    done = run(env, "complete", model, "--mtp", *OPTIONS, stdin=b"abc")
    assert done.code == 0
    assert "the model does not draft for itself: its file holds no NextN layer" in done.err


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--no-draft"], "--mtp is for drafts; leave out --no-draft"),
        (
            ["--drafter", "ngram"],
            "with --mtp a model drafts, beside mixture, or alone",
        ),
        (["-md", "smollm2"], "-md and --mtp exclude each other"),
        (["--beams", "2"], "--beams drafts in a way of its own; leave out --mtp"),
    ],
)
def test_options_that_exclude_it(env: dict[str, str], others: list[str], message: str) -> None:
    done = run(env, "complete", DEMO, "--mtp", *others, stdin=b"abc")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
