"""The chat APIs of the server: requests for the same things, and answers as clients read them, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import from_json
from support.fake_service import FakeService
from support.http import ask

Fields = dict[str, Any]

USER = {"role": "user", "content": "hi"}
SCHEMA: Fields = {"type": "object", "properties": {"at": {"type": "integer"}}}
LOOK: Fields = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "patch", "description": "Edits."}


class Turn(NamedTuple):
    """An answer as a client reads it."""

    reasoning: str
    text: str
    calls: list[tuple[str, Any]]  # names and arguments, or the free input of a custom tool
    reason: str  # why it ended, in the words of the API
    usage: tuple[int, int, int]  # tokens of the prompt, of these from the cache, and of the answer
    logprobs: list[Any]
    history: list[Fields]  # messages or items that the client sends back
    results: list[Fields]  # results of its calls


@dataclass(frozen=True)
class Dialect:
    """A chat API.

    Attributes:
        name: Name of the API.
        path: Path of the endpoint.
        messages: Name of the field with the conversation.
        limit: Name of the setting that limits the tokens of the answer.
        tools: The tools look and patch.
        read_whole: Function that reads the JSON of an answer.
        join: Function that makes the JSON of an answer from the chunks of its stream.
        settings: Name of the field with the settings; "" if they are next to the others.
    """

    name: str
    path: str
    messages: str
    limit: str
    tools: Sequence[Fields]
    read_whole: Callable[[Any], Turn]
    join: Callable[[list[Any]], Any]
    settings: str = ""

    def body(self, *, limit: int = 400, settings: Fields | None = None, **fields: Any) -> Fields:
        """Return a request with the two tools, and further settings and fields."""
        body: Fields = {"model": "m", "stream": False, self.messages: [USER], "tools": self.tools}
        body["stream_options"] = {"include_usage": True}
        settings = {self.limit: limit, **(settings or {})}
        return body | ({self.settings: settings} if self.settings else settings) | fields

    def ask(self, body: Fields, script: Any = None, **server: Any) -> tuple[Turn, FakeService]:
        """Return the answer to a request, streamed or not, and the engine."""
        answer, service = ask(self.path, body, script, **server)
        return self.read(answer), service

    def read(self, answer: Any) -> Turn:
        """Read the JSON of an answer, or the chunks of its stream."""
        return self.read_whole(self.join(answer) if isinstance(answer, list) else answer)


def _read_chat(answer: Any) -> Turn:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    usage = answer.get("usage") or {"prompt_tokens": 0, "prompt_tokens_details": {}, "completion_tokens": 0}
    return Turn(
        message.get("reasoning_content") or "",
        message.get("content") or "",
        [
            (call["function"]["name"], call["function"]["arguments"])
            if call["type"] == "function"
            else (call["custom"]["name"], call["custom"]["input"])
            for call in calls
        ],
        choice["finish_reason"],
        (usage["prompt_tokens"], usage["prompt_tokens_details"].get("cached_tokens", 0), usage["completion_tokens"]),
        (choice.get("logprobs") or {"content": []})["content"],
        [message],
        [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls],
    )


def _join_chat(chunks: list[Any]) -> Any:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    logprobs = [token for choice in choices for token in (choice.get("logprobs") or {"content": []})["content"]]
    choice = {"message": _merge([choice["delta"] for choice in choices]), "logprobs": {"content": logprobs}}
    return {"choices": [choice | {"finish_reason": choices[-1]["finish_reason"]}], "usage": chunks[-1].get("usage")}


def _merge(deltas: list[Fields]) -> Fields:
    """Return the object of deltas whose texts are joined; items of a list are merged if they have the same index."""
    message: Fields = {}
    for delta in deltas:
        for name, value in delta.items():
            before = message.get(name)
            if isinstance(value, list):
                message[name] = [*(before or []), *value]
            elif isinstance(value, dict):
                message[name] = _merge([before or {}, value])
            else:
                message[name] = before + value if isinstance(before, str) and isinstance(value, str) else value
    for name, items in message.items():
        if isinstance(items, list):
            groups = [[item for item in items if item["index"] == index] for index in {item["index"] for item in items}]
            message[name] = [_merge(group) for group in groups]
    return message


def _read_response(answer: Any) -> Turn:
    output, usage = answer["output"], answer["usage"]
    parts = [(item["type"], part) for item in output for part in item.get("content", [])]
    calls = [item for item in output if "call_id" in item]
    return Turn(
        "".join(part["text"] for kind, part in parts if kind == "reasoning"),
        "".join(part["text"] for kind, part in parts if kind == "message"),
        [(item["name"], item.get("arguments", item.get("input"))) for item in calls],
        answer["status"],
        (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]),
        [token for _, part in parts for token in part.get("logprobs", [])],
        output,
        [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "seen"} for item in calls],
    )


def _join_response(events: list[Any]) -> Any:
    """Return the response at the end of a stream, which the events before it describe."""
    answer, last = events[-1]["response"], events[-1]["type"]
    ids, deltas = list[str](), dict[int, str]()
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        if event["type"] == "response.output_item.added":
            ids.append(event["item"]["id"])
        if event["type"].endswith(".delta"):
            index = event["output_index"]
            assert event["item_id"] == ids[index]
            deltas[index] = deltas.get(index, "") + event["delta"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert last == f"response.{answer['status']}"
    items = [event for event in events if "output_item" in event["type"]]
    assert [(event["type"].rpartition(".")[2], event["output_index"]) for event in items] == [
        (kind, index) for index in range(len(answer["output"])) for kind in ("added", "done")
    ]
    assert [event["item"] for event in items[1::2]] == answer["output"]
    for index, item in enumerate(answer["output"]):
        parts = [part["text"] for part in item.get("content", [])]
        assert deltas.get(index, "") == "".join(parts) + item.get("arguments", item.get("input", ""))
    return answer


def _read_message(answer: Any) -> Turn:
    content, usage = answer["content"], answer["usage"]
    calls = [block for block in content if block["type"] == "tool_use"]
    cached = usage["cache_read_input_tokens"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "seen"} for call in calls]
    return Turn(
        "".join(block["thinking"] for block in content if block["type"] == "thinking"),
        "".join(block["text"] for block in content if block["type"] == "text"),
        [(call["name"], json.dumps(call["input"])) for call in calls],
        answer["stop_reason"],
        (usage["input_tokens"] + cached, cached, usage["output_tokens"]),
        [],
        [{"role": "assistant", "content": content}],
        [{"role": "user", "content": results}] if results else [],
    )


def _join_message(events: list[Any]) -> Any:
    """Return the message that Anthropic's client builds from a stream."""
    blocks = [(event["type"], event["index"]) for event in events if event["type"].startswith("content_block_st")]
    kinds = ("content_block_start", "content_block_stop")
    assert blocks == [(kind, index) for index in range(len(blocks) // 2) for kind in kinds]
    assert [events[i]["type"] for i in (0, -2, -1)] == ["message_start", "message_delta", "message_stop"]
    content: list[Fields] = []
    for event in events:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"]})
        elif event["type"] == "content_block_delta":
            block = content[event["index"]]
            block |= {name: block.get(name, "") + value for name, value in event["delta"].items() if name != "type"}
    for block in content:
        if raw := block.pop("partial_json", ""):
            block["input"] = from_json(raw, allow_partial=True)
    start, end = events[0]["message"], events[-2]
    return start | end["delta"] | {"content": content, "usage": start["usage"] | end["usage"]}


def _read_ollama(answer: Any) -> Turn:
    message = answer["message"]
    calls = message.get("tool_calls", [])
    return Turn(
        message.get("thinking", ""),
        message["content"],
        [(call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in calls],
        answer["done_reason"],
        (answer["prompt_eval_count"], 0, answer["eval_count"]),
        answer.get("logprobs", []),
        [message],
        [{"role": "tool", "tool_name": call["function"]["name"], "content": "seen"} for call in calls],
    )


def _join_ollama(lines: list[Any]) -> Any:
    message: Fields = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for line in lines:
        for name, value in line["message"].items():
            if name != "role":
                message[name] += value
    return lines[-1] | {"message": message, "logprobs": [one for line in lines for one in line.get("logprobs", [])]}


_DIALECTS = (
    Dialect(
        "chat completions",
        "/v1/chat/completions",
        "messages",
        "max_tokens",
        [{"type": "function", "function": LOOK}, {"type": "custom", "custom": PATCH}],
        _read_chat,
        _join_chat,
    ),
    Dialect(
        "responses",
        "/v1/responses",
        "input",
        "max_output_tokens",
        [{"type": "function"} | LOOK, PATCH],
        _read_response,
        _join_response,
    ),
    Dialect(
        "messages",
        "/v1/messages",
        "messages",
        "max_tokens",
        [{"name": name, "description": "", "input_schema": SCHEMA} for name in ("look", "patch")],
        _read_message,
        _join_message,
    ),
    Dialect(
        "ollama",
        "/api/chat",
        "messages",
        "num_predict",
        [{"type": "function", "function": LOOK | {"name": name}} for name in ("look", "patch")],
        _read_ollama,
        _join_ollama,
        "options",
    ),
)

DIALECTS = {dialect.name: dialect for dialect in _DIALECTS}
