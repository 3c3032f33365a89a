"""Tests of `ngramspec complete` as a user runs it: its input, its output, its end, and options for sampling."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from architectures.files import write_model as write_with_head
from support.cli_runner import DEMO, run, run_process, shell
from support.fake_hub import FakeHub, serve

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.fill_in import Limits, fill_in
from ngramspec.llama import crash_check
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling, options

TEXT = "".join(f"def value_{i}(self):\n    return self._value_{i}\n\n\n" for i in range(4)) + "def value_4("
SMALL = ["complete", "-t", "1", "-c", "512"]
PLAIN = [*SMALL, "--no-draft", "--exact", "off"]
TOKENS = 16
SUMMARY = re.compile(r"^\d+ tokens at [\d,.]+ tokens/s(, [^;]*)?(; seed \d+)?$", re.MULTILINE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_bytes(TEXT.encode())
    return path


def continued(target: Target, prompt: Sequence[int], tokens: int = TOKENS) -> list[str]:
    """Return the text of each token of the library's continuation without drafts."""
    target.sequences[0].clear()
    decoder = SpeculativeDecoder(target, drafter=None, exact="off")
    found = [piece for step in decoder.generate(prompt, max_tokens=tokens) for piece in step.pieces]
    assert "".join(found).strip(), "the demo model has little to say here; change the prompt"
    return found


def as_json(env: dict[str, str], *arguments: str | Path, stdin: str = "") -> dict[str, Any]:
    done = run(env, *arguments, "--json", stdin=stdin.encode()).ok()
    assert done.raw.endswith(b"\n")
    assert done.raw.count(b"\n") == 1
    return done.json


def test_complete_with_each_input_form_returns_library_text(env: dict[str, str], target: Target, file: Path) -> None:
    expected, raw = "".join(continued(target, target.vocabulary.tokenize(TEXT))), TEXT.encode()
    ways: list[tuple[list[str | Path], bytes]] = [
        ([file], b""),
        ([], raw),
        (["-"], raw),
        ([DEMO, file], b""),
        ([DEMO], raw),
        ([DEMO, "-"], raw),
        (["-f", file], b""),
        ([DEMO, "-f", file], b"not this"),
        (["-m", DEMO, file], b""),
        ([DEMO, "-p", TEXT], b"not this"),
        (["-m", DEMO, "--prompt", TEXT], b"not this"),
    ]
    for arguments, stdin in ways:
        done = run(env, *PLAIN, "-n", str(TOKENS), *arguments, stdin=stdin)
        assert (done.code, done.out) == (0, expected), arguments
        assert SUMMARY.search(done.err), done.err
        assert "stopped at the token limit (-n/--predict)" in done.err
        assert ("no model given" in done.err) == (DEMO not in arguments)


def test_complete_with_hub_model_downloads_it(env: dict[str, str], file: Path) -> None:
    repos = {"owner/repo-GGUF": {"README.md": b"hello", "m-Q8_0.gguf": DEMO.read_bytes()}}
    here = [*PLAIN, "-n", "4", "hf:owner/repo-GGUF", file]
    with serve(FakeHub(repos)) as hub:
        online = {**env, "HF_ENDPOINT": hub.url}
        mistaken = run(online, *SMALL, "hf:owner/repo-GGUF", "gone.py")
        assert hub.requests == [], "a mistake in the text costs no download"
        first = run(online, *here).ok()
        assert any("resolve" in path for _, path in hub.requests)
    assert first.raw == run(env, *PLAIN, "-n", "4", file).raw
    assert "gone.py" in mistaken.error_message


def test_complete_truncate_keeps_bos_and_end_of_text(env: dict[str, str], target: Target) -> None:
    text = TEXT * 20
    prompt = target.vocabulary.tokenize(text)
    assert prompt[:1] == target.vocabulary.tokenize(""), "the demo model has no start-of-text token"
    result = as_json(env, *PLAIN, "-n", "12", "--truncate", stdin=text)
    assert result["text"] == "".join(continued(target, prompt[:1] + prompt[-(512 - 12 - 1) :], 12))
    assert result["prompt_tokens"] == 512 - 12
    done = run(env, *PLAIN, "-c", "32", "--truncate", "--echo", "-n", "-1", stdin=text.encode())
    assert re.search(r"the text has \d+ tokens; only the last 16 are used", done.err)
    assert done.out.startswith(text)


@pytest.mark.parametrize("text", [TEXT, "naïve 👩‍🚀 \r\n漢字\tend 🙂", " \n"], ids=["code", "characters", "whitespace"])
def test_complete_echo_prints_input_bytes_and_continuation(env: dict[str, str], text: str) -> None:
    done = run(env, *PLAIN, "-n", "3", stdin=text.encode()).ok()
    assert run(env, *PLAIN, "-n", "3", "--echo", stdin=text.encode()).raw == text.encode() + done.raw
    assert as_json(env, *PLAIN, "-n", "3", stdin=text)["text"] == done.out
    assert as_json(env, *PLAIN, "-n", "3", "--echo", stdin=text)["text"] == text + done.out


def test_complete_with_ascii_stdout_replaces_characters(env: dict[str, str]) -> None:
    done = run_process({**env, "PYTHONIOENCODING": "ascii"}, *PLAIN, "-n", "1", "--echo", stdin="é 🙂".encode()).ok()
    assert done.raw.startswith(b"? ?")


@pytest.mark.parametrize("form", [[], pytest.param(["--json"], marks=pytest.mark.exhaustive)])
def test_complete_with_closed_pipe_exits_without_error(env: dict[str, str], file: Path, form: list[str]) -> None:
    done = shell(env, '"$@" | head -c 5; exit ${PIPESTATUS[0]}', *PLAIN, "-n", "200", "--echo", *form, file).ok()
    assert done.raw == (b'{"tex' if form else TEXT.encode()[:5])
    for line in done.err.splitlines():
        notes = "no model given", "token limit", crash_check.AMX_NOTE
        assert any(known in line for known in notes) or SUMMARY.match(line)


def test_complete_stops_at_token_limit_stop_string_or_context(env: dict[str, str], target: Target) -> None:
    pieces = continued(target, target.vocabulary.tokenize(TEXT))
    for count in (1, 7):
        assert run(env, *PLAIN, "-n", str(count), stdin=TEXT.encode()).out == "".join(pieces[:count])
    text = "".join(pieces)
    stop = text[9:12]
    result = as_json(env, *PLAIN, "-n", str(TOKENS), "--stop", "never in there", "--stop", stop, stdin=TEXT)
    assert (result["text"], result["stop_reason"]) == (text.partition(stop)[0], "stop")
    sampled = ["-c", "64", "-n", "-1", "--temp", "2", "--top-k", "0", "-s", "3"]
    result = as_json(env, *PLAIN, *sampled, stdin="all that fits")
    assert result["stop_reason"] == "eog" or (
        result["stop_reason"] == "context" and result["tokens"] + result["prompt_tokens"] == 64
    )


def test_the_text_ends_after_min_tokens(env: dict[str, str], target: Target) -> None:
    # A bias makes the token that ends the text the most likely one.
    end = next(token for token in range(target.vocabulary.n_vocab) if target.vocabulary.is_eog(token))
    ending = [*PLAIN, "-n", str(TOKENS), "--logit-bias", f"{end}+1000"]
    for least in (0, 5):
        result = as_json(env, *ending, "--min-tokens", str(least), stdin=TEXT)
        assert (result["stop_reason"], result["tokens"]) == ("eog", least + 1)


def test_complete_with_printed_seed_repeats_text(env: dict[str, str], file: Path) -> None:
    # At this temperature, two seeds do not give the same forty tokens by chance.
    options = [*PLAIN, "-n", "40", "--temp", "1.5", "--top-k", "0", str(file)]
    first = run(env, *options)
    seed = re.search(r"; seed (\d+)$", first.err, re.MULTILINE)
    assert seed, first.err
    again = as_json(env, *options, "-s", seed[1])
    assert (again["seed"], again["text"]) == (int(seed[1]), first.out)
    other = as_json(env, *options)
    assert other["seed"] != int(seed[1])
    assert other["text"] != first.out
    assert other["seconds"] > other["prefill_seconds"] > 0
    assert other["tokens_per_second"] > 0


def test_complete_json_with_beams_lists_all_beams(env: dict[str, str], file: Path) -> None:
    beams = [*SMALL, "-c", "2048", "-n", "24", "--beams", "3", file]
    found = as_json(env, *beams, "--no-draft")
    scores = [one["score"] for one in found["beams"]]
    assert (len(scores), scores) == (3, sorted(scores, reverse=True))
    assert all(math.isfinite(score) and score < 0 for score in scores)
    assert found["text"] == found["beams"][0]["text"]
    assert (found["target_passes"], found["drafted"]) == (found["plain_passes"], 0)
    drafted = as_json(env, *beams)
    assert drafted["target_passes"] <= drafted["plain_passes"]


BEFORE = "def cost(items):\n" + "    total = total + price(item, amount)\n" * 6
AFTER = "\n    return total\n"


@pytest.fixture
def suffix(tmp_path: Path) -> Path:
    path = tmp_path / "after.py"
    path.write_bytes(AFTER.encode())
    return path


def test_complete_suffix_prints_only_the_middle(
    env: dict[str, str], target: Target, suffix: Path, tmp_path: Path
) -> None:
    expected = "".join(continued(target, fill_in(target.vocabulary, BEFORE, AFTER)))
    before = tmp_path / "before.py"
    before.write_bytes(BEFORE.encode())
    for arguments, stdin in (
        (["-", "--suffix", suffix], BEFORE),
        ([before, "--suffix", suffix], ""),
        ([before, "--suffix", "-"], AFTER),
        (["-f", before, "--suffix", suffix], ""),
    ):
        done = run(env, *PLAIN, "-n", str(TOKENS), *arguments, stdin=stdin.encode())
        assert (done.code, done.out) == (0, expected), done.err


@pytest.mark.parametrize("form", [[], ["--beams", "2"]])
def test_complete_echo_with_suffix_prints_whole_file(env: dict[str, str], suffix: Path, form: list[str]) -> None:
    arguments = [*PLAIN, "-n", "8", *form, "--suffix", suffix]
    filled = run(env, *arguments, stdin=BEFORE.encode()).out
    assert run(env, *arguments, "--echo", stdin=BEFORE.encode()).out == BEFORE + filled + AFTER
    assert as_json(env, *arguments, stdin=BEFORE)["text"] == filled
    assert as_json(env, *arguments, "--echo", stdin=BEFORE)["text"] == BEFORE + filled + AFTER


def test_complete_suffix_accepts_one_empty_side(env: dict[str, str], suffix: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.touch()
    run(env, *PLAIN, "-n", "8", empty, "--suffix", suffix).ok()
    run(env, *PLAIN, "-n", "8", suffix, "--suffix", empty).ok()
    run(env, *PLAIN, empty, "--suffix", "-").assert_failed("the texts before and after the gap are empty")


def test_complete_truncate_with_suffix_keeps_tokens_next_to_gap(
    env: dict[str, str], target: Target, tmp_path: Path
) -> None:
    """Three quarters of the context are before the gap."""
    before, after = BEFORE * 9, AFTER * 199
    sizes = [len(target.vocabulary.tokenize(text, add_bos=False)) for text in (before, after)]
    marks = 4
    room = 512 - TOKENS - marks
    kept = (room - room // 4, room // 4)
    path = tmp_path / "long.py"
    path.write_bytes(after.encode())
    arguments = [*PLAIN, "-n", str(TOKENS), "--suffix", path]
    run(env, *arguments, stdin=before.encode()).assert_failed(
        f"the text has {sum(sizes) + marks} tokens and leaves no room for an answer in the context of 512",
        "raise -c/--ctx-size, or keep only the parts next to the gap with --truncate",
    )
    done = run(env, *arguments, "--truncate", "--json", stdin=before.encode())
    assert f"the texts have {sum(sizes)} tokens; only {kept[0]} before the gap and {kept[1]} after it" in done.err
    found = json.loads(done.out)
    assert found["prompt_tokens"] == 512 - TOKENS
    assert found["text"] == "".join(continued(target, fill_in(target.vocabulary, before, after, limits=Limits(*kept))))


def test_complete_prediction_speeds_up_and_keeps_text(env: dict[str, str], target: Target, tmp_path: Path) -> None:
    """The prediction is the demo model's answer, which the prompt does not contain, so all drafts are from it."""
    prompt = "Once upon a time"
    text = "".join(continued(target, target.vocabulary.tokenize(prompt), 24))
    predicted = tmp_path / "predicted.txt"
    predicted.write_text(text)
    usual = [*SMALL, "-n", "24", "--exact", "on", "--policy", "fixed"]
    without = as_json(env, *usual, stdin=prompt)
    given = as_json(env, *usual, "--prediction", predicted, stdin=prompt)
    assert given["text"] == without["text"]
    assert given["accepted"] > without["accepted"]
    assert given["target_passes"] < without["target_passes"]
    run(env, *SMALL, "--prediction", os.devnull).assert_failed("is empty")


def test_complete_with_huge_text_tokenizes_only_needed_part(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, sizes = Vocabulary.tokenize, list[int]()

    def tokenize(vocabulary: Vocabulary, text: str, **options: Any) -> list[int]:
        sizes.append(len(text))
        return plain(vocabulary, text, **options)

    monkeypatch.setattr(Vocabulary, "tokenize", tokenize)
    long = b"words of a text " * 80_000
    line = ["complete", str(DEMO), "-t", "1", "-c", "64", "-n", "8", "--no-draft", "--exact", "off"]
    run(env, *line, stdin=long).assert_failed("the text has more than 64 tokens and leaves no room")
    cut = run(env, *line, "--truncate", stdin=long).ok()
    assert "the text has more than 64 tokens; only the last 56 are used" in cut.err
    assert max(sizes) < len(long) / 10
    assert run(env, *line, "--truncate", stdin=long[-2000:]).ok().out == cut.out


PROMPT = b"def value_0(self):\n    return self._value_0\n\n\ndef value_1("
DRAFTED = ("-t", "1", "-c", "512", "-n", "40", "--json")


def test_bench_with_draft_model_accepts_its_drafts(env: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(PROMPT)
    options = ("--exact", "off", "--repeat", "1", "--policy", "all", "-md", tiny, "--drafter", "model", "--json", "-")
    found = run(env, "bench", tiny, *DRAFTED[:-1], "--prompts", tmp_path, *options).json
    assert found["settings"]["drafter"] == "model"
    fixed = [one for one in found["runs"] if one["policy"] == "fixed"]
    assert all(one["accepted"] == one["drafted"] > 0 for one in fixed)


def test_complete_mtp_drafts_with_nextn_layer(env: dict[str, str], tmp_path: Path) -> None:
    model = write_with_head(tmp_path / "head.gguf", "glm4moe", head=True)
    done = run(env, "complete", model, *DRAFTED, "--exact", "off", "--mtp", "--policy", "fixed", stdin=PROMPT)
    assert done.json["accepted"] > 0


AREA = b"def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return "
COMMAND = ("complete", str(DEMO), "-t", "1", "-c", "512")
SAMPLED = (*COMMAND, "--exact", "off", "--policy", "fixed")
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
    run(env, *SAMPLED, "--temp", "0.9", "-n", "4", "--trace", trace, *shlex.split(line), stdin=AREA).ok()
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
        answer = run(env, *SAMPLED, "-n", "80", "--temp", "0.8", "-s", "3", *named, stdin=AREA).json
        assert set(answer) == {"name", "wide"}
        assert isinstance(answer["wide"], bool)


def test_complete_logprobs_reports_every_token(env: dict[str, str]) -> None:
    found = run(env, *SAMPLED, "-n", "20", "--json", "--logprobs", "3", stdin=AREA).json
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
    done = run(env, *SAMPLED, "-n", "8", "--json", "--temp", "0.8", *options, stdin=AREA)
    assert done.json["lossy"] == label
    assert label is None or f"warning: {label}: drafts change the output" in done.err


def test_complete_with_entropy_policy_reports_steps(env: dict[str, str]) -> None:
    report = run(env, *COMMAND, "--exact", "off", "-n", "12", "--json", "--policy", "entropy", stdin=AREA).json
    assert len(report["steps"]) == report["target_passes"]
    assert all(0 <= step["entropy"] <= 1 and 1 <= step["gamma"] <= 16 for step in report["steps"])


def test_complete_with_slow_drafter_does_not_blame_the_text(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    slow = (
        "import time\n"
        "from ngramspec.drafting.predictor import NGramDrafter\n\n\n"
        "class Slow(NGramDrafter):\n"
        "    def propose(self, ask):\n"
        "        time.sleep(0.2)\n"
        "        return super().propose(ask)\n"
    )
    (tmp_path / "slow.py").write_text(slow)
    done = run(env, *SMALL, DEMO, file, "-n", "40", "--drafter", f"{tmp_path}/slow.py:Slow").ok()
    assert "no gain: drafting took too long" in done.err
