"""The `openai` package as a client over a real connection; its types say what an answer must look like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pydantic
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.fake_service import FakeService, Script
from support.http import scripted
from support.scripted_server import listening

from ngramspec.server.app import make_app

USER: Any = [{"role": "user", "content": "hi"}]
TEXT = "Hello, world"


@contextmanager
def client(
    script: Any = None, keys: tuple[str, ...] = (), **settings: Any
) -> Iterator[tuple[openai.OpenAI, FakeService]]:
    server, service = scripted(script, **settings)
    with (
        listening(make_app(server, keys=keys)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="sk-test", max_retries=0, timeout=120) as made,
    ):
        yield made, service


def valid(kind: type[pydantic.BaseModel], found: pydantic.BaseModel) -> None:
    """The client builds its objects without a check; this is the check."""
    kind.model_validate(found.model_dump(), strict=True)


def test_chats() -> None:
    with client(Script(step=2)) as (ai, service):
        answer = ai.chat.completions.create(model="any", messages=USER, logprobs=True, top_logprobs=3, seed=5, n=2)
        valid(ChatCompletion, answer)
        assert [choice.message.content for choice in answer.choices] == [TEXT] * 2
        likely = answer.choices[0].logprobs
        assert likely is not None
        assert likely.content is not None
        assert "".join(token.token for token in likely.content) == TEXT
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert sorted(request.sampling.seed for request in service.requests) == [5, 6]


def test_streams_of_chats() -> None:
    with client(Script(step=2)) as (ai, _):
        told = list(
            ai.chat.completions.create(
                model="any", messages=USER, stream=True, stream_options={"include_usage": True}, logprobs=True
            )
        )
        for chunk in told:
            valid(ChatCompletionChunk, chunk)
        assert "".join(c.choices[0].delta.content or "" for c in told[:-1]) == TEXT
        assert told[-1].usage is not None
        assert told[-1].usage.completion_tokens == 7
        with ai.chat.completions.stream(model="any", messages=USER, logprobs=True) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == TEXT
        assert final.choices[0].logprobs is not None
        assert "".join(token.token for token in final.choices[0].logprobs.content or ()) == TEXT


def test_completions() -> None:
    with client(Script(step=2)) as (ai, _):
        answer = ai.completions.create(model="any", prompt=["a", "b"], logprobs=2, max_tokens=5)
        valid(Completion, answer)
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        told = list(ai.completions.create(model="any", prompt="a", stream=True, echo=True))
        assert "".join(chunk.choices[0].text for chunk in told) == "a" + TEXT


def test_structured_output() -> None:
    class Place(pydantic.BaseModel):
        city: str
        people: int

    with client(Script('{"city": "Rome", "people": 3}')) as (ai, service):
        answer = ai.chat.completions.parse(model="any", messages=USER, response_format=Place)
        assert answer.choices[0].message.parsed == Place(city="Rome", people=3)
        assert service.requests[0].sampling.grammar


def test_tools() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    with client(Script(call)) as (ai, _):
        with ai.chat.completions.stream(model="any", messages=USER, tools=tools) as stream:
            final = stream.get_final_completion()
        (called,) = final.choices[0].message.tool_calls or ()
        assert (called.function.name, json.loads(called.function.arguments)) == ("weather", {"city": "Rome"})
        assert final.choices[0].finish_reason == "tool_calls"
        messages: Any = [
            *USER,
            final.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": called.id, "content": "sunny"},
        ]
        again = ai.chat.completions.create(model="any", messages=messages, tools=tools, tool_choice="none")
        valid(ChatCompletion, again)


def test_models() -> None:
    with client() as (ai, _):
        (model,) = ai.models.list().data
        valid(Model, model)
        assert model.id == "demo"


def test_errors_are_of_the_kinds_that_the_client_knows() -> None:
    with client(n_ctx=64) as (ai, service):
        with pytest.raises(openai.BadRequestError) as caught:
            ai.chat.completions.create(model="any", messages=[{"role": "user", "content": "word " * 100}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as caught:
            ai.chat.completions.create(model="any", messages=USER, temperature=-1)
        assert caught.value.param == "temperature"
        assert service.tickets == []
    with client(keys=("other",)) as (ai, _), pytest.raises(openai.AuthenticationError):
        ai.models.list()


def test_an_error_in_a_stream_is_raised() -> None:
    from ngramspec.errors import TargetError

    with client(Script(fails=TargetError("out of memory"), after=2)) as (ai, _):
        told = ai.chat.completions.create(model="any", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="out of memory"):
            list(told)
