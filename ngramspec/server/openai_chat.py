"""OpenAI's `/v1/chat/completions`, with llama-server's additional fields."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from ngramspec.chat_template.variables import check_variables
from ngramspec.server.answer import Block, End, Piece, TextEvent
from ngramspec.server.call import Call, Fields, ServedModel, bad_field, dumped, json_answer
from ngramspec.server.chat import NO_REASONING, ChatTask, Toolbox, answer_chat, as_json, count_prompt, free_text
from ngramspec.server.common_fields import (
    read_answers,
    read_format,
    read_max_tokens,
    read_prediction,
    read_stop,
    read_usage_too,
)
from ngramspec.server.drafted_text import DraftedText, Span
from ngramspec.server.native_answer import verbose_field
from ngramspec.server.reply import (
    DONE,
    FINGERPRINT,
    Reply,
    logprobs_content,
    members,
    prediction_usage,
    quoted,
    totals,
)
from ngramspec.server.telemetry import read_telemetry

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
"""Roles of the API, and the corresponding roles of chat templates."""

_TEXT_PARTS = ("text", "input_text", "output_text")


async def chat_completions(call: Call) -> Response:
    """Answer a chat."""
    given, model = call.given, call.model
    conversation, toolbox = await asyncio.to_thread(read_chat, given)
    task = replace(
        conversation,
        parallel=given.flag("parallel_tool_calls", "functions" not in given),
        form=read_format(given),
        max_tokens=read_max_tokens(given),
        stop=read_stop(given),
        logprobs=read_logprobs(given, model),
        post_sampling=given.flag("post_sampling_probs"),
        prediction=read_prediction(given),
    )
    reply = ChatReply(call, read_answers(given), toolbox, task.prediction)
    return await answer_chat(call, task, reply)


async def input_tokens(call: Call) -> Response:
    """Return the number of tokens of the prompt of a chat."""
    task, _ = await asyncio.to_thread(read_chat, call.given)
    count = await count_prompt(call, task)
    return json_answer({"object": "response.input_tokens", "input_tokens": count})


def read_logprobs(given: Fields, model: ServedModel) -> int | None:
    """Return the number of alternatives to report for each token; `None` means no log-probabilities."""
    top = given.whole("top_logprobs", most=model.vocabulary.n_vocab)
    if given.flag("logprobs"):
        return top or 0
    if top:
        raise bad_field("top_logprobs", "top_logprobs requires logprobs to be true")
    return None


# --------------------------------------------------------------------------- the conversation


def read_chat(given: Fields) -> tuple[ChatTask, Toolbox]:
    """Return a task with the fields of the prompt (messages, tools, variables of the template), and its tools."""
    toolbox = Toolbox()
    for item in given.objects("tools"):
        kind = item.choice("type", ("function", "custom"), "function")
        toolbox.add_one(item.needed_object(kind), kind, unique=False)
    for item in given.objects("functions"):  # older form of tools
        toolbox.add_one(item, "function", unique=False)
    given.needed("messages")
    messages = [_message(message, i) for i, message in enumerate(given.objects("messages"))]
    answered = given.flag("add_generation_prompt", True)
    begun = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    anew = answered and "add_generation_prompt" in given  # the request explicitly asks for a separate turn
    continued = given.flag("continue_final_message", begun and not anew)
    if continued and not begun:
        raise given.refused("continue_final_message", "the last message must be an assistant message with text")
    if continued and len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise given.refused("messages", "must not end with two assistant messages, of which one could be continued")
    if continued and anew:
        raise given.refused("add_generation_prompt", "cannot be combined with continue_final_message")
    task = ChatTask(
        messages=messages,
        tool_choice=toolbox.read_choice(given, given.name("tool_choice", "function_call")),
        tools=toolbox.tools,  # `read_choice` has dropped the tools that may not be called
        variables=_variables(given),
        continued=continued,
        answered=answered,
    )
    return task, toolbox


def _variables(given: Fields) -> dict[str, Any]:
    """Return the variables of the chat template; as in llama-server, the effort "none" disables reasoning."""
    variables: dict[str, Any] = {}
    if (kwargs := given.object("chat_template_kwargs")) is not None:
        variables = dict(kwargs.data)
        try:
            check_variables(variables)
        except ValueError as error:
            raise bad_field("chat_template_kwargs", f"chat_template_kwargs: {error}") from error
    if effort := given.text("reasoning_effort"):
        variables |= NO_REASONING if effort == "none" else {"reasoning_effort": effort}
    return variables


def _message(given: Fields, number: int) -> dict[str, Any]:
    given.needed("role")
    role = _ROLES[given.choice("role", tuple(_ROLES), "")]
    calls = [_call(call) for call in given.objects("tool_calls")]
    if (older := given.object("function_call")) is not None:
        calls.append(_function_call(older) | {"id": f"call_{number}"})
    if not calls and role != "assistant":
        given.needed("content")
    message: dict[str, Any] = {"role": role, "content": _content(given)}
    if calls:
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (text := given.text(name)) is not None:
            message[name] = text
    if given.data["role"] == "function":
        message["tool_call_id"] = f"call_{number - 1}"
    return message


def _content(given: Fields) -> str | list[dict[str, str]]:
    """Return the text of a message; several parts remain parts, because templates join them differently."""
    if not isinstance(given.data.get("content"), list):
        return given.text("content") or ""
    texts = given.parts("content", _part)
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _part(part: Fields) -> str:
    if part.text("type") == "image_url":
        raise part.refused_image()
    if part.text("type") not in _TEXT_PARTS:
        raise part.wrong("type", "'text', the only supported type")
    return part.needed_text("text")


def _call(given: Fields) -> dict[str, Any]:
    if (custom := given.object("custom")) is not None:
        function = {"name": custom.needed_text("name"), "arguments": as_json({"input": custom.needed_text("input")})}
        return {"id": given.text("id") or "", "type": "function", "function": function}
    return {"id": given.text("id") or "", **_function_call(given.needed_object("function"))}


def _function_call(function: Fields) -> dict[str, Any]:
    arguments = function.data.get("arguments")
    if isinstance(arguments, dict):  # not OpenAI's form, but what some clients keep
        arguments = as_json(arguments)
    else:
        arguments = function.text("arguments")
    return {"type": "function", "function": {"name": function.needed_text("name"), "arguments": arguments or "{}"}}


# --------------------------------------------------------------------------- the answer


class ChatReply(Reply):
    """A chat completion, or its stream: the role, the deltas and the finish of each choice; then usage and timings."""

    def __init__(self, call: Call, count: int, toolbox: Toolbox, prediction: str) -> None:
        super().__init__(count)
        given, self._prediction = call.given, prediction
        self._call, self._model = call, call.model
        self._toolbox, self._older = toolbox, "functions" in given
        self._sampled = given.flag("post_sampling_probs")
        self._likely, self._usage_too = given.flag("logprobs"), read_usage_too(call)
        self._marked = given.flag("return_drafts")
        self._head = {
            "id": f"chatcmpl-{secrets.token_urlsafe(18)}",
            "created": int(time.time()),
            "model": given.text("model") or self._model.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._chunk = f"data: {dumped(self._head | {'object': 'chat.completion.chunk'})[:-1]}"
        self._choices = [_Choice(call, number, self._chunk) for number in range(count)]

    def add(self, number: int, event: TextEvent) -> None:
        if self._marked and isinstance(event, Piece):
            self._choices[number].mark(event)

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice, answer in zip(self._choices, self.answers, strict=True):
            assert answer.end is not None
            message: dict[str, Any] = {"role": "assistant", "content": answer.text()}
            if reasoning := answer.text("thought"):
                message["reasoning_content"] = reasoning
            calls = answer.calls
            if calls and self._older:
                message["function_call"] = {"name": calls[0].name, "arguments": calls[0].text}
            elif calls:
                message["tool_calls"] = [self._tool_call(block) for block in calls]
            told = {"index": choice.number, "message": message, "finish_reason": self._reason(answer.end)}
            if self._likely:
                told["logprobs"] = {"content": logprobs_content(self._model, answer.logprobs, self._sampled)}
            if self._marked:
                told["drafted"] = choice.drafted
            choices.append(told)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            **self._totals(usage_too=True),
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
            parts = [("{}", {"finish_reason": self._reason(event)})]
            if not self._usage_too and all(answer.end for answer in self.answers):
                more = self._totals(usage_too=False)
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
        usage = members({"choices": [], **self._totals(usage_too=True)}) if self._usage_too else ""
        return f"{self._chunk}{usage}}}\n\n{DONE}" if usage else DONE

    def _parts(self, choice: _Choice, piece: Piece) -> list[tuple[str, dict[str, Any]]]:
        """Return the deltas of a piece as JSON, each with the other fields of its choice."""
        parts: list[tuple[str, dict[str, Any]]] = []
        spans = choice.mark(piece) if self._marked else ()
        for place, (kind, block, text, _) in enumerate(piece.changes):
            more = {"drafted": spans[place]} if self._marked else {}
            if block.kind == "call":
                if delta := self._call_delta(kind, block, text):
                    parts.append((dumped(delta), {}))
            elif text:
                field = "content" if block.kind == "text" else "reasoning_content"
                parts.append((f'{{"{field}":{quoted(text)}}}', more))
        if piece.logprobs:
            if not (parts and parts[-1][0].startswith('{"content"')):
                parts.append(('{"content":""}', {"drafted": []} if self._marked else {}))
            parts[-1][1]["logprobs"] = {"content": logprobs_content(self._model, piece.logprobs, self._sampled)}
        return parts

    def _call_delta(self, kind: str, block: Block, text: str) -> dict[str, Any]:
        """Return the delta of a call: its name once, then only its arguments; the input of a custom tool at its end."""
        is_custom = block.name in self._toolbox.custom
        told: dict[str, Any] = {}
        if kind == "opened":
            told = self._tool_call(block)
        elif kind == "closed" and is_custom:
            told = {"custom": {"input": free_text(block.text)}}  # the input is within JSON, which is complete only now
        elif kind == "grown" and not is_custom:
            told = {"function": {"arguments": text}}
        if not told:
            return {}
        return {"function_call": told["function"]} if self._older else {"tool_calls": [{"index": block.call, **told}]}

    def _tool_call(self, call: Block) -> dict[str, Any]:
        if call.name in self._toolbox.custom:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": free_text(call.text)}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}

    def _reason(self, end: End) -> str:
        return "function_call" if self._older and end.reason == "tool_calls" else end.reason

    def _totals(self, usage_too: bool) -> dict[str, Any]:
        told = totals(self.answers, len(self.answers), usage_too)
        if usage_too:
            reasoning = sum(answer.end.reasoning_tokens for answer in self.answers if answer.end is not None)
            predicted = prediction_usage(self._model, self._prediction, [answer.tokens for answer in self.answers])
            told["usage"]["completion_tokens_details"] = {"reasoning_tokens": reasoning, **predicted}
        return told


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
        """Return a chunk.

        Args:
            delta: The delta as JSON.
            fields: Further fields of the choice.
            more: Fields next to the choice.
        """
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
