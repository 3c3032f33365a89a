"""Tests of reasoning budgets over HTTP: every API respects them, streamed or not, with drafts or without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.dialects import DIALECTS, USER
from support.ear import run_engine
from support.http import ask, parse_chunks, send, vocabulary_with
from support.mock_shared import MockShared

from ngramspec.drafting.mixture.drafter import MixtureDrafter, TextIndexSet
from ngramspec.llama.chat_format import CHATML
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import ReasoningBudget
from ngramspec.server.state import ServedModel, Server

CHATS, MESSAGES = "/v1/chat/completions", "/v1/messages"
APIS = {dialect.path: dialect for dialect in DIALECTS.values() if dialect.name != "ollama"}
BODIES = {path: dialect.body(limit=60, tools=[]) for path, dialect in APIS.items()}
OPENED = CHATML.replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@contextmanager
def serving(*, drafted: bool = True, words: str | None = "abcdefgh", **settings: Any) -> Iterator[Server]:
    """Yield a server with an engine on a mock model, which soon repeats itself and only emits `words`."""
    known = vocabulary_with(OPENED)
    tokens = None if words is None else [known.tokenize(word, add_bos=False)[-1] for word in words]
    model = MockShared(2, vocabulary=known, words=tokens, peak=6.0)
    drafter = MixtureDrafter(TextIndexSet()) if drafted else None
    with run_engine(model, vocabulary=known, drafter=drafter) as engine:
        yield Server(model=ServedModel(engine, known, "mock", **settings))


def answer(server: Server, path: str, **fields: Any) -> tuple[str, str]:
    """Return the reasoning and the content of an answer at temperature 0."""
    response = send(server, path, {**BODIES[path], "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    turn = APIS[path].read(parse_chunks(response.text) if fields.get("stream") else response.json())
    return turn.reasoning, turn.text


def test_reasoning_budget_limits_every_api_with_and_without_drafts() -> None:
    found = set()
    for drafted in (False, True):
        with serving(drafted=drafted) as server:
            free = answer(server, CHATS)
            for path in BODIES:
                for stream in (False, True):
                    found.add(answer(server, path, stream=stream, reasoning_budget_tokens=10))
            assert server.model is not None
            assert bool(server.model.service.report().stats.accepted) == drafted
    ((reasoning, content),) = found
    assert reasoning == free[0][:9]  # The first of the ten tokens is the line end after the tag in the prompt.
    assert free[1] == ""
    assert len(content) > 10


def test_reasoning_budget_applies_per_choice_and_drafts_keep_text() -> None:
    texts = []
    for drafted in (False, True):
        with serving(drafted=drafted) as server:
            body = BODIES[CHATS] | {"n": 3, "seed": 5, "temperature": 0.9, "thinking_budget_tokens": 12}
            told = send(server, CHATS, body | {"logprobs": True}).json()
            texts.append([one["message"] for one in told["choices"]])
            assert [len(one["logprobs"]["content"]) for one in told["choices"]] == [60] * 3
    assert texts[0] == texts[1]
    assert len({one["reasoning_content"] for one in texts[0]}) == 3
    known = vocabulary_with(OPENED)
    for one in texts[0]:
        assert len(known.tokenize(one["reasoning_content"], add_bos=False)) <= 11
        assert one["content"]


def test_reasoning_budget_of_zero_removes_reasoning() -> None:
    with serving() as server:
        reasoning, content = answer(server, CHATS, reasoning_budget_tokens=0)
        assert reasoning == ""
        assert content
        assert answer(server, MESSAGES, thinking={"type": "enabled", "budget_tokens": 0}) == ("", content)


def test_reasoning_budget_message_precedes_tag_and_can_match_stop() -> None:
    message = "\nSo: STOP now.\n"
    with serving() as server:
        reasoning, content = answer(server, CHATS, reasoning_budget_tokens=9, reasoning_budget_message=message)
        assert reasoning.endswith("\nSo: STOP now.")
        assert content
        body = {"reasoning_budget_tokens": 9, "reasoning_budget_message": message, "stop": "STOP"}
        told = send(server, CHATS, BODIES[CHATS] | {"temperature": 0} | body).json()["choices"][0]
        assert told["finish_reason"] == "stop"
        assert told["message"]["reasoning_content"] == reasoning.partition("STOP")[0].rstrip()


@pytest.mark.parametrize("drafted", [False, True])
def test_reasoning_budget_with_grammar_constrains_text_after_reasoning(drafted: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    with serving(drafted=drafted, words=None) as server:
        reasoning, content = answer(server, CHATS, reasoning_budget_tokens=7, response_format=form)
        assert reasoning
        assert set(json.loads(content)) == {"a"}
        body = {"temperature": 0, "reasoning_budget_tokens": 7, "tools": [tool], "tool_choice": "required"}
        (choice,) = send(server, CHATS, BODIES[CHATS] | body | {"max_tokens": 200}).json()["choices"]
        assert choice["message"]["reasoning_content"] == reasoning
        assert set(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])) == {"a"}


def budget_of(path: str, vocabulary: Vocabulary, fields: dict[str, Any], **model: Any) -> ReasoningBudget | None:
    """Return the budget of the request that reaches the engine."""
    _, service = ask(path, BODIES[path] | fields, vocabulary=vocabulary, **model)
    return service.requests[0].rules.reasoning


def limit(path: str, template: str = OPENED, fields: dict[str, Any] | None = None, **model: Any) -> int | None:
    budget = budget_of(path, vocabulary_with(template), fields or {}, **model)
    return None if budget is None else budget.limit


@pytest.mark.parametrize("path", BODIES)
def test_reasoning_budget_of_request_overrides_server_default(path: str) -> None:
    assert limit(path) is None
    assert limit(path, reasoning_budget=5) == 5
    for fields, budget in (
        ({"reasoning_budget_tokens": 9}, 9),
        ({"thinking_budget_tokens": 9}, 9),
        ({"reasoning_budget_tokens": 9, "thinking_budget_tokens": 8}, 9),
        ({"reasoning_budget_tokens": -1}, 5),
        ({"reasoning_budget_tokens": None}, 5),
        ({"reasoning_budget_tokens": 0}, 0),
    ):
        assert limit(path, fields=fields, reasoning_budget=5) == budget


def test_reasoning_budget_message_of_request_overrides_server_default() -> None:
    known = vocabulary_with(OPENED)
    for fields, message in (
        ({}, "so"),
        ({"reasoning_budget_message": "then"}, "then"),
        ({"reasoning_budget_message": ""}, ""),
    ):
        budget = budget_of(CHATS, known, fields, reasoning_budget=5, reasoning_message="so")
        assert budget is not None
        assert b"".join(map(known.display_piece, budget.blocks[0].closing)).decode() == f"{message}</think>"


def test_reasoning_budget_of_gpt_oss_ends_block_with_end_of_message() -> None:
    harmony = vocabulary_with(CHATML + "{# <|channel|> <|message|> #}")
    budget = budget_of(CHATS, harmony, {"reasoning_budget_tokens": 9})
    assert budget is not None
    (block,) = budget.blocks
    assert (block.start, block.end, budget.open_block) == ("<|channel|>analysis<|message|>", "<|end|>", None)


def test_reasoning_budget_counts_reasoning_of_message_to_continue() -> None:
    known = vocabulary_with(OPENED)
    messages = [USER, {"role": "assistant", "reasoning_content": "one two", "content": ""}]
    budget = budget_of(CHATS, known, {"messages": messages, "reasoning_budget_tokens": 20})
    assert budget is not None
    assert budget.used == 1 + len(known.tokenize("one two", add_bos=False))


def test_grammar_without_closing_tag_overrides_reasoning_budget() -> None:
    with serving() as server:
        text = "".join(answer(server, CHATS, reasoning_budget_tokens=7, grammar="root ::= [a-d]+"))
    assert len(text) == 60
    assert set(text) <= set("abcd")
