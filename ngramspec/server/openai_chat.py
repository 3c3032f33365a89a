"""OpenAI's `/v1/chat/completions`, with llama-server's additional fields."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from ngramspec.chat.template import check_variables
from ngramspec.server.answer import Answer, Block
from ngramspec.server.call import Call
from ngramspec.server.chat import ChatTask, count_prompt, start_chat
from ngramspec.server.constraint_fields import read_response_format
from ngramspec.server.errors import bad_field
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonResponse
from ngramspec.server.reasoning import read_reasoning_variables, read_thinking_budget
from ngramspec.server.reply import (
    DONE,
    FINGERPRINT,
    Reply,
    logprobs_content,
    prediction_usage,
    read_telemetry,
    respond,
    totals,
    verbose_field,
)
from ngramspec.server.request_fields import (
    MAX_ALTERNATIVES,
    has_usage_chunk,
    read_max_tokens,
    read_n_answers,
    read_prediction,
    read_stop,
)
from ngramspec.server.toolbox import Toolbox, free_text
from ngramspec.server.transcript import dump_arguments

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
"""Roles of the API, and the corresponding roles of chat templates."""

_TEXT_PARTS = ("text", "input_text", "output_text")


async def chat_completions(call: Call) -> Response:
    """Answer a chat."""
    task, toolbox = await asyncio.to_thread(_read_request, call.fields)
    answers = await start_chat(call, task, read_n_answers(call.fields))
    return await respond(call, ChatReply(call, answers, toolbox))


def _read_request(fields: Fields) -> tuple[ChatTask, Toolbox]:
    conversation, toolbox = read_chat(fields)
    task = replace(
        conversation,
        parallel=fields.boolean("parallel_tool_calls", "functions" not in fields),
        json_format=read_response_format(fields),
        max_tokens=read_max_tokens(fields),
        stop=read_stop(fields),
        logprobs=read_logprobs(fields),
        post_sampling=fields.boolean("post_sampling_probs"),
        prediction=read_prediction(fields),
    )
    return task, toolbox


async def input_tokens(call: Call) -> Response:
    """Return the number of tokens of the prompt of a chat."""
    task, _ = await asyncio.to_thread(read_chat, call.fields)
    count = await count_prompt(call, task)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


def read_logprobs(fields: Fields) -> int | None:
    """Return the number of alternatives to report for each token; `None` means no log-probabilities."""
    top = fields.integer("top_logprobs", maximum=MAX_ALTERNATIVES)
    if fields.boolean("logprobs"):
        return top or 0
    if top:
        raise bad_field("top_logprobs", "top_logprobs requires logprobs to be true")
    return None


# --------------------------------------------------------------------------- the conversation


def read_chat(fields: Fields) -> tuple[ChatTask, Toolbox]:
    """Return a task with the fields of the prompt (messages, tools, variables of the template), and its tools."""
    toolbox = Toolbox()
    for item in fields.objects("tools"):
        kind = item.choice("type", ("function", "custom"), "function")
        toolbox.add_tool(item.require_object(kind), kind, unique=False)
    for item in fields.objects("functions"):  # older form of tools
        toolbox.add_tool(item, "function", unique=False)
    fields.require("messages")
    messages = [_read_message(message, i) for i, message in enumerate(fields.objects("messages"))]
    starts_answer = fields.boolean("add_generation_prompt", True)
    can_continue = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    # The request explicitly asks for a separate turn.
    wants_new_turn = starts_answer and "add_generation_prompt" in fields
    continues_message = fields.boolean("continue_final_message", can_continue and not wants_new_turn)
    if continues_message and not can_continue:
        raise fields.field_error("continue_final_message", "the last message must be an assistant message with text")
    if continues_message and len(messages) > 1 and messages[-2]["role"] == "assistant":
        problem = "must not end with two assistant messages, of which one could be continued"
        raise fields.field_error("messages", problem)
    if continues_message and wants_new_turn:
        raise fields.field_error("add_generation_prompt", "cannot be combined with continue_final_message")
    task = ChatTask(
        messages=messages,
        tool_choice=toolbox.read_choice(fields, fields.name("tool_choice", "function_call")),
        tools=toolbox.tools,  # `read_choice` has dropped the tools that may not be called
        variables=_read_variables(fields),
        reasoning_budget=_read_budget(fields),
        continues_message=continues_message,
        starts_answer=starts_answer,
    )
    return task, toolbox


def _read_variables(fields: Fields) -> dict[str, Any]:
    """Return the variables of the chat template; fields of reasoning have priority over `chat_template_kwargs`."""
    variables: dict[str, Any] = {}
    if (kwargs := fields.object("chat_template_kwargs")) is not None:
        variables = dict(kwargs.data)
        try:
            check_variables(variables)
        except ValueError as error:
            raise bad_field("chat_template_kwargs", f"chat_template_kwargs: {error}") from error
    return variables | read_reasoning_variables(fields)


def _read_budget(fields: Fields) -> int | None:
    """Return the reasoning budget in OpenRouter's `reasoning` or in Anthropic's `thinking`."""
    reasoning = fields.object("reasoning") or Fields({})
    return read_thinking_budget(fields) if "max_tokens" not in reasoning else reasoning.integer("max_tokens")


def _read_message(fields: Fields, number: int) -> dict[str, Any]:
    fields.require("role")
    role = _ROLES[fields.choice("role", tuple(_ROLES), "")]
    calls = [_read_call(call) for call in fields.objects("tool_calls")]
    if (older := fields.object("function_call")) is not None:
        calls.append(_read_function_call(older) | {"id": f"call_{number}"})
    if not calls and role != "assistant":
        fields.require("content")
    message: dict[str, Any] = {"role": role}
    message["content"] = _read_answer(fields, message) if role == "assistant" else _read_content(fields)
    if calls:
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if (text := fields.string(name)) is not None:
            message[name] = text
    if fields.data["role"] == "function":
        message["tool_call_id"] = f"call_{number - 1}"
    return message


def _read_content(fields: Fields) -> str | list[dict[str, str]]:
    """Return the text of a message; several parts remain parts, because templates join them differently."""
    if not isinstance(fields.data.get("content"), list):
        return fields.string("content") or ""
    return _join(fields.parts("content", _read_part))


def _join(texts: Sequence[str]) -> str | list[dict[str, str]]:
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _read_answer(fields: Fields, message: dict[str, Any]) -> str | list[dict[str, str]]:
    """Return the text of an assistant's message, or its refusal, and add its reasoning to the message.

    Servers return reasoning as `reasoning_content`, as `reasoning` (OpenRouter, vLLM), or in parts of the content.
    """
    field = fields.string(fields.name("reasoning_content", "reasoning"))
    reasoning, texts = [] if field is None else [field], list[str]()
    if not isinstance(fields.data.get("content"), list):
        texts.append(fields.string("content") or fields.string("refusal") or "")
    else:
        for part in fields.objects("content"):
            match part.data.get("type"):
                case "refusal":
                    texts.append(part.require_string("refusal"))
                case "thinking":  # in Mistral's API, its text has parts
                    part.require("thinking")
                    reasoning += part.parts("thinking", _read_part)
                case "reasoning":
                    reasoning.append(part.require_string("text"))
                case "redacted_thinking":
                    pass  # the part is encrypted by another server, so it cannot be read
                case _:
                    texts.append(_read_part(part))
    if reasoning:
        message["reasoning_content"] = "\n".join(filter(None, reasoning))
    return _join(texts)


def _read_part(part: Fields) -> str:
    if part.string("type") == "image_url":
        raise part.image_error()
    if part.string("type") not in _TEXT_PARTS:
        raise part.value_error("type", "'text', the only supported type")
    return part.require_string("text")


def _read_call(fields: Fields) -> dict[str, Any]:
    if (custom := fields.object("custom")) is not None:
        function = {
            "name": custom.require_string("name"),
            "arguments": dump_arguments({"input": custom.require_string("input")}),
        }
        return {"id": fields.string("id") or "", "type": "function", "function": function}
    return {"id": fields.string("id") or "", **_read_function_call(fields.require_object("function"))}


def _read_function_call(function: Fields) -> dict[str, Any]:
    arguments = function.data.get("arguments")
    if isinstance(arguments, dict):  # not OpenAI's form, but what some clients keep
        arguments = dump_arguments(arguments)
    else:
        arguments = function.string("arguments")
        function.check_json("arguments", arguments or "")
    return {"type": "function", "function": {"name": function.require_string("name"), "arguments": arguments or "{}"}}


# --------------------------------------------------------------------------- the answer


class ChatReply(Reply):
    """A chat completion, or its stream: the role, the deltas and the finish of each choice; then usage and timings."""

    ending = DONE

    def __init__(self, call: Call, answers: Sequence[Answer], toolbox: Toolbox) -> None:
        super().__init__(call, answers)
        fields = call.fields
        self._call, self._toolbox, self._uses_functions = call, toolbox, "functions" in fields
        self._telemetry = read_telemetry(call, answers)
        self._has_usage_event = has_usage_chunk(call) or not call.streamed
        self._drafts = [DraftedText() for _ in answers] if fields.boolean("return_drafts") else []
        self._begun = set[int]()  # choices whose role was sent
        self._head = {
            "id": f"chatcmpl-{secrets.token_urlsafe(18)}",
            "created": int(time.time()),
            "model": fields.string("model") or self.model.name,
            "system_fingerprint": FINGERPRINT,
            "object": "chat.completion.chunk",
        }
        self.body = self._head | {"choices": [{"index": answer.number} for answer in answers]}

    def events(self, answer: Answer) -> list[dict[str, Any]]:
        number = answer.number
        more = self._telemetry[number].update(answer) if self._telemetry else {}
        choices = self._deltas(answer)
        if answer.done is not None:
            choices.append({"delta": {}, "finish_reason": self._finish_reason(answer)})
            if not self._has_usage_event and all(answer.done for answer in self.answers):
                more = self._totals(with_usage=False)
        elif not choices and "prompt_progress" in more:
            choices.append({"delta": {}})
        if choices and number not in self._begun:
            self._begun.add(number)
            choices.insert(0, {"delta": {"role": "assistant", "content": None}})
        events = []
        for choice in choices:
            fields = {"index": number, "finish_reason": None, **choice}
            events.append({**self._head, "choices": [fields], **more})
        return events

    def last_events(self) -> list[dict[str, Any]]:
        return [{**self._head, "choices": [], **self._totals(with_usage=True)}] if self._has_usage_event else []

    def whole(self) -> dict[str, Any]:
        for choice, answer in zip(self.body["choices"], self.answers, strict=True):
            message = choice["message"] = choice.pop("delta")
            message["content"] = message["content"] or ""
            # A limit may have cut off the last call.
            calls = [
                {name: value for name, value in call.items() if name != "index"}
                for call in message.pop("tool_calls", [])[: len(answer.calls)]
            ]
            if calls:
                message["tool_calls"] = calls
            elif not answer.calls:
                message.pop("function_call", None)
            if answer.request.logprobs is not None:
                choice.setdefault("logprobs", {"content": []})
            if self._drafts:
                choice["drafted"] = self._drafts[answer.number].content_spans
        return {**self.body, "object": "chat.completion", **verbose_field(self._call, self.answers[0])}

    def _deltas(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the fields of the choice in each event of an event."""
        choices: list[dict[str, Any]] = []
        spans = self._drafts[answer.number].mark(answer) if self._drafts else ()
        for place, (kind, block, text, _) in enumerate(answer.changes):
            if block.kind == "call":
                if delta := self._call_delta(kind, block, text):
                    choices.append({"delta": delta})
            elif text:
                choices.append({"delta": {"content" if block.kind == "text" else "reasoning_content": text}})
                if spans:
                    choices[-1]["drafted"] = spans[place]
        if answer.logprobs:
            if not (choices and "content" in choices[-1]["delta"]):
                choices.append({"delta": {"content": ""}} | ({"drafted": []} if self._drafts else {}))
            content = logprobs_content(self.model, answer.logprobs, answer.request.post_sampling)
            choices[-1]["logprobs"] = {"content": content}
        return choices

    def _call_delta(self, kind: str, block: Block, text: str) -> dict[str, Any]:
        """Return the delta of a call: its name once, then only its arguments; the input of a custom tool at its end."""
        call_type = "custom" if block.name in self._toolbox.custom_tools else "function"
        field = "input" if call_type == "custom" else "arguments"
        if kind == "opened":
            delta = {"id": block.id, "type": call_type, call_type: {"name": block.name, field: ""}}
        elif kind == "closed" and call_type == "custom":
            delta = {"custom": {"input": free_text(block.text)}}  # the input is within JSON, which is complete only now
        elif kind == "grown" and call_type == "function":
            delta = {"function": {"arguments": text}}
        else:
            return {}
        if self._uses_functions:
            return {"function_call": delta["function"]} if block.call == 0 else {}
        return {"tool_calls": [{"index": block.call, **delta}]}

    def _finish_reason(self, answer: Answer) -> str:
        return "function_call" if self._uses_functions and answer.reason == "tool_calls" else answer.reason

    def _totals(self, *, with_usage: bool) -> dict[str, Any]:
        fields = totals(self.answers, len(self.answers), with_usage=with_usage)
        if with_usage:
            reasoning = sum(answer.reasoning_tokens for answer in self.answers)
            texts = [answer.tokens for answer in self.answers]
            prediction_fields = prediction_usage(self.answers[0].request.prediction, texts)
            fields["usage"]["completion_tokens_details"] = {"reasoning_tokens": reasoning, **prediction_fields}
        return fields


# --------------------------------------------------------------------------- drafts

Span = tuple[int, int]
"""First character of a part of a text, and the first one after it."""


class DraftedText:
    """Finds the accepted draft tokens in the text of an answer, for `return_drafts`.

    It finds the texts that a parser returns, in order, in the text that the parser received, and so the tokens they
    consist of. Text that the parser changed is not found, and has no spans.
    """

    def __init__(self) -> None:
        self.content_spans: list[Span] = []  # drafted spans of the content
        self._content_length = 0
        self._text = ""  # text that `_find` has not reached yet
        self._spans: list[Span] = []  # drafted parts of this text

    def mark(self, answer: Answer) -> list[list[Span]]:
        """Return the drafted spans of the text of each change."""
        for step in answer.steps:
            # Text that a token held back comes out with the next token, and belongs to it.
            for i, text in enumerate(step.pieces):
                start = len(self._text)
                self._text += text
                if text and i < step.accepted:
                    self._spans.append((start, len(self._text)))
        result = []
        for _, block, text, _ in answer.changes:
            spans = self._find(text)
            result.append(spans)
            if block.kind == "text":
                at = self._content_length
                self.content_spans += [(at + start, at + end) for start, end in spans]
                self._content_length += len(text)
        return result

    def _find(self, text: str) -> list[Span]:
        """Return the drafted spans of the next text; adjacent spans are merged."""
        at = self._text.find(text)
        if not text or at < 0:
            return []
        end = at + len(text)
        spans: list[Span] = []
        for first, last in self._spans:
            start, stop = max(first, at) - at, min(last, end) - at
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            elif start < stop:
                spans.append((start, stop))
        self._text = self._text[end:]
        self._spans = [(max(a - end, 0), b - end) for a, b in self._spans if b > end]
        return spans
