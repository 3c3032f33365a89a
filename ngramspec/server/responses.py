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

`ResponseReply` (responses_reply.py) converts the answer to items again. The server stores nothing, so a request that
refers to an earlier response is rejected.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from ngramspec.server.call import Call
from ngramspec.server.chat import EFFORTS, ChatTask, count_prompt, start_chat
from ngramspec.server.constraint_fields import JsonFormat, read_json_format
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import Encoded, JsonResponse, encode_json
from ngramspec.server.reasoning import NO_REASONING
from ngramspec.server.reply import respond
from ngramspec.server.request_fields import MAX_ALTERNATIVES, read_prediction
from ngramspec.server.responses_reply import ResponseReply
from ngramspec.server.toolbox import Toolbox, function_name
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
