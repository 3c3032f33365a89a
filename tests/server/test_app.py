"""Every address of the server answers as llama-server's clients expect it, over an engine that follows a script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_service import Script
from support.http import asking, chunks, demo_vocabulary, scripted

from ngramspec.batching.request import ClosedError, Request
from ngramspec.errors import GrammarError, TargetError
from ngramspec.sampling.settings import Sampling
from ngramspec.server.access_log import Entry
from ngramspec.server.sampling_fields import SamplingDefaults
from ngramspec.server.served import Server

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = "Hello, world"


def ask(method: str, path: str, body: Any = None, script: Script | None = None, **settings: Any) -> Any:
    """The response to one request, and the engine that it was made of."""
    server, service = scripted(script, **settings)

    async def run() -> Any:
        async with asking(server) as client:
            return await client.request(method, path, json=body)

    return asyncio.run(run()), service


def post(path: str, body: Any, script: Script | None = None, **settings: Any) -> Any:
    """The JSON of an answer that must be one."""
    response, _ = ask("POST", path, body, script, **settings)
    assert response.status_code == 200, response.text
    return response.json()


def refused(path: str, body: Any, script: Script | None = None, status: int = 400) -> dict[str, Any]:
    response, _ = ask("POST", path, body, script)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# --------------------------------------------------------------------------- chat


def test_a_chat_is_answered() -> None:
    told = post("/v1/chat/completions", CHAT, Script(step=3, cached=4))
    assert told["choices"] == [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}]
    tokens = len(demo_vocabulary().tokenize(TEXT, add_bos=False)) + 1
    prompt = len(demo_vocabulary().chat_prompt(CHAT["messages"]))
    assert told["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert told["timings"]["cache_n"] == 4
    assert told["timings"]["prompt_n"] == prompt - 4
    assert told["timings"]["predicted_n"] == tokens
    assert told["timings"]["draft_n"] == told["timings"]["draft_n_accepted"] == tokens - 3 - 2


def test_nothing_is_said_of_drafts_where_there_were_none() -> None:
    told = post("/v1/chat/completions", CHAT, Script(step=1))
    assert not {"draft_n", "draft_n_accepted", "close_calls"} & set(told["timings"])


def test_a_stream_has_its_chunks_in_order() -> None:
    response, _ = ask("POST", "/v1/chat/completions", CHAT | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *told, done = chunks(response.text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in told]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert deltas[-1] == {}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in told] == [None] * (len(told) - 1) + ["stop"]
    assert ["timings" in chunk for chunk in told] == [False] * (len(told) - 1) + [True]
    assert all("usage" not in chunk for chunk in told)


def test_usage_comes_in_a_chunk_of_its_own_where_it_is_asked_for() -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    *told, last, done = chunks(ask("POST", "/v1/chat/completions", body)[0].text)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"]
    assert all("usage" not in chunk and "timings" not in chunk for chunk in told)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_seeds_of_their_own(stream: bool) -> None:
    response, service = ask("POST", "/v1/chat/completions", CHAT | {"n": 3, "seed": 7, "stream": stream})
    assert sorted(request.sampling.seed for request in service.requests) == [7, 8, 9]
    if not stream:
        assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2]
        return
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks(response.text)[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == dict.fromkeys(range(3), TEXT)


def test_logprobs_of_a_stream_cover_its_text_and_no_more() -> None:
    body = CHAT | {"stream": True, "logprobs": True, "top_logprobs": 2, "stop": [" wor"]}
    told = chunks(ask("POST", "/v1/chat/completions", body, Script(step=2))[0].text)[:-1]
    content = [c["choices"][0] for c in told if c["choices"][0]["delta"].get("content")]
    assert "".join(choice["delta"]["content"] for choice in content) == "Hello,"
    for choice in content:
        tokens = choice["logprobs"]["content"]
        assert "".join(token["token"] for token in tokens) == choice["delta"]["content"]
        assert bytes(tokens[0]["bytes"]).decode() == tokens[0]["token"]
        assert [len(token["top_logprobs"]) for token in tokens] == [2] * len(tokens)


def test_logprobs_alone_ask_for_no_alternatives() -> None:
    told = post("/v1/chat/completions", CHAT | {"logprobs": True})
    content = told["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == TEXT
    assert all(token["top_logprobs"] == [] for token in content)


def test_an_answer_that_is_cut_says_so() -> None:
    told = post("/v1/chat/completions", CHAT | {"max_tokens": 2}, Script(ends=False))
    assert told["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_the_limit_has_three_names(name: str) -> None:
    assert ask("POST", "/v1/chat/completions", CHAT | {name: 3})[1].requests[0].max_tokens == 3


def test_parts_of_a_message_are_joined_and_a_developer_speaks_for_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    _, service = ask("POST", "/v1/chat/completions", {"messages": messages})
    plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a\nb"}]
    assert list(service.requests[0].prompt) == demo_vocabulary().chat_prompt(plain)


def test_a_tool_that_must_be_called_is_called() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    body = CHAT | {"tools": tools, "tool_choice": "required"}
    response, service = ask("POST", "/v1/chat/completions", body, Script(call))
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ""
    (called,) = choice["message"]["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert service.requests[0].sampling.grammar is not None

    told = chunks(ask("POST", "/v1/chat/completions", body | {"stream": True}, Script(call))[0].text)[:-1]
    deltas = [one for c in told for one in c["choices"][0]["delta"].get("tool_calls", [])]
    assert [one["function"].get("name") for one in deltas] == ["weather"] + [None] * (len(deltas) - 1)
    assert "name" not in deltas[1]["function"]
    assert "".join(one["function"]["arguments"] for one in deltas) == '{"city": "Rome"}'


def test_a_schema_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    _, service = ask("POST", "/v1/chat/completions", CHAT | {"response_format": form}, Script('{"a": 1}'))
    grammar = service.requests[0].sampling.grammar
    assert grammar is not None
    demo_vocabulary().grammar(grammar)
    _, service = ask("POST", "/v1/completions", {"prompt": "x", "response_format": {"type": "json_object"}})
    demo_vocabulary().grammar(service.requests[0].sampling.grammar or "")


# --------------------------------------------------------------------------- completions


def test_prompts_come_as_text_tokens_and_lists_of_both() -> None:
    for prompt, count in (("ab", 1), (["ab", "cd"], 2), ([5, 6], 1), ([[5, 6], [7]], 2)):
        told = post("/v1/completions", {"prompt": prompt})
        assert [(choice["index"], choice["text"]) for choice in told["choices"]] == [(i, TEXT) for i in range(count)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_once(stream: bool) -> None:
    response, _ = ask("POST", "/v1/completions", {"prompt": "Say: ", "echo": True, "stream": stream})
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks(response.text)[:-1])
    else:
        text = response.json()["choices"][0]["text"]
    assert text == "Say: " + TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_columns_of_logprobs_are_as_long_as_the_text_has_tokens(stream: bool) -> None:
    response, _ = ask("POST", "/v1/completions", {"prompt": "x", "logprobs": 2, "stream": stream}, Script(step=2))
    tables = (
        [chunk["choices"][0]["logprobs"] for chunk in chunks(response.text)[:-1]]
        if stream
        else [response.json()["choices"][0]["logprobs"]]
    )
    columns = {name: [item for table in tables for item in table[name]] for name in tables[0]}
    assert "".join(columns["tokens"]) == TEXT
    assert len({len(column) for column in columns.values()}) == 1
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert TEXT[offset:].startswith(token)


def test_usage_counts_each_prompt_once() -> None:
    told = post("/v1/completions", {"prompt": [[5, 6], [7]], "n": 2}, Script(cached=1))
    assert told["usage"]["prompt_tokens"] == 3
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert len(told["choices"]) == 4


# --------------------------------------------------------------------------- native


def test_the_native_answer_tells_how_it_ended() -> None:
    told = post("/completion", {"prompt": "x"})
    assert (told["content"], told["stop_type"], told["stopping_word"]) == (TEXT, "eos", "")
    told = post("/completion", {"prompt": "x", "stop": ["zzz", ", "]})
    assert (told["content"], told["stop_type"], told["stopping_word"]) == ("Hello", "word", ", ")
    told = post("/completion", {"prompt": "x", "n_predict": 2}, Script(ends=False))
    assert (told["stop_type"], told["truncated"], told["tokens_predicted"]) == ("limit", False, 2)
    told = post("/completion", {"prompt": "x"}, Script(ends=False), n_ctx=20)
    assert (told["stop_type"], told["truncated"]) == ("limit", True)


def test_a_request_for_nothing_fills_the_cache() -> None:
    response, service = ask("POST", "/completion", {"prompt": "x", "n_predict": 0, "response_fields": [""]})
    assert response.json() == {}
    assert service.requests[0].max_tokens == 0


def test_only_the_fields_asked_for() -> None:
    names = ["content", "timings/predicted_n", "generation_settings/top_k", "nothing/at/all"]
    told = post("/completion", {"prompt": "x", "response_fields": names})
    assert told == {"content": TEXT, "timings/predicted_n": 7, "generation_settings/top_k": 40}


def test_the_native_stream_ends_without_a_word() -> None:
    response, _ = ask("POST", "/completion", {"prompt": "x", "stream": True, "n_probs": 1})
    told = chunks(response.text)
    assert [chunk["stop"] for chunk in told] == [False] * (len(told) - 1) + [True]
    assert "".join(chunk["content"] for chunk in told) == TEXT
    assert told[0]["completion_probabilities"][0]["top_logprobs"][0]["logprob"] == -0.5


def test_prompts_of_mixed_pieces_are_one_prompt() -> None:
    vocabulary = demo_vocabulary()
    _, service = ask("POST", "/completion", {"prompt": ["ab", 7, "<|im_end|>"]})
    end = vocabulary.tokenize("<|im_end|>", special=True, add_bos=False)
    assert len(end) == 1
    assert list(service.requests[0].prompt) == [*vocabulary.tokenize("ab"), 7, *end]
    assert isinstance(post("/completion", {"prompt": ["ab", "cd"]}), list)


def test_any_slot_is_one_of_them() -> None:
    assert ask("POST", "/completion", {"prompt": "x", "id_slot": 6})[1].requests[0].slot == 2
    assert ask("POST", "/completion", {"prompt": "x", "id_slot": -1})[1].requests[0].slot is None


# --------------------------------------------------------------------------- sampling


def sampling_of(body: dict[str, Any], defaults: SamplingDefaults | None = None) -> Sampling:
    server, service = scripted()
    if defaults is not None:
        server.defaults = defaults

    async def run() -> Any:
        async with asking(server) as client:
            return await client.post("/completion", json={"prompt": "x"} | body)

    response = asyncio.run(run())
    assert response.status_code == 200, response.text
    sampling: Sampling = service.requests[0].sampling
    return sampling


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [
        ({"temperature": 1}, "temperature", 1.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 5.0}, "top_k", 5),
        ({"min_p": None}, "min_p", 0.05),
        ({"repetition_penalty": 1.5}, "repeat_penalty", 1.5),
        ({"samplers": ["top_k", "temperature"]}, "samplers", ("top_k", "temperature")),
        ({"samplers": "min_p;temp"}, "samplers", ("min_p", "temperature")),
        ({"samplers": ["top_k", "top_p"], "temperature": 0.3}, "temperature", 1.0),
        ({"samplers": ["top_k"], "min_p": 0.3}, "min_p", 0.05),
        ({"samplers": []}, "samplers", ()),
        ({"mirostat": 2, "top_k": 7}, "top_k", 40),
        ({"logit_bias": [[5, -1], [6, False]]}, "logit_bias", ((5, -1.0), (6, -math.inf))),
        ({"logit_bias": {"5": 2}}, "logit_bias", ((5, 2.0),)),
        ({"dry_sequence_breakers": ["x"]}, "dry_sequence_breakers", ("x",)),
        ({"grammar": ""}, "grammar", None),
        ({"seed": 2**63}, "seed", 2**63),
    ],
)
def test_settings_are_read(body: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(sampling_of(body), name) == value


def test_a_text_is_biased_token_by_token() -> None:
    tokens = demo_vocabulary().tokenize("hello", add_bos=False)
    assert sampling_of({"logit_bias": [["hello", 1]]}).logit_bias == tuple((token, 1.0) for token in tokens)


def test_ends_can_be_forbidden() -> None:
    biases = sampling_of({"ignore_eos": True, "logit_bias": {"5": 1}}).logit_bias
    assert biases[0] == (5, 1.0)
    assert {token for token, bias in biases if bias == -math.inf} == {
        token for token in range(demo_vocabulary().n_vocab) if demo_vocabulary().is_eog(token)
    }


def test_seeds_are_random_unless_somebody_chose_one() -> None:
    seeds = {sampling_of({"seed": seed}).seed for seed in (None, -1)} | {sampling_of({}).seed}
    assert len(seeds) == 3
    defaults = SamplingDefaults(Sampling(temperature=0.5, xtc_probability=0.5), seed=11)
    chosen = sampling_of({}, defaults)
    assert (chosen.seed, chosen.temperature, chosen.xtc_probability) == (11, 0.5, 0.5)


def test_defaults_give_way_to_what_is_asked_for() -> None:
    defaults = SamplingDefaults(Sampling(temperature=0.5, xtc_probability=0.5))
    assert sampling_of({"temperature": 0}, defaults).xtc_probability == 0


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [3]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ("/v1/chat/completions", CHAT | {"temperature": -1}, "temperature"),
        ("/v1/chat/completions", CHAT | {"temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", CHAT | {"temperature": 10**400}, "temperature"),
        ("/v1/chat/completions", CHAT | {"stream": "yes"}, "stream"),
        ("/v1/chat/completions", CHAT | {"n": 0}, "n"),
        ("/v1/chat/completions", CHAT | {"max_tokens": True}, "max_tokens"),
        ("/v1/chat/completions", CHAT | {"stop": [""]}, "stop"),
        ("/v1/chat/completions", CHAT | {"stop": 5}, "stop"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 3}, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}, "response_format.type"),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "bogus"}}}},
            "response_format",
        ),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [10**9]}, "prompt"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ("/v1/completions", {"prompt": ["x"] * 100, "n": 100}, "n"),
        ("/completion", {"prompt": "x", "logit_bias": [[1, 2, 3]]}, "logit_bias"),
        ("/completion", {"prompt": "x", "logit_bias": {"9999999": 1}}, "logit_bias"),
        ("/completion", {"prompt": "x", "samplers": ["magic"]}, None),
        ("/completion", {"prompt": "x", "grammar": "root ::= x", "json_schema": {}}, "json_schema"),
        ("/completion", {"prompt": "x", "n_predict": -2}, "n_predict"),
        ("/completion", {"prompt": "x", "post_sampling_probs": True}, "post_sampling_probs"),
        ("/tokenize", {"content": 5}, "content"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: Any, param: str | None) -> None:
    error = refused(path, body)
    assert error["type"] == "invalid_request_error"
    assert error["code"] == 400
    assert error.get("param") == param
    assert param is None or error["message"].startswith(param.split("[")[0])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_as_every_client_knows_it(path: str, stream: bool) -> None:
    long = "word " * 1000
    said = {"messages": [{"role": "user", "content": long}]} if "chat" in path else {"prompt": long}
    error = refused(path, {"stream": stream} | said)
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "exceed_context_size_error"
    assert error["n_ctx"] == 512
    assert f"({error['n_prompt_tokens']} tokens) exceeds the available context size (512 tokens)" in error["message"]
    assert "this model's maximum context length is 512 tokens" in error["message"]


@pytest.mark.parametrize(
    ("script", "status", "kind"),
    [
        (Script(wrong=GrammarError("no grammar")), 400, "invalid_request_error"),
        (Script(wrong=ValueError("no")), 400, "invalid_request_error"),
        (Script(wrong=ClosedError("stopping")), 503, "unavailable_error"),
        (Script(fails=TargetError("out of memory"), after=0), 500, "server_error"),
        (Script(fails=GrammarError("no token left"), after=1), 400, "invalid_request_error"),
    ],
)
def test_errors_of_the_engine_are_http_errors(script: Script, status: int, kind: str) -> None:
    assert refused("/v1/chat/completions", CHAT, script, status)["type"] == kind


def test_an_error_before_the_first_token_is_no_stream() -> None:
    error = refused("/v1/completions", {"prompt": "x", "stream": True}, Script(wrong=GrammarError("no grammar")))
    assert error["param"] == "grammar"
    script = Script(fails=TargetError("out of memory"), after=0)
    assert refused("/v1/chat/completions", CHAT | {"stream": True}, script, 500)["message"] == "out of memory"


def test_an_error_later_is_a_chunk_and_the_end() -> None:
    script = Script(fails=TargetError("out of memory"), after=2)
    told = chunks(ask("POST", "/v1/chat/completions", CHAT | {"stream": True}, script)[0].text)
    assert told[-1] == {"error": {"code": 500, "message": "out of memory", "type": "server_error"}}
    assert told[1]["choices"][0]["delta"]["content"]


@pytest.mark.parametrize(
    "raw",
    [
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
    ],
)
def test_a_body_that_is_no_request_is_refused(raw: bytes) -> None:
    server, service = scripted()

    async def run() -> Any:
        async with asking(server) as client:
            return await client.post("/completion", content=raw)

    response = asyncio.run(run())
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert service.tickets == []


@pytest.mark.parametrize("told", [True, False])
def test_a_body_may_have_so_many_bytes(told: bool) -> None:
    server, _ = scripted()
    server.most_bytes = 100

    async def body() -> Any:
        for _ in range(11):
            yield b" " * 10

    async def run() -> Any:
        async with asking(server) as client:
            return await client.post("/completion", content=b" " * 101 if told else body())

    assert asyncio.run(run()).status_code == 413


def test_addresses_that_are_not_there() -> None:
    assert ask("GET", "/nothing")[0].json()["error"]["code"] == 404
    response, _ = ask("GET", "/completion")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


# --------------------------------------------------------------------------- state


def test_while_the_model_loads_everybody_is_asked_to_wait() -> None:
    async def run() -> None:
        server = Server()
        async with asking(server) as client:
            for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/completion")):
                response = await client.request(method, path, json={} if method == "POST" else None)
                assert response.status_code == 503
                expected = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
                assert response.json() == {"error": expected}
            server.model = scripted()[0].model
            assert (await client.get("/health")).json() == {"status": "ok"}
            server.draining = True
            assert (await client.post("/completion", json={"prompt": "x"})).status_code == 503

    asyncio.run(run())


def test_models_are_listed_for_both_kinds_of_clients() -> None:
    told = ask("GET", "/v1/models")[0].json()
    assert told["data"][0]["id"] == told["models"][0]["name"] == "demo"
    assert told["data"][0]["owned_by"] == "llamacpp"
    assert told["data"][0]["meta"]["n_ctx"] == 512


def test_properties_and_slots() -> None:
    props = ask("GET", "/props")[0].json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["total_slots"] == 4
    assert (props["bos_token"], props["eos_token"]) == ("<|endoftext|>",) * 2
    assert [slot["is_processing"] for slot in ask("GET", "/slots")[0].json()] == [False] * 4


def test_metrics_have_names_of_both_servers_and_count() -> None:
    server, _ = scripted(Script(step=3))

    async def run() -> str:
        async with asking(server) as client:
            await client.post("/completion", json={"prompt": "x"})
            return (await client.get("/metrics")).text

    lines = asyncio.run(run()).splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
    assert values["llamacpp:tokens_predicted_total"] == values["vllm:generation_tokens_total"] == 7
    assert values["llamacpp:spec_decode_num_draft_tokens_total"] == 2
    assert 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",position="1"} 1' in lines
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))


def test_texts_become_tokens_and_back() -> None:
    vocabulary = demo_vocabulary()
    tokens = post("/tokenize", {"content": "hi <|im_end|>", "add_special": True})["tokens"]
    assert tokens == vocabulary.tokenize("hi <|im_end|>", special=True)
    plain = post("/tokenize", {"content": "hi <|im_end|>", "parse_special": False})["tokens"]
    assert plain == vocabulary.tokenize("hi <|im_end|>", add_bos=False)
    assert post("/detokenize", {"tokens": plain})["content"] == "hi <|im_end|>"
    assert post("/detokenize", {"tokens": tokens})["content"].endswith("hi <|im_end|>")
    pieces = post("/tokenize", {"content": "é", "with_pieces": True})["tokens"]
    raw = b"".join(bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces)
    assert raw.decode() == "é"


def test_a_template_applied_and_tokenized_is_the_prompt() -> None:
    text = post("/apply-template", CHAT)["prompt"]
    tokens = post("/tokenize", {"content": text, "add_special": False})["tokens"]
    prompt = demo_vocabulary().chat_prompt(CHAT["messages"])
    assert tokens == prompt[-len(tokens) :]


def test_the_log_says_what_a_request_cost_and_nothing_of_its_text() -> None:
    entries: list[Entry] = []
    server, _ = scripted(Script(step=3, cached=2))

    async def run(send: Callable[..., Awaitable[Any]] | None = None) -> None:
        async with asking(server, log=entries.append) as client:
            await client.post("/completion", json={"prompt": "secret", "stream": True})
            await client.get("/secret")

    asyncio.run(run())
    first, second = entries
    assert (first.method, first.path, first.status) == ("POST", "/completion", 200)
    tally = first.tally
    prompt_tokens = len(demo_vocabulary().tokenize("secret"))
    assert (tally.prompt_tokens, tally.cached, tally.tokens, tally.drafted) == (prompt_tokens, 2, 7, 2)
    assert (second.path, second.status) == ("?", 404)
    assert "secret" not in repr(entries)


def test_requests_are_what_the_engine_takes() -> None:
    _, service = ask("POST", "/completion", {"prompt": "x", "cache_prompt": False, "n_predict": -1})
    (request,) = service.requests
    assert isinstance(request, Request)
    assert (request.cache_prompt, request.max_tokens, request.controls) == (False, service.n_ctx, False)
