"""`/v1/messages` over HTTP, with Anthropic's own client; its warnings are errors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import anthropic
import pytest
from support.chat_scripts import finish, turn
from support.scripted_server import Script, scripted_server

from ngramspec.server.errors import ApiError, overflow
from ngramspec.tool_calls.deltas import Content

pytestmark = pytest.mark.filterwarnings("error")

ASK: dict[str, Any] = {"model": "any", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("look", "list")]
TURN = turn("list")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Script]]:
    with scripted_server(keys=["secret"]) as found:
        yield found


@pytest.fixture
def script(served: tuple[str, Script]) -> Script:
    return served[1]


@pytest.fixture
def client(served: tuple[str, Script]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served[0], api_key="secret", max_retries=0) as one:
        yield one


def blocks(message: Any) -> list[Any]:
    return [block.model_dump(exclude_none=True) for block in message.content]


EXPECTED = [
    {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
    {"type": "text", "text": "I löok."},
    {"type": "tool_use", "id": "c0", "name": "look", "input": {"at": "x"}},
    {"type": "tool_use", "id": "c1", "name": "list", "input": {}},
]


def test_a_message(client: anthropic.Anthropic, script: Script) -> None:
    script.deltas = TURN
    message = client.messages.create(**ASK, tools=TOOLS)
    assert blocks(message) == EXPECTED
    assert (message.stop_reason, message.model, message.usage.output_tokens) == ("tool_use", "any", 7)


def test_a_stream(client: anthropic.Anthropic, script: Script) -> None:
    script.deltas = TURN
    with client.messages.stream(**ASK, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert blocks(message) == EXPECTED
    assert (message.stop_reason, message.usage.input_tokens, message.usage.cache_read_input_tokens) == (
        "tool_use",
        15,
        5,
    )
    assert {"text", "thinking", "signature", "input_json"} <= set(kinds)


def test_an_answer_can_be_sent_back(client: anthropic.Anthropic, script: Script) -> None:
    """With its thoughts, which become the assistant's again."""
    script.deltas = TURN
    message = client.messages.create(**ASK, tools=TOOLS)
    results: Any = [{"type": "tool_result", "tool_use_id": id, "content": "ok"} for id in ("c0", "c1")]
    more: Any = [*ASK["messages"], message.to_param(), {"role": "user", "content": results}]
    client.messages.create(**ASK | {"messages": more}, tools=TOOLS)
    _, said, *told = script.tasks[-1].messages
    assert (said["content"], said["reasoning_content"], len(said["tool_calls"])) == ("I löok.", "hm", 2)
    assert [(one["role"], one["name"]) for one in told] == [("tool", "look"), ("tool", "list")]


def test_a_stop_sequence(client: anthropic.Anthropic, script: Script) -> None:
    script.deltas = [Content("a"), finish("stop", "END")]
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}  # older clients have arguments for these
    message = client.messages.create(**ASK, stop_sequences=["END"], extra_body=body)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    task = script.tasks[-1]
    assert (task.stop, task.sampling.temperature, task.sampling.top_p, task.sampling.top_k) == (("END",), 0.5, 0.9, 3)


def test_counting(client: anthropic.Anthropic) -> None:
    """Of the whole prompt, tools included, be it longer than the context."""
    counted = client.messages.count_tokens(model="any", messages=ASK["messages"], system="b" * 9000, tools=TOOLS)
    assert counted.input_tokens == 9000 + len("looklisthi")


def test_a_request_that_is_wrong(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        client.messages.create(**ASK | {"max_tokens": -1})
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(client: anthropic.Anthropic, script: Script, stream: bool) -> None:
    """Before the first token an error is one of HTTP, in streams too."""
    script.deltas = [overflow(9000, 4096)]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9000 tokens > 4096 maximum"):
        client.messages.create(**ASK, stream=stream)


def test_a_failure_within_a_stream(client: anthropic.Anthropic, script: Script) -> None:
    script.deltas = [Content("a"), ApiError(500, "it broke")]
    told = pytest.raises(anthropic.APIStatusError, match="it broke")
    with client.messages.create(**ASK, stream=True) as stream, told as caught:
        list(stream)
    assert caught.value.type == "api_error"


def test_a_wrong_key(served: tuple[str, Script]) -> None:
    client = anthropic.Anthropic(base_url=served[0], api_key="other", max_retries=0)
    with client, pytest.raises(anthropic.AuthenticationError) as caught:
        client.messages.create(**ASK)
    assert caught.value.type == "authentication_error"


def test_who_leaves_is_not_answered_on(client: anthropic.Anthropic, script: Script) -> None:
    script.deltas = chain.from_iterable(repeat((Content("a"), 0.01)))
    with client.messages.create(**ASK, stream=True) as stream:
        next(stream)
        assert not script.closed.is_set()
    assert script.closed.wait(20)


def test_silence_before_and_within_an_answer() -> None:
    with scripted_server(ping=0.05) as (address, script), anthropic.Anthropic(base_url=address, api_key="-") as client:
        script.deltas = [0.2, Content("a"), 0.2, Content("b"), finish()]
        with client.messages.stream(**ASK) as stream:
            assert stream.get_final_text() == "ab"
        with client.messages.with_streaming_response.create(**ASK, stream=True) as response:
            lines = [line for line in response.iter_lines() if line.startswith("event:")]
    assert lines[:2] == ["event: message_start", "event: ping"]
    assert lines[lines.index("event: content_block_delta") + 1] == "event: ping"
