"""A request of OpenAI's Responses API as a `ChatTask`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ngramspec.sampling.settings import Sampling
from ngramspec.server.dialogue import ChatTask
from ngramspec.server.fields import Fields
from ngramspec.server.needs import needed_choice, needed_name, needed_object, needed_there, wrong
from ngramspec.server.responses_tools import Toolbox, function_name
from ngramspec.server.sampling_fields import ANY_OBJECT
from ngramspec.server.transcript import Transcript, as_json

_LOGPROBS = "message.output_text.logprobs"

_EFFORTS = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""Their levels of effort in the words that chat templates know."""

_ELSEWHERE = (
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "computer_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "compaction",
    "compaction_trigger",
)
"""Items of a conversation that tell what OpenAI's servers did, or hold what only these can read."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, understood.

    Attributes:
        task: to be done.
        toolbox: what the tools of the task stand for.
        echo: fields that the answer repeats.
    """

    task: ChatTask
    toolbox: Toolbox
    echo: dict[str, Any]


def read_request(given: Fields, sampling: Sampling) -> Asked:
    """What a request asks for; `sampling` is what it says about that.

    Raises:
        ApiError: a field has an impossible value, or asks for what this server does not do.
    """
    _refuse(given)
    transcript, toolbox = Transcript(), Toolbox()
    toolbox.add(given.objects("tools"))
    transcript.system(given.text("instructions") or "")
    _input(given, transcript, toolbox)
    form, schema = _format(given)
    task = ChatTask(
        messages=transcript.messages,
        tool_choice=_choice(given, toolbox),
        tools=toolbox.tools,  # those that the choice allows
        parallel=given.flag("parallel_tool_calls", default=True),
        schema=schema,
        max_tokens=given.whole("max_output_tokens", least=1),
        sampling=sampling,
        logprobs=_logprobs(given),
        variables=_variables(given),
    )
    return Asked(task, toolbox, _echo(given, task, form))


def _echo(given: Fields, task: ChatTask, form: dict[str, Any]) -> dict[str, Any]:
    metadata, reasoning = given.object("metadata"), given.object("reasoning")
    return {
        "instructions": given.text("instructions"),
        "max_output_tokens": task.max_tokens,
        "metadata": metadata.data if metadata else {},
        "parallel_tool_calls": task.parallel,
        "reasoning": {"effort": None, "summary": None} | (dict(reasoning.data) if reasoning else {}),
        "temperature": task.sampling.temperature,
        "text": {"format": form},
        "tool_choice": given.data.get("tool_choice") or "auto",
        "tools": given.list("tools"),
        "top_p": task.sampling.top_p,
    }


def _refuse(given: Fields) -> None:
    for name in ("previous_response_id", "conversation"):
        if name in given:
            raise wrong(given, name, "this server stores no answers; send the whole conversation as input")
    if "prompt" in given:
        raise wrong(given, "prompt", "this server stores no prompts; send instructions and input")
    if given.flag("background"):
        raise wrong(given, "background", "this server answers only while the client waits")
    if given.choice("truncation", ("auto", "disabled"), "disabled") == "auto":
        raise wrong(given, "truncation", "this server leaves nothing out of an input, as 'disabled' asks")


def _input(given: Fields, transcript: Transcript, toolbox: Toolbox) -> None:
    value = needed_there(given, "input")
    if isinstance(value, str):
        transcript.user(value)
    else:
        for item in given.objects("input"):
            _item(item, transcript, toolbox)
    if not transcript.messages:
        transcript.user("")  # Codex asks so whether anybody is there


def _item(item: Fields, transcript: Transcript, toolbox: Toolbox) -> None:
    match item.text("type") or "message":
        case "message":
            _message(item, transcript)
        case "reasoning":
            parts = [*item.objects("content")] or [*item.objects("summary")]
            if text := "\n".join(part.needed_text("text") for part in parts):
                transcript.thought(text)
        case "function_call" | "custom_tool_call" | "local_shell_call" as kind:
            _call(item, kind, transcript)
        case "function_call_output" | "custom_tool_call_output":
            transcript.result(needed_name(item, "call_id"), _text(item, "output"))
        case "local_shell_call_output":
            transcript.result(item.text("call_id") or needed_name(item, "id"), _text(item, "output"))
        case "additional_tools":
            toolbox.add(item.objects("tools"))
        case "item_reference":
            raise wrong(item, "id", "this server stores no items; send the item itself")
        case kind if kind not in _ELSEWHERE:
            raise wrong(item, "type", f"{kind!r} is nothing that a model of text can be given here")


def _message(item: Fields, transcript: Transcript) -> None:
    role = needed_choice(item, "role", ("user", "assistant", "system", "developer"))
    text = _text(item, "content")
    match role:
        case "user":
            transcript.user(text)
        case "assistant":
            transcript.assistant(text)
        case _:
            transcript.system(text)


def _call(item: Fields, kind: str, transcript: Transcript) -> None:
    call = needed_name(item, "call_id")
    if kind == "local_shell_call":
        transcript.call(call, "local_shell", as_json(needed_object(item, "action")))
        return
    if kind == "custom_tool_call":
        arguments = as_json({"input": item.needed_text("input")})
    else:
        arguments = item.needed_text("arguments") or "{}"
    transcript.call(call, function_name(needed_name(item, "name"), item.text("namespace")), arguments)


def _text(item: Fields, name: str) -> str:
    """The text of a field that holds a string or parts."""
    value = needed_there(item, name)
    return value if isinstance(value, str) else "\n".join(_part(part) for part in item.objects(name))


def _part(part: Fields) -> str:
    match needed_name(part, "type"):
        case "input_text" | "output_text" | "text":
            return part.needed_text("text")
        case "refusal":
            return part.needed_text("refusal")
        case "input_image" | "input_file" | "input_audio" as kind:
            raise wrong(part, "type", f"{kind!r} cannot be read; this model takes only text")
        case other:
            raise wrong(part, "type", f"{other!r} is nothing that a model of text can be given here")


def _choice(given: Fields, toolbox: Toolbox) -> str:
    """The tool choice; where it allows only some tools, the others leave the toolbox."""
    if not isinstance(given.data.get("tool_choice"), dict):
        word = given.choice("tool_choice", ("auto", "none", "required"), "auto")
        if word == "required" and not toolbox.tools:
            raise wrong(given, "tool_choice", "'required' needs tools that the model can be given")
        return word
    choice = Fields(given.data["tool_choice"], "tool_choice.")
    match needed_name(choice, "type"):
        case "function" | "custom":
            return _known(choice, toolbox)
        case "allowed_tools":
            mode = choice.choice("mode", ("auto", "required"), "auto")
            allowed = {_known(tool, toolbox) for tool in choice.objects("tools") if "name" in tool}
            toolbox.tools = [tool for tool in toolbox.tools if tool.name in allowed]
            if mode == "required" and not toolbox.tools:
                raise wrong(choice, "tools", "names no tool that the model can be given")
            return mode
        case other:
            raise wrong(choice, "type", f"{other!r} is not a tool that the model can be given")


def _known(choice: Fields, toolbox: Toolbox) -> str:
    name = function_name(needed_name(choice, "name"), choice.text("namespace"))
    if name not in toolbox.origins:
        raise wrong(choice, "name", f"{name!r} is not the name of a tool that the model can be given")
    return name


def _format(given: Fields) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The form of the text as the answer repeats it, and the schema that it means."""
    text = given.object("text")
    form = text.object("format") if text else None
    if form is None:
        return {"type": "text"}, None
    kind = needed_choice(form, "type", ("text", "json_object", "json_schema"))
    schema = needed_object(form, "schema") if kind == "json_schema" else dict(ANY_OBJECT)
    return dict(form.data), None if kind == "text" else schema


def _logprobs(given: Fields) -> int | None:
    count = given.whole("top_logprobs", most=20)
    return count or (0 if _LOGPROBS in given.texts("include") else None)


def _variables(given: Fields) -> dict[str, Any]:
    reasoning = given.object("reasoning")
    effort = reasoning.choice("effort", tuple(_EFFORTS), "") if reasoning else ""
    return {"enable_thinking": effort != "none", "reasoning_effort": _EFFORTS[effort]} if effort else {}
