"""`-md`: a model that drafts, as a user names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from ngramspec_cli.complete_beams import check_beams
from ngramspec_cli.options import DraftOptions
from support.cli_runner import DEMO, run
from support.tiny_models import write_model

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.sampling.settings import Sampling

PROMPT = "def value_0(self):\n    return self._value_0\n\n\ndef value_1("
SMALL = ("-t", "1", "-c", "512", "--exact", "on")
TWIN = ("-md", str(DEMO), "-td", "1")
ALONE = (*TWIN, "--drafter", "model")


def test_a_model_that_drafts_for_itself_is_always_right(env: dict[str, str]) -> None:
    said = []
    for drafts in (("--no-draft",), (*ALONE, "--policy", "fixed"), (*TWIN, "--policy", "fixed")):
        done = run(env, "complete", str(DEMO), *SMALL, "-s", "3", "-n", "40", "--json", *drafts, stdin=PROMPT.encode())
        assert done.code == 0, done.err
        said.append(json.loads(done.out))
    plain, drafted, both = said
    assert drafted["text"] == both["text"] == plain["text"]
    assert both["drafted"] > 0
    assert drafted["accepted"] == drafted["drafted"] > 20
    assert drafted["target_passes"] < 0.5 * plain["target_passes"]


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


def test_bad_models_and_places_are_a_line(env: dict[str, str], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", "llama")
    complete = ("complete", str(DEMO), "-t", "1", "-c", "256", "-n", "4", "--temp", "0")
    serve = ("serve", str(DEMO), "-t", "1", "-c", "256", "--port", "0")
    for arguments, said in (
        ((*complete, "-md", str(tmp_path / "gone.gguf")), "gone.gguf"),
        ((*complete, "-md", str(other)), "their vocabularies differ, at token"),
        ((*serve, "-md", str(tmp_path / "gone.gguf")), "gone.gguf"),
        ((*serve, "-md", str(other)), "their vocabularies differ, at token"),
        ((*serve, "-md", str(DEMO), "--no-draft"), "leave out --no-draft"),
        ((*serve, "-td", "1"), "name it with -md"),
    ):
        done = run(env, *arguments, stdin=PROMPT.encode())
        assert done.code != 0
        assert done.out == ""
        assert said in done.complaint
        assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threads_draft": 2}, "name it with -md"),
        ({"gpu_layers_draft": 0}, "name it with -md"),
        ({"draft_model": "m.gguf", "no_draft": True}, "leave out --no-draft"),
        ({"draft_model": "m.gguf", "drafter": "ngram"}, "leave out --drafter"),
        ({"draft_model": "m.gguf", "drafter": "model", "memory": "mine"}, "looks at no memory"),
        ({"draft_model": "m.gguf", "mtp": True}, "exclude each other"),
        ({"drafter": "model"}, "name it with -md"),
    ],
)
def test_options_that_contradict_each_other(
    options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        DraftOptions(**options)
    assert said in capsys.readouterr().err


def test_beams_take_no_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        check_beams(Sampling(), Acceptance(), DraftOptions(draft_model="m.gguf"), {}, exact=False)
    assert "leave out --draft-model" in capsys.readouterr().err
