"""A request of Anthropic's Messages API as a `ChatTask`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ngramspec.sampling.settings import Sampling
from ngramspec.server.dialogue import ChatTask
from ngramspec.server.fields import Fields
from ngramspec.server.needs import needed_choice, needed_name, needed_object, needed_there, wrong
from ngramspec.server.transcript import Transcript, as_json
from ngramspec.tool_calls.deltas import Tool

# Claude Code begins its system prompt with this line, which differs in every request and says nothing to a model. Left
# in, no two prompts would share more than their first tokens with what the cache holds.
_BILLING = re.compile(r"(?:\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Their levels of effort in the words that chat templates know."""


def read_request(given: Fields, sampling: Sampling, *, counting: bool = False) -> ChatTask:
    """The task that a request asks for.

    Args:
        given: the request.
        sampling: what it says about sampling.
        counting: whether only the prompt's tokens are asked for; no `max_tokens` is needed then.

    Raises:
        ApiError: a field has an impossible value, or asks for what a model of text cannot do.
    """
    if not counting:
        needed_there(given, "max_tokens")
    tools = _tools(given)
    choice, parallel = _choice(given, tools)
    stop = tuple(given.texts("stop_sequences"))
    if not all(stop):
        raise wrong(given, "stop_sequences", "must not hold an empty text")
    return ChatTask(
        messages=_messages(given),
        tools=tools,
        tool_choice=choice,
        parallel=parallel,
        schema=_schema(given),
        max_tokens=given.whole("max_tokens"),
        sampling=sampling,
        stop=stop,
        variables=_variables(given),
    )


def hides_thoughts(given: Fields) -> bool:
    """Whether a request wants thinking blocks without their text."""
    thinking = given.object("thinking")
    return thinking is not None and thinking.choice("display", ("summarized", "omitted"), "summarized") == "omitted"


def _messages(given: Fields) -> list[dict[str, Any]]:
    transcript = Transcript()
    for text in _texts(given, "system"):
        transcript.system(_BILLING.sub("", text, count=1) if _BILLING.match(text) else text)
    for message in given.objects("messages"):
        role = needed_choice(message, "role", ("user", "assistant", "system"))
        content = needed_there(message, "content")
        if role == "system":
            for text in _texts(message, "content"):
                transcript.system(text)
        elif role == "user":
            _user(transcript, content if isinstance(content, str) else list(message.objects("content")))
        elif isinstance(content, str):
            transcript.assistant(content)
        else:
            _assistant(transcript, message.objects("content"))
    if not given.list("messages"):
        raise wrong(given, "messages", "must hold at least one message")
    if transcript.messages and transcript.messages[-1]["role"] == "assistant":
        raise wrong(given, "messages", "must not end with the assistant's turn, which this server cannot continue")
    return transcript.messages


def _user(transcript: Transcript, content: str | list[Fields]) -> None:
    if isinstance(content, str):
        transcript.user(content)
        return
    # Templates want the results of calls right after the calls.
    for block in content:
        if block.data.get("type") == "tool_result":
            text = "\n".join(_texts(block, "content"))
            transcript.result(needed_name(block, "tool_use_id"), f"Error: {text}" if block.flag("is_error") else text)
    for block in content:
        if block.data.get("type") != "tool_result":
            transcript.user(_text(block))


def _assistant(transcript: Transcript, blocks: Iterable[Fields]) -> None:
    transcript.assistant("")
    for block in blocks:
        match block.data.get("type"):
            case "thinking":
                transcript.thought(block.needed_text("thinking"))
            case "redacted_thinking":
                pass  # encrypted by another server: there is nothing to read in it
            case "tool_use":
                arguments = as_json(needed_object(block, "input"))
                transcript.call(needed_name(block, "id"), needed_name(block, "name"), arguments)
            case _:
                transcript.assistant(_text(block))


def _texts(given: Fields, name: str) -> list[str]:
    """The texts of a field that holds a string or blocks."""
    value = given.data.get(name)
    return [value] if isinstance(value, str) else [_text(block) for block in given.objects(name)]


def _text(block: Fields) -> str:
    match needed_name(block, "type"):
        case "text":
            return block.needed_text("text")
        case "document":
            return _document(block)
        case "search_result":
            return "\n".join([block.needed_text("title"), block.needed_text("source"), *_texts(block, "content")])
        case "tool_reference":
            return block.needed_text("tool_name")
        case "image":
            raise wrong(block, "type", "images cannot be read; this model takes only text")
        case other:
            raise wrong(block, "type", f"{other!r} is nothing that a model of text can be given here")


def _document(block: Fields) -> str:
    source = block.object("source")
    if source is None:
        raise wrong(block, "source", "is missing")
    if source.data.get("type") not in ("text", "content"):
        raise wrong(source, "type", "only documents of text can be read, whose type is text or content")
    texts = [source.needed_text("data")] if source.data["type"] == "text" else _texts(source, "content")
    return "\n".join([part for part in (block.text("title"), block.text("context")) if part] + texts)


def _tools(given: Fields) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for tool in given.objects("tools"):
        if (tool.text("type") or "custom") != "custom":
            continue  # Anthropic's own (web search, ...), which only its servers run, or only its models know
        name = needed_name(tool, "name")
        if name in tools:
            raise wrong(tool, "name", f"{name!r} is the name of two tools")
        tools[name] = Tool(name, tool.text("description") or "", needed_object(tool, "input_schema"))
    return tuple(tools.values())


def _choice(given: Fields, tools: tuple[Tool, ...]) -> tuple[str, bool]:
    """The tool choice, and whether several calls may be made."""
    choice = given.object("tool_choice")
    if choice is None:
        return "auto", True
    parallel = not choice.flag("disable_parallel_tool_use")
    match needed_choice(choice, "type", ("auto", "any", "tool", "none")):
        case "any":
            if not tools:
                raise wrong(given, "tool_choice", "'any' needs tools that the model can be given")
            return "required", parallel
        case "tool":
            name = needed_name(choice, "name")
            if name not in {tool.name for tool in tools}:
                raise wrong(choice, "name", f"{name!r} is not the name of a tool that the model can be given")
            return name, parallel
        case kind:
            return kind, parallel


def _schema(given: Fields) -> dict[str, Any] | None:
    config = given.object("output_config")
    form = (config.object("format") if config else None) or given.object("output_format")  # the latter is the older
    if form is None:
        return None
    needed_choice(form, "type", ("json_schema",))
    return needed_object(form, "schema")


def _variables(given: Fields) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    if (thinking := given.object("thinking")) is not None:
        kind = needed_choice(thinking, "type", ("enabled", "disabled", "adaptive", "between_tools"))
        variables["enable_thinking"] = kind != "disabled"
    config = given.object("output_config")
    if config is not None and (effort := config.choice("effort", tuple(_EFFORTS), "")):
        variables["reasoning_effort"] = _EFFORTS[effort]
    return variables
