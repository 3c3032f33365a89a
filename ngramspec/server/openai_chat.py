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
from ngramspec.server.answer import Block, End, Piece, TextEvent
from ngramspec.server.call import Call
from ngramspec.server.chat import ChatTask, answer_chat, count_prompt
from ngramspec.server.constraint_fields import read_response_format
from ngramspec.server.drafted_text import DraftedText, Span
from ngramspec.server.errors import bad_field
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonResponse, encode_json, members, quote
from ngramspec.server.native_answer import verbose_field
from ngramspec.server.reasoning import read_reasoning_variables, read_thinking_budget
from ngramspec.server.reply import DONE, FINGERPRINT, Reply, logprobs_content, prediction_usage, totals
from ngramspec.server.request_fields import (
    MAX_ALTERNATIVES,
    has_usage_chunk,
    read_max_tokens,
    read_n_answers,
    read_prediction,
    read_stop,
)
from ngramspec.server.telemetry import read_telemetry
from ngramspec.server.toolbox import Toolbox, free_text
from ngramspec.server.transcript import dump_arguments

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
"""Roles of the API, and the corresponding roles of chat templates."""

_TEXT_PARTS = ("text", "input_text", "output_text")


async def chat_completions(call: Call) -> Response:
    """Answer a chat."""
    task, toolbox = await asyncio.to_thread(_read_request, call.fields)
    return await answer_chat(call, task, ChatReply(call, read_n_answers(call.fields), toolbox))


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

    def __init__(self, call: Call, count: int, toolbox: Toolbox) -> None:
        super().__init__(count)
        fields = call.fields
        self._call, self._model = call, call.model
        self._toolbox, self._uses_functions = toolbox, "functions" in fields
        self._post_sampling = fields.boolean("post_sampling_probs")
        self._has_logprobs, self._has_usage_chunk = fields.boolean("logprobs"), has_usage_chunk(call)
        self._marks_drafts = fields.boolean("return_drafts")
        self._head = {
            "id": f"chatcmpl-{secrets.token_urlsafe(18)}",
            "created": int(time.time()),
            "model": fields.string("model") or self._model.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._chunk = f"data: {encode_json(self._head | {'object': 'chat.completion.chunk'})[:-1]}"
        self._choices = [_Choice(call, number, self._chunk) for number in range(count)]

    def add(self, number: int, event: TextEvent) -> None:
        if self._marks_drafts and isinstance(event, Piece):
            self._choices[number].mark(event)

    def response_body(self) -> dict[str, Any]:
        choices = []
        for choice, answer in zip(self._choices, self.answers, strict=True):
            assert answer.end is not None
            message: dict[str, Any] = {"role": "assistant", "content": answer.text()}
            if reasoning := answer.text("reasoning"):
                message["reasoning_content"] = reasoning
            calls = answer.calls
            if calls and self._uses_functions:
                message["function_call"] = {"name": calls[0].name, "arguments": calls[0].text}
            elif calls:
                message["tool_calls"] = [self._tool_call(block) for block in calls]
            fields = {"index": choice.number, "message": message, "finish_reason": self._finish_reason(answer.end)}
            if self._has_logprobs:
                fields["logprobs"] = {"content": logprobs_content(self._model, answer.logprobs, self._post_sampling)}
            if self._marks_drafts:
                fields["drafted"] = choice.drafted
            choices.append(fields)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            **self._totals(with_usage=True),
            **verbose_field(self._call, self.answers[0]),
        }

    def chunks(self, number: int, event: TextEvent) -> str:
        choice = self._choices[number]
        more = choice.telemetry.update(event) if choice.telemetry else {}
        if isinstance(event, Piece):
            parts = self._parts(choice, event)
            if not (parts or "timings" in more):
                return ""
        elif isinstance(event, End):
            parts = [("{}", {"finish_reason": self._finish_reason(event)})]
            if not self._has_usage_chunk and all(answer.end for answer in self.answers):
                more = self._totals(with_usage=False)
        elif "prompt_progress" in more:
            parts = [("{}", {})]
        else:
            return ""
        text = ""
        if not choice.has_begun:
            choice.has_begun = True
            text = choice.chunk('{"role":"assistant","content":null}', {}, {})
        for delta, fields in parts:
            text += choice.chunk(delta, fields, more)
        return text

    def last_chunks(self) -> str:
        usage = members({"choices": [], **self._totals(with_usage=True)}) if self._has_usage_chunk else ""
        return f"{self._chunk}{usage}}}\n\n{DONE}" if usage else DONE

    def _parts(self, choice: _Choice, piece: Piece) -> list[tuple[str, dict[str, Any]]]:
        """Return the deltas of a piece as JSON, each with the other fields of its choice."""
        parts: list[tuple[str, dict[str, Any]]] = []
        spans = choice.mark(piece) if self._marks_drafts else ()
        for place, (kind, block, text, _) in enumerate(piece.changes):
            more = {"drafted": spans[place]} if self._marks_drafts else {}
            if block.kind == "call":
                if delta := self._call_delta(kind, block, text):
                    parts.append((encode_json(delta), {}))
            elif text:
                field = "content" if block.kind == "text" else "reasoning_content"
                parts.append((f'{{"{field}":{quote(text)}}}', more))
        if piece.logprobs:
            if not (parts and parts[-1][0].startswith('{"content"')):
                parts.append(('{"content":""}', {"drafted": []} if self._marks_drafts else {}))
            parts[-1][1]["logprobs"] = {"content": logprobs_content(self._model, piece.logprobs, self._post_sampling)}
        return parts

    def _call_delta(self, kind: str, block: Block, text: str) -> dict[str, Any]:
        """Return the delta of a call: its name once, then only its arguments; the input of a custom tool at its end."""
        is_custom = block.name in self._toolbox.custom_tools
        delta: dict[str, Any] = {}
        if kind == "opened":
            delta = self._tool_call(block)
        elif kind == "closed" and is_custom:
            delta = {"custom": {"input": free_text(block.text)}}  # the input is within JSON, which is complete only now
        elif kind == "grown" and not is_custom:
            delta = {"function": {"arguments": text}}
        if not delta:
            return {}
        if self._uses_functions:
            return {"function_call": delta["function"]}
        return {"tool_calls": [{"index": block.call, **delta}]}

    def _tool_call(self, call: Block) -> dict[str, Any]:
        if call.name in self._toolbox.custom_tools:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": free_text(call.text)}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}

    def _finish_reason(self, end: End) -> str:
        return "function_call" if self._uses_functions and end.reason == "tool_calls" else end.reason

    def _totals(self, with_usage: bool) -> dict[str, Any]:
        fields = totals(self.answers, len(self.answers), with_usage)
        if with_usage:
            reasoning = sum(answer.end.reasoning_tokens for answer in self.answers if answer.end is not None)
            texts = [answer.tokens for answer in self.answers]
            prediction_fields = prediction_usage(self._call.requests[0].prediction, texts)
            fields["usage"]["completion_tokens_details"] = {"reasoning_tokens": reasoning, **prediction_fields}
        return fields


class _Choice:
    """The state of a choice of a response; `head` is the start of its chunks as JSON."""

    def __init__(self, call: Call, number: int, head: str) -> None:
        self.number, self.telemetry = number, read_telemetry(call)
        self.has_begun = False  # True after the stream sent the role
        self.drafted: list[Span] = []  # drafted spans of its content
        self._length = 0  # length of the content so far
        self._texts = DraftedText()
        self._head = f'{head},"choices":[{{"index":{number},"delta":'

    def chunk(self, delta: str, fields: dict[str, Any], more: dict[str, Any]) -> str:
        """Return a chunk with a delta as JSON, further fields of the choice, and fields next to it (`more`)."""
        reason = "" if "finish_reason" in fields else ',"finish_reason":null'
        return f"{self._head}{delta}{reason}{members(fields) if fields else ''}}}]{members(more) if more else ''}}}\n\n"

    def mark(self, piece: Piece) -> list[list[Span]]:
        """Return the drafted spans of the text of each change."""
        self._texts.add(piece.steps)
        spans = []
        for _, block, text, _ in piece.changes:
            spans.append(self._texts.find(text))
            if block.kind == "text":
                self.drafted += [(self._length + start, self._length + end) for start, end in spans[-1]]
                self._length += len(text)
        return spans
