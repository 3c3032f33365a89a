"""Tests of OpenAI's and Anthropic's APIs over HTTP with their official clients, whose warnings are errors.

Templates, parsers of tool calls and grammars are the server's; only the engine is scripted. The import of the clients
takes five seconds, so `conftest.py` skips this file by default; `test_recorded.py` and `test_dialects.py` are quick.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import numpy as np
import openai
import pydantic
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from support.dialects import DIALECTS
from support.fake_embedder import CountingEmbedder, expected_embeddings
from support.fake_service import FakeService, Script
from support.http import allows, ask, demo_vocabulary, format_tool_call, make_server, run_server, thinking_vocabulary

from ngramspec.data import TargetError

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("error")]

Clients = tuple[anthropic.Anthropic, openai.OpenAI, FakeService]

TEXT = "Hello, world"
CALLS = "\n".join(format_tool_call("look", f'{{"at": {at}}}') for at in (1, 2))
TURN = f"<think>\nLong thoughts of many words.\n</think>\n\nI löok.\n{CALLS}"
PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
FORM: Any = {"type": "json_schema", "name": "n", "schema": SCHEMA}
# These are requests to chat completions and messages, to responses, and with tools.
ASK: Any = {"model": "m", "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}
ASK_RESPONSE: Any = {"model": "m", "input": "hi"}
LOOK = {"name": "look", "parameters": PARAMETERS}
CHAT: Any = ASK | {"tools": [{"type": "function", "function": LOOK}]}
MESSAGE: Any = ASK | {"tools": [{"name": "look", "input_schema": PARAMETERS}]}
RESPONSE: Any = ASK_RESPONSE | {"tools": [{"type": "function", "strict": False} | LOOK, {"type": "web_search"}]}
LONG: Any = [{"role": "user", "content": "word " * 4000}]


@contextmanager
def serving(script: Script | str, ping: float = 15.0) -> Iterator[Clients]:
    """Yield both clients of a server, and its engine, which follows a script or returns a text in three-token steps."""
    if isinstance(script, str):
        script = Script(script, step=3, n_cached=2)
    server, engine = make_server(script, vocabulary=thinking_vocabulary(), n_ctx=2000)
    server.ping_seconds = ping
    with (
        run_server(server, keys=["secret"]) as address,
        anthropic.Anthropic(base_url=address, api_key="secret", max_retries=0) as one,
        openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as other,
    ):
        yield one, other, engine


def valid(kind: type[pydantic.BaseModel], *found: pydantic.BaseModel) -> None:
    """Validate an object of OpenAI's client, which builds objects without validation."""
    for one in found:
        kind.model_validate(one.model_dump(), strict=True)


@pytest.mark.parametrize("stream", [False, True])
def test_official_clients_receive_reasoning_text_and_tool_calls(stream: bool) -> None:
    message: Any
    with serving(TURN) as (one, other, _):
        if stream:
            with one.messages.stream(**MESSAGE) as events:
                message = events.get_final_message()
            with other.responses.stream(**RESPONSE) as told:
                response: Any = told.get_final_response()
            with other.chat.completions.stream(**CHAT) as chunks:
                chat: Any = chunks.get_final_completion()
        else:
            message = one.messages.create(**MESSAGE)
            response = other.responses.create(**RESPONSE)
            chat = other.chat.completions.create(**CHAT)
            valid(ChatCompletion, chat)
    expected, arguments = ("Long thoughts of many words.", "I löok."), [("look", f'{{"at": {at}}}') for at in (1, 2)]
    thought, words, *calls = message.content
    assert (thought.thinking, words.text, message.stop_reason) == (*expected, "tool_use")
    assert [(call.name, json.dumps(call.input)) for call in calls] == arguments
    thought, _, *calls = response.output
    assert (thought.content[0].text, response.output_text, response.status) == (*expected, "completed")
    assert [(call.name, call.arguments) for call in calls] == arguments
    (choice,) = chat.choices
    assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == (*expected, "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == arguments


TEXTS = ("", "Hello, wörld", TURN, f"I look.\n{CALLS}", "<think>\nhm", f"{CALLS[:-20]}")


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_official_types_accept_every_event(text: str, is_cut: bool) -> None:
    script = Script(text or "x", step=3, ends=not is_cut, n_cached=5)
    limit = 20 if is_cut else 400
    server: Any = {"vocabulary": thinking_vocabulary(), "n_ctx": 4000}
    messages, responses = DIALECTS["messages"], DIALECTS["responses"]
    events, _ = ask(messages.path, messages.body(limit=limit, stream=True), script, **server)
    snapshot, parts, kind = None, dict[int, bytes](), pydantic.TypeAdapter[Any](RawMessageStreamEvent)
    for event in events:
        snapshot = accumulate_event(event=kind.validate_python(event), current_snapshot=snapshot, json_bufs=parts)
    assert messages.read(snapshot.model_dump(exclude_none=True)) == messages.read(events)
    events, _ = ask(responses.path, responses.body(limit=limit, stream=True), script, **server)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=openai.omit)
    kind = pydantic.TypeAdapter(ResponseStreamEvent)
    for event in events:
        state.handle_event(kind.validate_python(event))
    Response.model_validate(responses.join(events))


def test_openai_client_accepts_chat_completions_and_completions() -> None:
    with serving(Script(TEXT, step=2)) as (_, ai, _):
        answer = ai.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, n=2)
        valid(ChatCompletion, answer)
        assert [choice.message.content for choice in answer.choices] == [TEXT] * 2
        told: Any = ai.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        *chunks, last = told
        valid(ChatCompletionChunk, *chunks, last)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        assert last.usage.completion_tokens == 7
        with ai.chat.completions.stream(**ASK, logprobs=True) as stream:
            (final,) = stream.get_final_completion().choices
        assert final.message.content == TEXT
        assert "".join(token.token for token in final.logprobs.content or ()) == TEXT
        texts = ai.completions.create(model="any", prompt=["a", "b"], logprobs=2, max_tokens=5)
        valid(Completion, texts)
        assert [choice.finish_reason for choice in texts.choices] == ["length", "length"]
        parts = ai.completions.create(model="any", prompt="a", stream=True, echo=True)
        assert "".join(part.choices[0].text for part in parts) == "a" + TEXT
        (model,) = ai.models.list().data
        valid(Model, model)
        assert model.id == "demo"


def test_responses_api_with_schema_and_tools_allows_tool_calls() -> None:
    """Codex always sends tools; its --output-schema applies to the final answer."""
    asked: Any = RESPONSE | {"text": {"format": FORM}}
    with serving('{"answer": "x"}') as (_, other, engine):
        assert other.responses.create(**asked).output_text == '{"answer": "x"}'
        other.responses.create(**asked, tool_choice="none")
        other.responses.create(**asked, tool_choice="required")
        texts = {"answer": '{"answer": "x"}', "call": CALLS}
        found = [{name for name, text in texts.items() if allows(engine, text, number)} for number in range(3)]
    assert found == [{"answer", "call"}, {"answer"}, {"call"}]


def test_count_tokens_equals_input_tokens_of_message() -> None:
    with serving("x") as (one, _, _):
        counted = one.messages.count_tokens(model="m", messages=MESSAGE["messages"], tools=MESSAGE["tools"], system="s")
        usage = one.messages.create(**MESSAGE, system="s").usage
        assert one.messages.count_tokens(model="m", messages=LONG).input_tokens > 2000  # too long for the context
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_official_clients_raise_matching_exception_types() -> None:
    bad: Any = {"type": "json_schema", "name": "n", "schema": {"type": "bogus"}}
    with serving("x") as (one, other, engine):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            one.with_options(api_key="other").messages.create(**ASK)
        assert refused.value.type == "authentication_error"
        with pytest.raises(openai.AuthenticationError):
            other.with_options(api_key="other").models.list()
        with pytest.raises(openai.BadRequestError) as caught:
            other.chat.completions.create(**ASK, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
            one.messages.create(**ASK, output_config={"format": bad})
        with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema"):
            other.responses.create(**ASK_RESPONSE, text={"format": bad})
        for stream in (False, True):  # HTTP errors before the first token
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2000 maximum"):
                one.messages.create(**ASK | {"messages": LONG}, stream=stream)
            with pytest.raises(openai.BadRequestError, match="maximum context length is 2000") as caught:
                other.responses.create(model="m", input=LONG, stream=stream)
            assert caught.value.code == "context_length_exceeded"
        assert engine.tickets == []


def test_official_clients_raise_error_of_failed_stream() -> None:
    with serving(Script("a b c", error=TargetError("it broke"), after=2)) as (one, other, _):
        failed = pytest.raises(anthropic.APIStatusError, match="it broke")
        with one.messages.create(**ASK, stream=True) as stream, failed as caught:
            list(stream)
        assert caught.value.type == "api_error"
        with pytest.raises(openai.APIError, match="it broke"):
            list(other.chat.completions.create(**ASK, stream=True))
        *_, last = other.responses.create(**ASK_RESPONSE, stream=True)
    assert last.type == "response.failed"
    assert last.response.error.message == "it broke"


def test_embeddings_work_with_openai_client() -> None:
    with run_server(make_server(embedder=CountingEmbedder())[0]) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        answer = client.embeddings.create(model="demo", input=["hello", "there"])  # requests base64
        plain = client.embeddings.create(model="demo", input=[5, 6], encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="dimensions: must be 3"):
            client.embeddings.create(model="demo", input="hello", dimensions=2)
    assert np.allclose(
        [one.embedding for one in answer.data],
        expected_embeddings(*map(demo_vocabulary().tokenize, ("hello", "there"))),
        atol=1e-6,
    )
    assert np.allclose(plain.data[0].embedding, expected_embeddings([5, 6])[0], atol=1e-6)
