"""`answer`: a prompt of `llm`'s as a conversation of the model, and the model's answer as `llm`'s events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import llm
from llm.parts import Message, ReasoningPart, StreamEvent, TextPart, ToolCallPart, ToolResultPart

from ngramspec.decoding.step import Stats
from ngramspec.llama.json_schema import schema_rules
from ngramspec.llm_plugin.opened import Opened
from ngramspec.llm_plugin.options import sampling_of
from ngramspec.tool_calls import forced_grammar, parser_for, thoughts_first
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Delta, Reasoning, Tool


def answer(opened: Opened, prompt: llm.Prompt, response: llm.Response) -> Iterator[StreamEvent]:
    """Answer a prompt: events as text comes, calls of tools when they are whole.

    The response is told the tokens it took, and what was measured. Where the answer stops early, the model is left
    as after what was emitted.

    Raises:
        NGramSpecError: the conversation does not fit, the template refuses it, or llama.cpp fails.
        ValueError: options that contradict each other, or a tool's earlier arguments that are no JSON object.
    """
    target = opened.target
    options: Any = prompt.options  # made of `prompt_options`
    tools = [Tool(t.name, t.description or "", t.input_schema) for t in prompt.tools if isinstance(t, llm.Tool)]
    chat = target.chat([m for message in prompt.messages for m in _openai(message)], tools)
    sampling = sampling_of(prompt.options, _grammar(prompt.schema, tools, target.chat_template, chat.opening))
    target.sampler(sampling)  # refuses what this model cannot do, before the conversation is read
    parser = parser_for(target.chat_template, tools, opening=chat.opening)
    stats, tokens, calls, stop = Stats(), list[int](), _Calls(), None
    steps = opened.decoder.generate(
        chat.tokens,
        max_tokens=options.max_tokens or target.n_ctx,
        sampling=sampling,
        stop=(options.stop,) if options.stop else (),
    )
    with closing(steps):
        for step in steps:
            stats.add(step)
            tokens += [token for token in step.tokens if not target.is_eog(token)]
            stop = step.stop
            yield from _events(parser.push(step.text), calls)
    yield from _events(parser.finish(), calls)
    yield from calls.told(response)
    if opened.memory is not None:
        opened.memory.hear(tokens)
    drafts = {"drafted": stats.drafted, "accepted": stats.accepted} if stats.drafted else None
    response.set_usage(input=len(chat.tokens), output=stats.generated, details=drafts)
    response.response_json = {
        "stop_reason": stop,
        "seed": sampling.seed,
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_pass": stats.tokens_per_pass,
        "estimated_gain": stats.estimated_gain,
        "exact": opened.decoder.footing.same,
        "close_calls": stats.close_calls,
        "tuned": dict(opened.tuned),
        "notes": list(target.notes),
    }


def _grammar(schema: Any, tools: Sequence[Tool], template: str | None, opening: str) -> str | None:
    """What the answer must be like, where there is a schema; with tools it may also be calls of them."""
    if schema is None:
        return None
    if tools:
        return forced_grammar(tools, "required", True, schema_rules, template=template, opening=opening, instead=schema)
    return "\n".join([*thoughts_first("answer", template, opening), schema_rules({"answer": schema})])


def _openai(message: Message) -> Iterator[dict[str, Any]]:
    """A message in OpenAI's form; each result of a tool is one of its own."""
    texts, thoughts, calls = [], [], []
    for part in message.parts:
        match part:
            case TextPart(text=text):
                texts.append(text)
            case ReasoningPart(text=text):
                thoughts.append(text)
            case ToolCallPart(name=name, arguments=arguments, tool_call_id=id_):
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": id_, "type": "function", "function": function})
            case ToolResultPart(name=name, output=output, tool_call_id=id_):
                yield {"role": "tool", "name": name, "content": output, "tool_call_id": id_}
            case _:
                raise ValueError("this model takes text alone: leave attachments out")
    if texts or thoughts or calls:
        found: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
        if any(thoughts):
            found["reasoning_content"] = "".join(thoughts)
        if calls:
            found["tool_calls"] = calls
        yield found


class _Calls:
    """Collects the calls of tools in an answer. One that was cut off must not be run."""

    def __init__(self) -> None:
        self._begun: list[CallBegin] = []
        self._arguments: list[str] = []

    def begin(self, call: CallBegin) -> None:
        self._begun.append(call)
        self._arguments.append("")

    def extend(self, piece: CallArguments) -> None:
        self._arguments[piece.call] += piece.text

    def told(self, response: llm.Response) -> Iterator[StreamEvent]:
        """Tell the response of whole calls; one that is not is text."""
        for call, written in zip(self._begun, self._arguments, strict=True):
            try:
                arguments = json.loads(written or "{}")
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict):
                yield StreamEvent("text", f"{call.name} {written}")
                continue
            yield StreamEvent("tool_call_name", call.name, tool_call_id=call.id)
            yield StreamEvent("tool_call_args", json.dumps(arguments), tool_call_id=call.id)
            response.add_tool_call(llm.ToolCall(call.name, arguments, call.id))


def _events(deltas: Sequence[Delta], calls: _Calls) -> Iterator[StreamEvent]:
    for delta in deltas:
        match delta:
            case Content(text):
                yield StreamEvent("text", text)
            case Reasoning(text):
                yield StreamEvent("reasoning", text)
            case CallBegin():
                calls.begin(delta)
            case CallArguments():
                calls.extend(delta)
