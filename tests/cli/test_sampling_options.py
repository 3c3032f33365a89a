"""Tests of the options for sampling and acceptance, as a user types them."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import DEMO, run

from ngramspec.sampling.settings import Sampling, options

TEXT = b"def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return "
COMMAND = ("complete", str(DEMO), "-t", "1", "-c", "512")
DRAFTED = (*COMMAND, "--exact", "off", "--policy", "fixed")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "wide": {"type": "boolean"}},
    "required": ["name", "wide"],
}


TOGETHER: list[dict[str, Any]] = [
    {"repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "repeat_last_n": -1},
    {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": 9},
    {"typical_p": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.4, "dynatemp_exponent": 1.2},
    {"top_n_sigma": 1.5, "top_k": 30, "top_p": 0.5, "min_p": 0.1, "seed": 7, "grammar": "root ::= [a-z]+"},
    {"mirostat": 2, "mirostat_eta": 0.2, "mirostat_tau": 3.0},
]
"""Compatible settings, which are typed unchanged."""

PARSED = {
    "--samplers 'temperature;top-k;dry'": {"samplers": ["temperature", "top_k", "dry"]},
    "--dry-multiplier 1 --dry-sequence-breaker none": {"dry_sequence_breakers": []},
    "-l 40-inf --logit-bias 50+2": {"logit_bias": [[40, "-inf"], [50, 2.0]]},
}


FLAGS = {name: known.flags[0] for name, known in options(Sampling).items()}
TYPED = PARSED | {shlex.join(word for n, v in some.items() for word in (FLAGS[n], str(v))): some for some in TOGETHER}
"""Options and their resulting settings."""


@pytest.mark.parametrize(("line", "settings"), TYPED.items())
def test_complete_passes_each_sampling_option_to_sampler(
    env: dict[str, str], tmp_path: Path, line: str, settings: dict[str, Any]
) -> None:
    trace = tmp_path / "trace.jsonl"
    run(env, *DRAFTED, "--temp", "0.9", "-n", "4", "--trace", trace, *shlex.split(line), stdin=TEXT).ok()
    found = json.loads(trace.read_text().splitlines()[0])["sampling"]
    assert {name: found[name] for name in settings} == settings
    assert found["temperature"] == 0.9


def test_sampling_option_cases_cover_every_field() -> None:
    tried = {name for settings in TYPED.values() for name in settings}
    assert tried | {"temperature"} == {field.name for field in fields(Sampling)}


def test_complete_with_json_schema_returns_matching_json(env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for named in (["--json-schema", json.dumps(SCHEMA)], ["-jf", file]):
        answer = run(env, *DRAFTED, "-n", "80", "--temp", "0.8", "-s", "3", *named, stdin=TEXT).json
        assert set(answer) == {"name", "wide"}
        assert isinstance(answer["wide"], bool)


def test_complete_logprobs_reports_every_token(env: dict[str, str]) -> None:
    found = run(env, *DRAFTED, "-n", "20", "--json", "--logprobs", "3", stdin=TEXT).json
    assert len(found["logprobs"]) == found["tokens"]
    for one in found["logprobs"]:
        assert bytes(one["bytes"]).decode("utf-8", "replace") == one["token"]
        assert len(one["top_logprobs"]) == 3
        # In greedy decoding, the token itself is the most likely.
        assert one["top_logprobs"][0]["logprob"] == one["logprob"]
        assert sum(math.exp(top["logprob"]) for top in one["top_logprobs"]) <= 1
    assert found["text"] == "".join(one["token"] for one in found["logprobs"])


@pytest.mark.parametrize(
    ("options", "label"),
    [(["--lenience", "0.5"], "lenience 0.5"), (["--typical-acceptance"], "typical acceptance"), ([], None)],
)
def test_complete_with_lossy_acceptance_labels_output(
    env: dict[str, str], options: list[str], label: str | None
) -> None:
    done = run(env, *DRAFTED, "-n", "8", "--json", "--temp", "0.8", *options, stdin=TEXT)
    assert done.json["lossy"] == label
    assert label is None or f"warning: {label}: drafts change the output" in done.err


def test_complete_with_entropy_policy_reports_steps(env: dict[str, str]) -> None:
    report = run(env, *COMMAND, "--exact", "off", "-n", "12", "--json", "--policy", "entropy", stdin=TEXT).json
    assert len(report["steps"]) == report["target_passes"]
    assert all(0 <= step["entropy"] <= 1 and 1 <= step["gamma"] <= 16 for step in report["steps"])
