"""`/v1/chat/completions`: a chat in OpenAI's words, with what llama-server adds to them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from ngramspec.chat_template.variables import check_variables
from ngramspec.server.call import Call, Fields, ServedModel, bad_field, json_answer
from ngramspec.server.chat import NO_REASONING, ChatTask, Toolbox, as_json, count_prompt, free_text, run_chat
from ngramspec.server.common_fields import (
    read_answers,
    read_format,
    read_max_tokens,
    read_prediction,
    read_stop,
    read_usage_too,
)
from ngramspec.server.generate import DraftedText, End, Piece, Span, TextEvent
from ngramspec.server.native_answer import verbose_field
from ngramspec.server.reply import (
    DONE,
    FINGERPRINT,
    Answer,
    Block,
    Reply,
    chunk_maker,
    logprobs_content,
    prediction_usage,
    respond,
    totals,
)
from ngramspec.server.telemetry import Telemetry
from ngramspec.tool_calls.deltas import Delta

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
"""As templates know them."""

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
    return await respond(call, run_chat(call, task, len(reply.answers)), reply)


async def input_tokens(call: Call) -> Response:
    """How many tokens the prompt of a chat has."""
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
    """The fields that say what the prompt is (messages, tools, variables of the template), and what tools stand for."""
    toolbox = Toolbox()
    for item in given.objects("tools"):
        kind = item.choice("type", ("function", "custom"), "function")
        toolbox.add_one(item.needed_object(kind), kind, unique=False)
    for item in given.objects("functions"):  # as they were before there were tools
        toolbox.add_one(item, "function", unique=False)
    given.needed("messages")
    messages = [_message(message, i) for i, message in enumerate(given.objects("messages"))]
    answered = given.flag("add_generation_prompt", True)
    begun = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    anew = answered and "add_generation_prompt" in given  # said in so many words: a turn of its own
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
        tools=toolbox.tools,  # those that the choice allows
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
    """A chat completion, or its stream: of each choice its role, its deltas and its finish; then usage and timings."""

    def __init__(self, call: Call, count: int, toolbox: Toolbox, prediction: str) -> None:
        super().__init__()
        given, self._prediction = call.given, prediction
        self._request = call
        self._toolbox, self._older = toolbox, "functions" in given
        self._model = call.model
        self._sampled = given.flag("post_sampling_probs")
        self._likely, self._usage_too = given.flag("logprobs"), read_usage_too(call)
        self._marked = given.flag("return_drafts")
        self.answers = self._choices = [_Choice(number, self._marked, Telemetry(call)) for number in range(count)]
        self._head = {
            "id": f"chatcmpl-{secrets.token_urlsafe(18)}",
            "created": int(time.time()),
            "model": given.text("model") or self._model.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._chunk = chunk_maker({**self._head, "object": "chat.completion.chunk"})

    def add(self, number: int, event: TextEvent) -> None:
        choice = self._choices[number]
        if self._marked and isinstance(event, Piece):
            for delta, drafted in choice.marked(event):
                if delta.kind == "text":
                    choice.drafted += [(choice.length + start, choice.length + end) for start, end in drafted]
                    choice.length += len(delta.text)
        choice.take(event)

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self._choices:
            assert choice.end is not None
            message: dict[str, Any] = {"role": "assistant", "content": choice.text()}
            if thoughts := choice.text("thought"):
                message["reasoning_content"] = thoughts
            calls = choice.calls
            if calls and self._older:
                message["function_call"] = {"name": calls[0].name, "arguments": calls[0].text}
            elif calls:
                message["tool_calls"] = [self._call(one) for one in calls]
            told = {"index": choice.number, "message": message, "finish_reason": self._reason(choice.end)}
            if self._likely:
                told["logprobs"] = {"content": logprobs_content(self._model, choice.logprobs, self._sampled)}
            if self._marked:
                told["drafted"] = choice.drafted
            choices.append(told)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            **self._totals(usage_too=True),
            **verbose_field(self._request, self._choices[0]),
        }

    def chunks(self, number: int, event: TextEvent) -> Iterator[str]:
        choice = self._choices[number]
        choice.take(event)
        choice.telemetry.update(event)
        if progress := choice.telemetry.progress(event):
            yield from self._beginning(choice)
            yield self._part(choice, {}, progress)
        elif isinstance(event, Piece):
            yield from self._pieces(choice, event)
        elif isinstance(event, End):
            yield from self._beginning(choice)
            last = not self._usage_too and all(one.end for one in self._choices)
            more = self._totals(usage_too=False) if last else choice.telemetry.timings()
            yield from self._input(choice)
            yield self._part(choice, {}, more, finish_reason=self._reason(event))

    def last_chunks(self) -> Iterator[str]:
        if self._usage_too:
            yield self._chunk({"choices": [], **self._totals(usage_too=True)})
        yield DONE

    def _pieces(self, choice: _Choice, piece: Piece) -> Iterator[str]:
        deltas = choice.marked(piece)
        if piece.logprobs and not (deltas and deltas[-1][0].kind == "text"):
            deltas.append((Delta("text"), []))
        if deltas or choice.telemetry.has_timings:
            yield from self._beginning(choice)
        for place, (delta, drafted) in enumerate(deltas):
            if delta.kind == "arguments" and choice.input is not None:
                choice.input[1].append(delta.text)
                continue
            if delta.kind != "text" or delta.text:
                yield from self._input(choice)
            if delta.kind == "call" and delta.name in self._toolbox.custom:
                choice.input = delta.call, []
            more: dict[str, Any] = {}
            if self._marked and delta.kind in ("text", "thought"):
                more["drafted"] = drafted
            if piece.logprobs and place == len(deltas) - 1:
                more["logprobs"] = {"content": logprobs_content(self._model, piece.logprobs, self._sampled)}
            yield self._part(choice, self._fields(delta), choice.telemetry.timings(), **more)

    def _part(self, choice: _Choice, delta: dict[str, Any], more: dict[str, Any], **fields: Any) -> str:
        """A chunk of one choice; `more`: beside the choice, `fields`: in it."""
        told = {"index": choice.number, "delta": delta, "finish_reason": None, **fields}
        return self._chunk({"choices": [told], **more})

    def _input(self, choice: _Choice) -> Iterator[str]:
        """The input of a custom tool, which stands within JSON, once that has ended."""
        if choice.input is not None:
            (call, parts), choice.input = choice.input, None
            delta = {"tool_calls": [{"index": call, "custom": {"input": free_text("".join(parts))}}]}
            yield self._part(choice, delta, choice.telemetry.timings())

    def _call(self, call: Block) -> dict[str, Any]:
        if call.name in self._toolbox.custom:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": free_text(call.text)}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}

    def _fields(self, delta: Delta) -> dict[str, Any]:
        """A delta in OpenAI's form: a name once, then only pieces."""
        match delta.kind:
            case "text":
                return {"content": delta.text}
            case "thought":
                return {"reasoning_content": delta.text}
            case "arguments":
                told: dict[str, Any] = {"function": {"arguments": delta.text}}
            case "call":
                told = self._call(Block(0, "call", delta.id, delta.name))
        return {"function_call": told["function"]} if self._older else {"tool_calls": [{"index": delta.call, **told}]}

    def _reason(self, end: End) -> str:
        return "function_call" if self._older and end.reason == "tool_calls" else end.reason

    def _beginning(self, choice: _Choice) -> Iterator[str]:
        if not choice.begun:
            choice.begun = True
            yield self._part(choice, {"role": "assistant", "content": None}, {})

    def _totals(self, usage_too: bool) -> dict[str, Any]:
        told = totals(self.answers, len(self.answers), usage_too)
        if usage_too:
            reasoning = sum(answer.end.reasoning_tokens for answer in self.answers if answer.end is not None)
            predicted = prediction_usage(self._model, self._prediction, [answer.tokens for answer in self.answers])
            told["usage"]["completion_tokens_details"] = {"reasoning_tokens": reasoning, **predicted}
        return told


class _Choice(Answer):
    """An answer, and the state of its stream."""

    def __init__(self, number: int, marked: bool, telemetry: Telemetry) -> None:
        super().__init__()
        self.number = number
        self.telemetry = telemetry
        self.begun = False  # True after the stream sent the role
        self.input: tuple[int, list[str]] | None = None  # a call of a custom tool that is open, and its arguments
        self.drafted: list[Span] = []  # of its content
        self.length = 0  # of the content so far
        self._texts = DraftedText() if marked else None

    def marked(self, piece: Piece) -> list[tuple[Delta, list[Span]]]:
        """The deltas of a piece, and what of each was drafted."""
        return [(delta, []) for delta in piece.deltas] if self._texts is None else self._texts.mark(piece)
