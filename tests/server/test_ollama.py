"""Tests of Ollama's API with a scripted engine: requests, responses, streams and errors as its clients expect them."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import http
from support.fake_service import FakeService, Script
from support.http import (
    allows,
    demo_vocabulary,
    format_tool_call,
    get_error,
    make_server,
    run_server,
    send,
    vocabulary_with,
)
from support.json_chat import Chat
from support.vocabulary_files import write_vocabulary

from ngramspec.data import TargetError
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.server.state import Server

TEXT = "Hello, world"
USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "hi"}
BODIES = {"/api/chat": CHAT, "/api/generate": PROMPT}
PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}]
CALLS = "\n".join(format_tool_call("look", f'{{"at": {at}}}') for at in (1, 2))
TURN = f"<think>\nLong thoughts.\n</think>\n\nI löok.\n{CALLS}"


def ask(path: str, body: Any, script: Any = None, **settings: Any) -> tuple[list[dict[str, Any]], FakeService]:
    """Return the JSON objects of a response, one or a stream of them, and the engine."""
    parts, service = http.ask(path, body, script, **settings)
    return parts if isinstance(parts, list) else [parts], service


def content(part: dict[str, Any]) -> dict[str, Any]:
    """Return the text, reasoning and calls of a response or chunk of either endpoint."""
    return part["message"] if "message" in part else {"content": part["response"], **part}


# --------------------------------------------------------------------------- answers


@pytest.mark.parametrize("path", BODIES)
def test_ollama_api_streams_unless_stream_is_false(path: str) -> None:
    parts, service = ask(path, BODIES[path], Script(step=2))
    (whole,), _ = ask(path, BODIES[path] | {"stream": False}, Script(step=2))
    assert len(parts) > 1
    assert "".join(content(part)["content"] for part in parts) == content(whole)["content"] == TEXT
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert content(parts[-1])["content"] == ""
    for part in (*parts, whole):
        assert part["model"] == "m"
        assert part["created_at"].endswith("Z")
        assert datetime.fromisoformat(part["created_at"]).tzinfo is not None
        assert ("message" in part, "response" in part) == (path == "/api/chat", path == "/api/generate")
        assert part.get("message", {"role": "assistant"})["role"] == "assistant"
    tokens = len(demo_vocabulary().tokenize(TEXT, add_bos=False)) + 1
    for end in (parts[-1], whole):
        assert end["done_reason"] == "stop"
        assert (end["prompt_eval_count"], end["eval_count"]) == (len(service.requests[0].prompt), tokens)
        durations = [end[f"{name}_duration"] for name in ("prompt_eval", "eval", "load")]
        assert durations == [500_000_000, 250_000_000, 0]
        assert isinstance(end["total_duration"], int)
        assert end["total_duration"] > 0


def test_ollama_chat_omits_incomplete_tool_calls() -> None:
    limit = len(demo_vocabulary().tokenize(CALLS, add_bos=False)) - 12
    for stream in (False, True):
        body = CHAT | {"tools": TOOLS, "stream": stream, "options": {"num_predict": limit}}
        parts, _ = ask("/api/chat", body, Script(CALLS))
        calls = [call["function"]["arguments"] for part in parts for call in content(part).get("tool_calls", [])]
        assert (calls, parts[-1]["done_reason"]) == ([{"at": 1}], "length")


@pytest.mark.parametrize("path", BODIES)
def test_ollama_api_logprobs_cover_exactly_the_text(path: str) -> None:
    asked = BODIES[path] | {"logprobs": True, "top_logprobs": 2}
    parts, _ = ask(path, asked, Script(step=2))
    (whole,), _ = ask(path, asked | {"stream": False})
    for found in (whole["logprobs"], [one for part in parts for one in part.get("logprobs", [])]):
        assert "".join(one["token"] for one in found) == TEXT
        assert {(one["logprob"], len(one["top_logprobs"])) for one in found} == {(-0.5, 2)}
    (whole,), _ = ask(path, BODIES[path] | {"stream": False})
    assert "logprobs" not in whole


def test_ollama_chat_stream_sends_keepalive_and_error_as_json_lines() -> None:
    script = Script("a b c", error=TargetError("it broke"), after=2, go=threading.Semaphore(0))
    server, _ = make_server(script)
    server.ping_seconds = 0.02
    with run_server(server) as address, httpx.stream("POST", f"{address}/api/chat", json=CHAT) as response:
        parts = []
        for line in response.iter_lines():
            parts.append(json.loads(line))
            script.go.release()  # type: ignore[union-attr]
    assert (parts[0]["message"]["content"], parts[0]["done"]) == ("", False)
    assert parts[-1] == {"error": "it broke"}


# --------------------------------------------------------------------------- requests


def test_ollama_options_reach_the_sampler() -> None:
    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.7, "seed": 5}
    penalties = {"repeat_penalty": 1.2, "repeat_last_n": 33, "presence_penalty": 1.5, "frequency_penalty": 1.0}
    fixed = {"num_ctx": 9, "num_gpu": 1, "num_thread": 8, "num_batch": 2, "num_keep": 5, "use_mmap": True}
    unknown = {"tfs_z": 1.0, "n": 3, "whatever": [1]}
    for path, body in (*BODIES.items(), ("/api/generate", PROMPT | {"raw": True})):
        options = sampling | penalties | fixed | unknown | {"num_predict": 4, "stop": ["END"], "penalize_newline": True}
        _, service = ask(path, body | {"options": options}, Script(ends=False))
        (request,) = service.requests
        assert {name: getattr(request.sampling, name) for name in sampling | penalties} == sampling | penalties
        assert (request.max_tokens, request.stop) == (4, ("END",))
    mirostat = {"mirostat": 2, "mirostat_tau": 0.8, "mirostat_eta": 0.6, "top_k": 20}
    _, service = ask("/api/chat", CHAT | {"options": mirostat})
    (request,) = service.requests
    assert (request.sampling.mirostat, request.sampling.mirostat_tau, request.sampling.mirostat_eta) == (2, 0.8, 0.6)
    for limit in (None, -2, -1, 0):  # These mean until the context is full.
        _, service = ask("/api/chat", CHAT | {"options": {"num_predict": limit}})
        assert service.requests[0].max_tokens == 512


@pytest.mark.parametrize("body", [CHAT, PROMPT, PROMPT | {"raw": True}])
def test_ollama_format_becomes_a_grammar(body: dict[str, Any]) -> None:
    path = "/api/chat" if "messages" in body else "/api/generate"
    for form, texts in (
        (PARAMETERS, ['{"at": 1}', '{"b": 1}']),
        ("json", ['{"b": 1}', "5"]),
        # Unsupported keywords are ignored, as in Ollama.
        (PARAMETERS | {"propertyNames": {"pattern": "b"}}, ['{"at": 1}', '{"b": 1}']),
    ):
        _, service = ask(path, body | {"format": form}, Script("{}"))
        assert [allows(service, text) for text in texts] == [True, False]
    for nothing in ({}, {"format": ""}):
        assert ask(path, body | nothing)[1].requests[0].sampling.grammar is None
    assert get_error(path, body | {"format": "yaml"}).startswith('format must be "json" or a JSON schema')


def test_ollama_think_sets_template_variables() -> None:
    template = "<think>{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %} {{ reasoning_effort }}"
    vocabulary = vocabulary_with(template + "{% for m in messages %}{{ m.content }}{% endfor %}")
    for path, body in BODIES.items():
        for think, text in (
            (None, "<think>True hi"),  # By default, a template that supports reasoning uses it.
            (False, "<think>False hi"),
            (True, "<think>True hi"),
            ("low", "<think>True lowhi"),
            ("high", "<think>True highhi"),
        ):
            _, service = ask(path, body | {"think": think}, vocabulary=vocabulary)
            assert service.prompt_text() == text
        assert get_error(path, body | {"think": "some"}).startswith("think must be one of true, false, low")
    # Clients recognize these words and retry without the field.
    assert get_error("/api/chat", CHAT | {"think": True}) == "think: 'demo' does not support thinking"
    ask("/api/chat", CHAT | {"think": False})


def test_ollama_messages_reach_the_chat_template() -> None:
    def call(at: int, **more: Any) -> dict[str, Any]:
        return {"function": {"name": "look", "arguments": {"at": at}}, **more}

    said = {"role": "assistant", "content": "I look.", "thinking": "hm"}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER | {"images": []},
        said | {"tool_calls": [call(1), call(2), call(3, id="c3")]},
        {"role": "tool", "content": "third", "tool_call_id": "c3"},
        {"role": "tool", "content": "first", "tool_name": "look"},
        {"role": "tool", "content": "second"},
        {"role": "tool", "content": "other", "tool_name": "list"},
        {"role": "system", "content": "Late."},
    ]
    system, user, turn, *results, late = Chat("/api/chat", model="m").messages(messages=messages)
    assert (system, user["content"], turn["reasoning_content"]) == (messages[0], "hi", "hm")
    ids = [called["id"] for called in turn["tool_calls"]]
    assert [called["function"]["arguments"] for called in turn["tool_calls"]] == [{"at": i} for i in (1, 2, 3)]
    assert len(set(ids)) == 3
    found = {result["content"]: (result["tool_call_id"], result.get("name")) for result in results}
    other = found.pop("other")
    assert found == {"first": (ids[0], "look"), "second": (ids[1], "look"), "third": (ids[2], "look")}
    assert (other[0] in ids, other[1]) == (False, "list")
    assert late == {"role": "user", "content": "<system>\nLate.\n</system>"}


def test_ollama_chat_accepts_own_response_in_next_request() -> None:
    body = CHAT | {"tools": TOOLS, "stream": False}
    (answer,), _ = ask("/api/chat", body, Script(CALLS), n_ctx=2000)
    results = [{"role": "tool", "tool_name": "look", "content": f"saw {at}"} for at in (1, 2)]
    messages = [USER, answer["message"], *results]
    (again,), service = ask("/api/chat", body | {"messages": messages}, n_ctx=2000)
    prompt = service.prompt_text()
    for part in ('{"at": 1}', '{"at": 2}', "saw 1", "saw 2"):
        assert part in prompt
    assert again["message"] == {"role": "assistant", "content": TEXT}


def test_ollama_generate_formats_prompt_as_chat_and_continues_context() -> None:
    vocabulary = demo_vocabulary()
    (whole,), service = ask("/api/generate", PROMPT | {"system": "s", "stream": False})
    (request,) = service.requests
    assert list(request.prompt) == vocabulary.chats.tokens([{"role": "system", "content": "s"}, USER])
    text = vocabulary.tokenize(TEXT, add_bos=False)
    assert whole["context"][: len(request.prompt) + len(text)] == [*request.prompt, *text]
    # The next prompt continues the context, without a second start token.
    _, service = ask("/api/generate", PROMPT | {"context": whole["context"]})
    assert list(service.requests[0].prompt) == [*whole["context"], *vocabulary.chats.tokens([USER])[1:]]


def test_ollama_generate_with_raw_skips_chat_template() -> None:
    for prompt in ("hi", "<|im_start|>user\nhi"):
        (whole,), service = ask("/api/generate", PROMPT | {"prompt": prompt, "raw": True, "stream": False})
        assert list(service.requests[0].prompt) == demo_vocabulary().tokenize(prompt, special=True)
        assert (whole["response"], "context" in whole) == (TEXT, False)


def test_ollama_generate_with_suffix_uses_fill_in_the_middle(tmp_path: Path) -> None:
    _, service = ask("/api/generate", {"prompt": "a", "suffix": "b"})
    before, after = (demo_vocabulary().tokenize(text, add_bos=False) for text in "ab")
    marks = demo_vocabulary().fill_in_tokens
    assert list(service.requests[0].prompt)[-5:] == [marks.prefix, *before, marks.suffix, *after, marks.middle]
    with closing(Vocabulary(write_vocabulary(tmp_path / "plain.gguf", fill_in=False))) as plain:
        error = get_error("/api/generate", {"prompt": "a", "suffix": "b"}, vocabulary=plain)
        assert error.startswith("this model does not support fill-in-the-middle")
        assert "insert" not in send(make_server(vocabulary=plain)[0], "/api/show", {}).json()["capabilities"]


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_requests_without_prompt_return_load_or_unload(stream: bool) -> None:
    for keep_alive, reason in ((None, "load"), (0, "unload"), ("0s", "unload"), (-1, "load"), ("10m", "load")):
        asked = {"stream": stream, "keep_alive": keep_alive}
        (chat,), first = ask("/api/chat", {"model": "m", "messages": []} | asked)
        (text,), second = ask("/api/generate", {"model": "m"} | asked)
        assert (chat["message"], text["response"]) == ({"role": "assistant", "content": ""}, "")
        assert (chat["done"], chat["done_reason"], text["done"], text["done_reason"]) == (True, reason) * 2
        assert first.tickets == second.tickets == []


# --------------------------------------------------------------------------- errors


def test_ollama_api_rejects_invalid_values_by_field_name() -> None:
    image = {"images": ["aGk="]}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/api/chat", {"messages": "hi"}, "messages must be a list"),
        ("/api/chat", {"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        ("/api/chat", {"messages": [USER | image]}, "messages[0].images: images are not supported"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools[0].function is missing"),
        ("/api/chat", {"tools": [{"type": "web"}]}, "tools[0].type must be"),
        ("/api/generate", image, "images: images are not supported"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template: Go templates are not supported"),
        ("/api/generate", {"raw": True, "system": "s"}, "system cannot be combined with raw"),
        ("/api/generate", {"raw": True, "context": [1]}, "context cannot be combined with raw"),
        ("/api/generate", {"raw": True, "suffix": "s"}, "suffix cannot be combined with raw"),
        ("/api/generate", {"context": [10**9]}, "context must contain"),
        ("/api/generate", {"prompt": 5}, "prompt must be a string"),
    ]
    common: list[tuple[dict[str, Any], str]] = [
        ({"options": {"temperature": -1}}, "options.temperature must be"),
        ({"options": {"num_predict": "x"}}, "options.num_predict must be"),
        *(({"options": {"min_tokens": value}}, "options.min_tokens must be a whole") for value in (-1, 1.5, "3", True)),
        ({"options": {"stop_token_ids": [-1]}}, "stop_token_ids must contain"),
        ({"options": {"lora": [{"id": 0}]}}, "lora: unknown adapter"),
        ({"options": 5}, "options must be an object"),
        ({"format": "json", "options": {"grammar": 'root ::= "a"'}}, "grammar cannot be combined with format"),
        ({"keep_alive": "5 minutes"}, "keep_alive must be a number of seconds"),
        ({"keep_alive": True}, "keep_alive must be a number of seconds"),
        ({"stream": "no"}, "stream must be true or false"),
        ({"top_logprobs": 2}, "top_logprobs requires logprobs"),
    ]
    cases += [(path, fields, message) for path in BODIES for fields, message in common]
    for path, fields, message in cases:
        assert get_error(path, BODIES[path] | fields).startswith(message), (path, fields)
    long = {"messages": [USER | {"content": "word " * 4000}]}
    assert "exceeds the available context size (512 tokens)" in get_error("/api/chat", CHAT | long)


def test_ollama_api_errors_of_unsupported_paths_have_ollama_format() -> None:
    assert get_error("/api/nothing", {}, 404)
    assert get_error("/api/chat", None, 405, "GET")
    for path, method in [*((name, "POST") for name in ("pull", "push", "create", "copy")), ("delete", "DELETE")]:
        assert "restart it: ngramspec serve MODEL" in get_error(f"/api/{path}", {"model": "x"}, 501, method)
    assert "restart it" in get_error("/api/blobs/sha256:29", {}, 501)
    response = send(Server(), "/api/chat", CHAT)
    assert (response.status_code, response.json()) == (503, {"error": "Loading model"})


def test_ollama_api_requires_api_key() -> None:
    settings = {"keys": ["k"]}
    for path in ("/api/chat", "/api/pull"):
        response = send(make_server()[0], path, CHAT, settings=settings)
        assert (response.status_code, response.json()) == (401, {"error": "Invalid API Key"})
    response = send(make_server()[0], "/api/chat", CHAT, settings=settings, headers={"Authorization": "Bearer k"})
    assert response.status_code == 200
