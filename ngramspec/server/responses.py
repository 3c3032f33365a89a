"""`/v1/responses`: a chat in the words of OpenAI's newer API, as Codex has it. Nothing is stored."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.answer import Block, End, Piece, TextEvent
from ngramspec.server.call import ApiError, Call, Fields, dumped, json_answer
from ngramspec.server.chat import (
    EFFORTS,
    NO_REASONING,
    ChatTask,
    Toolbox,
    Transcript,
    answer_chat,
    as_json,
    count_prompt,
    free_text,
    function_name,
)
from ngramspec.server.common_fields import Form, read_form, read_prediction
from ngramspec.server.reply import Reply, logprobs_content, members, prediction_usage, quoted
from ngramspec.server.telemetry import read_telemetry

_EFFORTS = {"none": "", "minimal": "low"} | EFFORTS

_ELSEWHERE = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call"),
    *("mcp_list_tools", "tool_search_call", "tool_search_output", "compaction", "compaction_trigger"),
)
"""Items of a conversation that only OpenAI's servers create or can read; they are ignored."""


async def responses(call: Call) -> Response:
    """Answer a chat."""
    task, toolbox, echo = await asyncio.to_thread(read_request, call.given)
    id, name = f"resp_{secrets.token_hex(12)}", call.given.text("model") or call.model.name
    return await answer_chat(call, task, ResponseReply(call, toolbox, echo, id, name, task.prediction))


async def input_tokens(call: Call) -> Response:
    """Return the number of tokens of the prompt of a chat."""
    task, _, _ = await asyncio.to_thread(read_request, call.given)
    return json_answer({"object": "response.input_tokens", "input_tokens": await count_prompt(call, task)})


# --------------------------------------------------------------------------- the request


def read_request(given: Fields) -> tuple[ChatTask, Toolbox, dict[str, Any]]:
    """Return the task of a request, its tools, and the fields that the response repeats.

    Raises:
        ApiError: A field is invalid or not supported.
    """
    _refuse(given)
    transcript, toolbox = Transcript(), Toolbox()
    toolbox.add(given.objects("tools"))
    transcript.system(given.text("instructions") or "")
    _input(given, transcript, toolbox)
    told, form = _format(given)
    task = ChatTask(
        messages=transcript.messages,
        tool_choice=toolbox.read_choice(given, "tool_choice"),
        tools=toolbox.tools,  # `read_choice` has dropped the tools that may not be called
        parallel=given.flag("parallel_tool_calls", default=True),
        form=read_form(given, form),
        max_tokens=given.whole("max_output_tokens", least=1),
        logprobs=_logprobs(given),
        variables=_variables(given),
        prediction=read_prediction(given),
    )
    return task, toolbox, _echo(given, task, told)


def _echo(given: Fields, task: ChatTask, form: dict[str, Any]) -> dict[str, Any]:
    metadata, reasoning = given.object("metadata"), given.object("reasoning")
    return {
        "instructions": given.text("instructions"),
        "max_output_tokens": task.max_tokens,
        "metadata": metadata.data if metadata else {},
        "parallel_tool_calls": task.parallel,
        "reasoning": {"effort": None, "summary": None} | (dict(reasoning.data) if reasoning else {}),
        "text": {"format": form},
        "tool_choice": given.data.get("tool_choice") or "auto",
        "tools": given.list("tools"),
    }


def _refuse(given: Fields) -> None:
    for name in ("previous_response_id", "conversation"):
        if name in given:
            raise given.refused(name, "this server does not store responses; send the whole conversation as input")
    if "prompt" in given:
        raise given.refused("prompt", "this server does not store prompts; send instructions and input")
    if given.flag("background"):
        raise given.refused("background", "background responses are not supported")
    if given.choice("truncation", ("auto", "disabled"), "disabled") == "auto":
        raise given.refused("truncation", "only 'disabled' is supported")


def _input(given: Fields, transcript: Transcript, toolbox: Toolbox) -> None:
    if isinstance(value := given.needed("input"), str):
        transcript.say("user", value)
    else:
        for item in given.objects("input"):
            _item(item, transcript, toolbox)
    if not transcript.messages:
        transcript.say("user", "")  # Codex sends an empty input to check the connection


def _item(item: Fields, transcript: Transcript, toolbox: Toolbox) -> None:
    match item.text("type") or "message":
        case "message":
            _message(item, transcript)
        case "reasoning":
            parts = [*item.objects("content")] or [*item.objects("summary")]
            if text := "\n".join(part.needed_text("text") for part in parts):
                transcript.thought(text)
        case "function_call" | "custom_tool_call" | "local_shell_call" as kind:
            _call(item, kind, transcript)
        case "function_call_output" | "custom_tool_call_output":
            transcript.result(item.needed_name("call_id"), _text(item, "output"))
        case "local_shell_call_output":
            transcript.result(item.text("call_id") or item.needed_name("id"), _text(item, "output"))
        case "additional_tools":
            toolbox.add(item.objects("tools"))
        case "item_reference":
            raise item.refused("id", "this server does not store items; send the item itself")
        case kind if kind not in _ELSEWHERE:
            raise item.refused("type", f"unsupported item type {kind!r}")


def _message(item: Fields, transcript: Transcript) -> None:
    role = item.needed_choice("role", ("user", "assistant", "system", "developer"))
    text = _text(item, "content")
    if role in ("user", "assistant"):
        transcript.say(role, text)
    else:
        transcript.system(text)


def _call(item: Fields, kind: str, transcript: Transcript) -> None:
    call = item.needed_name("call_id")
    if kind == "local_shell_call":
        transcript.call(call, "local_shell", as_json(item.needed_object("action").data))
        return
    if kind == "custom_tool_call":
        arguments = as_json({"input": item.needed_text("input")})
    else:
        arguments = item.needed_text("arguments") or "{}"
    transcript.call(call, function_name(item.needed_name("name"), item.text("namespace")), arguments)


def _text(item: Fields, name: str) -> str:
    """Return the text of a field that is a string or a list of parts."""
    item.needed(name)
    return "\n".join(item.parts(name, _part))


def _part(part: Fields) -> str:
    match part.needed_name("type"):
        case "input_text" | "output_text" | "text":
            return part.needed_text("text")
        case "refusal":
            return part.needed_text("refusal")
        case "input_image":
            raise part.refused_image()
        case "input_file" | "input_audio" as kind:
            raise part.refused("type", f"{kind!r} is not supported; this model accepts only text")
        case other:
            raise part.refused("type", f"unsupported content type {other!r}")


def _format(given: Fields) -> tuple[dict[str, Any], Form | None]:
    """Return the format of the text as the response repeats it, and the corresponding `Form`."""
    text = given.object("text")
    form = text.object("format") if text else None
    if form is None:
        return {"type": "text"}, None
    kind = form.needed_choice("type", ("text", "json_object", "json_schema"))
    schema = form.needed_object("schema").data if kind == "json_schema" else {}
    strict = bool(form.data.get("strict"))
    return dict(form.data), None if kind == "text" else Form(schema, f"{form.path}schema", strict)


def _logprobs(given: Fields) -> int | None:
    count = given.whole("top_logprobs", most=20)
    return count or (0 if "message.output_text.logprobs" in given.texts("include") else None)


def _variables(given: Fields) -> dict[str, Any]:
    reasoning = given.object("reasoning")
    effort = reasoning.choice("effort", tuple(_EFFORTS), "") if reasoning else ""
    if effort == "none":
        return dict(NO_REASONING)
    return {"enable_thinking": True, "reasoning_effort": _EFFORTS[effort]} if effort else {}


# --------------------------------------------------------------------------- the answer


class ResponseReply(Reply):
    """A response, or its stream of events; the name of each event is its "type".

    Args:
        call: HTTP request.
        toolbox: Tools that `read_request` returned.
        echo: Fields that `read_request` returned.
        id: Id of the response, from which the ids of the items are derived.
        name: Name of the model in the response.
        prediction: Text that the answer probably copies.
    """

    def __init__(
        self, call: Call, toolbox: Toolbox, echo: dict[str, Any], id: str, name: str, prediction: str = ""
    ) -> None:
        super().__init__()
        self._call, self._model, self._prediction = call, call.model, prediction
        self._telemetry = read_telemetry(call)
        self._toolbox, self._echo, self._id, self._name = toolbox, echo, id, name
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._sent = 0
        self._growth = ""  # start of the events of the open block as JSON, up to the text
        self._closed: Block | None = None  # its last events are sent later, because it was cut only if nothing follows

    def whole(self) -> dict[str, Any]:
        (answer,) = self.answers
        assert answer.end is not None
        cut = answer.end.reason == "length"
        last = len(answer.blocks) - 1
        self._output = [self._item(one, cut and one.index == last) for one in answer.blocks]
        return self._ending(answer.end)

    def chunks(self, number: int, event: TextEvent) -> str:
        more = self._telemetry.update(event) if self._telemetry else {}
        text = ""
        if isinstance(event, Piece):
            for kind, block, piece, logprobs in event.changes:
                if not self._sent or self._closed is not None:
                    text += self._beginning() + self._closing(cut=False)
                if kind == "opened":
                    text += self._opening(block)
                elif kind == "grown":
                    text += self._growing(block, piece, logprobs, more)
                else:
                    self._closed = block
        elif isinstance(event, End):
            text = self._beginning() + self._closing(cut=event.reason == "length")
            response = self._ending(event)
            text += self._chunk(f"response.{response['status']}", {"response": response, **more})
        elif "prompt_progress" in more:
            text = self._beginning()
            text += self._chunk("response.in_progress", {"response": self._response("in_progress"), **more})
        return text

    def silence(self) -> str:
        return self._beginning() + self._chunk("keepalive", {})

    def failed(self, error: ApiError) -> str:
        code = error.code if isinstance(error.code, str) else "server_error"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self._beginning() + self._chunk("response.failed", {"response": response})

    def _beginning(self) -> str:
        """Return the first events, if they were not sent yet."""
        if self._sent:
            return ""
        response = {"response": self._response("in_progress")}
        return self._chunk("response.created", response) + self._chunk("response.in_progress", response)

    def _chunk(self, kind: str, fields: dict[str, Any]) -> str:
        """Return an event; all have their type first and their number last."""
        self._sent += 1
        return f'event: {kind}\ndata: {{"type":"{kind}"{members(fields)},"sequence_number":{self._sent - 1}}}\n\n'

    def _ending(self, end: End) -> dict[str, Any]:
        (answer,) = self.answers
        generated = end.done.stats.generated
        predicted = prediction_usage(self._model, self._prediction, [answer.tokens])
        return self._response("incomplete" if end.reason == "length" else "completed") | {
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": end.done.cached, "cache_write_tokens": 0},
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens, **predicted},
                "total_tokens": answer.prompt_tokens + generated,
            }
        }

    def _response(self, status: str) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = {"completed_at": int(time.time())} if status == "completed" else {}
        sampling = self._call.requests[0].sampling
        return {
            "id": self._id,
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

    def _opening(self, block: Block) -> str:
        item, at = self._item(block) | {"status": "in_progress"}, self._place(block)
        name = _DELTAS.get(item["type"], "")
        self._growth = name and f'event: {name}\ndata: {{"type":"{name}"{members(at)},"delta":'
        if block.kind == "call":
            return self._chunk("response.output_item.added", {"output_index": block.index, "item": item})
        item["content"] = []
        text = self._chunk("response.output_item.added", {"output_index": block.index, "item": item})
        return text + self._chunk("response.content_part.added", at | {"part": self._part(block)})

    def _growing(self, block: Block, piece: str, logprobs: Sequence[Logprobs], more: dict[str, Any]) -> str:
        if not self._growth:
            return ""
        rest = ""
        if block.kind == "text":
            likely = dumped(logprobs_content(self._model, logprobs)) if logprobs else "[]"
            rest = f',"logprobs":{likely}{members(more) if more else ""}'
        self._sent += 1
        return f'{self._growth}{quoted(piece)}{rest},"sequence_number":{self._sent - 1}}}\n\n'

    def _closing(self, cut: bool) -> str:
        """Return the last events of the closed block, if they were not sent yet."""
        block, self._closed = self._closed, None
        if block is None:
            return ""
        item = self._item(block, cut)
        at = self._place(block)
        match item["type"]:
            case "custom_tool_call":  # its input is within the JSON of arguments, which is complete only now
                text = self._chunk("response.custom_tool_call_input.delta", at | {"delta": item["input"]})
                text += self._chunk("response.custom_tool_call_input.done", at | {"input": item["input"]})
            case "function_call":
                done = {"name": item["name"], "arguments": item["arguments"]}
                text = self._chunk("response.function_call_arguments.done", at | done)
            case kind:
                part = self._part(block)
                if kind == "message":
                    done = {"text": block.text, "logprobs": part["logprobs"]}
                    text = self._chunk("response.output_text.done", at | done)
                else:
                    text = self._chunk("response.reasoning_text.done", at | {"text": block.text})
                text += self._chunk("response.content_part.done", at | {"part": part})
        self._output.append(item)
        return text + self._chunk("response.output_item.done", {"output_index": block.index, "item": item})

    def _named(self, block: Block) -> tuple[str, str]:
        """Return the type and the id of the item of a block."""
        custom = block.name in self._toolbox.custom
        kind = {"text": "message", "thought": "reasoning"}.get(block.kind) or (
            "custom_tool_call" if custom else "function_call"
        )
        return kind, f"{_PREFIXES[kind]}_{self._id.removeprefix('resp_')}_{block.index}"

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._named(block)[1], "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _item(self, block: Block, cut: bool = False) -> dict[str, Any]:
        """Return the item of a block, with its content so far."""
        kind, id = self._named(block)
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
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = logprobs_content(self._model, block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
"""Prefixes of the ids of items."""

_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
"""Events of items that grow; the input of a custom tool is sent at its end."""
