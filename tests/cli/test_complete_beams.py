"""`ngramspec complete --beams`, as a user types it."""

from __future__ import annotations

import json
import math

import pytest
from support.cli_runner import DEMO, run

LINE = "    total = total + price(item, amount)\n"
TEXT = ("def cost(items):\n" + LINE * 6).encode()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--temp 0.5", "samples none; leave out --temp"),
        ("--repeat-penalty 1.2", "scores texts by the model alone"),
        ("--acceptance match", "accepts drafts in one way only"),
        ("--drafter ngram", "leave out --drafter"),
        ("--policy fixed", "leave out --policy"),
        ("--logprobs 1 --json", "leave out --logprobs"),
        ("--trace t.jsonl", "leave out --trace"),
        ("--exact on", "--exact on is for one text at a time"),
    ],
)
def test_what_beam_search_cannot_heed_is_refused(env: dict[str, str], arguments: str, complaint: str) -> None:
    done = run(env, "complete", DEMO, "--beams", "2", "-n", "4", "-t", "1", *arguments.split(), stdin=TEXT)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.complaint


def test_more_than_the_context_holds_is_refused(env: dict[str, str]) -> None:
    done = run(env, "complete", DEMO, "--beams", "40", "-n", "100", "-c", "2048", "-t", "1", stdin=TEXT)
    assert (done.code, done.out) == (1, "")
    assert "40 beams of 100 tokens after a prompt of" in done.complaint
    assert "which holds 2048; try -c" in done.complaint


def test_one_beam_is_greedy_decoding(env: dict[str, str]) -> None:
    arguments = ["complete", DEMO, "-n", "24", "-t", "1", "--no-draft"]
    assert run(env, *arguments, "--beams", "1", stdin=TEXT).out == run(env, *arguments, stdin=TEXT).out


def test_the_object_tells_all_beams(env: dict[str, str]) -> None:
    arguments = ["complete", DEMO, "--beams", "3", "-n", "24", "-t", "1", "--json"]
    found = json.loads(run(env, *arguments, "--no-draft", stdin=TEXT).out)
    assert len(found["beams"]) == 3
    scores = [one["score"] for one in found["beams"]]
    assert scores == sorted(scores, reverse=True)
    assert all(math.isfinite(score) and score < 0 for score in scores)
    assert found["text"] == found["beams"][0]["text"]
    assert found["target_passes"] == found["plain_passes"]
    assert found["drafted"] == 0
    drafted = json.loads(run(env, *arguments, stdin=TEXT).out)
    assert drafted["target_passes"] <= drafted["plain_passes"]
