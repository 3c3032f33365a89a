"""`/infill` as editors send it, and `suffix` of `/v1/completions`, on a scripted engine.

`llama_vim.json` is what llama.vim sends: first to fill the cache, then for a suggestion.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_service import FakeService, Script
from support.http import asking, chunks
from support.vocabulary_files import write_vocabulary

from ngramspec.fill_in import Extra, Limits, fill_in
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.server import native
from ngramspec.server.app import make_app
from ngramspec.server.deadline import LineLimits
from ngramspec.server.infill import NEAR
from ngramspec.server.served import ServedModel, Server

VIM: dict[str, Any] = json.loads(Path(__file__).with_name("llama_vim.json").read_text("utf-8"))
ASKED: dict[str, Any] = {"input_prefix": "def f(a):\n    ", "input_suffix": "\n    return b\n"}
TEXT = "b = a\n    b += 1\n  c"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("vocabulary") / "coder.gguf"
    return Vocabulary(write_vocabulary(path, controls=["<|repo_name|>", "<|file_sep|>"]))


class Bench:
    """A server on a script."""

    def __init__(self, vocabulary: Vocabulary, script: Script | None = None, *, n_ctx: int = 512, **model: Any) -> None:
        self.service = FakeService(vocabulary, script or Script(TEXT), n_ctx=n_ctx)
        self.server = Server(model=ServedModel(self.service, vocabulary, "coder", **model))

    def post(self, path: str, fields: dict[str, Any]) -> httpx.Response:
        async def post() -> httpx.Response:
            async with asking(self.server) as client:
                return await client.post(path, json=fields)

        return asyncio.run(post())

    def ask(self, **fields: Any) -> Any:
        """The answer's JSON, or where it streams its chunks."""
        response = self.post("/infill", ASKED | fields)
        assert response.status_code == 200, response.text
        return chunks(response.text) if fields.get("stream") else response.json()

    def refusal(self, path: str = "/infill", **fields: Any) -> tuple[int, dict[str, Any]]:
        asked = (ASKED if path == "/infill" else {}) | fields
        response = self.post(path, {name: value for name, value in asked.items() if value is not ...})
        return response.status_code, response.json()["error"]


# ------------------------------------------------------------------------------------- what editors send


def test_llama_vims_suggestion(coder: Vocabulary) -> None:
    bench = Bench(coder, Script("result = 0\n    for x in basket:\n  end"), n_ctx=8192)
    asked = VIM["suggestion"]
    response = bench.post("/infill", asked)
    assert response.status_code == 200, response.text
    told = response.json()
    assert list(told) == asked["response_fields"]
    assert told["content"] == "result = 0\n    for x in basket:\n"  # the line after it is indented less
    assert told["truncated"] is False
    assert told["timings/prompt_n"] == len(bench.service.requests[0].prompt) < told["tokens_cached"]
    request = bench.service.requests[0]
    assert (request.slot, request.max_tokens, request.stop, request.cache_prompt) == (0, 128, (), True)
    sampling = request.sampling
    assert sampling.samplers == ("top_k", "top_p", "infill")
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (40, 0.9, 1.0)
    assert list(request.prompt) == fill_in(
        coder,
        asked["input_prefix"],
        asked["input_suffix"],
        prompt="    ",
        others=[Extra(item["filename"], item["text"]) for item in asked["input_extra"]],
        limits=Limits.within(8192, near=NEAR, n_predict=128),
    )


def test_llama_vim_fills_the_cache_beforehand(coder: Vocabulary) -> None:
    bench = Bench(coder)
    response = bench.post("/infill", VIM["warm_up"])
    assert (response.status_code, response.json()) == (200, {})
    assert bench.service.requests[0].max_tokens == 0
    assert bench.service.requests[0].sampling.samplers == ()


def test_what_the_cache_was_filled_with_is_the_start_of_the_next_prompt(coder: Vocabulary) -> None:
    bench = Bench(coder, n_ctx=8192)
    for name in ("warm_up", "suggestion"):
        bench.post("/infill", VIM[name] | {"input_extra": VIM["warm_up"]["input_extra"]})
    first, second = (list(request.prompt) for request in bench.service.requests)
    around = first.index(coder.fill_in_tokens.prefix or 0)
    assert around > 10
    assert second[:around] == first[:around]


def test_llama_vscodes_suggestions(coder: Vocabulary) -> None:
    """Several at once, with fields that only its own server knows."""
    told = Bench(coder).ask(n_cmpl=3, top_k=40, top_p=0.99, samplers=["top_k", "top_p", "infill"], lora=[], model="x")
    assert [one["index"] for one in told] == [0, 1, 2]
    assert {one["content"] for one in told} == {TEXT}


def test_all_is_told_where_nothing_is_chosen(coder: Vocabulary) -> None:
    told = Bench(coder).ask()
    assert (told["content"], told["stop"], told["stop_type"]) == (TEXT, True, "eos")
    assert told["timings"]["predicted_n"] == told["tokens_predicted"]


def test_a_stream(coder: Vocabulary) -> None:
    *parts, last = Bench(coder).ask(stream=True, n_indent=4)
    assert "".join(part["content"] for part in parts) == "b = a\n    b += 1\n"
    assert {part["stop"] for part in parts} == {False}
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "limit")


def test_a_file_without_a_name_and_one_with_an_empty_one(coder: Vocabulary) -> None:
    bench = Bench(coder, n_ctx=8192)
    bench.ask(input_extra=[{"text": "x = 1\n"}, {"text": "y = 2\n", "filename": "", "time": 3}])
    others = [Extra("tmp", "x = 1\n"), Extra("", "y = 2\n")]
    expected = fill_in(coder, ASKED["input_prefix"], ASKED["input_suffix"], others=others)
    assert list(bench.service.requests[0].prompt) == expected


def test_no_file_is_too_long(coder: Vocabulary) -> None:
    long = "value = value + 1\n" * 2000
    bench = Bench(coder, n_ctx=512)
    bench.ask(input_prefix=long, input_suffix=long, input_extra=[{"text": long}] * 3, n_predict=64)
    prompt = list(bench.service.requests[0].prompt)
    assert 512 // 2 < len(prompt) <= 512 - 64
    # Where much more fits, what stands round the gap is as long as in llama-server, and other files fill the rest.
    bench = Bench(coder, n_ctx=8192)
    bench.ask(input_prefix=long, input_suffix=long, input_extra=[{"text": long}] * 3, n_predict=64)
    prompt = list(bench.service.requests[0].prompt)
    marks = coder.fill_in_tokens
    at = [prompt.index(mark) for mark in (marks.prefix, marks.suffix, marks.middle) if mark is not None]
    assert (at[1] - at[0] - 1, at[2] - at[1] - 1) == (1536, 510)
    assert at[0] == 1 + 8192 - 2048 - 2048 // 8  # bos first


def test_the_suffix_first(coder: Vocabulary) -> None:
    bench = Bench(coder, n_ctx=8192, suffix_first=True)
    bench.ask()
    expected = fill_in(coder, ASKED["input_prefix"], ASKED["input_suffix"], suffix_first=True)
    assert list(bench.service.requests[0].prompt) == expected


# ------------------------------------------------------------------------------------- how a suggestion ends


def test_the_deadline_ends_it_with_a_line(coder: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token starts the time, which is over when the second comes."""
    seconds = itertools.count(step=0.02)
    monkeypatch.setattr(native, "LineLimits", partial(LineLimits, clock=lambda: next(seconds)))
    bench = Bench(coder, Script("a = 1; b = 2\nc = 3\nd = 4\n", ends=False, go=threading.Semaphore(40)))
    told = bench.ask(t_max_predict_ms=10)
    assert (told["content"], told["stop_type"], told["stopping_word"]) == ("a = 1; b = 2\n", "limit", "")
    assert bench.service.tickets[0].cancelled.is_set()


@pytest.mark.parametrize("milliseconds", [0, -1])
def test_no_deadline(coder: Vocabulary, milliseconds: int) -> None:
    assert Bench(coder).ask(t_max_predict_ms=milliseconds, t_max_prompt_ms=1)["content"] == TEXT


@pytest.mark.parametrize("step", [1, 3, 50])
def test_drafts_do_not_move_the_cut(coder: Vocabulary, step: int) -> None:
    bench = Bench(coder, Script("x\n    y\n\n    z\nmore", ends=False, step=step))
    told = bench.ask(n_indent=4)
    assert (told["content"], told["stop_type"]) == ("x\n    y\n", "limit")


def test_completion_has_the_same_rules(coder: Vocabulary) -> None:
    bench = Bench(coder, Script("x\n    y\nz", ends=True))
    told = bench.post("/completion", {"prompt": "a", "n_indent": 2}).json()
    assert (told["content"], told["stop_type"]) == ("x\n    y\n", "limit")


def test_an_editor_that_types_on_hangs_up(coder: Vocabulary) -> None:
    """A key is pressed while the prompt is read: the request ends before its first token."""
    bench = Bench(coder, Script(TEXT, begin=threading.Event()))
    body = json.dumps(ASKED | {"n_predict": 64}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/infill",
        "raw_path": b"/infill",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }
    sent: list[Any] = []

    async def hang_up() -> None:
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            while not bench.service.tickets:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await make_app(bench.server)(scope, receive, send)

    asyncio.run(hang_up())
    assert bench.service.tickets[0].ended.wait(120)
    assert bench.service.stats.generated == 0


# ------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input_prefix": ...}, "input_prefix", "input_prefix is missing"),
        ({"input_suffix": ...}, "input_suffix", "input_suffix is missing"),
        ({"input_suffix": 5}, "input_suffix", "input_suffix is 5, but must be text"),
        ({"prompt": ["a"]}, "prompt", "must be text"),
        ({"input_extra": "a"}, "input_extra", "must be a list"),
        ({"input_extra": ["a"]}, "input_extra", "must be an object"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text", "input_extra[0].text is missing"),
        ({"input_extra": [{"text": "", "filename": 3}]}, "input_extra[0].filename", "must be text"),
        ({"n_indent": -1}, "n_indent", "must be a whole number"),
        ({"n_indent": "4"}, "n_indent", "must be a whole number"),
        ({"t_max_predict_ms": "x"}, "t_max_predict_ms", "must be a whole number"),
        ({"samplers": ["infill"]}, "samplers", "samplers names infill without top_k before it"),
        ({"samplers": ["top_k", "infill"], "top_k": 0}, "top_k", "top_k is 0, but must be 1 to 256"),
        ({"prompt": "a b c d e f g h " * 200}, None, "exceeds the available context size"),
    ],
    ids=str,
)
def test_mistakes_are_told_by_field(coder: Vocabulary, fields: dict[str, Any], param: str, message: str) -> None:
    bench = Bench(coder)
    status, error = bench.refusal(**fields)
    assert status == 400
    assert error.get("param") == param
    assert message in error["message"]
    assert bench.service.requests == []


def test_a_model_that_cannot(word_vocabulary: Vocabulary) -> None:
    bench = Bench(word_vocabulary)
    for path, fields in (("/infill", {}), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
        status, error = bench.refusal(path, **fields)
        assert (status, error["type"], error["code"]) == (400, "not_supported_error", 400)  # a retry mends nothing
        assert error["message"].startswith("this model cannot fill in the middle: its vocabulary has no token for pre")


# ------------------------------------------------------------------------------------- OpenAI's suffix


@pytest.mark.parametrize("prompt", [ASKED["input_prefix"], ""])
def test_completions_with_a_suffix(coder: Vocabulary, prompt: str) -> None:
    bench = Bench(coder)
    suffix = ASKED["input_suffix"]
    asked = {"prompt": prompt, "suffix": suffix, "max_tokens": 50, "echo": True}
    told = bench.post("/v1/completions", asked).json()
    assert told["choices"][0]["text"] == prompt + TEXT
    expected = fill_in(coder, prompt, suffix)
    assert list(bench.service.requests[0].prompt) == expected
    assert told["usage"]["prompt_tokens"] == len(expected)


def test_an_empty_suffix_is_none(coder: Vocabulary) -> None:
    bench = Bench(coder)
    bench.post("/v1/completions", {"prompt": "abc", "suffix": ""})
    assert list(bench.service.requests[0].prompt) == coder.tokenize("abc", special=True)


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {}], ids=str)
def test_a_suffix_goes_with_one_text(coder: Vocabulary, fields: dict[str, Any]) -> None:
    status, error = Bench(coder).refusal("/v1/completions", suffix="b", **fields)
    assert (status, error["param"], error["message"]) == (400, "suffix", "suffix goes with one prompt that is text")
