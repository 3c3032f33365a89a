"""Tests of the comparison with a running server: the requests, the speed of the responses, and the server's errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import DEMO, run
from support.mock_target import Clock, MockTarget
from support.wsgi import serve_wsgi

from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.data import NGramSpecError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.instruments.benchmark.against import RemoteServer, against_report, compare, compare_answers
from ngramspec.instruments.prompts import Case
from ngramspec.sampling.settings import Sampling

Reply = tuple[int, bytes]
PROMPT = (1, 2, 3, 1, 2)
TIMINGS = {"predicted_n": 5, "predicted_ms": 2000.0}


@contextmanager
def server(reply: Callable[[str, dict[str, Any]], Reply]) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Run a server that responds with `reply`; yield its address and the requests it receives."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def answer(request: dict[str, Any], begin: Callable[..., Any]) -> list[bytes]:
        asked.append((request["PATH_INFO"], json.loads(request["wsgi.input"].read(int(request["CONTENT_LENGTH"])))))
        status, raw = reply(*asked[-1])
        begin(f"{status} of a test", [("Content-Length", str(len(raw)))])
        return [raw]

    with serve_wsgi(answer) as url:
        yield url, asked


def native(_path: str, _body: dict[str, Any]) -> Reply:
    return 200, json.dumps({"content": "abc", "timings": TIMINGS}).encode()


def openai_only(path: str, _body: dict[str, Any]) -> Reply:
    if path != "/v1/completions":
        return 404, b"{}"
    chunks = [{"choices": [{"text": text}]} for text in ("a", "", "bc")]
    chunks.append({"choices": [], "usage": {"completion_tokens": 4}})
    return 200, b"".join(b"data: %s\n\n" % json.dumps(c).encode() for c in chunks) + b"data: [DONE]\n\n"


def test_rival_with_native_api_sends_tokens_and_returns_server_time() -> None:
    with server(native) as (url, asked):
        answer = RemoteServer(url + "/v1/", MockTarget()).ask(PROMPT, 5, Sampling(0.8, seed=7))
    assert answer == ("abc", 5, 2.0)
    path, body = asked[0]
    assert path == "/completion"
    assert body["prompt"] == list(PROMPT)
    assert (body["n_predict"], body["cache_prompt"], body["temperature"], body["seed"]) == (5, False, 0.8, 7)


def test_rival_with_openai_api_sends_text_and_streams() -> None:
    with server(openai_only) as (url, asked):
        rival = RemoteServer(url, MockTarget())
        first, second = (rival.ask(PROMPT, 5, Sampling()) for _ in range(2))
    assert first[:2] == second[:2] == ("abc", 4)
    assert [path for path, _ in asked] == ["/completion", "/v1/completions", "/v1/completions"]
    assert asked[1][1]["prompt"] == "bcdbc"
    assert asked[1][1]["stream"] is True


def test_rival_with_failing_server_raises_clear_error() -> None:
    for reply, words in (
        ((401, b"no key"), "returned status 401: no key"),
        ((404, b""), "neither /completion nor /v1/completions"),
        ((200, b"<html>"), "without text or timings"),
    ):
        with server(lambda *_, reply=reply: reply) as (url, _), pytest.raises(NGramSpecError, match=words):
            RemoteServer(url, MockTarget()).ask(PROMPT, 5, Sampling())
    # The last server has stopped.
    with pytest.raises(NGramSpecError, match=f"{url} does not respond"):
        RemoteServer(url, MockTarget()).ask(PROMPT, 5, Sampling())


def test_compare_alternates_sides_and_sends_each_prompt_once() -> None:
    clock, order = Clock(), list[str]()
    target = MockTarget(seconds=lambda n: 0.5, clock=clock)

    class Ours(SpeculativeDecoder):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            order.append("ours")
            return super().generate(*arguments, **options)

    def reply(path: str, body: dict[str, Any]) -> Reply:
        order.append("theirs")
        return native(path, body)

    decoder = Ours(target, drafter=None, times=make_fixed_curve({1: 1.0}), clock=clock.perf_counter)
    cases = [Case("kind", str(i), (*PROMPT, i)) for i in range(3)]
    with server(reply) as (url, asked):
        pairs = list(compare(decoder, RemoteServer(url, target), cases, 5, Sampling()))
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert [tuple(body["prompt"]) for _, body in asked] == [case.tokens for case in cases]
    assert target.prefill_sizes == [6, 6, 6]
    assert [one["ours"]["tokens_per_second"] for one in pairs] == pytest.approx([2.0] * 3, rel=0.01)
    assert [one["ratio"] for one in pairs] == pytest.approx([1.0] * 3, rel=0.01)
    notes = [against_report(url, "c", [], pairs, total).notes for total in (3, 4)]
    assert notes == [[], ["INCOMPLETE: stopped after 3 of 4 prompts"]]
    # The prompt's time includes the first token, and a text of one token has no speed.
    found = compare_answers(cases[0], ("ab", 5, 2.0), ("a", 1, 0.0))
    assert (found["ours"]["tokens_per_second"], found["ratio"]) == (2.0, None)


def test_bench_against_compares_speeds(env: dict[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for name in ("a.txt", "b.txt"):
        (prompts / name).write_text(f"It was a dark night in {name}")
    bench = ["bench", DEMO, "--prompts", prompts, "-n", "5", "-t", "1", "-c", "256", "--against"]
    with server(native) as (url, asked):
        done = run(env, *bench, url, "--json", tmp_path / "found.json")
        assert done.code == 0, done.err
        assert len(asked) == 3  # one check of the server, and each prompt once
        assert "ngramspec, compared with this server: no difference that these runs can show: " in done.out
        table = [line.split() for line in done.out.splitlines() if line.startswith(("prompts ", "overall "))]
        assert [row[:3] for row in table] == [["prompts", "2", "2.0"], ["overall", "2", "2.0"]]
        assert table[0][-3:] == ["0", "of", "2"]
    told = json.loads((tmp_path / "found.json").read_text())
    assert [compare_answers["theirs"]["tokens_per_second"] for compare_answers in told["pairs"]] == [2.0, 2.0]
    assert "does not respond" in run(env, *bench, url).error_message
