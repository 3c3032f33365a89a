"""Both dialects over the whole server: templates, parsers of calls, grammars; only the engine follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from support.fake_service import FakeService, Script
from support.scripted_server import listening

import ngramspec.demo
from ngramspec.batching.request import Request
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.server.app import make_app
from ngramspec.server.served import ServedModel, Server

CALLS = "I look.\n" + "\n".join(
    f'<tool_call>\n{{"name": "look", "arguments": {{"at": {at}}}}}\n</tool_call>' for at in (1, 2)
)
PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
FORM: Any = {"type": "json_schema", "name": "n", "schema": SCHEMA}
TOOL: Any = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}
ASK: Any = {"model": "m", "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}


class ThinkingVocabulary(Vocabulary):
    """One whose template, its own otherwise, also knows thoughts."""

    @property
    def chat_template(self) -> str | None:
        return f"{super().chat_template}{{# <think> </think> #}}"


@contextmanager
def serving(text: str) -> Iterator[tuple[anthropic.Anthropic, openai.OpenAI, FakeService]]:
    """Both clients of a server whose engine says a text, in steps of three tokens."""
    with (
        closing(ThinkingVocabulary(Path(ngramspec.demo.__file__).parent / "demo.gguf")) as vocabulary,
        _clients(FakeService(vocabulary, Script(text, step=3, cached=2), n_ctx=2000)) as found,
    ):
        yield found


@contextmanager
def _clients(engine: FakeService) -> Iterator[tuple[anthropic.Anthropic, openai.OpenAI, FakeService]]:
    app = make_app(Server(model=ServedModel(engine, engine.vocabulary, "demo")))
    with (
        listening(app) as address,
        anthropic.Anthropic(base_url=address, api_key="-", max_retries=0) as one,
        openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as other,
    ):
        yield one, other, engine


def test_calls_are_found_in_the_text() -> None:
    with serving(CALLS) as (one, other, _):
        message = one.messages.create(**ASK, tools=[{"name": "look", "input_schema": PARAMETERS}])
        response = other.responses.create(model="m", input="hi", tools=[TOOL])
    assert [block.to_dict() for block in message.content[1:]] == [
        {"type": "tool_use", "id": block.id, "name": "look", "input": {"at": at}}
        for at, block in enumerate(message.content[1:], 1)
        if block.type == "tool_use"
    ]
    assert (len(message.content), message.stop_reason) == (3, "tool_use")
    calls = [item for item in response.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ['{"at": 1}', '{"at": 2}']
    assert response.output_text.strip() == "I look."


def test_thoughts_are_counted() -> None:
    with serving("<think>\nLong thoughts of many words.\n</think>\n\nYes.") as (one, other, engine):
        message = one.messages.create(**ASK)
        response = other.responses.create(model="m", input="hi")
    thought, text = message.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    assert response.usage is not None
    counted = message.usage.output_tokens_details.thinking_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == counted
    assert message.usage.input_tokens + 2 == len(engine.requests[0].prompt) == response.usage.input_tokens


def test_a_schema_leaves_room_for_calls() -> None:
    """Codex always sends tools; its --output-schema is for the answer at the end."""
    with serving('{"answer": "x"}') as (_, other, engine):
        answer = other.responses.create(model="m", input="hi", tools=[TOOL], text={"format": FORM})
        other.responses.create(model="m", input="hi", tools=[TOOL], text={"format": FORM}, tool_choice="none")
        other.responses.create(model="m", input="hi", tools=[TOOL], text={"format": FORM}, tool_choice="required")
        both, only, forced = (_allowed(engine.vocabulary, request) for request in engine.requests)
    assert answer.output_text == '{"answer": "x"}'
    assert both == {"answer", "call"}
    assert only == {"answer"}
    assert forced == {"call"}


def _allowed(vocabulary: Any, request: Request) -> set[str]:
    """Which texts the grammar of a request allows, to their ends."""
    call = CALLS.removeprefix("I look.\n")
    return {
        name for name, text in {"answer": '{"answer": "x"}', "call": call}.items() if _fits(vocabulary, request, text)
    }


def _fits(vocabulary: Any, request: Request, text: str) -> bool:
    grammar = vocabulary.sampler(request.sampling).grammar
    end = next(token for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token))
    for token in [*vocabulary.tokenize(text, add_bos=False), end]:
        if not grammar.allows(token):
            return False
        if token != end:
            grammar.accept(token)
    return True


def test_a_schema_that_cannot_be_is_named() -> None:
    bad = {"type": "bogus"}
    with serving("x") as (one, other, _):
        with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema"):
            other.responses.create(model="m", input="hi", text={"format": FORM | {"schema": bad}})
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
            one.messages.create(**ASK, output_config={"format": {"type": "json_schema", "schema": bad}})


def test_counting_is_what_a_message_costs() -> None:
    tools: Any = [{"name": "look", "input_schema": PARAMETERS}]
    with serving("x") as (one, _, _):
        counted = one.messages.count_tokens(model="m", messages=ASK["messages"], tools=tools, system="s")
        usage = one.messages.create(**ASK, tools=tools, system="s").usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stream_begins_with_the_length_of_its_prompt() -> None:
    with serving("x") as (one, _, engine), one.messages.stream(**ASK) as stream:
        start = next(event for event in stream if event.type == "message_start")
        usage = start.message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(engine.requests[0].prompt) - 2, 2)


def test_a_prompt_beyond_the_context() -> None:
    long: Any = [{"role": "user", "content": "word " * 4000}]
    with serving("x") as (one, other, _):
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2000 maximum"):
            one.messages.create(**ASK | {"messages": long}, stream=True)
        with pytest.raises(openai.BadRequestError) as caught:
            other.responses.create(model="m", input=long, stream=True)
        assert one.messages.count_tokens(model="m", messages=long).input_tokens > 2000
    assert caught.value.code == "context_length_exceeded"
