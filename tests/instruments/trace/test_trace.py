"""Tests of traces: writing and reading, the file during a generation, and `ngramspec trace` as a user runs it."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import DEMO, run, shell
from support.mock_target import MockTarget

from ngramspec.acceptance.rules import TokenDecision
from ngramspec.acceptance.verifier import Acceptance
from ngramspec.data import NGramSpecError, encode
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Draft
from ngramspec.instruments.trace import (
    CONTEXT,
    TracedPass,
    TraceHeader,
    TraceWriter,
    read_trace,
)
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats, Step

HOT = Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)
HOW: dict[str, tuple[Sampling, Acceptance]] = {
    "greedy": (Sampling(), Acceptance()),
    "coupled": (HOT, Acceptance()),
    "rejection": (HOT, Acceptance("rejection")),
    "lenient greedy": (Sampling(), Acceptance(lenience=0.2)),
    "lenient rejection": (HOT, Acceptance(lenience=0.5)),
    "typical": (HOT, Acceptance(typical=True)),
}
HEADER = TraceHeader(
    model="m\x1b[31m",
    sampling=encode({"temperature": 0.8, "top_k": 40, "seed": 7}),
    acceptance="coupled",
    lossy="typical acceptance",
    drafter="ngram",
    policy="fixed",
    program="ngramspec 9",
)


def records(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return list(read_trace(file))


def made(target: Any, path: Path, prompt: Sequence[int], how: str, n: int = 120, **options: Any) -> list[Step]:
    """Run a generation with a trace, and check that each line is written at once."""
    sampling, verify = HOW[how]
    decoder = SpeculativeDecoder(target, policy="fixed", draft_max=6, calibration_folder=path.parent)
    steps = []
    path.write_text("something older")
    with TraceWriter(path) as trace:
        trace.begin(prompt, target.vocabulary.piece, TraceHeader.of(decoder, "some model", sampling, verify))
        options |= {"sampling": sampling, "acceptance": verify, "return_decisions": True}
        for step in decoder.generate(prompt, max_tokens=n, **options):
            trace.add(step)
            steps.append(step)
            assert path.read_bytes().count(b"\n") == 1 + len(steps)
    return steps


class HalfCharacters(MockTarget):
    """Target in which every other token is an incomplete character."""

    def piece(self, token: int) -> bytes:
        return bytes([0xC3 if token % 2 else 97 + token])


@pytest.mark.parametrize("how", HOW)
def test_trace_of_generation_contains_every_step(how: str, tmp_path: Path) -> None:
    path, prompt, target = tmp_path / "t.jsonl", [5, 6, 7, 8, 9] * 4, HalfCharacters(12, peak=4.0)
    steps = made(target, path, prompt, how, logprobs=2)
    header, *found = records(path)
    assert isinstance(header, TraceHeader)
    assert (header.model, header.drafter, header.policy) == ("some model", "mixture", "fixed")
    assert header.acceptance in how
    assert bool(header.lossy) == (how not in ("greedy", "coupled", "rejection"))
    assert any(done.step.correct_guesses for done in found)
    text = list(prompt)
    for done, step in zip(found, steps, strict=True):
        draft = step.verified_draft
        for token, q, kept in zip(draft.tokens, draft.q, done.step.verified_draft.q, strict=bool(draft.q)):
            assert [kept[t] for t in list(kept)[:5]] == sorted(q.values(), reverse=True)[:5]
            assert kept[token] == q[token]
            assert all(q[t] == kept[t] for t in kept)
        assert replace(done.step, verified_draft=replace(done.step.verified_draft, q=draft.q)) == step
        assert done.context == tuple(text[-CONTEXT:])
        assert done.texts == {token: target.piece(token) for token in done.texts}
        assert done.texts.keys() >= {*done.context, *step.tokens, *draft.tokens, *(e.token for e in step.logprobs)}
        text += step.tokens
    stats = Stats()
    for step in steps:
        stats.add(step)
    assert 0 < stats.accepted < stats.drafted


def test_trace_round_trips_values_that_json_lacks(tmp_path: Path) -> None:
    path, token = tmp_path / "t.jsonl", TokenDecision(3, None, 1.0, {"margin": float("inf"), "slack": float("-inf")})
    step = Step((3,), ("é",), position=4, decisions=(token,), policy_details={"entropy": 0.5, "gamma": 3})
    raws = (b"", b" the", b"\n\x1b\0", "é€😀".encode(), b"\xc3", b"\xa9 x", b"\xff\xfe", "\ufffd".encode())
    with TraceWriter(path) as trace:
        for raw in raws:
            # A command line may contain bytes that are not valid text.
            trace.begin([3], lambda _token, raw=raw: raw, replace(HEADER, model="m\udcff"))  # type: ignore[misc]
            trace.add(step)
    header, *found = records(path)
    assert header.model == "m?"
    assert found == [TracedPass(step, (3,), {3: raw}) for raw in raws]
    assert path.read_bytes().isascii()
    line = json.loads(path.read_text().splitlines()[1])
    always = ["position", "batch", "seconds", "tokens", "pieces"]
    assert list(line) == [*always, "policy_details", "decisions", "context", "texts"]
    assert line["decisions"][0]["why"] == {"margin": "inf", "slack": "-inf"}


def test_trace_header_of_generation_describes_its_settings(tmp_path: Path) -> None:
    plain = SpeculativeDecoder(MockTarget(), drafter=None, exact="on", calibration_folder=tmp_path)
    header = TraceHeader.of(plain, "m", Sampling(0.5, logit_bias=((3, float("-inf")),)), Acceptance())
    assert (header.drafter, header.policy, header.acceptance, header.lossy) == ("", "cost", "coupled", None)
    assert header.exact
    assert (header.sampling["temperature"], header.sampling["logit_bias"]) == (0.5, [[3, "-inf"]])
    with pytest.raises(ValueError, match="temperature"):
        TraceHeader.of(plain, "m", Sampling(0.5), Acceptance("greedy"))


def test_trace_writer_rejects_step_without_decisions(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as trace:
        with pytest.raises(ValueError, match="begin"):
            trace.add(Step((1,), ("",)))
        trace.begin([1], lambda _token: b"", HEADER)
        with pytest.raises(ValueError, match="return_decisions=True"):
            trace.add(Step((1,), ("",)))


def test_trace_writer_writes_header_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    step = Step((3,), ("d",), position=1, stop="length", decisions=(TokenDecision(3, None, 1.0, {}),))
    other = replace(HEADER, sampling={"temperature": 0.8, "seed": 8})
    with TraceWriter(path) as trace:
        for header in (HEADER, HEADER, other):
            trace.begin([1], MockTarget().piece, header)
            trace.add(step)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # it contains texts
    first, *passes, second, last = records(path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", first.date)
    assert (replace(first, date=""), replace(second, date="")) == (HEADER, other)
    assert [done.context for done in (*passes, last)] == [(1,)] * 3


def test_trace_writer_rejects_unwritable_path(tmp_path: Path) -> None:
    for name, words in (("none/t", "No such file"), (".", "directory"), ("a\0b", "null")):
        with pytest.raises(NGramSpecError, match=f"^cannot write the trace .*{words}"):
            TraceWriter(tmp_path / name)
    if os.path.exists("/dev/full"):
        with pytest.raises(NGramSpecError, match="No space left"), TraceWriter("/dev/full") as trace:
            trace.begin([1], MockTarget().piece, HEADER)


HEAD = json.dumps({"ngramspec_trace": 3, **encode(HEADER)}).encode() + b"\n"
OWN = {"token": 1, "accepted": None, "p": 1.0, "why": {}}
PASS = {"tokens": [1], "position": 3, "batch": 1, "seconds": 0.5, "decisions": [OWN]}
NO_HEADERS = (b"hello\n", b"GGUF\x03\0\xff\n", b"[]\n", b'{"messages": []}\n', HEAD[:-20], b'{"ngramspec_trace": 3}\n')


def test_read_trace_rejects_file_that_is_not_a_trace() -> None:
    for lines, words in (
        ([], "empty"),
        ([b"\n", b" \n"], "empty"),
        *(([raw], "line 1 is (not a header|a model|not UTF-8)") for raw in (*NO_HEADERS, b"[" * 100_000)),
        ([json.dumps(PASS).encode()], "the header is missing"),
        ([HEAD.replace(b'_trace": 3', b'_trace": 1')], "has format 1, but this version of ngramspec reads format 3"),
    ):
        with pytest.raises(NGramSpecError, match=words):
            list(read_trace(lines))


WRONG: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, f"{name}: ")
        for name, value in {"seconds": None, "tokens": 1, "decisions": 1, "stop": "x"}.items()
    ),
    ({"position": 3.5}, "position: "),
    ({"tokens": ["x"]}, "tokens.0: "),
    ({"decisions": [{"token": 1}]}, "decisions.0.accepted: Field required"),
    ({"decisions": [{**OWN, "accepted": True, "why": {"u": []}}]}, "decisions.0.why.u: "),
    ({"logprobs": [{"token": 1, "logprob": 1, "top": [[1]]}]}, "logprobs.0.top.0.1: "),
    ({"verified_draft": {"tokens": [1], "q": [{"x": 1}]}}, "verified_draft.q.0.x"),
    ({"context": ["x"]}, "'context' is not"),
    ({"texts": {"1": 1}}, "'texts' is not"),
    ({"texts": {"1": "\ud800"}}, "surrogates not allowed"),
]


def test_read_trace_names_and_skips_invalid_line() -> None:
    reasons = [(json.dumps(PASS | change).encode(), reason) for change, reason in WRONG]
    reasons += [(raw, "") for raw in (b'{"position": 3}', b"\xff", b"{" * 9, b"1e999", b"[" * 100_000, b"9" * 9999)]
    reasons.append((b"[]", "Input should be a dictionary"))
    head = HEAD.replace(json.dumps(HEADER.model).encode(), b'"\\ud800"')
    for raw, reason in reasons:
        header, broken, done = read_trace([head, raw + b"\n", json.dumps(PASS | {"new": 1}).encode() + b"\n"])
        assert header.model == "?"
        assert not isinstance(broken, TraceHeader | TracedPass)
        number, told, cut = broken
        assert (number, cut) == (2, False)
        assert reason in told
        assert "\n" not in told
        assert isinstance(done, TracedPass)


PIECES = {0: b"one", 1: b" two", 2: b"\xe2\x82", 3: b"\xac", 4: b"\n\t\r\x1b[31m[bold]", 5: b"", 6: "漢字".encode()}


def judged(token: int, accepted: bool | None = None, **why: float) -> TokenDecision:
    return TokenDecision(token, accepted, 0.25, why)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """Return one pass of each kind."""
    law = {1: 0.5, 4: 0.125, 0: 0.375}
    draft = Draft((0, 1, 4, 2), (law,) * 4, (2, 3, 4, 5), (), (0.75, 0.5, 0.4, 0.3), "ngram")
    refused = (judged(0, True, u=0.125, q=0.375), judged(1, False, u=0.875), judged(6))
    kept = (judged(2, True), judged(3, True), judged(5))
    late = (judged(1, True, **{"\x1b[2J": 1.0}), judged(1, True), judged(0, False), judged(6))
    both, three = Draft((2, 3), source="x"), Draft((1, 1, 0))

    def step(position: int, tokens: Sequence[int], texts: Sequence[str], sent: Sequence[int], **more: Any) -> Step:
        sizes = {"drafted": tuple(sent), "batch": 1 + len(sent), "position": position}
        return Step(tuple(tokens), tuple(texts), **{"source": "ngram", **sizes, **more})

    first = {"policy_details": {"entropy": 0.5, "gamma": 4}, "seconds": 0.0123}
    held = {"source": "ngram+grammar", "seconds": 0.002}
    end = {"source": "my/drafter.py:ngram", "stop": "stop", "stop_string": "\nwo"}
    steps = [
        Step((0,), ("one",), position=3, seconds=0.5, decisions=(judged(0),)),
        step(4, [0, 6], ["one", "漢字"], draft.tokens, accepted=1, verified_draft=draft, decisions=refused, **first),
        Step((4,), ("\n",), position=6, batch=1, seconds=0.001, elapsed=0.5, decisions=(judged(4),)),
        step(7, [2, 3, 5], ["", "€", ""], [2, 3], accepted=2, verified_draft=both, decisions=kept, **held),
        # The grammar forbids this token, so it is refused without being sent.
        step(10, [1], [""], [], verified_draft=Draft((0,)), decisions=(judged(0, False), judged(1))),
        step(11, [1], [" t"], [1, 1, 0], accepted=1, verified_draft=three, decisions=late, **end),
    ]
    path = tmp_path / "sample.jsonl"
    with TraceWriter(path) as trace:
        trace.begin([0, 2, 3], PIECES.__getitem__, HEADER)
        for each in steps:
            trace.add(each)
    return path


PLAIN = """\
     3     0   500.0  prefill                      one€ [>one]
     4     5    12.3  ngram                     one€one [+one][- two][.⏎⇥␍␛[31m[bold]][.\\xe2\\x82][>漢字]
     6     1     1.0  -                  one€oneone漢字 [>⏎⇥␍␛[31m[bold]]
     7     3     2.0  ngram+grammar oneone漢字⏎⇥␍␛[31m[bold] [+\\xe2\\x82][+\\xac][><5>]
    10     1     0.0  ngram    neone漢字⏎⇥␍␛[31m[bold]€ [-one][> two]
    11     4     0.0  ngram    e漢字⏎⇥␍␛[31m[bold]€ two [+ two][~ two][~one]  end: stop '\\nwo'
"""


def test_trace_in_pipe_prints_one_marked_line_per_step(env: dict[str, str], sample: Path) -> None:
    done = run(env, "trace", sample)
    assert (done.code, done.err) == (0, "")
    head, columns, *passes, total = done.out.splitlines()
    how = "temperature 0.8, seed 7; acceptance coupled; CHANGES THE OUTPUT: typical acceptance; "
    assert head.startswith(f"m␛[31m; {how}")
    assert "drafter ngram, policy fixed; 20" in head
    assert head.endswith("; ngramspec 9")
    assert columns.split() == ["pos", "batch", "ms", "source", "context", "draft", "and", "own", "token"]
    assert passes == PLAIN.splitlines()
    assert total.startswith("passes: 5, 2 of them without a draft; 9 tokens at ")
    counts = "44% of 9 draft tokens accepted; accepted: ngram 2 of 7, ngram+grammar 2 of 2"
    assert total.endswith(f"; 1.60 tokens per pass; {counts}")
    lines = run(env, "trace", "--numbers", sample).out.splitlines()[2:-1]
    assert [line for line in lines if not line.startswith(" " * 9)] == passes
    numbers = [line.strip() for line in lines if line.startswith(" " * 9)]
    assert numbers[1:5] == [
        "entropy 0.5, maximum draft length 4",
        '+ "one"  p 0.25, q 0.375, u 0.125, expected 0.75, match 2',
        '- " two"  p 0.25, q 0.5, u 0.875, expected 0.5, match 3',
        '> "漢字"  p 0.25',
    ]
    assert numbers.count('- "one"  p 0.25, forbidden by the grammar, not verified') == 1
    assert numbers[-3:] == ['+ " two"  p 0.25, ␛[2J 1', '~ " two"  p 0.25', '~ "one"  p 0.25']


def test_trace_at_terminal_prints_colours(env: dict[str, str], sample: Path) -> None:
    env = {k: v for k, v in env.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color", "COLUMNS": "80"}
    # This makes rich assume a terminal; a pseudo-terminal would require a separate process.
    env["FORCE_COLOR"] = "1"
    shown = run(env, "trace", sample).out.splitlines()
    assert len(shown) == 9
    green, red, dim_red, blue, end = "\x1b[32m", "\x1b[9;31m", "\x1b[2;9;31m", "\x1b[94m", "\x1b[0m"
    assert shown[3].endswith(f"{green}one{end}{red} two{end}{dim_red}⏎⇥␍␛[31m[bold]\\xe2\\x82{end}{blue}漢字{end}")
    assert f"\x1b[2m         one€one{end} " in shown[3]
    # Several tokens of one character are displayed as one character.
    assert shown[5].endswith(f"{green}€{end}{blue}<5>{end}")
    assert shown[7].endswith(f"{green} two{end}\x1b[2m twoone{end}\x1b[2m  end: stop '\\nwo'{end}")
    assert run({**env, "NO_COLOR": "1"}, "trace", sample).out.splitlines()[2:-1] == PLAIN.splitlines()


CODE = "def get_width(self):\n    return self.width\n\ndef get_height(self):\n    return self.height\n\ndef get_"


def test_numbers_show_why_a_draft_had_its_length(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    options = ["-t", "1", "-c", "512", "-n", "60", "--temp", "0", "--exact", "off", "--trace", path]
    text = run(env, "complete", *options, DEMO, stdin=CODE.encode()).ok().out
    done = run(env, "trace", path, "--numbers").ok()
    first, *passes = [item.step for item in records(path) if isinstance(item, TracedPass)]
    assert "".join(step.text for step in (first, *passes)) == text
    assert done.out.count(" reason: ") == len(passes)
    assert all(len(step.drafted) <= int(step.policy_details.get("planned", 0)) for step in passes)
    costs = r"  P\((\d+)\) \S+, T\(\d+\) (\S+), V\(\d+\) \S+  <- planned"
    planned = [step.policy_details for step in passes if "V(0)" in step.policy_details]
    shown = [(int(length), float(cost)) for length, cost in re.findall(costs, done.out)]
    assert [length for length, _ in shown] == [details["planned"] for details in planned] != []
    for (_, cost), details in zip(shown, planned, strict=True):
        assert cost <= float(details["cap"]) + 1e-3
        assert f"lambda {details['lambda']:.4g}, cap {details['cap']:.4g}" in done.out


def test_trace_rejects_missing_or_invalid_files(env: dict[str, str], tmp_path: Path) -> None:
    none = tmp_path / "none"
    for done, words, code in (
        (run(env, "trace", none), f"cannot read {none}: No such file or directory", 1),
        (run(env, "trace", DEMO), "demo.gguf: this is not a trace", 1),
        (run(env, "trace", "-"), "standard input: this is not a trace: it is empty", 1),
        (shell(env, '"$@" <&-', "trace", "-"), "no trace on standard input", 2),
    ):
        assert (done.code, done.raw) == (code, b""), done.err
        assert words in done.error_message


def test_trace_with_broken_lines_names_them_and_prints_the_rest(env: dict[str, str], sample: Path) -> None:
    lines = sample.read_bytes().splitlines(keepends=True)
    lines[2:2] = [b"nonsense\n"] * 12
    lines[-2] = lines[-2].replace(b'"tokens"', b'"ducats"', 1)
    sample.write_bytes(b"".join(lines)[:-30])
    done = run(env, "trace", sample)
    shown = done.out.splitlines()
    assert (done.code, len(shown)) == (0, 2 + 4 + 1)
    assert shown[-1].startswith("passes: 3, ")
    assert done.err.splitlines() == [
        *(f"{sample}: skipped line {number}: it is not valid JSON" for number in range(3, 13)),
        f"warning: {sample}: line 19, the last one, is incomplete; its writer was interrupted",
        f"{sample}: skipped 13 broken lines in total",
    ]


def test_trace_with_incomplete_text_or_newer_format_reports_it(env: dict[str, str], sample: Path) -> None:
    lines = sample.read_bytes().splitlines(keepends=True)
    sample.write_bytes(b"".join(lines[:-1]))
    done = run(env, "trace", sample)
    assert (done.code, len(done.out.splitlines())) == (0, 8)
    assert done.err == f"{sample}: the last text is incomplete; its generation was interrupted or is still running\n"
    sample.write_bytes(b"".join([*lines, lines[0].replace(b'_trace":3', b'_trace":9')]))
    done = run(env, "trace", sample)
    assert (done.code, len(done.out.splitlines())) == (1, 9)
    assert done.error_message == f"{sample}: the trace has format 9, but this version of ngramspec reads format 3"
