"""Ollama's `/api/chat` and `/api/generate`, and `/api/tags`, `/api/ps`, `/api/show` and `/api/version`."""

from __future__ import annotations

import asyncio
import math
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from starlette.responses import Response

from ngramspec.batching.request import Done
from ngramspec.chat.families import reasoning_tags
from ngramspec.request import Request
from ngramspec.server.answer import Answer
from ngramspec.server.call import Call
from ngramspec.server.chat import EFFORTS, ChatTask, start_chat
from ngramspec.server.constraint_fields import JsonFormat
from ngramspec.server.errors import ApiError, bad_field
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonResponse, encode_json
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
    reply = OllamaReply(inner, fields, is_chat=True)
    if not fields.list("messages"):
        return reply.load_response()
    reply.answers = await start_chat(inner, await asyncio.to_thread(_read_chat, call, inner))
    return await respond(inner, reply)


async def generate_text(call: Call) -> Response:
    """Answer a prompt in the chat template, continue it as it is (`raw`), or generate the text before `suffix`."""
    fields, inner = call.fields, _merge_options(call)
    reply = OllamaReply(inner, fields, is_chat=False)
    prompt, suffix = fields.string("prompt") or "", fields.string("suffix") or ""
    _refuse_images(fields)
    if fields.string("template"):
        raise fields.field_error("template", "Go templates are not supported; use raw with the whole prompt")
    if not prompt and not suffix:
        return reply.load_response()
    if fields.boolean("raw") or suffix:
        reply.answers = [Answer(await asyncio.to_thread(_read_request, call, inner, prompt, suffix))]
    else:
        reply.has_context = True
        reply.answers = await start_chat(inner, await asyncio.to_thread(_read_prompt, call, inner, prompt))
    return await respond(inner, reply)


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

    `call` has the options of the request, and `fields` its other fields.
    """

    media_type, head, tail = "application/x-ndjson", "", "\n"

    def __init__(self, call: Call, fields: Fields, *, is_chat: bool) -> None:
        super().__init__(call, ())
        self._is_chat, self._started_at = is_chat, time.monotonic()
        self._name = fields.string("model") or call.model.name
        self._unloads = _has_zero_keep_alive(fields)
        self.has_context = False  # whether the answer contains its `context`
        self._n_calls = 0

    def load_response(self) -> Response:
        """Return the response to a request without a prompt. The model is always loaded and never unloaded."""
        return JsonResponse(self._event() | {"done": True, "done_reason": "unload" if self._unloads else "load"})

    def events(self, answer: Answer) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for kind, block, text, _ in answer.changes:
            if block.kind != "call":
                if text:
                    events.append(self._event(**{"thinking" if block.kind == "reasoning" else "text": text}))
            # A limit may have cut off the arguments.
            elif kind == "closed" and (arguments := read_arguments(block.text)) is not None:
                function = {"index": self._n_calls, "name": block.name, "arguments": arguments}
                events.append(self._event(tool_calls=[{"id": block.id, "function": function}]))
                self._n_calls += 1
        if answer.logprobs:
            events = events or [self._event()]
            events[-1]["logprobs"] = logprobs_content(self.model, answer.logprobs)
        if answer.done is not None:
            events.append(self._event() | self._end_fields(answer, answer.done))
        return events

    def keepalive(self) -> str:
        return self.encode([self._event()])

    def error_chunk(self, error: ApiError) -> str:
        return self.encode([error_body(error)])

    def _event(self, text: str = "", **more: Any) -> dict[str, Any]:
        """Return an event with a text; `more` contains reasoning (`thinking`) or `tool_calls`."""
        created_at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head = {"model": self._name, "created_at": created_at}
        if self._is_chat:
            return {**head, "message": {"role": "assistant", "content": text, **more}, "done": False}
        return {**head, "response": text, **more, "done": False}

    def _end_fields(self, answer: Answer, done: Done) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if answer.reason == "length" else "stop",
            "total_duration": round(1e9 * (time.monotonic() - self._started_at)),
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": round(1e9 * done.prompt_seconds),
            "eval_count": done.stats.generated,
            "eval_duration": round(1e9 * done.seconds),
        }
        if self.has_context:
            fields["context"] = [*answer.request.prompt, *answer.tokens]
        return fields


def timestamp(seconds: float) -> str:
    """Return a time in seconds since 1970 in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


VERSION = "0.13.0"
"""The version of Ollama whose API this is. Clients reject servers with an older version than they require."""

_CENTURY = 100 * 365 * 86400.0  # seconds

_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n")


async def version(call: Call) -> Response:
    return JsonResponse({"version": VERSION})


async def tags(call: Call) -> Response:
    """Return the list of models, which has one entry."""
    return JsonResponse({"models": [{**_entry(call.model), "modified_at": timestamp(call.server.started_at)}]})


async def processes(call: Call) -> Response:
    """Return the list of loaded models: the same one, which is never unloaded."""
    process = {
        "expires_at": timestamp(call.server.started_at + _CENTURY),
        "size_vram": 0,
        "context_length": call.model.n_ctx,
    }
    return JsonResponse({"models": [_entry(call.model) | process]})


async def show(call: Call) -> Response:
    """Return details of the model, whatever name the request gives it."""
    model = call.model
    metadata = {
        name: value
        for name, value in model.vocabulary.metadata.items()
        if name != "tokenizer.chat_template" and not (isinstance(value, float) and not math.isfinite(value))
    }
    # Clients take this for the length of the longest prompt.
    metadata[f"{_family(model)}.context_length"] = model.n_ctx
    if "n_params" in model.meta:
        metadata["general.parameter_count"] = model.meta["n_params"]
    sampling = {name: getattr(call.server.sampling, name) for name in _PARAMETERS}
    parameters = {"num_ctx": model.n_ctx, **sampling}
    return JsonResponse(
        {
            "modelfile": f"FROM {model.path}\n",
            "parameters": "\n".join([f"{name:<30} {value}" for name, value in parameters.items()]),
            "template": model.vocabulary.chat_template or "",
            "details": _details(model),
            "model_info": metadata,
            "capabilities": _capabilities(model),
            "modified_at": timestamp(call.server.started_at),
        }
    )


def _entry(model: ServedModel) -> dict[str, Any]:
    name = model.name if ":" in model.name else f"{model.name}:latest"  # Ollama's names have tags
    capabilities, details = _capabilities(model), _details(model)
    # Clients store under the digest what they know about a model.
    digest = sha256(encode_json([name, model.path, dict(model.meta), capabilities, model.n_ctx]).encode()).hexdigest()
    size = model.meta.get("size", 0)
    return {"name": name, "model": name, "size": size, "digest": digest, "details": details}


def _details(model: ServedModel) -> dict[str, Any]:
    family, n_params = _family(model), model.meta.get("n_params", 0)
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.2f}M",
        "quantization_level": model.meta.get("ftype") or "unknown",
    }


def _family(model: ServedModel) -> str:
    return str(model.vocabulary.metadata.get("general.architecture", ""))


def _capabilities(model: ServedModel) -> list[str]:
    vocabulary = model.vocabulary
    marks = vocabulary.fill_in_tokens
    # Tools work without a template that knows them: they are described in a message.
    capabilities = {
        "completion": True,
        "tools": True,
        "thinking": bool(reasoning_tags(vocabulary.chat_template)),
        "insert": None not in (marks.prefix, marks.suffix, marks.middle),
        "embedding": model.embedder is not None and model.embedder.pooling != "none",
    }
    return [name for name, is_available in capabilities.items() if is_available]
