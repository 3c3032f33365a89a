"""`/v1/responses` over HTTP, with OpenAI's own client; its warnings are errors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from support.chat_scripts import finish, turn
from support.scripted_server import Script, scripted_server

from ngramspec.sampling.logprobs import Logprobs
from ngramspec.server.dialogue import Likely
from ngramspec.server.errors import ApiError, overflow
from ngramspec.tool_calls.deltas import Content

pytestmark = pytest.mark.filterwarnings("error")

ASK: dict[str, Any] = {"model": "any", "input": "hi"}
TOOLS: Any = [
    {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "web_search"},
]
TURN = turn("look")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Script]]:
    with scripted_server() as found:
        yield found


@pytest.fixture
def script(served: tuple[str, Script]) -> Script:
    return served[1]


@pytest.fixture
def client(served: tuple[str, Script]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0) as one:
        yield one


def told(response: Any) -> list[Any]:
    """The items of a response, in short."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.call_id, item.name, item.arguments))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


EXPECTED = [("reasoning", "hm"), ("message", "I löok."), ("c0", "look", '{"at": "x"}'), ("c1", "look", "{}")]


def test_a_response(client: openai.OpenAI, script: Script) -> None:
    script.deltas = TURN
    response = client.responses.create(**ASK, tools=TOOLS)
    assert told(response) == EXPECTED
    assert (response.output_text, response.status, response.model) == ("I löok.", "completed", "any")
    assert response.usage is not None
    assert (response.usage.input_tokens_details.cached_tokens, response.usage.total_tokens) == (5, 27)


def test_a_stream(client: openai.OpenAI, script: Script) -> None:
    script.deltas = TURN
    with client.responses.stream(**ASK, tools=TOOLS) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert told(stream.get_final_response()) == EXPECTED
    assert text == "I löok."
    events = list(client.responses.create(**ASK, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    snapshots = [
        event.snapshot for event in _streamed(client) if event.type == "response.function_call_arguments.delta"
    ]
    assert snapshots == ['{"at": "', '{"at": "x"}', "{}"]


def _streamed(client: openai.OpenAI) -> list[Any]:
    with client.responses.stream(**ASK, tools=TOOLS) as stream:
        return list(stream)


def test_the_output_can_be_sent_back(client: openai.OpenAI, script: Script) -> None:
    script.deltas = TURN
    output: Any = client.responses.create(**ASK, tools=TOOLS).output
    results = [{"type": "function_call_output", "call_id": id, "output": "ok"} for id in ("c0", "c1")]
    client.responses.create(model="any", input=[{"role": "user", "content": "hi"}, *output, *results])
    _, said, *back = script.tasks[-1].messages
    assert (said["content"], said["reasoning_content"], len(said["tool_calls"])) == ("I löok.", "hm", 2)
    assert [(one["role"], one["tool_call_id"]) for one in back] == [("tool", "c0"), ("tool", "c1")]


def test_structured_output(client: openai.OpenAI, script: Script) -> None:
    class Place(BaseModel):
        name: str

    script.deltas = [Content('{"name": "here"}'), finish()]
    assert client.responses.parse(**ASK, text_format=Place).output_parsed == Place(name="here")
    schema = script.tasks[-1].schema
    assert schema is not None
    assert schema["required"] == ["name"]
    with client.responses.stream(**ASK, text_format=Place) as stream:
        assert stream.get_final_response().output_parsed == Place(name="here")


def test_logprobs(client: openai.OpenAI, script: Script) -> None:
    script.deltas = [Content("a"), Likely((Logprobs(97, -0.5, ((97, -0.5), (98, -2.0))),)), finish()]
    response: Any = client.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
    (one,) = response.output[0].content[0].logprobs
    assert (one.token, one.logprob, one.top_logprobs[1].token, script.tasks[-1].logprobs) == ("a", -0.5, "b", 2)


def test_an_answer_that_was_cut(client: openai.OpenAI, script: Script) -> None:
    script.deltas = [Content("a"), finish("length")]
    *_, last = client.responses.create(**ASK, stream=True, max_output_tokens=1)
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(client: openai.OpenAI, script: Script, stream: bool) -> None:
    """Before the first token an error is one of HTTP, in streams too."""
    script.deltas = [overflow(9000, 4096)]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as caught:
        client.responses.create(**ASK, stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_what_is_not_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK, previous_response_id="resp_0")
    assert caught.value.param == "previous_response_id"


def test_a_failure_within_a_stream(client: openai.OpenAI, script: Script) -> None:
    script.deltas = [Content("a"), ApiError(500, "it broke")]
    *_, last = client.responses.create(**ASK, stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "it broke"


def test_who_leaves_is_not_answered_on(client: openai.OpenAI, script: Script) -> None:
    script.deltas = chain.from_iterable(repeat((Content("a"), 0.01)))
    with client.responses.create(**ASK, stream=True) as stream:
        next(stream)
        assert not script.closed.is_set()
    assert script.closed.wait(20)


def test_silence_before_and_within_an_answer() -> None:
    with scripted_server(ping=0.05) as (address, script), openai.OpenAI(base_url=address, api_key="-") as client:
        script.deltas = [0.2, Content("a"), 0.2, Content("b"), finish()]
        with client.responses.stream(**ASK) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == "ab"
    assert kinds[:3] == ["response.created", "response.in_progress", "keepalive"]
    assert kinds[kinds.index("response.output_text.delta") + 1] == "keepalive"
