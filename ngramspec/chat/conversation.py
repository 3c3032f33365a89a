"""Conversations: their history (`Conversation`), the form that a template requires (`adapt`), and prompts."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ngramspec.chat.families import HERMES, Family, family_of, find_open_tag, find_reasoning_tags
from ngramspec.chat.prompt import ChatPrompt
from ngramspec.chat.stream import Tool, complete_object, read_object, to_json
from ngramspec.chat.template import (
    LARGE,
    Message,
    Messages,
    TemplateFeatures,
    examine,
    find_marks,
    large_worker,
    lay_out,
    openai_tool,
    split_contents,
    worker,
)
from ngramspec.data import ModelError, NGramSpecError, PromptError, get_reason
from ngramspec.storage import utf8, write_whole
from ngramspec.tokens import Control, Tokenizer, make_pattern

T = TypeVar("T")


class Turn(NamedTuple):
    user: str
    assistant: str
    reasoning: str = ""  # the model's reasoning before the answer


@dataclass(slots=True)
class Conversation:
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    # Index of the oldest turn in the last prompt. Earlier turns never return, because that requires a long prefill.
    first: int = 0

    def messages(self, first: int = 0) -> list[Message]:
        """Return the system message and the turns from `first` on, in the format of chat templates."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[first:]:
            messages.append({"role": "user", "content": turn.user})
            reasoning = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
            messages.append({"role": "assistant", "content": turn.assistant, **reasoning})
        return messages

    def prompt(
        self, question: str, encode: Callable[[list[Message]], list[int]], max_tokens: int
    ) -> tuple[list[int], int]:
        """Return the tokens of the next question's prompt, with as many turns as fit, and the first of them."""

        def encode_from(first: int) -> list[int]:
            return encode([*self.messages(first), {"role": "user", "content": question}])

        first, tokens = self.first, encode_from(self.first)
        if len(tokens) > max_tokens:
            turns = range(len(self.turns))
            first = bisect_left(turns, True, lo=first, key=lambda i: len(encode_from(i)) <= max_tokens)
            tokens = encode_from(first)
        if len(tokens) > max_tokens:
            what = "the message and the system message make" if self.system else "the message makes"
            raise PromptError(
                f"{what} a prompt of {len(tokens)} tokens, but the context has room for {max_tokens} and an answer;"
                " shorten it or raise -c/--ctx-size"
            )
        return tokens, first

    def add(self, turn: Turn, first: int) -> None:
        """Append an answered turn; `first` is the index of the oldest turn in its prompt."""
        self.first = first
        self.turns.append(turn)

    def undo(self) -> Turn:
        """Remove and return the last turn; raise an IndexError without one."""
        turn = self.turns.pop()
        self.first = min(self.first, len(self.turns))
        return turn


def answer_room(n_ctx: int, max_tokens: int) -> int:
    """Return the number of tokens that a prompt must leave free: `max_tokens`, at most a quarter of the context."""
    return max(1, min(max_tokens, n_ctx // 4))


def save(conversation: Conversation, path: Path, *, model: str, sampling: Mapping[str, Any]) -> None:
    """Write a conversation atomically as JSON; another existing file is not overwritten."""
    data = {"messages": conversation.messages(), "model": model, "sampling": dict(sampling)}
    try:
        if path.exists():
            try:
                load(path)
            except NGramSpecError as error:
                raise NGramSpecError(f"{path} exists and is not a saved conversation; use another name") from error
        path = path.resolve()  # a link stays a link
        write_whole(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise NGramSpecError(f"cannot write {path}: {get_reason(error)}") from error


def load(path: Path) -> tuple[Conversation, str]:
    """Return a saved conversation and the name of its model ("" if not recorded)."""
    try:
        data = json.loads(utf8(path.read_bytes()))
    except OSError as error:
        raise NGramSpecError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, UnicodeError) else "not valid JSON"
        raise NGramSpecError(f"{path} is not a saved conversation: it is {reason}") from error
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        raise NGramSpecError(f'{path} is not a saved conversation: it has no list "messages"')
    messages: list[Message] = []
    for number, message in enumerate(data["messages"], 1):
        texts = {"reasoning_content": ""} | message if isinstance(message, dict) else {}
        fields = {name: texts.get(name) for name in ("role", "content", "reasoning_content")}
        # JSON can contain half a surrogate pair, which cannot be encoded as UTF-8.
        if any(not isinstance(text, str) or re.search("[\ud800-\udfff]", text) for text in fields.values()):
            raise NGramSpecError(f'{path}: message {number} requires "role" and "content" strings')
        messages.append(fields)
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = messages.pop(0)["content"] if has_system else None
    for i, message in enumerate(messages):
        if (role := message["role"]) != (expected := ("user", "assistant")[i % 2]):
            raise NGramSpecError(f"{path}: message {i + 1 + has_system} must have the role {expected!r}, got {role!r}")
    if len(messages) % 2:
        raise NGramSpecError(f"{path}: the last message has no answer")
    turns = [
        Turn(question["content"], answer["content"], answer["reasoning_content"])
        for question, answer in zip(messages[::2], messages[1::2], strict=True)
    ]
    model = data.get("model")
    return Conversation(system, turns), model if isinstance(model, str) else ""


class ChatTemplate:
    """A chat template in Jinja over a vocabulary, the control tokens by their texts, and the texts of BOS and EOS."""

    def __init__(self, source: str, controls: Mapping[str, Control], bos: str = "", eos: str = "") -> None:
        self._parts = pickle.dumps((source, tuple(controls), bos, eos), pickle.HIGHEST_PROTOCOL)
        self.source, self.family, self._controls = source, family_of(source), controls

    def prompt(
        self,
        messages: Messages,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] = MappingProxyType({}),
        check: Callable[[int], None] | None = None,
    ) -> ChatPrompt:
        """Return the prompt of a conversation; `check` raises an error for the length of a text that is too long."""
        prompt = self.lay_out({**variables, "messages": messages})
        if check is not None:
            check(len(prompt.text))
        return self._tokenize(prompt, tokenizer)

    def extend(
        self, prompt: ChatPrompt, pieces: Sequence[tuple[str, bool]], opening: str, tokenizer: Tokenizer
    ) -> ChatPrompt:
        """Return a prompt followed by pieces of text; control tokens are parsed only in the template's own pieces."""
        return self._tokenize(prompt.extend(pieces, opening, self._pattern), tokenizer)

    @cached_property
    def features(self) -> TemplateFeatures:
        """Features for `adapt`; calls of unknown families could not be parsed."""
        return self.examine(TemplateFeatures, self.family is not None)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return make_pattern(self._controls)

    def lay_out(self, values: Mapping[str, Any]) -> ChatPrompt:
        """Return the text of a prompt for the variables of the template; raise a ModelError if it rejects them."""
        with _nesting_errors():
            raw = pickle.dumps(dict(values), pickle.HIGHEST_PROTOCOL)
            return (large_worker if len(raw) > LARGE else worker).call(lay_out, self._parts, raw)

    def examine(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function of a module that renders conversations with its first argument."""
        with _nesting_errors():
            result: T = worker.call(examine, self._parts, function, arguments)
        return result

    def _tokenize(self, prompt: ChatPrompt, tokenizer: Tokenizer) -> ChatPrompt:
        text, add_bos = prompt.text, not prompt.has_bos
        if prompt.only_own:
            return prompt._replace(tokens=tokenizer.tokenize(text, special=True, add_bos=add_bos))
        tokens, at, before = tokenizer.tokenize("", add_bos=add_bos)[:1], 0, None
        space = " \t\n\v\f\r"  # C's isspace()
        # The tokenizer, too, cuts a text at its control tokens first and takes what is between them by itself.
        for start, end in [*prompt.controls, (len(text), len(text))]:
            control = self._controls.get(text[start:end])
            piece = text[at:start]
            piece = piece.lstrip(space) if before is not None and before.rstrip else piece
            piece = piece.rstrip(space) if control is not None and control.lstrip else piece
            tokens += tokenizer.tokenize(piece, add_bos=False) if piece else []
            tokens += [control.token] if control is not None else []
            at, before = end, control
        return prompt._replace(tokens=tokens)


@contextmanager
def _nesting_errors() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ModelError("the conversation or a variable of the chat template is nested too deeply") from None


def adapt(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> tuple[list[Message], list[Any] | None]:
    """Return messages in OpenAI's form and tools as the template requires them; `None` if it receives no tools.

    What a template does not support becomes plain messages: tools are described in the system message, calls are part
    of the assistant's text in the form that `AnswerParser` reads, and results are in a user's turn.
    """
    features, family = template.features, template.family or HERMES
    fields = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
    turns = [{key: m[key] for key in fields if m.get(key) is not None} for m in messages]
    has_calls = bool(tools) or any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)
    renders_calls = features.arguments and features.results and features.tools
    keeps_parts = features.system and (renders_calls or not has_calls)
    for number, turn in enumerate(turns):
        can_have_parts = keeps_parts and turn["role"] in features.parts and not turn.get("tool_calls")
        if isinstance(content := turn.get("content"), list) and not can_have_parts:
            turn["content"] = "\n".join(part["text"] for part in content)
        _adapt_calls(turn, features, number)
    if features.arguments is None:
        turns = [_write_calls(turn, family) for turn in turns]
    elif not features.parallel:
        turns = list(_split_turns(turns))
    if not features.user_next:
        turns = list(_add_answers(turns))
    if not features.results:
        turns = _move_results_to_turns(turns)
    if tools and not features.tools:
        turns = _add_description(turns, _describe(tools, family), features.system)
    if not features.system:
        turns = _merge_system_message(turns)
    turns = _adapt_rare_forms(turns, template.source)
    if not features.strings and "user" in features.parts:
        turns = split_contents(turns)
    shown_tools = tools if features.tools else ()
    return turns, [openai_tool(tool if features.schemas else _simplify(tool)) for tool in shown_tools] or None


def begin_answer(
    template: ChatTemplate, opening: str, reasoning: str, text: str, variables: Mapping[str, Any]
) -> list[tuple[str, bool]]:
    """Return the pieces of a begun answer, each with whether it is the template's own; reasoning requires tags."""
    answer: Message = {"role": "assistant", "content": "qtextq"}
    answer |= {"reasoning_content": "qthoughtq"} if reasoning else {}
    turns, _ = adapt(template, [{"role": "user", "content": "quserq"}, answer], ())
    before = between = ""  # the reasoning, and between it and the text
    if template.family is not None and template.family.channels:
        final = "<|channel|>final<|message|>"
        before = "<|channel|>analysis<|message|>" if reasoning else final if text else ""
        between = f"<|end|><|start|>assistant{final}" if reasoning else ""
    elif (marks := template.examine(find_marks, turns, variables)) is not None:
        before, between = marks
    else:
        tags, has_line_ends = find_reasoning_tags(template.source), opening.endswith("\n")
        tag = find_open_tag(tags, opening)
        if tag is None and reasoning and tags:
            tag = next(iter(tags))
            has_line_ends = tag == "<think>"
            before = f"{tag}\n" if has_line_ends else tag
        if tag is None:
            reasoning = ""
        else:
            between = f"\n{tags[tag]}\n\n" if has_line_ends else tags[tag]
    return [(before, True), (reasoning, False), (between if text else "", True), (text, False)]


def _write_calls(message: Message, family: Family) -> Message:
    calls = message.pop("tool_calls", None)
    if not calls:
        return message
    functions = [(call["function"]["name"], to_json(call["function"]["arguments"])) for call in calls]
    text = family.write(functions)
    return {**message, "content": f"{message['content']}\n{text}" if message["content"] else text}


def _describe(tools: Sequence[Tool], family: Family) -> str:
    descriptions = "\n".join(to_json(openai_tool(tool)["function"]) for tool in tools)
    example = family.write([("NAME", '{"PARAMETER": "VALUE"}')])
    return (
        f"# Tools\n\nYou can call these functions:\n\n<tools>\n{descriptions}\n</tools>\n\n"
        "To call one, answer with its name and with arguments that fit its parameters, in this form:\n\n"
        f"{example}\n\nYou then get the result. If no function is needed, just answer."
    )


def _adapt_calls(turn: Message, features: TemplateFeatures, number: int) -> None:
    """Write the calls and ids of a turn as the template requires them."""

    def adapt_id(id_: str) -> str:
        """Return an id of nine letters and digits, which depends only on the given id, if the template requires it."""
        if not features.short_ids or (len(id_) == 9 and id_.isalnum()):
            return id_
        return hashlib.blake2b(id_.encode()).hexdigest()[:9]

    if "tool_call_id" in turn:
        turn["tool_call_id"] = adapt_id(turn["tool_call_id"])
    calls = turn.get("tool_calls") or []
    if calls:
        turn.setdefault("content", "")
        turn["tool_calls"] = []  # in the same place, because some templates write whole messages
    else:
        turn.pop("tool_calls", None)
    for place, call in enumerate(calls):
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        value = _read_arguments(arguments) if isinstance(arguments, str) else arguments
        if features.arguments == "text":
            is_object = isinstance(arguments, str) and arguments.lstrip().startswith("{") and read_object(arguments)
            value = arguments if is_object else to_json(value)
        id_ = adapt_id(str(call.get("id") or f"call_{number}_{place}"))
        function = {"name": function["name"], "arguments": value}
        turn["tool_calls"].append({"id": id_, "type": "function", "function": function})


def _read_arguments(text: str) -> dict[str, Any]:
    """Return the object that arguments are or begin; another text becomes the only value of an object."""
    value = read_object(text)
    value = complete_object(text) or {} if value is None else value
    return value if value or text.strip() in {"{", "{}", "null"} else {"input": text}


def _split_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages whose turns have one call each, before its results."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls, results = message.get("tool_calls") or [], list[Message]()
        while len(calls) > 1 and rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for call in calls[:-1]:
            yield {**message, "tool_calls": [call]}
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            for result in own or [result for result in results if "tool_call_id" not in result][:1]:
                results.remove(result)
                yield result
            message = {"role": "assistant", "content": ""}
        yield {**message, "tool_calls": calls[-1:]} if calls else message
        yield from results


def _add_answers(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with an empty answer between calls or their results and the user's turn (Mistral)."""
    needs_answer = False
    role = ""  # of the last message that is not a result
    for message in messages:
        if needs_answer and message["role"] == "user":
            yield {"role": "assistant", "content": ""}
        yield message
        if message["role"] == "tool":
            needs_answer = needs_answer or role == "user"  # without a call, results belong to that turn
        else:
            needs_answer, role = "tool_calls" in message, message["role"]


def _simplify(tool: Tool) -> Tool:
    """Return a tool whose parameters have properties, and no lists of types (Seed-OSS, Hermes 2 and 3)."""

    def drop_lists(value: Any) -> Any:
        if isinstance(value, list):
            return [drop_lists(item) for item in value]
        if not isinstance(value, dict):
            return value
        types = value.get("type")
        first = next((kind for kind in types if kind != "null"), "string") if isinstance(types, list) else None
        return {key: drop_lists(item) for key, item in value.items()} | ({"type": first} if first else {})

    parameters = {"type": "object", "properties": {}} | drop_lists(dict(tool.parameters))
    return replace(tool, parameters=parameters | {"properties": parameters["properties"] or {}})


def _move_results_to_turns(messages: list[Message]) -> list[Message]:
    """Return messages with results in user turns; consecutive results share a turn with the next user message."""
    turns: list[Message] = []
    is_open = False
    for message in messages:
        is_result = message["role"] == "tool"
        content = message.get("content", "")
        content = f"<tool_response>\n{content}\n</tool_response>" if is_result else content
        if is_open and message["role"] in {"user", "tool"}:
            turns[-1]["content"] += f"\n{content}"
        else:
            turns.append({"role": "user", "content": content} if is_result else message)
        is_open = is_result
    return turns


def _add_description(messages: list[Message], text: str, accepts_system: bool) -> list[Message]:
    """Return messages with a text after the system message; without support for one, before the first turn."""
    match messages:
        case [{"role": "system"} as first, *rest]:
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
        case [first, *rest] if not accepts_system:
            return [{**first, "content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _merge_system_message(messages: list[Message]) -> list[Message]:
    match messages:
        case [{"role": "system"} as first, {"role": "user"} as second, *rest]:
            return [{**second, "content": f"{first['content']}\n{second['content']}"}, *rest]
        case [{"role": "system"} as first, *rest]:
            return [{**first, "role": "user"}, *rest]
    return messages


def _adapt_rare_forms(messages: list[Message], source: str) -> list[Message]:
    """Return messages in the forms that only some templates require."""
    strips = "You have access to the following functions in JSONSchema format" in source
    has_thinking = re.search(r"""message(\.|\[['"])thinking""", source) is not None
    has_blocks = all(mark in source for mark in ("[TOOL_CALLS]", "[ARGS]", "block['thinking']"))
    for message in messages:
        for key in ("content", "reasoning_content") if strips else ():
            # StepFun: leftover white space makes the model reason in circles.
            if isinstance(value := message.get(key), str):
                message[key] = value.strip()
            elif value:
                message[key] = [{**part, "text": part["text"].strip()} for part in value]
        if has_thinking and "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]  # LFM2 and gpt-oss
            if "<|channel|>" in source and message.get("tool_calls"):
                del message["content"]
        if has_blocks and message["role"] in ("system", "assistant"):
            # Ministral 3: reasoning is a block of the content.
            content, reasoning = message.get("content", ""), message.pop("reasoning_content", None)
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            message["content"] = [{"type": "thinking", "thinking": reasoning}, *blocks] if reasoning else blocks
    if "'<|tool_call>call:'" in source and "message['tool_responses']" in source and "'tool_call_id'" not in source:
        return _move_results_to_calls(messages)
    return messages


def _move_results_to_calls(messages: list[Message]) -> list[Message]:
    """Return messages whose results are part of the calls, and so is the answer after them (early Gemma 4)."""
    turns: list[Message] = []
    call_turn: Message | None = None  # turn whose results follow
    for message in messages:
        if call_turn is not None and message["role"] == "tool":
            results, calls = call_turn.setdefault("tool_responses", []), call_turn["tool_calls"]
            call = calls[len(results)]["function"] if len(results) < len(calls) else {}
            name = str(call.get("name", message.get("tool_call_id", "")))
            try:
                response = json.loads(message["content"])
            except (TypeError, ValueError, RecursionError):
                response = message["content"]
            results.append({"name": name, "response": response})
        elif call_turn is not None and message["role"] == "assistant" and not message.get("tool_calls"):
            call_turn["content"], call_turn = message["content"], None
        else:
            call_turn = message if message.get("tool_calls") else None
            turns.append(message)
            if call_turn is not None:
                call_turn.pop("content", None)
    return turns
