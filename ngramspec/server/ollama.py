"""`/api/chat` and `/api/generate`: chats and completions in Ollama's format."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from ngramspec.chat.families import reasoning_tags
from ngramspec.request import Request
from ngramspec.server.answer import Block, End, Piece, TextEvent
from ngramspec.server.call import Call
from ngramspec.server.chat import EFFORTS, ChatTask, answer_chat
from ngramspec.server.constraint_fields import JsonFormat
from ngramspec.server.errors import ApiError, bad_field
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonResponse, encode_json, members, quote
from ngramspec.server.openai_chat import read_logprobs
from ngramspec.server.openai_completions import fill_in_prompt, read_requests, read_tokens
from ngramspec.server.reply import Reply, logprobs_content, respond
from ngramspec.server.request_fields import SHARED_FIELDS, read_max_tokens, read_stop
from ngramspec.server.sampling_fields import check_token, read_sampling
from ngramspec.server.state import ServedModel
from ngramspec.server.toolbox import Toolbox
from ngramspec.server.transcript import Transcript, dump_arguments, read_arguments

_ROLES = ("system", "user", "assistant", "tool")
_LEVELS = ("low", "medium", "high", "max")  # levels of `think`

# A duration as Go writes it ("1h30m"), or a number of seconds.
_DURATION = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+|[-+]?\d+(?:\.\d+)?")


async def chat(call: Call) -> Response:
    """Answer a chat."""
    fields, inner = call.fields, _merge_options(call)
    reply, unload = OllamaReply(inner, "chat", fields), _has_zero_keep_alive(fields)
    if not fields.list("messages"):
        return reply.load_response(unload)
    return await answer_chat(inner, await asyncio.to_thread(_read_chat, call, inner), reply)


async def generate_text(call: Call) -> Response:
    """Answer a prompt in the chat template, continue it as it is (`raw`), or generate the text before `suffix`."""
    fields, inner = call.fields, _merge_options(call)
    reply, unload = OllamaReply(inner, "generate", fields), _has_zero_keep_alive(fields)
    prompt, suffix = fields.string("prompt") or "", fields.string("suffix") or ""
    _refuse_images(fields)
    if fields.string("template"):
        raise fields.field_error("template", "Go templates are not supported; use raw with the whole prompt")
    if not prompt and not suffix:
        return reply.load_response(unload)
    if fields.boolean("raw") or suffix:
        request = await asyncio.to_thread(_read_request, call, inner, prompt, suffix)
        return await respond(inner, [request], reply)
    reply.has_context = True
    return await answer_chat(inner, await asyncio.to_thread(_read_prompt, call, inner, prompt), reply)


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's format."""
    return {"error": error.message}


# --------------------------------------------------------------------------- the request


def _merge_options(call: Call) -> Call:
    """Return the call with the fields of its `options` under their names in the other APIs.

    All other options are dropped, such as those that select how Ollama loads a model (`num_ctx`, `num_gpu`, ...).
    """
    options = call.fields.object("options") or Fields({}, "options.")
    data = {name: value for name, value in options.data.items() if name in SHARED_FIELDS}
    limit = options.integer("num_predict", -1, minimum=-(2**31)) or -1
    data |= {"n_predict": max(limit, -1), "stream": call.fields.boolean("stream", True)}
    return replace(call, fields=Fields(data, options.path))


def _read_chat(call: Call, inner: Call) -> ChatTask:
    toolbox = Toolbox()
    for tool in call.fields.objects("tools"):
        tool.choice("type", ("function",), "function")
        toolbox.add_tool(tool.require_object("function"), "function", unique=False)
    return _make_task(call, inner, read_messages(call.fields), tools=toolbox.tools)


def _read_prompt(call: Call, inner: Call, prompt: str) -> ChatTask:
    transcript = Transcript()
    transcript.add_system(call.fields.string("system") or "")
    transcript.add_message("user", prompt)
    before = [check_token(call.model.vocabulary, token, "context") for token in call.fields.list("context")]
    return _make_task(call, inner, transcript.messages, earlier_tokens=before)


def _make_task(call: Call, inner: Call, messages: list[dict[str, Any]], **more: Any) -> ChatTask:
    """Return the chat of a request; `inner` is the call with its options, and `more` further fields of the task."""
    return ChatTask(
        messages=messages,
        json_format=_read_format(call.fields),
        max_tokens=read_max_tokens(inner.fields),
        stop=read_stop(inner.fields),
        logprobs=read_logprobs(call.fields),
        variables=_read_think(call.fields, call.model),
        **more,
    )


def _has_zero_keep_alive(fields: Fields) -> bool:
    """Return True if `keep_alive` asks for the model to be unloaded."""
    match fields.data.get("keep_alive"):
        case None:
            return False
        case int() | float() as seconds if not isinstance(seconds, bool):
            return seconds == 0
        case str() as text if _DURATION.fullmatch(text):
            return not re.search("[1-9]", text)
    raise fields.value_error("keep_alive", 'a number of seconds or a duration such as "5m"')


def _refuse_images(fields: Fields) -> None:
    if fields.list("images"):
        raise fields.field_error("images", "images are not supported; this model accepts only text")


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages of a chat in OpenAI's format."""
    transcript, waiting = Transcript(), dict[str, str]()  # names of the tools whose results are missing, by id
    for number, message in enumerate(fields.objects("messages")):
        _refuse_images(message)
        text = message.string("content") or ""
        match message.require_choice("role", _ROLES):
            case "system":
                transcript.add_system(text)
            case "tool":
                name = message.string(message.name("tool_name", "name")) or ""
                # A result without an id belongs to the first call of its tool; without a name, to the first call.
                first = next((id for id, tool in waiting.items() if tool == name or not name), f"result_{number}")
                id = message.string("tool_call_id") or first
                waiting.pop(id, None)
                transcript.add_result(id, text, name)
            case "assistant":
                transcript.add_message("assistant", text)
                if thinking := message.string("thinking"):
                    transcript.add_reasoning(thinking)
                for place, call in enumerate(message.objects("tool_calls")):
                    function = call.require_object("function")
                    id, name = call.string("id") or f"call_{number}_{place}", function.require_name("name")
                    arguments = function.object("arguments")
                    transcript.add_call(id, name, dump_arguments({} if arguments is None else arguments.data))
                    waiting[id] = name
            case role:
                transcript.add_message(role, text)
    return transcript.messages


def _read_format(fields: Fields) -> JsonFormat | None:
    match fields.data.get("format"):
        case None | "":
            return None
        case "json":
            return JsonFormat({}, "format")
        case dict() as schema:
            return JsonFormat(schema, "format", strict=False)
    raise fields.value_error("format", '"json" or a JSON schema')


def _read_think(fields: Fields, model: ServedModel) -> dict[str, Any]:
    level = fields.data.get("think")
    if level is None:
        return {}
    if not isinstance(level, bool) and level not in _LEVELS:
        raise fields.value_error("think", f"one of true, false, {', '.join(_LEVELS)}")
    if level is not False and not reasoning_tags(model.vocabulary.chat_template):
        raise fields.field_error("think", f"{model.name!r} does not support thinking")
    effort = {} if isinstance(level, bool) else {"reasoning_effort": EFFORTS[level]}
    return {"enable_thinking": level is not False} | effort


def _read_request(call: Call, inner: Call, prompt: str, suffix: str) -> Request:
    """Return the request for a text without the chat template."""
    fields, model = call.fields, call.model
    field = "raw" if fields.boolean("raw") else "suffix"
    for name in ("system", "context", "think", *(["suffix"] if field == "raw" else [])):
        if fields.data.get(name):
            raise bad_field(name, f"{name} cannot be combined with {field}")
    tokens = fill_in_prompt(model, prompt, suffix) if suffix else read_tokens(model, prompt, "prompt")
    sampling, form = read_sampling(inner), _read_format(fields)
    if form is not None:
        if sampling.grammar is not None:
            raise bad_field("grammar", "grammar cannot be combined with format")
        sampling = replace(sampling, grammar=form.make_grammar())
    (request,) = read_requests(inner, [tokens], sampling, read_logprobs(fields))
    return request


# --------------------------------------------------------------------------- the answer


class OllamaReply(Reply):
    """An answer of `/api/chat` or `/api/generate`, or its stream of JSON lines.

    `call` has the options of the request, and `fields` its other fields. `kind` is "chat", whose text is in a message,
    or "generate".
    """

    media_type = "application/x-ndjson"

    def __init__(self, call: Call, kind: str, fields: Fields) -> None:
        super().__init__()
        self._call, self._model, self._kind, self._started_at = call, call.model, kind, time.monotonic()
        self._name = fields.string("model") or call.model.name
        self._with_logprobs = fields.boolean("logprobs")
        self.has_context = False  # True if the answer contains its `context`
        self._calls = 0
        # JSON before and after a text
        self._frames = {
            "text": members(self._fields("\0")).split(quote("\0")),
            "reasoning": members(self._fields(thinking="\0")).split(quote("\0")),
        }

    def load_response(self, unload: bool) -> Response:
        """Return the response to a request without a prompt. The model is always loaded and never unloaded."""
        ending = {"done": True, "done_reason": "unload" if unload else "load"}
        return JsonResponse(self._head() | self._fields() | ending)

    def response_body(self) -> dict[str, Any]:
        (answer,) = self.answers
        calls = [call for block in answer.blocks for call in self._tool_call(block)]
        fields = self._fields(answer.text(), answer.text("reasoning"), calls)
        return self._head() | fields | self._end_fields(answer.logprobs)

    def chunks(self, number: int, event: TextEvent) -> str:
        if isinstance(event, End):
            return self._line(members(self._fields() | self._end_fields(())))
        if not isinstance(event, Piece):
            return ""
        lines = []
        for change, block, text, _ in event.changes:
            if change == "closed" and (calls := self._tool_call(block)):
                lines.append(members(self._fields(calls=calls)))
            elif change == "grown" and text and block.kind != "call":
                before, after = self._frames[block.kind]
                lines.append(f"{before}{quote(text)}{after}")
        if event.logprobs:
            lines = lines or [members(self._fields())]
            lines[-1] += members(self._logprobs(event.logprobs))
        return "".join(map(self._line, lines))

    def keepalive(self) -> str:
        return self._line(members(self._fields()))

    def error_chunk(self, error: ApiError) -> str:
        return encode_json(error_body(error)) + "\n"

    def _line(self, rest: str) -> str:
        """Return a chunk; `rest` is JSON as `members` returns it."""
        return f'{{"model":{quote(self._name)},"created_at":"{timestamp(time.time())}"{rest}}}\n'

    def _head(self) -> dict[str, Any]:
        return {"model": self._name, "created_at": timestamp(time.time())}

    def _fields(self, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        if self._kind == "chat":
            return {"message": {"role": "assistant", "content": text, **more}, "done": False}
        return {"response": text, **more, "done": False}

    def _tool_call(self, block: Block) -> list[dict[str, Any]]:
        """Return a block that is a call with complete arguments; other blocks return nothing."""
        arguments = read_arguments(block.text) if block.kind == "call" else None
        if arguments is None:
            return []
        function = {"index": self._calls, "name": block.name, "arguments": arguments}
        self._calls += 1
        return [{"id": block.id, "function": function}]

    def _logprobs(self, logprobs: Sequence[Any]) -> dict[str, Any]:
        return {"logprobs": logprobs_content(self._model, logprobs)} if self._with_logprobs else {}

    def _end_fields(self, logprobs: Sequence[Any]) -> dict[str, Any]:
        (answer,) = self.answers
        assert answer.end is not None
        done = answer.end.done
        ending: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if answer.end.reason == "length" else "stop",
            "total_duration": round(1e9 * (time.monotonic() - self._started_at)),
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": round(1e9 * done.prompt_seconds),
            "eval_count": done.stats.generated,
            "eval_duration": round(1e9 * done.seconds),
        }
        if self.has_context:
            ending["context"] = [*self._call.requests[0].prompt, *answer.tokens]
        return ending | (self._logprobs(logprobs) if logprobs else {})


def timestamp(seconds: float) -> str:
    """Return a time in seconds since 1970 in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
