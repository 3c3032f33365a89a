"""Tests of every endpoint with a scripted engine: responses are as llama-server's clients expect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from support.fake_service import Script
from support.http import CHAT, ask, demo_vocabulary, get_error, make_server, send

from ngramspec.batching.request import Report, Slot
from ngramspec.data import GrammarError, ShutdownError, TargetError
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.request import Request
from ngramspec.sampling.distribution import BadLogits, NoTokenLeft
from ngramspec.sampling.settings import Sampling
from ngramspec.server.state import Counters, Server
from ngramspec.steps import Stats

CHATS, TEXTS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
TEXT = "Hello, world"


def request_of(path: str, body: dict[str, Any], script: Script | None = None) -> Request:
    """Return the request that reaches the engine."""
    _, service = ask(path, body, script)
    (request,) = service.requests
    return request


def test_chat_completions_with_n_uses_a_seed_per_choice() -> None:
    texts = {0: "", 1: "", 2: ""}
    chunks, service = ask(CHATS, CHAT | {"n": 3, "seed": 7, "stream": True})
    assert sorted(request.sampling.seed for request in service.requests) == [7, 8, 9]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == dict.fromkeys(range(3), TEXT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a a🙂 a", "a<|im_end|>b", "é", [1, "é"], ["a", 7, "<|im_end|>", "ab"], ""])
@pytest.mark.parametrize("is_sentencepiece", [False, True])
def test_completions_text_offsets_are_characters_of_returned_text(
    prompt: Any, is_sentencepiece: bool, stream: bool, word_vocabulary: Vocabulary
) -> None:
    vocabulary = word_vocabulary if is_sentencepiece else demo_vocabulary()
    tokens = vocabulary.tokenize("a 🙂 bc é", add_bos=False)
    answer = b"".join(map(vocabulary.piece, tokens)).decode()  # with SentencePiece it begins with a space
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream}
    told, service = ask(TEXTS, body, Script("a 🙂 bc é", step=3), vocabulary=vocabulary)
    choices = [chunk["choices"][0] for chunk in told] if stream else told["choices"]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    echoed = "".join(choice["text"] for choice in choices).removesuffix(answer)
    if isinstance(prompt, str):
        assert echoed == prompt
    expected = []
    read = vocabulary.display_piece if isinstance(prompt, str) else vocabulary.piece
    for text, pieces in (
        (echoed, list(map(read, service.requests[0].prompt))),
        (answer, list(map(vocabulary.piece, tokens))),
    ):
        n_before = len(b"".join(pieces)) - len(text.encode())  # bytes that the text lacks at its start
        ends = [max(0, sum(map(len, pieces[:i])) - n_before) for i in range(len(pieces))]
        expected += [
            (text is answer) * len(echoed) + len(text.encode()[:end].decode("utf-8", "ignore")) for end in ends
        ]
    assert offsets == expected


def test_completion_decodes_prompt_only_for_responses_with_prompt() -> None:
    with mock.patch("ngramspec.server.reply.prompt_text", return_value="text") as prompt_text:
        for names, count in ((["content", "prompt/x"], 0), (["prompt"], 1), ([], 2)):
            told, _ = ask(NATIVE, {"prompt": "x", "response_fields": names})
            assert (told.get("prompt"), prompt_text.call_count) == ("text" if count else None, count)


def test_completion_joins_prompt_parts_of_text_and_tokens() -> None:
    vocabulary = demo_vocabulary()
    end = vocabulary.tokenize("<|im_end|>", special=True, add_bos=False)
    assert len(end) == 1
    prompt = request_of(NATIVE, {"prompt": ["ab", 7, "<|im_end|>"]}).prompt
    assert list(prompt) == [*vocabulary.tokenize("ab"), 7, *end]
    assert isinstance(ask(NATIVE, {"prompt": ["ab", "cd"]})[0], list)
    assert list(request_of(NATIVE, {"prompt": {"prompt_string": "ab"}}).prompt) == vocabulary.tokenize("ab")


def sampling_of(body: dict[str, Any], defaults: tuple[Sampling, int] | None = None) -> Sampling:
    server, service = make_server()
    if defaults is not None:
        server.sampling, server.seed = defaults
    response = send(server, NATIVE, {"prompt": "x"} | body)
    assert response.status_code == 200, response.text
    return service.requests[0].sampling


def test_completion_uses_server_defaults_and_random_seeds() -> None:
    seeds = {sampling_of({"seed": seed}).seed for seed in (None, -1)} | {sampling_of({}).seed}
    assert len(seeds) == 3
    defaults = Sampling(temperature=0.5, xtc_probability=0.5), 11
    chosen = sampling_of({}, defaults)
    assert (chosen.seed, chosen.temperature, chosen.xtc_probability) == (11, 0.5, 0.5)
    assert sampling_of({"temperature": 0}, defaults).xtc_probability == 0


@pytest.mark.parametrize("length", [1000, 2_000_000])
def test_serve_rejects_too_long_prompt_with_known_error_code(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "word " * length
    if length > 1000:  # It is not even tokenized.
        monkeypatch.setattr(demo_vocabulary(), "tokenize", None)
    messages = {"messages": [{"role": "user", "content": long}]}
    for path, said in ((CHATS, messages), (TEXTS, {"prompt": long}), (NATIVE, {"prompt": [1, long]})):
        error = get_error(path, said | {"stream": path != TEXTS})
        assert (error["code"], error["type"]) == ("context_length_exceeded", "exceed_context_size_error")
        tokens = f"({error['n_prompt_tokens']} tokens) exceeds the available context size ({error['n_ctx']} tokens)"
        assert tokens in error["message"]
        assert "this model's maximum context length is 512 tokens" in error["message"]


def test_serve_engine_errors_are_http_errors_before_stream_start() -> None:
    memory, grammar = TargetError("out of memory"), GrammarError("no grammar")
    for script, status, kind in (
        (Script(start_error=grammar), 400, "invalid_request_error"),
        (Script(start_error=ValueError("no")), 400, "invalid_request_error"),
        (Script(start_error=ShutdownError("shutting down")), 503, "unavailable_error"),
        (Script(error=memory, after=0), 500, "server_error"),
        (Script(error=NoTokenLeft("no token is left"), after=0), 400, "invalid_request_error"),
        (Script(error=BadLogits("the logit of token 3 is nan"), after=0), 500, "server_error"),
    ):
        for path, body in ((CHATS, CHAT), (TEXTS, {"prompt": "x"})):
            for stream in (False, True):
                response = send(make_server(script)[0], path, body | {"stream": stream})
                assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    response = send(make_server(Script(error=grammar))[0], TEXTS, {"prompt": "x"})
    assert response.json()["error"]["param"] == "grammar"
    for error, status, kind in ((memory, 500, "api_error"), (ShutdownError("bye"), 503, "overloaded_error")):
        response = send(make_server(Script(start_error=error))[0], "/v1/messages", CHAT | {"max_tokens": 9})
        answer = response.json()
        assert (response.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    told, _ = ask(CHATS, CHAT | {"stream": True}, Script(error=memory, after=2))
    assert told[1]["choices"][0]["delta"]["content"]
    assert told[-1] == {"error": {"code": 500, "message": "out of memory", "type": "server_error"}}


def test_serve_rejects_body_that_is_not_a_valid_request() -> None:
    server, service = make_server()
    for raw in (
        b"",
        b"{",
        b"[]",
        b"nul",
        b"\xff\xfe{}",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "x"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b"9" * 10_000 + b"}",
        '{"prompt": "\ud800"}'.encode("utf-16-le", "surrogatepass"),
        '{"prompt": "\ud800"}'.encode("utf-8", "surrogatepass"),
    ):
        response = send(server, NATIVE, content=raw)
        assert response.status_code == 400, raw[:40]
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert service.tickets == []


@pytest.mark.parametrize("told", [True, False])
def test_serve_rejects_body_larger_than_limit(told: bool) -> None:
    server, _ = make_server()
    server.max_body_bytes = 100

    async def body() -> Any:
        for _ in range(11):
            yield b" " * 10

    assert send(server, NATIVE, content=b" " * 101 if told else body()).status_code == 413


def test_serve_returns_503_while_model_loads_or_server_drains() -> None:
    server = Server()
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", NATIVE)):
        response = send(server, path, {"prompt": "x"} if method == "POST" else None, method)
        expected = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        assert (response.status_code, response.json()) == (503, {"error": expected})
    server.model = make_server()[0].model
    assert send(server, "/health", method="GET").json() == {"status": "ok"}
    server.draining = True
    assert send(server, NATIVE, {"prompt": "x"}).status_code == 503
    assert send(server, "/api/chat", CHAT).json() == {"error": "the server is shutting down"}


def test_slots_describes_requests_without_their_text() -> None:
    server, service = make_server()
    secret = Sampling(0.3, grammar='root ::= "secret"')
    request = Request([5] * 7, 60, secret, ("secret",))
    slots = (Slot(0, 26, request, 12, 7, 3, 20, new_line=True), Slot(1, 26))
    slots += (Slot(2, 26, replace(request, max_tokens=512), 13, 7, 3, 20),)
    with mock.patch.object(service, "report", return_value=Report(slots, 0, Stats(), 0, 0, 0, 0)):
        response = send(server, "/slots", method="GET")
    busy, idle, endless = response.json()
    assert "secret" not in response.text
    assert (busy["id_task"], busy["n_prompt_tokens_cache"]) == (12, 3)
    assert busy["next_token"] == [{"has_next_token": True, "has_new_line": True, "n_remain": 40, "n_decoded": 20}]
    assert (busy["params"]["temperature"], busy["params"]["n_predict"]) == (0.3, 60)
    assert (idle["id_task"], "params" in idle, idle["next_token"][0]["n_remain"]) == (-1, False, -1)
    assert (endless["params"]["n_predict"], endless["next_token"][0]["n_remain"]) == (-1, -1)


def test_error_that_no_retry_fixes_says_so() -> None:
    """The clients of OpenAI and Anthropic retry status 500; the recorded exchanges have the errors of images."""
    part = {"type": "image_url", "image_url": {}}
    response = send(make_server()[0], CHATS, {"messages": [{"role": "user", "content": [part]}]})
    assert (response.status_code, response.headers["X-Should-Retry"]) == (500, "false")


def test_metrics_when_disabled_returns_501() -> None:
    server, _ = make_server()
    for has_metrics, status in ((True, 200), (False, 501)):
        server.has_metrics = has_metrics
        assert send(server, "/metrics", method="GET").status_code == status
        assert send(server, "/props", method="GET").json()["endpoint_metrics"] is has_metrics


def test_metrics_counts_under_names_of_llama_server_and_vllm() -> None:
    server, _ = make_server(Script(step=3))
    send(server, NATIVE, {"prompt": "x"})
    response = send(server, "/metrics", method="GET")
    assert response.headers["Process-Start-Time-Unix"] == str(server.started_at)
    lines = response.text.splitlines()
    values = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
    assert values["llamacpp:tokens_predicted_total"] == values["vllm:generation_tokens_total"] == 7
    assert values["llamacpp:spec_decode_num_draft_tokens_total"] == 2
    assert 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1' in lines
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",position="1"} 1' in lines
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))
    names = [
        word for line in lines if line.startswith("# HELP") for word in line.split()[3:] if word[1:].lower() != word[1:]
    ]
    assert set(names) <= {"CPU"}  # descriptions are English, without names of classes


def test_applied_template_has_tokens_of_prompt() -> None:
    prompt = ask("/apply-template", CHAT)[0]["prompt"]
    applied = ask("/tokenize", {"content": prompt, "add_special": False})[0]["tokens"]
    assert applied == demo_vocabulary().chats.tokens(CHAT["messages"])[-len(applied) :]


def test_request_log_contains_counters_reasons_and_no_client_text() -> None:
    entries: list[Counters] = []
    server, _ = make_server(Script(step=3, n_cached=2))
    invalid, settings = "invalid_request_error", {"log": entries.append, "keys": ["k"]}
    failed, _ = make_server(Script("a b c", error=TargetError("secret"), after=2))
    expected = [
        (server, "POST", f"{NATIVE}?a=secret", b'{"prompt": "secret", "stream": true}', (NATIVE, 200, "", "")),
        (server, "GET", "/no/%1B[2J%0A%C3%A9?secret", b"", (r"/no/\x1b[2J\n\xe9", 404, "not_found_error", "")),
        (server, "GET", f"/{'x' * 200}", b"", (f"/{'x' * 99}", 404, "not_found_error", "")),
        (server, "GET", NATIVE, b"", (NATIVE, 405, invalid, "")),
        (server, "POST", "/api/pull", b'{"model": "secret"}', ("/api/pull", 501, "not_supported_error", "")),
        (server, "POST", "/slots/1", b"secret", ("/slots/1", 400, invalid, "")),
        (server, "POST", CHATS, b'{"messages": [{"role": "secret"}]}', (CHATS, 400, invalid, "messages[0].role")),
        (server, "POST", NATIVE, b'{"prompt": "x", "secret": "\\ud800"}', (NATIVE, 400, invalid, "")),
        (
            *(server, "POST", NATIVE, b'{"prompt": "%s"}' % (b"secret " * 10_000)),
            (NATIVE, 400, "exceed_context_size_error", "context_length_exceeded"),
        ),
        (failed, "POST", NATIVE, b'{"prompt": "secret", "stream": true}', (NATIVE, 200, "server_error", "")),
    ]
    headers = {"Authorization": "Bearer k"}
    for used, method, path, content, _ in expected:
        send(used, path, None, method, settings=settings, content=content, headers=headers)
    send(server, NATIVE, {"prompt": "secret"}, settings=settings)  # without a key
    found = [(entry.path, entry.status, entry.error, entry.field) for entry in entries]
    assert found == [*(entry for *_, entry in expected), (NATIVE, 401, "authentication_error", "")]
    first, prompt_tokens = entries[0], len(demo_vocabulary().tokenize("secret"))
    assert (first.prompt_tokens, first.cached_tokens, first.tokens, first.draft_tokens) == (prompt_tokens, 2, 7, 2)
    assert "secret" not in repr(entries)
