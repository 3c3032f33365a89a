"""`ResponseReply`: the response of `/v1/responses`, as a whole or as a stream of events.

Each block of an `Answer` becomes an item: text a "message", reasoning a "reasoning", and a call a "function_call" or a
"custom_tool_call". A stream sends a block as events that open the item, extend it and close it. For the text "Hi!" in
two chunks:

    response.created, response.in_progress              `_begin`, before the first event of the answer
    response.output_item.added                          `_open`: the item, without content
    response.content_part.added                         `_open`: its only part, without text
    response.output_text.delta {"delta": "Hi"}
    response.output_text.delta {"delta": "!"}
    response.output_text.done {"text": "Hi!"}           `_close`
    response.content_part.done                          `_close`
    response.output_item.done                           `_close`: the complete item
    response.completed                                  with the same JSON as a response that is not streamed

Each event has its type first and its `sequence_number`, from 0, last. The last events of an item are sent only when
something follows: the status of an item is "incomplete" if a token limit ended the answer in it, and that is known only
at the end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from ngramspec.server.answer import Answer, Block
from ngramspec.server.call import Call
from ngramspec.server.errors import ApiError
from ngramspec.server.json_text import Encoded
from ngramspec.server.reply import NAMED, Reply, logprobs_content, prediction_usage, read_telemetry
from ngramspec.server.toolbox import Toolbox, free_text

Event = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
"""Prefixes of the ids of items."""

_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
"""Events of items that grow; the input of a custom tool is sent at its end."""


class ResponseReply(Reply):
    """A response, or its stream of events. `toolbox` and `echo` come from `read_request`."""

    head = NAMED

    def __init__(self, call: Call, answers: Sequence[Answer], toolbox: Toolbox, echo: Mapping[str, Any]) -> None:
        super().__init__(call, answers)
        self._telemetry = read_telemetry(call, answers)
        self._toolbox, self._echo, self._name = toolbox, echo, call.fields.string("model") or call.model.name
        self._key = secrets.token_hex(12)  # part of the ids of the response and its items
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []  # items whose last events were sent
        self._has_begun, self._numbers = False, count()
        self._item: dict[str, Any] = {}  # item of the open block, which grows, and what its events have in common
        self._place: dict[str, Any] = {}
        self._closed: Block | None = None  # its last events are sent later, because it was cut only if nothing follows

    def events(self, answer: Answer) -> list[Event]:
        more = self._telemetry[0].update(answer) if self._telemetry else {}
        events = self._begin() if answer.changes or answer.done or "prompt_progress" in more else []
        if "prompt_progress" in more:
            events.append(self._event("response.in_progress", response=self._response("in_progress"), **more))
        for kind, block, text, logprobs in answer.changes:
            if self._closed is not None:
                events += self._close(self._closed, cut=False)
            if kind == "opened":
                events += self._open(block)
            elif kind == "closed":
                self._closed = block
            elif (name := _DELTAS.get(self._item["type"])) is not None:
                event: Event = {"type": name, **self._place, "delta": text}
                if block.kind == "text":
                    event |= {"logprobs": [], **more}
                if logprobs:
                    event["logprobs"] = logprobs_content(self.model, logprobs)
                    self._item["content"][0]["logprobs"].extend(event["logprobs"])
                event["sequence_number"] = next(self._numbers)
                events.append(event)
        if answer.done is not None:
            is_cut = answer.reason == "length"
            if self._closed is not None:
                events += self._close(self._closed, cut=is_cut)
            response = self._response("incomplete" if is_cut else "completed")
            response["usage"] = self._usage(answer, answer.done.stats.generated)
            events.append(self._event(f"response.{response['status']}", response=response, **more))
        return events

    def fold(self, event: Event) -> None:
        self.body = event.get("response", self.body)

    def keepalive(self) -> str:
        return self.encode([*self._begin(), self._event("keepalive")])

    def error_chunk(self, error: ApiError) -> str:
        code = error.code if isinstance(error.code, str) else "server_error"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self.encode([*self._begin(), self._event("response.failed", response=response)])

    def _event(self, name: str, /, **fields: Any) -> Event:
        """Return an event; all have their type first and their number last."""
        return {"type": name, **fields, "sequence_number": next(self._numbers)}

    def _begin(self) -> list[Event]:
        """Return the first events, if they were not sent yet."""
        if self._has_begun:
            return []
        self._has_begun, response = True, self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _open(self, block: Block) -> list[Event]:
        call_type = "custom_tool_call" if block.name in self._toolbox.custom_tools else "function_call"
        kind = {"text": "message", "reasoning": "reasoning"}.get(block.kind, call_type)
        id = f"{_PREFIXES[kind]}_{self._key}_{block.index}"
        item: dict[str, Any] = {"id": id, "type": kind, "status": "in_progress"}
        self._item, self._place = item, {"item_id": id, "output_index": block.index}
        if block.kind == "call":
            name, namespace = self._toolbox.origin(block.name)
            item |= {"call_id": block.id, "name": name, "input" if kind == "custom_tool_call" else "arguments": ""}
            if namespace is not None:
                item["namespace"] = namespace
            return [self._event("response.output_item.added", output_index=block.index, item=dict(item))]
        self._place["content_index"] = 0
        item |= {"role": "assistant"} if kind == "message" else dict[str, Any](summary=[])
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": Encoded.join(())}
        item["content"] = [part]
        return [
            self._event("response.output_item.added", output_index=block.index, item={**item, "content": []}),
            self._event("response.content_part.added", **self._place, part=dict(part)),
        ]

    def _close(self, block: Block, *, cut: bool) -> list[Event]:
        item, place, events = self._item, self._place, list[Event]()
        self._closed, item["status"] = None, "incomplete" if cut else "completed"
        match item["type"]:
            case "custom_tool_call":  # its input is within the JSON of arguments, which is complete only now
                name, text = "response.custom_tool_call_input", free_text(block.text)
                item["input"] = text
                events += [self._event(f"{name}.delta", **place, delta=text)]
                events += [self._event(f"{name}.done", **place, input=text)]
            case "function_call":
                item["arguments"] = block.text
                done = {"name": item["name"], "arguments": block.text}
                events += [self._event("response.function_call_arguments.done", **place, **done)]
            case kind:
                (part,) = item["content"]
                part["text"] = block.text
                done = {name: part[name] for name in ("text", "logprobs") if name in part}
                name = "output_text" if kind == "message" else "reasoning_text"
                events += [self._event(f"response.{name}.done", **place, **done)]
                events += [self._event("response.content_part.done", **place, part=part)]
        self._output.append(item)
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _response(self, status: str) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = {"completed_at": int(time.time())} if status == "completed" else {}
        sampling = self.answers[0].request.sampling
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            **done,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "model": self._name,
            "output": list(self._output),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self._echo,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }

    def _usage(self, answer: Answer, output_tokens: int) -> dict[str, Any]:
        input_tokens = answer.prompt_tokens
        prediction_fields = prediction_usage(answer.request.prediction, [answer.tokens])
        return {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens, **prediction_fields},
            "total_tokens": input_tokens + output_tokens,
        }
