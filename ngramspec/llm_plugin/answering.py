"""Conversion of prompts of `llm` to conversations, and of answers to events of `llm`; the options of a prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import Annotated, Any, cast, get_type_hints

import llm
from llm.parts import Message, ReasoningPart, StreamEvent, TextPart, ToolCallPart, ToolResultPart
from pydantic import AfterValidator, Field, create_model

from ngramspec.chat.families import AnswerParser, answer_grammar
from ngramspec.chat.stream import Delta, Tool, read_object
from ngramspec.grammars.json_schema import json_rule
from ngramspec.loading.load import LoadedModel
from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import Option, Sampling, options
from ngramspec.steps import Stats

_SAMPLING = {name: option for name, option in options(Sampling).items() if not option.repeatable}
LOADING = {name: option for name, option in options(LoadSettings).items() if name != "hf_repo"}  # -m names the model


@cache
def prompt_options() -> type[llm.Options]:
    hints = get_type_hints(Sampling) | get_type_hints(LoadSettings)
    fields: dict[str, Any] = {name: _field(name, option, hints[name]) for name, option in (_SAMPLING | LOADING).items()}
    fields["max_tokens"] = int | None, Field(None, ge=1, description="Maximum number of tokens in the answer.")
    fields["stop"] = str | None, Field(None, min_length=1, description="Stop before this text.")
    return create_model("Options", __base__=llm.Options, **fields)


def _field(name: str, option: Option, kind: Any) -> tuple[Any, Any]:
    def check(value: Any) -> Any:
        read, allowed = None if value is None else option.read(value), option.allowed
        # The seed -1 means a random one.
        if read is not None and allowed and not allowed.accepts(read) and (name, value) != ("seed", -1):
            raise ValueError(f"must be {allowed.description}")
        return value

    value_type = kind if option.parse is None else str
    return Annotated[value_type | None, AfterValidator(check)], Field(None, description=option.help)


def make_sampling(options: llm.Options, grammar: str | None) -> Sampling:
    """Return the sampling settings, by default with a random seed; raise a ValueError for contradictions."""
    given = {"temperature": 0.8} | read_given(options, _SAMPLING)  # llama.cpp's default for chats
    if given.get("seed", -1) == -1:
        given["seed"] = random.SystemRandom().randrange(2**32)
    if grammar is not None:
        if "grammar" in given:
            raise ValueError("the option grammar cannot be combined with a schema")
        given["grammar"] = grammar
    return Sampling(**given)


def read_given(options: llm.Options, declared: Mapping[str, Option]) -> dict[str, Any]:
    return {name: declared[name].read(value) for name, value in options if name in declared and value is not None}


def answer(model: LoadedModel, prompt: llm.Prompt, response: llm.Response) -> Iterator[StreamEvent]:
    """Yield the events of an answer: text as it is generated, and calls of tools when they are complete."""
    target, vocabulary, template = model.target, model.target.vocabulary, model.target.vocabulary.chat_template
    options: Any = prompt.options  # an instance of `prompt_options()`
    tools = [Tool(t.name, t.description or "", t.input_schema) for t in prompt.tools if isinstance(t, llm.Tool)]
    chat = vocabulary.chats.prompt([m for message in prompt.messages for m in _to_openai(message)], tools)
    form: dict[str, Any] = {"opening": chat.opening, "parallel": vocabulary.chats.allows_parallel_calls}
    grammar = None
    if (schema := cast(Any, prompt.schema)) is not None:
        grammar = answer_grammar(tools, json=json_rule(schema), template=template, controls=vocabulary.controls, **form)
    sampling = make_sampling(prompt.options, grammar)
    parser = AnswerParser(template, tools, **form)
    stats, tokens, stop, deltas = Stats(), list[int](), None, list[Delta]()
    steps = model.decoder.generate(
        chat.tokens,
        max_tokens=options.max_tokens or target.n_ctx,
        sampling=sampling,
        stop=(options.stop,) if options.stop else (),
        controls=vocabulary.chats.marks,
    )
    with closing(steps):
        for step in steps:
            stats.add(step)
            tokens += [token for token in step.tokens if not vocabulary.is_eog(token)]
            stop = step.stop
            deltas += (additions := parser.push(step.text))
            yield from _make_events(additions)
            if parser.ended:
                break
    deltas += (additions := parser.finish(cut=stop in {"length", "context"}))
    yield from _make_events(additions)
    yield from _emit_calls(deltas, response)
    if model.memory is not None:
        model.memory.add_text(tokens)
    drafts = {"drafted": stats.drafted, "accepted": stats.accepted} if stats.drafted else None
    response.set_resolved_model(target.weights.path.name)
    response.set_usage(input=len(chat.tokens), output=stats.generated, details=drafts)
    response.response_json = {
        "stop_reason": stop,
        "seed": sampling.seed,
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_pass": stats.tokens_per_pass,
        "estimated_gain": stats.estimated_gain,
        "exact": model.decoder.exactness.bit_identical,
        "close_calls": stats.close_calls,
        "tuned": dict(model.tuning),
        "notes": list(target.weights.notes),
    }


def _to_openai(message: Message) -> Iterator[dict[str, Any]]:
    """Yield a message in OpenAI's form; each result of a tool is a separate message."""
    texts, reasoning, calls = [], [], []
    for part in message.parts:
        match part:
            case TextPart(text=text):
                texts.append(text)
            case ReasoningPart(text=text):
                reasoning.append(text)
            case ToolCallPart(name=name, arguments=arguments, tool_call_id=id_):
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": id_, "type": "function", "function": function})
            case ToolResultPart(name=name, output=output, tool_call_id=id_):
                yield {"role": "tool", "name": name, "content": output, "tool_call_id": id_}
            case _:
                raise ValueError("this model accepts only text; remove the attachments")
    more = {"reasoning_content": "".join(reasoning), "tool_calls": calls}
    if texts or reasoning or calls:
        yield {"role": message.role, "content": "".join(texts)} | {name: value for name, value in more.items() if value}


def _make_events(deltas: Sequence[Delta]) -> list[StreamEvent]:
    return [StreamEvent(delta.kind, delta.text) for delta in deltas if delta.kind in ("text", "reasoning")]


def _emit_calls(deltas: Sequence[Delta], response: llm.Response) -> Iterator[StreamEvent]:
    """Add complete calls to the response, and yield their events; an incomplete call becomes text, so it is not run."""
    for number, call in enumerate(delta for delta in deltas if delta.kind == "call"):
        text = "".join(delta.text for delta in deltas if delta.kind == "arguments" and delta.call == number)
        if (arguments := read_object(text or "{}")) is None:
            yield StreamEvent("text", f"{call.name} {text}")
        else:
            yield StreamEvent("tool_call_name", call.name, tool_call_id=call.id)
            yield StreamEvent("tool_call_args", json.dumps(arguments), tool_call_id=call.id)
            response.add_tool_call(llm.ToolCall(call.name, arguments, call.id))
