"""The deltas of a chat as the answers of OpenAI's Responses API: one response, or its stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from ngramspec.sampling.logprobs import Logprobs
from ngramspec.server.blocks import Block, Change, Closed, Deltas, Grown, Opened, changes
from ngramspec.server.dialogue import Finish
from ngramspec.server.errors import ApiError
from ngramspec.server.responses_request import Asked
from ngramspec.server.responses_tools import free_text

Spell = Callable[[Logprobs], dict[str, Any]]
"""Logprobs of a token as OpenAI's JSON: token, bytes, logprob, top_logprobs."""

Event = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
"""What the ids of items begin with."""


class Answer:
    """One response in the making.

    Args:
        asked: the request.
        id: a name of its own; the ids of its items are made of it.
        model: what answers.
        spell: logprobs in OpenAI's JSON.
        now: tells the time, in seconds since 1970.
    """

    def __init__(self, asked: Asked, id: str, model: str, spell: Spell, now: Callable[[], float] = time.time) -> None:
        self._asked, self._id, self._model, self._spell, self._now = asked, id, model, spell, now
        self._created = int(now())
        self._output: list[dict[str, Any]] = []
        self._sent = 0

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        """The response at its end."""
        async with aclosing(self.events(deltas)) as events:
            async for event in events:
                last = event
        response: dict[str, Any] = last["response"]
        return response

    async def events(self, deltas: Deltas) -> AsyncGenerator[Event, None]:
        """The events of a stream; each is sent under the name in its "type". The first are there with the first
        delta.
        """
        closed: Block | None = None
        async with aclosing(changes(deltas)) as found:
            async for change in found:
                for event in self._beginning():
                    yield self._numbered(event)
                if change is None:
                    yield self._numbered({"type": "keepalive"})
                    continue
                # Whether a block was cut is known only when nothing follows it.
                if closed is not None:
                    cut = isinstance(change, Finish) and change.reason == "length"
                    for event in self._closing(closed, cut):
                        yield self._numbered(event)
                closed = change.block if isinstance(change, Closed) else None
                for event in self._events(change):
                    yield self._numbered(event)

    def failed(self, error: ApiError) -> list[Event]:
        """The events that end a stream in which something went wrong."""
        code = error.code if isinstance(error.code, str) else "server_error"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        last = {"type": "response.failed", "response": response}
        return [self._numbered(event) for event in (*self._beginning(), last)]

    def _beginning(self) -> Sequence[Event]:
        """The first events, if they were not sent yet."""
        if self._sent:
            return ()
        response = self._response("in_progress")
        return [{"type": kind, "response": response} for kind in ("response.created", "response.in_progress")]

    def _events(self, change: Change) -> Iterator[Event]:
        match change:
            case Opened(block):
                yield from self._opening(block)
            case Grown(block, piece, logprobs):
                yield from self._growing(block, piece, logprobs)
            case Finish():
                status = "incomplete" if change.reason == "length" else "completed"
                response = self._response(status) | {"usage": _usage(change)}
                yield {"type": f"response.{status}", "response": response}

    def _numbered(self, event: Event) -> Event:
        self._sent += 1
        return event | {"sequence_number": self._sent - 1}

    def _response(self, status: str) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = {"completed_at": int(self._now())} if status == "completed" else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            **done,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "model": self._model,
            "output": list(self._output),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self._asked.echo,
        }

    def _opening(self, block: Block) -> Iterator[Event]:
        item = self._item(block, "in_progress")
        if block.kind != "call":
            item["content"] = []
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind != "call":
            yield {"type": "response.content_part.added", **_place(item["id"], block, 0), "part": self._part(block)}

    def _growing(self, block: Block, piece: str, logprobs: Iterable[Logprobs]) -> Iterator[Event]:
        kind, item = self._named(block)
        if kind == "message":
            event = {"type": "response.output_text.delta", **_place(item, block, 0), "delta": piece}
            yield event | {"logprobs": [self._spell(one) for one in logprobs]}
        elif kind == "reasoning":
            yield {"type": "response.reasoning_text.delta", **_place(item, block, 0), "delta": piece}
        elif kind == "function_call":
            yield {"type": "response.function_call_arguments.delta", **_place(item, block), "delta": piece}

    def _closing(self, block: Block, cut: bool) -> Iterator[Event]:
        item = self._item(block, "incomplete" if cut else "completed")
        if item["type"] == "custom_tool_call":
            # Its text stands within the JSON of the function's arguments, and is known when these are whole.
            at = _place(item["id"], block)
            yield {"type": "response.custom_tool_call_input.delta", **at, "delta": item["input"]}
            yield {"type": "response.custom_tool_call_input.done", **at, "input": item["input"]}
        elif item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **_place(item["id"], block), **done}
        else:
            part, at = self._part(block), _place(item["id"], block, 0)
            if item["type"] == "message":
                yield {"type": "response.output_text.done", **at, "text": block.text, "logprobs": part["logprobs"]}
            else:
                yield {"type": "response.reasoning_text.done", **at, "text": block.text}
            yield {"type": "response.content_part.done", **at, "part": part}
        self._output.append(item)
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _named(self, block: Block) -> tuple[str, str]:
        """The type of the item that a block is, and its id."""
        custom = self._asked.toolbox.origin(block.name).custom
        kind = {"text": "message", "thought": "reasoning"}.get(block.kind) or (
            "custom_tool_call" if custom else "function_call"
        )
        return kind, f"{_PREFIXES[kind]}_{self._id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """The item that a block is, with all it holds so far."""
        kind, id = self._named(block)
        item: dict[str, Any] = {"id": id, "type": kind, "status": status}
        if kind == "message":
            return item | {"role": "assistant", "content": [self._part(block)]}
        if kind == "reasoning":
            return item | {"summary": [], "content": [self._part(block)]}
        origin = self._asked.toolbox.origin(block.name)
        item |= {"call_id": block.id, "name": origin.name}
        if origin.namespace is not None:
            item["namespace"] = origin.namespace
        return item | ({"input": free_text(block.text)} if origin.custom else {"arguments": block.text})

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = [self._spell(one) for one in block.logprobs]
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


def _place(item: str, block: Block, content: int | None = None) -> dict[str, Any]:
    place = {"item_id": item, "output_index": block.index}
    return place if content is None else place | {"content_index": content}


def _usage(finish: Finish) -> dict[str, Any]:
    generated = finish.done.stats.generated
    return {
        "input_tokens": finish.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finish.done.cached, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": finish.thought},
        "total_tokens": finish.prompt_tokens + generated,
    }
