"""OpenAI's `/v1/responses`, the newer API for chats, which Codex uses: the endpoints, and the reading of a request.

A request contains a list of items: messages, reasoning, calls and their results. `read_request` converts it to a
`ChatTask`, which has messages as in chat completions. For example,

    {"instructions": "Be brief.", "tools": [{"type": "custom", "name": "shell"}], "max_output_tokens": 50, "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "ls does it."}]},
        {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "a.txt"}]}

becomes a task with max_tokens 50, one tool, `shell(input: str)`, and four messages:

    system      Be brief.
    user        List the files.
    assistant   reasoning_content "ls does it.", tool_calls [shell({"input": "ls"}) with id c1]
    tool        a.txt, for the call c1

`ResponseReply` converts the answer to items again. The server stores nothing, so a request that
refers to an earlier response is rejected.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from starlette.responses import Response

from ngramspec.server.answer import Answer, Block
from ngramspec.server.call import Call
from ngramspec.server.chat import EFFORTS, ChatTask, count_prompt, start_chat
from ngramspec.server.constraint_fields import JsonFormat, read_json_format
from ngramspec.server.errors import ApiError
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import Encoded, JsonResponse, encode_json
from ngramspec.server.reasoning import NO_REASONING
from ngramspec.server.reply import NAMED, Reply, logprobs_content, prediction_usage, read_telemetry, respond
from ngramspec.server.request_fields import MAX_ALTERNATIVES, read_prediction
from ngramspec.server.toolbox import Toolbox, free_text, function_name
from ngramspec.server.transcript import Transcript, dump_arguments

_EFFORTS = {"none": "", "minimal": "low"} | EFFORTS

_IGNORED_ITEMS = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call"),
    *("mcp_list_tools", "tool_search_call", "tool_search_output", "compaction", "compaction_trigger"),
)
"""Items of a conversation that only OpenAI's servers create or can read; they are ignored."""


async def responses(call: Call) -> Response:
    """Answer a chat."""
    task, toolbox, echo = await asyncio.to_thread(read_request, call.fields)
    return await respond(call, ResponseReply(call, await start_chat(call, task), toolbox, echo))


async def input_tokens(call: Call) -> Response:
    """Return the number of tokens of the prompt of a chat."""
    task, _, _ = await asyncio.to_thread(read_request, call.fields)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": await count_prompt(call, task)})


# --------------------------------------------------------------------------- the request


def read_request(fields: Fields) -> tuple[ChatTask, Toolbox, dict[str, Any]]:
    """Return the task of a request, its tools, and the fields that the response repeats."""
    _check_unsupported(fields)
    transcript, toolbox = Transcript(), Toolbox()
    toolbox.add_tools(fields.objects("tools"))
    transcript.add_system(fields.string("instructions") or "")
    _read_input(fields, transcript, toolbox)
    format, json_format = _read_format(fields)
    task = ChatTask(
        messages=transcript.messages,
        tool_choice=toolbox.read_choice(fields, "tool_choice"),
        tools=toolbox.tools,  # `read_choice` has dropped the tools that may not be called
        parallel=fields.boolean("parallel_tool_calls", default=True),
        json_format=read_json_format(fields, json_format),
        max_tokens=fields.integer("max_output_tokens", minimum=1),
        logprobs=_read_logprobs(fields),
        variables=_read_variables(fields),
        prediction=read_prediction(fields),
    )
    return task, toolbox, _echo_fields(fields, task, format)


def _echo_fields(fields: Fields, task: ChatTask, format: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the request that OpenAI's responses repeat."""
    metadata, reasoning = fields.object("metadata"), fields.object("reasoning")
    return {
        "instructions": fields.string("instructions"),
        "max_output_tokens": task.max_tokens,
        "metadata": metadata.data if metadata else {},
        "parallel_tool_calls": task.parallel,
        "reasoning": {"effort": None, "summary": None} | (dict(reasoning.data) if reasoning else {}),
        "text": {"format": Encoded([encode_json(format)])},  # a stream has these three times
        "tool_choice": fields.data.get("tool_choice") or "auto",
        "tools": Encoded.join(fields.list("tools")),
    }


def _check_unsupported(fields: Fields) -> None:
    """Raise an ApiError for a field that requires storage on the server, or another unsupported feature."""
    for name in ("previous_response_id", "conversation"):
        if name in fields:
            raise fields.field_error(name, "this server does not store responses; send the whole conversation as input")
    if "prompt" in fields:
        raise fields.field_error("prompt", "this server does not store prompts; send instructions and input")
    if fields.boolean("background"):
        raise fields.field_error("background", "background responses are not supported")
    if fields.choice("truncation", ("auto", "disabled"), "disabled") == "auto":
        raise fields.field_error("truncation", "only 'disabled' is supported")


def _read_input(fields: Fields, transcript: Transcript, toolbox: Toolbox) -> None:
    if isinstance(value := fields.require("input"), str):
        transcript.add_message("user", value)
    else:
        for item in fields.objects("input"):
            _read_item(item, transcript, toolbox)
    if not transcript.messages:
        transcript.add_message("user", "")  # Codex sends an empty input to check the connection


def _read_item(item: Fields, transcript: Transcript, toolbox: Toolbox) -> None:
    match item.string("type") or "message":
        case "message":
            _read_message(item, transcript)
        case "reasoning":
            parts = [*item.objects("content")] or [*item.objects("summary")]
            if text := "\n".join(part.require_string("text") for part in parts):
                transcript.add_reasoning(text)
        case "function_call" | "custom_tool_call" | "local_shell_call" as kind:
            _read_call(item, kind, transcript)
        case "function_call_output" | "custom_tool_call_output":
            transcript.add_result(item.require_name("call_id"), _read_text(item, "output"))
        case "local_shell_call_output":
            transcript.add_result(item.string("call_id") or item.require_name("id"), _read_text(item, "output"))
        case "additional_tools":
            toolbox.add_tools(item.objects("tools"))
        case "item_reference":
            raise item.field_error("id", "this server does not store items; send the item itself")
        case kind if kind not in _IGNORED_ITEMS:
            raise item.field_error("type", f"unsupported item type {kind!r}")


def _read_message(item: Fields, transcript: Transcript) -> None:
    role = item.require_choice("role", ("user", "assistant", "system", "developer"))
    text = _read_text(item, "content")
    if role in ("user", "assistant"):
        transcript.add_message(role, text)
    else:
        transcript.add_system(text)


def _read_call(item: Fields, kind: str, transcript: Transcript) -> None:
    call = item.require_name("call_id")
    if kind == "local_shell_call":
        transcript.add_call(call, "local_shell", dump_arguments(item.require_object("action").data))
        return
    if kind == "custom_tool_call":
        arguments = dump_arguments({"input": item.require_string("input")})
    else:
        arguments = item.require_string("arguments") or "{}"
        item.check_json("arguments", arguments)
    transcript.add_call(call, function_name(item.require_name("name"), item.string("namespace")), arguments)


def _read_text(item: Fields, name: str) -> str:
    item.require(name)
    return "\n".join(item.parts(name, _read_part))


def _read_part(part: Fields) -> str:
    match part.require_name("type"):
        case "input_text" | "output_text" | "text":
            return part.require_string("text")
        case "refusal":
            return part.require_string("refusal")
        case "input_image":
            raise part.image_error()
        case "input_file" | "input_audio" as kind:
            raise part.field_error("type", f"{kind!r} is not supported; this model accepts only text")
        case other:
            raise part.field_error("type", f"unsupported content type {other!r}")


def _read_format(fields: Fields) -> tuple[dict[str, Any], JsonFormat | None]:
    """Return the format of the text as the response repeats it, and the corresponding `JsonFormat`."""
    text = fields.object("text")
    format = text.object("format") if text else None
    if format is None:
        return {"type": "text"}, None
    kind = format.require_choice("type", ("text", "json_object", "json_schema"))
    schema = format.require_object("schema").data if kind == "json_schema" else {}
    strict = bool(format.data.get("strict"))
    return dict(format.data), None if kind == "text" else JsonFormat(schema, f"{format.path}schema", strict)


def _read_logprobs(fields: Fields) -> int | None:
    count = fields.integer("top_logprobs", maximum=MAX_ALTERNATIVES)
    return count or (0 if "message.output_text.logprobs" in fields.string_list("include") else None)


def _read_variables(fields: Fields) -> dict[str, Any]:
    reasoning = fields.object("reasoning")
    effort = reasoning.choice("effort", tuple(_EFFORTS), "") if reasoning else ""
    if effort == "none":
        return dict(NO_REASONING)
    return {"enable_thinking": True, "reasoning_effort": _EFFORTS[effort]} if effort else {}


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
    """A response, or its stream of events. `toolbox` and `echo` come from `read_request`.

    Each block of an answer becomes an item: text a "message", reasoning a "reasoning", and a call a "function_call" or
    a "custom_tool_call". For the text "Hi!" in two chunks, the events are:

        response.created, response.in_progress              `_begin`, before the first event of the answer
        response.output_item.added                          `_open`: the item, without content
        response.content_part.added                         `_open`: its only part, without text
        response.output_text.delta {"delta": "Hi"}
        response.output_text.delta {"delta": "!"}
        response.output_text.done {"text": "Hi!"}           `_close`
        response.content_part.done                          `_close`
        response.output_item.done                           `_close`: the complete item
        response.completed                                  the response as it is returned without a stream
    """

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
