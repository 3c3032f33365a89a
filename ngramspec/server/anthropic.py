"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, which Claude Code uses."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from ngramspec.server.answer import Answer, Block
from ngramspec.server.call import Call
from ngramspec.server.chat import EFFORTS, ChatTask, count_prompt, start_chat
from ngramspec.server.constraint_fields import JsonFormat, read_json_format
from ngramspec.server.errors import ApiError
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonResponse
from ngramspec.server.reasoning import read_thinking, read_thinking_budget
from ngramspec.server.reply import NAMED, Reply, merge, respond
from ngramspec.server.toolbox import Toolbox
from ngramspec.server.transcript import Transcript, dump_arguments, read_arguments

# Claude Code begins its system prompt with this line, which differs in every request. It is removed, because otherwise
# only the first tokens of a prompt would be in the cache.
_BILLING = re.compile(r"\A(?:\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")

Event = dict[str, Any]

_SIGNATURE = "unsigned"
"""Signature of thinking blocks. Clients do not send blocks without one back, and the model would lose its reasoning."""

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def messages(call: Call) -> Response:
    """Answer a chat."""
    answers = await start_chat(call, await asyncio.to_thread(read_request, call.fields))
    return await respond(call, MessageReply(call, answers))


async def count_tokens(call: Call) -> Response:
    task = await asyncio.to_thread(read_request, call.fields, counting=True)
    return JsonResponse({"input_tokens": await count_prompt(call, task)})


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error in Anthropic's format, for the body of a response or for an event of a stream."""
    text, default = error.message, "invalid_request_error" if error.status < 500 else "api_error"
    if "n_prompt_tokens" in error.details:
        # Claude Code recognises these words, and then shortens the conversation.
        tokens, limit = error.details["n_prompt_tokens"], error.details["n_ctx"]
        text = f"prompt is too long: {tokens} tokens > {limit} maximum; {text}"
    return {"type": "error", "error": {"type": _ERRORS.get(error.status, default), "message": text}}


# --------------------------------------------------------------------------- the request


def read_request(fields: Fields, *, counting: bool = False) -> ChatTask:
    """Return the task of a request; with `counting`, which only counts tokens, `max_tokens` is not required."""
    if not counting:
        fields.require("max_tokens")
    toolbox = Toolbox()
    for tool in fields.objects("tools"):
        # Other tools, such as web search, run only on Anthropic's servers.
        if (tool.string("type") or "custom") == "custom":
            toolbox.add_tool(tool, "function", schema="input_schema")
    choice, parallel = _read_choice(fields, toolbox)
    stop = tuple(fields.string_list("stop_sequences"))
    if not all(stop):
        raise fields.field_error("stop_sequences", "must not contain an empty string")
    return ChatTask(
        messages=_read_messages(fields),
        tools=toolbox.tools,
        tool_choice=choice,
        parallel=parallel,
        json_format=_read_output_format(fields),
        max_tokens=fields.integer("max_tokens"),
        stop=stop,
        variables=_read_variables(fields),
        reasoning_budget=read_thinking_budget(fields),
    )


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    transcript = Transcript()
    for text in fields.parts("system", _read_text):
        transcript.add_system(_BILLING.sub("", text))
    for message in fields.objects("messages"):
        role = message.require_choice("role", ("user", "assistant", "system"))
        content = message.require("content")
        if role == "system":
            for text in message.parts("content", _read_text):
                transcript.add_system(text)
        elif isinstance(content, str):
            transcript.add_message(role, content)
        else:
            add_blocks = _add_user_blocks if role == "user" else _add_assistant_blocks
            add_blocks(transcript, list(message.objects("content")))
    fields.require("messages")
    return transcript.messages


def _add_user_blocks(transcript: Transcript, blocks: list[Fields]) -> None:
    # Templates require the results of calls directly after the calls.
    for block in blocks:
        if block.data.get("type") == "tool_result":
            text = "Error: " * block.boolean("is_error") + "\n".join(block.parts("content", _read_text))
            transcript.add_result(block.require_name("tool_use_id"), text)
    for block in blocks:
        if block.data.get("type") != "tool_result":
            transcript.add_message("user", _read_text(block))


def _add_assistant_blocks(transcript: Transcript, blocks: list[Fields]) -> None:
    transcript.add_message("assistant", "")
    for block in blocks:
        match block.data.get("type"):
            case "thinking":
                transcript.add_reasoning(block.require_string("thinking"))
            case "redacted_thinking":
                pass  # the block is encrypted by another server, so it cannot be read
            case "tool_use":
                arguments = dump_arguments(block.require_object("input").data)
                transcript.add_call(block.require_name("id"), block.require_name("name"), arguments)
            case _:
                transcript.add_message("assistant", _read_text(block))


def _read_text(block: Fields) -> str:
    match block.require_name("type"):
        case "text":
            return block.require_string("text")
        case "document":
            return _read_document(block)
        case "search_result":
            heading = [block.require_string("title"), block.require_string("source")]
            return "\n".join(heading + block.parts("content", _read_text))
        case "tool_reference":
            return block.require_string("tool_name")
        case "image":
            raise block.image_error()
        case other:
            raise block.field_error("type", f"unsupported content type {other!r}; this model accepts only text")


def _read_document(block: Fields) -> str:
    source = block.require_object("source")
    if source.data.get("type") not in ("text", "content"):
        raise source.field_error("type", "only text documents (type text or content) are supported")
    texts = [source.require_string("data")] if source.data["type"] == "text" else source.parts("content", _read_text)
    return "\n".join([part for part in (block.string("title"), block.string("context")) if part] + texts)


def _read_choice(fields: Fields, toolbox: Toolbox) -> tuple[str, bool]:
    """Return the tool choice, and whether parallel calls are allowed."""
    choice = fields.object("tool_choice")
    if choice is None:
        return "auto", True
    parallel = not choice.boolean("disable_parallel_tool_use")
    match choice.require_choice("type", ("auto", "any", "tool", "none")):
        case "any":
            return "required", parallel
        case "tool":
            return toolbox.choose(choice), parallel
        case kind:
            return kind, parallel


def _read_output_format(fields: Fields) -> JsonFormat | None:
    config = fields.object("output_config")
    # `output_format` is the older form.
    form = (config.object("format") if config else None) or fields.object("output_format")
    if form is None:
        return read_json_format(fields)
    form.require_choice("type", ("json_schema",))
    return read_json_format(fields, JsonFormat(form.require_object("schema").data, f"{form.path}schema"))


def _read_variables(fields: Fields) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    if (enabled := read_thinking(fields)) is not None:
        variables["enable_thinking"] = enabled
    config = fields.object("output_config")
    if config is not None and (effort := config.choice("effort", tuple(EFFORTS), "")):
        variables["reasoning_effort"] = EFFORTS[effort]
    return variables


# --------------------------------------------------------------------------- the answer


class MessageReply(Reply):
    """A message, or its stream of events."""

    head = NAMED

    def __init__(self, call: Call, answers: Sequence[Answer]) -> None:
        super().__init__(call, answers)
        self._id, self._model = f"msg_{secrets.token_hex(12)}", call.fields.string("model") or call.model.name
        thinking = call.fields.object("thinking") or Fields({})
        # True if the text of reasoning is omitted
        self._hides = thinking.choice("display", ("summarized", "omitted"), "summarized") == "omitted"
        self._has_begun = False

    def events(self, answer: Answer) -> list[Event]:
        events = self._begin() if answer.steps or answer.done else []
        for kind, block, text, _ in answer.changes:
            at = {"index": block.index}
            if kind == "opened":
                events.append({"type": "content_block_start", **at, "content_block": _open(block)})
            elif kind == "grown":
                delta, field = _DELTAS[block.kind]
                if block.kind != "reasoning" or not self._hides:
                    events.append({"type": "content_block_delta", **at, "delta": {"type": delta, field: text}})
            else:
                if block.kind == "reasoning":
                    signature = {"type": "signature_delta", "signature": _SIGNATURE}
                    events.append({"type": "content_block_delta", **at, "delta": signature})
                events.append({"type": "content_block_stop", **at})
        if answer.done is not None:
            usage = self._input_usage() | {
                "output_tokens": answer.done.stats.generated,
                "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
            }
            events.append({"type": "message_delta", "delta": _stop_fields(answer), "usage": usage})
            events.append({"type": "message_stop"})
        return events

    def fold(self, event: Event) -> None:
        match event:
            case {"message": message}:
                self.body = message
            case {"content_block": block}:
                self.body["content"].append(block)
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                merge(self.body["content"][index], {name: value for name, value in delta.items() if name != "type"})
            case {"type": "content_block_stop", "index": index}:
                block = self.body["content"][index]
                if block["type"] == "tool_use":  # a limit may have cut the arguments, which must not be used then
                    block["input"] = read_arguments(block.pop("partial_json", "")) or {}
            case {"delta": stop_fields, "usage": usage}:
                self.body |= stop_fields | {"usage": usage}

    def keepalive(self) -> str:
        return self.encode([*self._begin(), {"type": "ping"}])

    def error_chunk(self, error: ApiError) -> str:
        return self.encode([error_body(error)])

    def _begin(self) -> list[Event]:
        """Return the first event, if it was not sent yet. It has the length of the prompt, unless a ping came first."""
        if self._has_begun:
            return []
        self._has_begun = True
        message = {
            **{"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": []},
            **{"stop_reason": None, "stop_sequence": None, "usage": self._input_usage() | {"output_tokens": 0}},
        }
        return [{"type": "message_start", "message": message}]

    def _input_usage(self) -> dict[str, int]:
        (answer,) = self.answers
        return {
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.cached_tokens,
        }


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _open(block: Block) -> dict[str, Any]:
    """Return the content of a block that is still empty."""
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _stop_fields(answer: Answer) -> dict[str, Any]:
    if answer.is_full:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    if answer.stop_string is not None and answer.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    return {"stop_reason": _REASONS[answer.reason], "stop_sequence": None}
