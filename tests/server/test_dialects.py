"""Tests of OpenAI's and Anthropic's APIs over HTTP with their official clients, whose warnings are errors.

Templates, parsers of tool calls and grammars are the server's; only the engine is scripted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.dialects import DIALECTS, USER, Dialect
from support.fake_service import FakeService, Script
from support.http import (
    allows,
    ask,
    demo_vocabulary,
    format_tool_call,
    make_server,
    run_server,
    thinking_vocabulary,
    vocabulary_with,
)
from support.templates import CHAT_VALUES, ONE_CALL

from ngramspec.data import TargetError

pytestmark = pytest.mark.filterwarnings("error")

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


def test_reasoning_token_count_does_not_depend_on_drafts() -> None:
    counts, vocabulary = set(), thinking_vocabulary()
    expected = len(vocabulary.tokenize("<think>\nLong thoughts of many words.", add_bos=False))
    for step in (1, 2, 3, 7, 100):
        for path, body in (("chat/completions", CHAT), ("messages", MESSAGE), ("responses", RESPONSE)):
            for stream in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
                script = Script(TURN, step=step)
                answer, _ = ask(f"/v1/{path}", body | stream, script, vocabulary=vocabulary, n_ctx=2000)
                last = answer[-2:] if stream else answer
                counts |= set(re.findall(r'"(?:reasoning|thinking)_tokens": (\d+)', json.dumps(last)))
    assert counts == {f"{expected}"}


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


EACH = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
LOOKS = [format_tool_call("look", f'{{"at": {at}}}') for at in (1, 2)]


@EACH
def test_settings_reach_the_engine(dialect: Dialect) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.2, "seed": 7, "repeat_penalty": 1.2}
    stop = "stop_sequences" if dialect.path == "/v1/messages" else "stop"
    _, engine = dialect.ask(dialect.body(limit=9, settings={**sampling, stop: ["END"]}, unknown=[1]), n_ctx=2000)
    (request,) = engine.requests
    assert {name: getattr(request.sampling, name) for name in sampling} == sampling
    assert (request.max_tokens, request.sampling.grammar) == (9, None)
    assert request.stop == ("END",) or dialect.name == "responses"  # OpenAI's responses have no stop strings


FRAGMENTS = ("<think>\n", "hm ", "\n</think>\n\n", "I löok. ", "\n", '<tool_call>\n{"name": "loo', '{"at": [1]}', "</")


@st.composite
def answers(draw: st.DrawFn) -> tuple[Script, int]:
    """Draw reasoning, texts, calls and parts of them in any order; and the maximum number of tokens."""
    calls = map(format_tool_call, ("look", "patch", "made_up"))
    parts = draw(st.lists(st.sampled_from([*FRAGMENTS, *calls]), max_size=8))
    is_cut = draw(st.booleans())
    script = Script("".join(parts) or "x", step=draw(st.integers(1, 9)), ends=not is_cut, n_cached=5)
    return script, 60 if is_cut else 400


@EACH
@given(answer=answers(), has_tools=st.booleans())
def test_stream_equals_whole_answer(dialect: Dialect, answer: tuple[Script, int], has_tools: bool) -> None:
    script, limit = answer
    server = {"vocabulary": vocabulary_with(CHAT_VALUES), "n_ctx": 4000}
    tools = dialect.tools if has_tools else []
    whole, _ = dialect.ask(dialect.body(limit=limit, tools=tools), script, **server)
    streamed, _ = dialect.ask(dialect.body(limit=limit, tools=tools, stream=True), script, **server)
    streamed_calls = streamed.calls
    if dialect.path == "/v1/chat/completions" and whole.reason == "length":
        streamed_calls = streamed_calls[: len(whole.calls)]  # the whole answer omits a call that a limit cut off
    assert streamed[:2] == whole[:2]
    assert (streamed_calls, streamed[3:6]) == (whole.calls, whole[3:6])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["chat completions", "responses", "ollama"])
def test_logprobs_cover_exactly_the_text(name: str, stream: bool) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "include": ["message.output_text.logprobs"], "stream": stream}
    for text in ("a END b", "Hello, wörld", "1 <tool b"):
        turn, _ = DIALECTS[name].ask(DIALECTS[name].body(**asked), Script(text, step=2), n_ctx=2000)
        assert turn.text == text
        assert b"".join(bytes(token["bytes"]) for token in turn.logprobs).decode() == text
        assert {(token["logprob"], len(token["top_logprobs"])) for token in turn.logprobs} == {(-0.5, 2)}


ONE, TWO, FREE = LOOKS[0], "\n".join(LOOKS), format_tool_call("patch", '{"input": "x"}')
NAMED_CHOICE = {"type": "function", "name": "look"}
ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
CHOICES: list[tuple[str, Any, list[str] | None]] = [
    *((name, choice, None) for name in ("chat completions", "responses") for choice in (None, "auto", "none")),
    ("chat completions", "required", [ONE, TWO, FREE]),
    ("chat completions", {"type": "function", "function": {"name": "look"}}, [ONE]),
    ("chat completions", {"type": "allowed_tools", "allowed_tools": ALLOWED}, [ONE, TWO]),
    ("responses", "required", [ONE, TWO, FREE]),
    ("responses", NAMED_CHOICE, [ONE]),
    ("responses", {"type": "allowed_tools", "mode": "required", "tools": [NAMED_CHOICE]}, [ONE, TWO]),
    ("messages", {"type": "auto"}, None),
    ("messages", {"type": "none"}, None),
    ("messages", {"type": "any"}, [ONE, TWO]),
    ("messages", {"type": "any", "disable_parallel_tool_use": True}, [ONE]),
    ("messages", {"type": "tool", "name": "look"}, [ONE]),
]


@pytest.mark.parametrize(("name", "choice", "allowed"), CHOICES)
def test_tool_choice_becomes_a_grammar(name: str, choice: Any, allowed: list[str] | None) -> None:
    _, engine = DIALECTS[name].ask(DIALECTS[name].body(tool_choice=choice), n_ctx=2000)
    if allowed is None:
        assert engine.requests[0].sampling.grammar is None
        return
    texts = [ONE, TWO, "no"] + ([FREE] if name != "messages" else [])
    assert [text for text in texts if allows(engine, text)] == [text for text in texts if text in allowed]


@EACH
def test_answer_continues_last_message_of_assistant(dialect: Dialect) -> None:
    vocabulary, begun = demo_vocabulary(), {"role": "assistant", "content": "The answer <|im_end|> is "}
    body = dialect.body(tools=[], **{dialect.messages: [USER, begun]})
    turn, engine = dialect.ask(body, Script("4."))
    expected = vocabulary.chats.tokens([USER]) + vocabulary.tokenize(begun["content"], add_bos=False)
    assert (turn.text, list(engine.requests[0].prompt)) == ("4.", expected)


SINGLE = {
    "chat completions": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "ollama": None,  # without such a field
}


@EACH
@pytest.mark.parametrize("stream", [False, True])
def test_answer_with_single_call_ends_after_it(dialect: Dialect, stream: bool) -> None:
    endless, single = Script(TWO, ends=False, step=3), SINGLE[dialect.name]
    asked = dialect.body(stream=stream)
    # A template that accepts only one call in a turn has the same effect as the field.
    answers = [dialect.ask(asked, endless, vocabulary=vocabulary_with(ONE_CALL), n_ctx=2000)]
    if single is not None:
        answers.append(dialect.ask(asked | single, endless, n_ctx=2000))
    for turn, _ in answers:
        assert ([json.loads(arguments) for _, arguments in turn.calls], turn.reason) == ([{"at": 1}], turn.reason)
        assert turn.reason not in ("length", "incomplete", "max_tokens")
