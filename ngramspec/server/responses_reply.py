"""`ResponseReply`: the response of `/v1/responses`, as a whole or as a stream of events.

Each block of an `Answer` becomes an item: text a "message", reasoning a "reasoning", and a call a "function_call" or a
"custom_tool_call". A stream sends a block as events that open the item, extend it and close it. For the text "Hi!" in
two chunks:

    response.created, response.in_progress              `_start_events`, before the first event of the answer
    response.output_item.added                          `_open_events`: the item, without content
    response.content_part.added                         `_open_events`: its only part, without text
    response.output_text.delta {"delta": "Hi"}          `_delta_event`
    response.output_text.delta {"delta": "!"}           `_delta_event`
    response.output_text.done {"text": "Hi!"}           `_close_events`
    response.content_part.done                          `_close_events`
    response.output_item.done                           `_close_events`: the complete item
    response.completed                                  with the same JSON as a response that is not streamed

Each event has its type first and its `sequence_number`, from 0, last. The last events of an item are sent only when
something follows: the status of an item is "incomplete" if a token limit ended the answer in it, and that is known only
at the end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.answer import Block, End, Piece, TextEvent
from ngramspec.server.call import Call
from ngramspec.server.errors import ApiError
from ngramspec.server.json_text import Encoded, members, quote
from ngramspec.server.reply import Reply, logprobs_content, prediction_usage
from ngramspec.server.telemetry import read_telemetry
from ngramspec.server.toolbox import Toolbox, free_text

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
"""Prefixes of the ids of items."""

_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
"""Events of items that grow; the input of a custom tool is sent at its end."""


class ResponseReply(Reply):
    """A response, or its stream of events; the name of each event is its "type".

    `toolbox` and `echo` come from `read_request`.
    """

    def __init__(self, call: Call, toolbox: Toolbox, echo: dict[str, Any]) -> None:
        super().__init__()
        self._call, self._model = call, call.model
        self._telemetry = read_telemetry(call)
        self._toolbox, self._echo, self._name = toolbox, echo, call.fields.string("model") or call.model.name
        self._key = secrets.token_hex(12)  # part of the ids of the response and its items
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._n_sent = 0
        self._logprobs: list[str] = []  # logprobs of the open block as JSON, if it is streamed
        self._delta_start = ""  # start of the events of the open block as JSON, up to the text
        self._closed: Block | None = None  # its last events are sent later, because it was cut only if nothing follows

    def response_body(self) -> dict[str, Any]:
        (answer,) = self.answers
        assert answer.end is not None
        was_cut = answer.end.reason == "length"
        last = len(answer.blocks) - 1
        self._output = [self._item(block, was_cut and block.index == last) for block in answer.blocks]
        return self._final_response(answer.end)

    def chunks(self, number: int, event: TextEvent) -> str:
        more = self._telemetry.update(event) if self._telemetry else {}
        if isinstance(event, Piece):
            return self._piece_events(event, more)
        if isinstance(event, End):
            text = self._start_events() + self._close_events(cut=event.reason == "length")
            response = self._final_response(event)
            return text + self._event(f"response.{response['status']}", {"response": response, **more})
        if "prompt_progress" in more:
            text = self._start_events()
            return text + self._event("response.in_progress", {"response": self._response("in_progress"), **more})
        return ""

    def _piece_events(self, piece: Piece, more: dict[str, Any]) -> str:
        """Return the events of a piece; `more` contains further fields of the events with text."""
        events = ""
        for kind, block, text, logprobs in piece.changes:
            if not self._n_sent or self._closed is not None:
                events += self._start_events() + self._close_events(cut=False)
            if kind == "opened":
                events += self._open_events(block)
            elif kind == "grown":
                events += self._delta_event(block, text, logprobs, more)
            else:
                self._closed = block
        return events

    def keepalive(self) -> str:
        return self._start_events() + self._event("keepalive", {})

    def error_chunk(self, error: ApiError) -> str:
        code = error.code if isinstance(error.code, str) else "server_error"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self._start_events() + self._event("response.failed", {"response": response})

    def _start_events(self) -> str:
        """Return the first events, if they were not sent yet."""
        if self._n_sent:
            return ""
        response = {"response": self._response("in_progress")}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def _event(self, kind: str, fields: dict[str, Any]) -> str:
        """Return an event; all have their type first and their number last."""
        self._n_sent += 1
        return f'event: {kind}\ndata: {{"type":"{kind}"{members(fields)},"sequence_number":{self._n_sent - 1}}}\n\n'

    def _final_response(self, end: End) -> dict[str, Any]:
        (answer,) = self.answers
        output_tokens = end.done.stats.generated
        prediction_fields = prediction_usage(self._call.requests[0].prediction, [answer.tokens])
        return self._response("incomplete" if end.reason == "length" else "completed") | {
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": end.done.n_cached, "cache_write_tokens": 0},
                "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens, **prediction_fields},
                "total_tokens": answer.prompt_tokens + output_tokens,
            }
        }

    def _response(self, status: str) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = {"completed_at": int(time.time())} if status == "completed" else {}
        sampling = self._call.requests[0].sampling
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

    def _open_events(self, block: Block) -> str:
        self._logprobs = []
        item, at = self._item(block) | {"status": "in_progress"}, self._position(block)
        name = _DELTAS.get(item["type"], "")
        self._delta_start = name and f'event: {name}\ndata: {{"type":"{name}"{members(at)},"delta":'
        if block.kind == "call":
            return self._event("response.output_item.added", {"output_index": block.index, "item": item})
        item["content"] = []
        text = self._event("response.output_item.added", {"output_index": block.index, "item": item})
        return text + self._event("response.content_part.added", at | {"part": self._part(block)})

    def _delta_event(self, block: Block, piece: str, logprobs: Sequence[Logprobs], more: dict[str, Any]) -> str:
        """Return the event with a further text of a block; the input of a custom tool has none."""
        if not self._delta_start:
            return ""
        rest = ""
        if block.kind == "text":
            likely = ""
            if logprobs:
                items = ["".join(logprobs_content(self._model, [entry]).parts[1:-1]) for entry in logprobs]
                self._logprobs += items
                likely = ",".join(items)
            rest = f',"logprobs":[{likely}]{members(more) if more else ""}'
        self._n_sent += 1
        return f'{self._delta_start}{quote(piece)}{rest},"sequence_number":{self._n_sent - 1}}}\n\n'

    def _close_events(self, cut: bool) -> str:
        """Return the last events of the closed block, if they were not sent yet."""
        block, self._closed = self._closed, None
        if block is None:
            return ""
        item = self._item(block, cut)
        at = self._position(block)
        match item["type"]:
            case "custom_tool_call":  # its input is within the JSON of arguments, which is complete only now
                text = self._event("response.custom_tool_call_input.delta", at | {"delta": item["input"]})
                text += self._event("response.custom_tool_call_input.done", at | {"input": item["input"]})
            case "function_call":
                done = {"name": item["name"], "arguments": item["arguments"]}
                text = self._event("response.function_call_arguments.done", at | done)
            case kind:
                (part,) = item["content"]
                if kind == "message":
                    done = {"text": block.text, "logprobs": part["logprobs"]}
                    text = self._event("response.output_text.done", at | done)
                else:
                    text = self._event("response.reasoning_text.done", at | {"text": block.text})
                text += self._event("response.content_part.done", at | {"part": part})
        self._output.append(item)
        return text + self._event("response.output_item.done", {"output_index": block.index, "item": item})

    def _type_and_id(self, block: Block) -> tuple[str, str]:
        call_type = "custom_tool_call" if block.name in self._toolbox.custom_tools else "function_call"
        kind = {"text": "message", "reasoning": "reasoning"}.get(block.kind, call_type)
        return kind, f"{_PREFIXES[kind]}_{self._key}_{block.index}"

    def _position(self, block: Block) -> dict[str, Any]:
        """Return the fields of an event that name the item of a block, and its part of content."""
        place = {"item_id": self._type_and_id(block)[1], "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _item(self, block: Block, cut: bool = False) -> dict[str, Any]:
        kind, id = self._type_and_id(block)
        item: dict[str, Any] = {"id": id, "type": kind, "status": "incomplete" if cut else "completed"}
        if kind == "message":
            return item | {"role": "assistant", "content": [self._part(block)]}
        if kind == "reasoning":
            return item | {"summary": [], "content": [self._part(block)]}
        name, namespace = self._toolbox.origin(block.name)
        item |= {"call_id": block.id, "name": name}
        if namespace is not None:
            item["namespace"] = namespace
        custom = kind == "custom_tool_call"
        return item | ({"input": free_text(block.text)} if custom else {"arguments": block.text})

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        streamed = self._call.streamed  # these were encoded already
        logprobs = (
            Encoded(["[", ",".join(self._logprobs), "]"]) if streamed else logprobs_content(self._model, block.logprobs)
        )
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
