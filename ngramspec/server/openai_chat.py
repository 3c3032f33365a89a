"""`/v1/chat/completions`: a chat in OpenAI's words, with what llama-server adds to them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from ngramspec.batching.request import Prefilled, Started
from ngramspec.server.call import Call, Fields, ServedModel, bad_field, json_answer
from ngramspec.server.chat import ChatTask, Toolbox, as_json, count_prompt, free_text, run_chat
from ngramspec.server.common_fields import (
    read_answers,
    read_format,
    read_max_tokens,
    read_prediction,
    read_rules,
    read_sampling,
    read_slot,
    read_stop,
    read_usage_too,
)
from ngramspec.server.generate import DraftedText, End, Piece, Span, TextEvent
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
    timings,
    totals,
)
from ngramspec.steps import Stats, Step
from ngramspec.tool_calls.deltas import Delta

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
"""As templates know them."""

_TEXT_PARTS = ("text", "input_text", "output_text")


async def chat_completions(call: Call) -> Response:
    """Answer a chat."""
    given, model = call.given, call.model
    conversation, toolbox = read_chat(given)
    task = replace(
        conversation,
        parallel=given.flag("parallel_tool_calls", "functions" not in given),
        form=read_format(given),
        max_tokens=read_max_tokens(given),
        sampling=read_sampling(call, schemas=False),
        stop=read_stop(given),
        rules=read_rules(call),
        logprobs=_read_logprobs(given, model),
        slot=read_slot(call),
        prediction=read_prediction(given),
    )
    reply = ChatReply(call, read_answers(given), toolbox, task.prediction)
    return await respond(call, run_chat(call, task, len(reply.answers)), reply)


async def input_tokens(call: Call) -> Response:
    """How many tokens the prompt of a chat has."""
    call.server.ready()
    count = await count_prompt(call, read_chat(call.given)[0])
    return json_answer({"object": "response.input_tokens", "input_tokens": count})


def _read_logprobs(given: Fields, model: ServedModel) -> int | None:
    top = given.whole("top_logprobs", most=model.vocabulary.n_vocab)
    if given.flag("logprobs"):
        return top or 0
    if top:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs to be true")
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
    variables = given.object("chat_template_kwargs")
    effort = given.text("reasoning_effort")
    messages = [_message(message, i) for i, message in enumerate(given.objects("messages"))]
    if not messages:
        raise bad_field("messages", "messages is empty, but must hold at least one message")
    answered = given.flag("add_generation_prompt", True)
    begun = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    anew = answered and "add_generation_prompt" in given  # said in so many words: a turn of its own
    continued = given.flag("continue_final_message", begun and not anew)
    if continued and not begun:
        raise given.refused("continue_final_message", "the last message is no text of the assistant to go on with")
    if continued and anew:
        raise given.refused("add_generation_prompt", "excludes continue_final_message")
    task = ChatTask(
        messages=messages,
        tool_choice=_tool_choice(given, toolbox),
        tools=toolbox.tools,  # those that the choice allows
        variables=({} if effort is None else {"reasoning_effort": effort})
        | ({} if variables is None else dict(variables.data)),
        continued=continued,
        answered=answered,
    )
    return task, toolbox


def _message(given: Fields, number: int) -> dict[str, Any]:
    given.needed("role")
    role = _ROLES[given.choice("role", tuple(_ROLES), "")]
    calls = [_call(call) for call in given.objects("tool_calls")]
    if (older := given.object("function_call")) is not None:
        calls.append(_function_call(older) | {"id": f"call_{number}"})
    if not calls and role != "assistant":
        given.needed("content")
    listed = isinstance(given.data.get("content"), list)
    content = "\n".join(given.parts("content", _part)) if listed else given.text("content") or ""
    message: dict[str, Any] = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (text := given.text(name)) is not None:
            message[name] = text
    if given.data["role"] == "function":
        message["tool_call_id"] = f"call_{number - 1}"
    return message


def _part(part: Fields) -> str:
    if part.text("type") not in _TEXT_PARTS:
        raise part.wrong("type", "text: this server reads nothing else")
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


def _tool_choice(given: Fields, toolbox: Toolbox) -> str:
    """Which tools are to be called: see `ChatTask`."""
    name = given.name("tool_choice", "function_call")
    if not isinstance(given.data.get(name), dict):
        choice = given.choice(name, ("auto", "none", "required"), "auto")
        if choice == "required" and not toolbox.tools:
            raise bad_field(name, f"{name} is 'required', but there are no tools")
        return choice
    asked = given.needed_object(name)
    if asked.data.get("type") == "allowed_tools":
        allowed = asked.object("allowed_tools") or asked
        return toolbox.allow(allowed, [_chosen(tool, toolbox, name) for tool in allowed.objects("tools")])
    return _chosen(asked, toolbox, name)


def _chosen(choice: Fields, toolbox: Toolbox, name: str) -> str:
    """The tool that a choice names; `name`: of the field."""
    named = choice.object("function") or choice.object("custom") or choice
    chosen = named.text("name")
    if chosen not in toolbox.origins:
        raise bad_field(name, f"{name} names no function that is in tools")
    return str(chosen)


# --------------------------------------------------------------------------- the answer


class ChatReply(Reply):
    """A chat completion, or its stream: of each choice its role, its deltas and its finish; then usage and timings."""

    def __init__(self, call: Call, count: int, toolbox: Toolbox, prediction: str) -> None:
        super().__init__(count)
        given, self._prediction = call.given, prediction
        self._toolbox, self._older = toolbox, "functions" in given
        self._inputs: list[tuple[int, list[str]] | None] = [None for _ in self.answers]  # of calls of custom tools
        self._model = call.model
        self._likely, self._usage_too = given.flag("logprobs"), read_usage_too(call)
        self._progress_too = given.flag("return_progress")
        self._paces = [_Pace() for _ in self.answers] if call.streamed and given.flag("timings_per_token") else []
        self._texts = [DraftedText() for _ in self.answers] if given.flag("return_drafts") else []
        self._drafted: list[list[Span]] = [[] for _ in self.answers]
        self._lengths = [0 for _ in self.answers]  # of the content so far
        self._begun: set[int] = set()
        self._ended = 0
        self._head = {
            "id": f"chatcmpl-{secrets.token_urlsafe(18)}",
            "created": int(time.time()),
            "model": given.text("model") or self._model.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._chunk = chunk_maker({**self._head, "object": "chat.completion.chunk"})

    def add(self, number: int, event: TextEvent) -> None:
        if self._texts and isinstance(event, Piece):
            for delta, drafted in self._texts[number].mark(event):
                if delta.kind == "text":
                    at = self._lengths[number]
                    self._drafted[number] += [(at + start, at + end) for start, end in drafted]
                    self._lengths[number] += len(delta.text)
        self.answers[number].take(event)

    def whole(self) -> dict[str, Any]:
        choices = []
        for number, answer in enumerate(self.answers):
            assert answer.end is not None
            message: dict[str, Any] = {"role": "assistant", "content": answer.text()}
            if thoughts := answer.text("thought"):
                message["reasoning_content"] = thoughts
            calls = [block for block in answer.blocks if block.kind == "call"]
            if calls and self._older:
                message["function_call"] = {"name": calls[0].name, "arguments": calls[0].text}
            elif calls:
                message["tool_calls"] = [self._call(one) for one in calls]
            choice = {"index": number, "message": message, "finish_reason": self._reason(answer.end)}
            if self._likely:
                choice["logprobs"] = {"content": logprobs_content(self._model, answer.logprobs)}
            if self._texts:
                choice["drafted"] = self._drafted[number]
            choices.append(choice)
        return {**self._head, "object": "chat.completion", "choices": choices, **self._totals(usage_too=True)}

    def chunks(self, number: int, event: TextEvent) -> Iterator[str]:
        self.answers[number].take(event)
        if isinstance(event, Started) and self._paces:
            self._paces[number].begin()
        elif isinstance(event, Prefilled) and self._progress_too:
            yield from self._beginning(number)
            progress = {"total": event.total, "cache": self.answers[number].cached, "processed": event.done}
            yield self._part(number, {}, {"prompt_progress": progress})
        elif isinstance(event, Piece):
            if self._paces and event.step is not None:
                self._paces[number].add(event.step)
            yield from self._pieces(number, event)
        elif isinstance(event, End):
            yield from self._beginning(number)
            self._ended += 1
            last = not self._usage_too and self._ended == len(self.answers)
            more = self._totals(usage_too=False) if last else self._timings(number)
            yield from self._input(number)
            yield self._part(number, {}, more, finish_reason=self._reason(event))

    def last_chunks(self) -> Iterator[str]:
        if self._usage_too:
            yield self._chunk({"choices": [], **self._totals(usage_too=True)})
        yield DONE

    def _pieces(self, number: int, piece: Piece) -> Iterator[str]:
        deltas = self._texts[number].mark(piece) if self._texts else [(delta, []) for delta in piece.deltas]
        if piece.logprobs and not (deltas and deltas[-1][0].kind == "text"):
            deltas.append((Delta("text"), []))
        if number not in self._begun and (deltas or self._paces):
            yield from self._beginning(number)
        for place, (delta, drafted) in enumerate(deltas):
            if delta.kind == "arguments" and (waiting := self._inputs[number]) is not None:
                waiting[1].append(delta.text)
                continue
            if self._inputs[number] is not None and (delta.kind != "text" or delta.text):
                yield from self._input(number)
            if delta.kind == "call" and delta.name in self._toolbox.custom:
                self._inputs[number] = delta.call, []
            more: dict[str, Any] = {}
            if self._texts and delta.kind in ("text", "thought"):
                more["drafted"] = drafted
            if piece.logprobs and place == len(deltas) - 1:
                more["logprobs"] = {"content": logprobs_content(self._model, piece.logprobs)}
            yield self._part(number, self._fields(delta), self._timings(number), **more)

    def _part(self, number: int, delta: dict[str, Any], more: dict[str, Any], **fields: Any) -> str:
        """A chunk of one choice; `more`: beside the choice, `fields`: in it."""
        choice = {"index": number, "delta": delta, "finish_reason": None, **fields}
        return self._chunk({"choices": [choice], **more})

    def _input(self, number: int) -> Iterator[str]:
        """The input of a custom tool, which stands within JSON, once that has ended."""
        if (waiting := self._inputs[number]) is not None:
            self._inputs[number] = None
            delta = {"tool_calls": [{"index": waiting[0], "custom": {"input": free_text("".join(waiting[1]))}}]}
            yield self._part(number, delta, self._timings(number))

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

    def _beginning(self, number: int) -> Iterator[str]:
        if number not in self._begun:
            self._begun.add(number)
            yield self._part(number, {"role": "assistant", "content": None}, {})

    def _timings(self, number: int) -> dict[str, Any]:
        """How far a choice is, where each chunk tells it."""
        return {"timings": self._paces[number].timings(self.answers[number])} if self._paces else {}

    def _totals(self, usage_too: bool) -> dict[str, Any]:
        told = totals(self.answers, len(self.answers), usage_too)
        texts = [answer.tokens for answer in self.answers]
        if usage_too and (predicted := prediction_usage(self._model, self._prediction, texts)):
            told["usage"]["completion_tokens_details"] = predicted
        return told


class _Pace:
    """Counts the steps of an answer, and the time they take to come."""

    def __init__(self) -> None:
        self._stats = Stats()
        self._first: float | None = None
        self.begin()

    def begin(self) -> None:
        """It left the queue."""
        self._began = self._now = time.monotonic()

    def add(self, step: Step) -> None:
        self._now = time.monotonic()
        if self._first is None:
            self._first = self._now
        self._stats.add(step)

    def timings(self, answer: Answer) -> dict[str, Any]:
        first = self._now if self._first is None else self._first
        return timings(answer.prompt_tokens, self._stats, answer.cached, first - self._began, self._now - first)
