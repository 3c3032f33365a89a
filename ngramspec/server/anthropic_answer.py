"""The deltas of a chat as the answers of Anthropic's Messages API: one message, or its stream of events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ngramspec.server.blocks import Block, Change, Closed, Deltas, Grown, Opened, changes
from ngramspec.server.dialogue import Finish, Progress
from ngramspec.server.errors import ApiError

_SIGNATURE = "unsigned"
"""Thinking blocks carry one; clients that see none do not send the block back, and the model forgets its thoughts."""


async def message(deltas: Deltas, id: str, model: str, hide: bool = False) -> dict[str, Any]:
    """The whole answer. `hide`: leave the text of thoughts out."""
    content: list[dict[str, Any]] = []
    async with aclosing(changes(deltas)) as found:
        async for change in found:
            if isinstance(change, Closed):
                content.append(_whole(change.block, hide))
            elif isinstance(change, Finish):
                finish = change
    return _message(id, model, content) | _ending(finish) | {"usage": _usage(finish)}


async def events(deltas: Deltas, id: str, model: str, hide: bool = False) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream; each is sent under the name in its "type". The first is there with the first delta.

    Where `Progress` is told, the first event tells how long the prompt is, unless silence came before.
    """
    begun = False
    async with aclosing(changes(deltas)) as found:
        async for change in found:
            if not begun:
                yield {"type": "message_start", "message": _message(id, model, []) | _begun(change)}
                begun = True
            match change:
                case Opened(block):
                    start = _EMPTY[block.kind] | ({"id": block.id, "name": block.name} if block.kind == "call" else {})
                    yield {"type": "content_block_start", "index": block.index, "content_block": start}
                case Grown(block, piece) if not (hide and block.kind == "thought"):
                    kind, field = _DELTAS[block.kind]
                    yield _delta(block, {"type": kind, field: piece})
                case Closed(block):
                    if block.kind == "thought":
                        yield _delta(block, {"type": "signature_delta", "signature": _SIGNATURE})
                    yield {"type": "content_block_stop", "index": block.index}
                case Finish():
                    yield {"type": "message_delta", "delta": _ending(change), "usage": _usage(change)}
                    yield {"type": "message_stop"}
                case None:
                    yield {"type": "ping"}


def worded(error: ApiError) -> dict[str, Any]:
    """An error as Anthropic words it: the body of a response; in a stream that began, an event."""
    text = error.message
    if "n_prompt_tokens" in error.details:
        # By these words Claude Code knows that it has to make the conversation shorter.
        tokens, most = error.details["n_prompt_tokens"], error.details["n_ctx"]
        text = f"prompt is too long: {tokens} tokens > {most} maximum; {text}"
    return {"type": "error", "error": {"type": _ERRORS.get(error.status, "api_error"), "message": text}}


_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_EMPTY: dict[str, dict[str, Any]] = {
    "thought": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
    "call": {"type": "tool_use", "id": "", "name": "", "input": {}},
}

_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _message(id: str, model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "model": model, "content": content}


def _whole(block: Block, hide: bool) -> dict[str, Any]:
    match block.kind:
        case "thought":
            return {"type": "thinking", "thinking": "" if hide else block.text, "signature": _SIGNATURE}
        case "text":
            return {"type": "text", "text": block.text}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.text)}


def _input(text: str) -> dict[str, Any]:
    """A call's arguments; none where `max_tokens` cut them, since half an argument must not be acted on."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _delta(block: Block, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _ending(finish: Finish) -> dict[str, Any]:
    reason = _REASONS[finish.reason]
    if finish.reason == "stop" and finish.stop_string is not None:
        reason = "stop_sequence"
    elif finish.done.reason == "context":
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": finish.stop_string if reason == "stop_sequence" else None}


def _begun(change: Change | None) -> dict[str, Any]:
    told = (change.prompt_tokens, change.cached) if isinstance(change, Progress) else (0, 0)
    usage = _input_usage(*told)
    return {"stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}


def _usage(finish: Finish) -> dict[str, Any]:
    return _input_usage(finish.prompt_tokens, finish.done.cached) | {
        "output_tokens": finish.done.stats.generated,
        "output_tokens_details": {"thinking_tokens": finish.thought},
    }


def _input_usage(prompt_tokens: int, cached: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }
