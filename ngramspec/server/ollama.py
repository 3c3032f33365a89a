"""Ollama's `/api/chat` and `/api/generate`, and `/api/tags`, `/api/ps`, `/api/show` and `/api/version`."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, Field, PlainValidator, model_validator
from starlette.responses import Response

from ngramspec.batching.request import Done
from ngramspec.chat.families import reasoning_tags
from ngramspec.sampling.settings import Sampling, TextRules, options
from ngramspec.server.answer import Answer
from ngramspec.server.body import Body, FieldError, Items, Name, Tokens, describe_value, refuse, whole
from ngramspec.server.chat import EFFORTS, Chat, ChatTask, Toolbox, ToolFields, Transcript, answer_chat
from ngramspec.server.generation import (
    Alternatives,
    Constraint,
    Generation,
    check_token,
    fill_in_prompt,
    make_text_answers,
    read_logprobs,
    read_tokens,
)
from ngramspec.server.json_text import ApiError, JsonResponse, dump_arguments, encode_json, read_arguments
from ngramspec.server.reply import Reply, logprobs_content, respond
from ngramspec.server.state import Call, ServedModel

# A duration as Go writes it ("1h30m"), or a number of seconds.
_DURATION = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+|[-+]?\d+(?:\.\d+)?")

_SHARED = {*options(Sampling), *options(TextRules), "stop_token_ids", "bad_words", "stop", "lora", "id_slot"}
"""Names of the options under which fields of all APIs are read; others, except `num_predict`, are ignored."""


class _Options(Generation):
    max_tokens: Annotated[int, whole(-(2**31)), AfterValidator(lambda count: count if count > 0 else -1)] = Field(
        -1, validation_alias="num_predict"
    )

    @model_validator(mode="before")
    @classmethod
    def _select(cls, data: Any) -> Any:
        """Drop all other options, such as those that select how Ollama loads a model (`num_ctx`, `num_gpu`, ...)."""
        names = (*_SHARED, "num_predict")
        return {name: data[name] for name in names if name in data} if isinstance(data, dict) else data


_Images = Annotated[Items[Any], refuse("images are not supported; this model accepts only text")]


def _read_keep_alive(value: Any) -> bool:
    """Return False if the client asks to unload the model."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value != 0
    if isinstance(value, str) and _DURATION.fullmatch(value):
        return bool(re.search("[1-9]", value))
    raise FieldError(f'must be a number of seconds or a duration such as "5m", got {describe_value(value)}')


def _read_format(value: Any) -> Constraint | None:
    match value:
        case "":
            return None
        case "json":
            return Constraint("format", {})
        case dict() as schema:
            return Constraint("format", schema, strict=False)
    raise FieldError(f'must be "json" or a JSON schema, got {describe_value(value)}')


def _read_think(value: Any) -> str | bool:
    levels = ("low", "medium", "high", "max")
    if not isinstance(value, bool) and value not in levels:
        raise FieldError(f"must be one of true, false, {', '.join(levels)}, got {describe_value(value)}")
    return bool(value) if isinstance(value, bool) else str(value)


class _OllamaBody(Body):
    model: str = ""
    stream: bool = True
    options: _Options = Field(default_factory=_Options)
    format: Annotated[Constraint | None, PlainValidator(_read_format)] = None
    keep_alive: Annotated[bool, PlainValidator(_read_keep_alive)] = True
    think: Annotated[str | bool | None, PlainValidator(_read_think)] = None
    logprobs: bool = False
    top_logprobs: Alternatives = 0
    return_progress: ClassVar = False  # not in this API
    timings_per_token: ClassVar = False

    def _make_task(
        self, model: ServedModel, messages: list[dict[str, Any]], toolbox: Toolbox, earlier_tokens: Sequence[int] = ()
    ) -> ChatTask:
        variables: dict[str, Any] = {} if self.think is None else {"enable_thinking": self.think is not False}
        if self.think and not reasoning_tags(model.vocabulary.chat_template):
            raise FieldError(f"{model.name!r} does not support thinking", "think")
        if isinstance(self.think, str):
            variables["reasoning_effort"] = EFFORTS[self.think]
        return ChatTask(
            self.options,
            messages,
            toolbox,
            constraint=self.options.read_constraint(self.format),
            logprobs=read_logprobs(self.logprobs, self.top_logprobs),
            variables=variables,
            earlier_tokens=earlier_tokens,
        )


class _CalledFunction(Body):
    name: Name
    arguments: dict[str, Any] | None = None


class _Call(Body):
    id: str = ""
    function: _CalledFunction


class _Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: _Images = ()
    thinking: str = ""
    tool_calls: Items[_Call] = ()
    tool_call_id: str = ""
    tool_name: str = Field("", validation_alias=AliasChoices("tool_name", "name"))


class _Tool(Body):
    type: Literal["function"] = "function"
    function: ToolFields


class ChatBody(_OllamaBody, Chat):
    messages: Items[_Message] = ()
    tools: Items[_Tool] = ()

    def task(self, model: ServedModel) -> ChatTask:
        toolbox = Toolbox()
        for tool in self.tools:
            toolbox.add_tool(tool.function, "function")
        return self._make_task(model, _make_messages(self.messages), toolbox)


class GenerateBody(_OllamaBody, Chat):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    context: Tokens = ()
    images: _Images = ()
    template: Annotated[str, refuse("Go templates are not supported; use raw with the whole prompt")] = ""

    def task(self, model: ServedModel) -> ChatTask:
        transcript = Transcript()
        transcript.add_system(self.system)
        transcript.add_message("user", self.prompt)
        before = [check_token(model.vocabulary, token, "context") for token in self.context]
        return self._make_task(model, transcript.messages, Toolbox(), before)


async def chat(call: Call[ChatBody]) -> Response:
    return await answer_chat(call, OllamaReply) if call.body.messages else _load(call)


async def generate_text(call: Call[GenerateBody]) -> Response:
    """Answer a prompt in the chat template, continue it as it is (`raw`), or generate the text before `suffix`."""
    body = call.body
    if not body.prompt and not body.suffix:
        return _load(call)
    if body.raw or body.suffix:
        return await respond(lambda: OllamaReply(call, _read_request(call)))
    return await answer_chat(call, OllamaReply)


def _load(call: Call[Any]) -> Response:
    """Answer a request without a prompt. The model is always loaded and never unloaded."""
    reason = "load" if call.body.keep_alive else "unload"
    return JsonResponse(OllamaReply(call, ()).event() | {"done": True, "done_reason": reason})


def _make_messages(messages: Sequence[_Message]) -> list[dict[str, Any]]:
    transcript, waiting = Transcript(), dict[str, str]()  # names of the tools whose results are missing, by id
    for number, message in enumerate(messages):
        match message.role:
            case "system":
                transcript.add_system(message.content)
            case "tool":
                name = message.tool_name
                # A result without an id belongs to the first call of its tool; without a name, to the first call.
                first = next((id for id, tool in waiting.items() if tool == name or not name), f"result_{number}")
                id = message.tool_call_id or first
                waiting.pop(id, None)
                transcript.add_result(id, message.content, name)
            case "assistant":
                transcript.add_message("assistant", message.content)
                if message.thinking:
                    transcript.add_reasoning(message.thinking)
                for place, call in enumerate(message.tool_calls):
                    id, name = call.id or f"call_{number}_{place}", call.function.name
                    transcript.add_call(id, name, dump_arguments(call.function.arguments or {}))
                    waiting[id] = name
            case role:
                transcript.add_message(role, message.content)
    return transcript.messages


def _read_request(call: Call[GenerateBody]) -> list[Answer]:
    """Return the answer to a prompt without the chat template."""
    body, model = call.body, call.model
    field = "raw" if body.raw else "suffix"
    for name in ("system", "context", "think", *(["suffix"] if body.raw else [])):
        if getattr(body, name):
            raise FieldError(f"cannot be combined with {field}", name)
    if body.suffix:
        tokens = fill_in_prompt(model, body.prompt, body.suffix)
    else:
        tokens = read_tokens(model, body.prompt, "prompt")
    logprobs = read_logprobs(body.logprobs, body.top_logprobs)
    return make_text_answers(call, body.options, [tokens], body.format, logprobs=logprobs)


class OllamaReply(Reply):
    media_type, head, tail = "application/x-ndjson", "", "\n"

    def __init__(self, call: Call[Any], answers: Sequence[Answer], _: Toolbox | None = None) -> None:
        super().__init__(call, answers)
        self._n_calls = 0

    def events(self, answer: Answer) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for kind, block, text, _ in answer.changes:
            if block.kind != "call":
                if text:
                    events.append(self.event(**{"thinking" if block.kind == "reasoning" else "text": text}))
            # A limit may have cut off the arguments.
            elif kind == "closed" and (arguments := read_arguments(block.text)) is not None:
                function = {"index": self._n_calls, "name": block.name, "arguments": arguments}
                events.append(self.event(tool_calls=[{"id": block.id, "function": function}]))
                self._n_calls += 1
        if answer.logprobs:
            events = events or [self.event()]
            events[-1]["logprobs"] = logprobs_content(self.model, answer.logprobs)
        if answer.done is not None:
            events.append(self.event() | self._end_fields(answer, answer.done))
        return events

    def keepalive(self) -> str:
        return self.encode([self.event()])

    def event(self, text: str = "", **more: Any) -> dict[str, Any]:
        """Return an event with a text; `more` contains reasoning (`thinking`) or `tool_calls`."""
        head = {"model": self.name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        if isinstance(self.call.body, ChatBody):
            return {**head, "message": {"role": "assistant", "content": text, **more}, "done": False}
        return {**head, "response": text, **more, "done": False}

    def _end_fields(self, answer: Answer, done: Done) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if answer.reason == "length" else "stop",
            "total_duration": round(1e9 * (time.monotonic() - self.call.started_at)),
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": round(1e9 * done.prompt_seconds),
            "eval_count": done.stats.generated,
            "eval_duration": round(1e9 * done.seconds),
        }
        body = self.call.body
        if isinstance(body, GenerateBody) and not (body.raw or body.suffix):
            fields["context"] = [*answer.request.prompt, *answer.tokens]
        return fields


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


def timestamp(seconds: float) -> str:
    """Return a time in seconds since 1970 in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def version(call: Call[Body]) -> Response:
    """Return the version of Ollama whose API this is. Clients reject servers with older ones."""
    return JsonResponse({"version": "0.13.0"})


async def tags(call: Call[Body]) -> Response:
    return JsonResponse({"models": [{**_entry(call.model), "modified_at": timestamp(call.server.started_at)}]})


async def processes(call: Call[Body]) -> Response:
    """Return the list of loaded models: the same one, which is never unloaded."""
    never = timestamp(call.server.started_at + 100 * 365 * 86400.0)
    process = {"expires_at": never, "size_vram": 0, "context_length": call.model.n_ctx}
    return JsonResponse({"models": [_entry(call.model) | process]})


async def show(call: Call[Body]) -> Response:
    """Return details of the model, whatever name the request gives it."""
    model = call.model
    metadata = {
        name: value
        for name, value in model.vocabulary.metadata.items()
        if name != "tokenizer.chat_template" and not (isinstance(value, float) and not math.isfinite(value))
    }
    # Clients take this for the length of the longest prompt.
    metadata[f"{metadata.get('general.architecture', '')}.context_length"] = model.n_ctx
    if "n_params" in model.meta:
        metadata["general.parameter_count"] = model.meta["n_params"]
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n")
    parameters = {"num_ctx": model.n_ctx} | {name: getattr(call.server.sampling, name) for name in names}
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
    family, n_params = model.vocabulary.metadata.get("general.architecture", ""), model.meta.get("n_params", 0)
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.2f}M",
        "quantization_level": model.meta.get("ftype") or "unknown",
    }


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
