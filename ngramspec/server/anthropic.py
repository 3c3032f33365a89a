"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, which Claude Code uses."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ngramspec.server.answer import Answer, Block
from ngramspec.server.body import Body, Items, Name, TextPart, join_parts, parts, tagged, whole
from ngramspec.server.chat import (
    EFFORTS,
    Chat,
    ChatTask,
    NamedTool,
    Thinking,
    Toolbox,
    ToolFields,
    Transcript,
)
from ngramspec.server.generation import Constraint, Generation, Stop
from ngramspec.server.json_text import ApiError, dump_arguments, read_arguments
from ngramspec.server.reply import NAMED, Reply, merge
from ngramspec.server.state import Call, ServedModel

# Claude Code begins its system prompt with this line, which differs in every request. It is removed, because otherwise
# only the first tokens of a prompt would be in the cache.
_BILLING = re.compile(r"\A(?:\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")

Event = dict[str, Any]

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error in Anthropic's format, for the body of a response or for an event of a stream."""
    text, default = error.message, "invalid_request_error" if error.status < 500 else "api_error"
    if "n_prompt_tokens" in error.details:
        # Claude Code recognises these words, and then shortens the conversation.
        tokens, limit = error.details["n_prompt_tokens"], error.details["n_ctx"]
        text = f"prompt is too long: {tokens} tokens > {limit} maximum; {text}"
    return {"type": "error", "error": {"type": _ERRORS.get(error.status, default), "message": text}}


_TEXTS: dict[str, type[Body]] = {"text": TextPart}
"""Models of the parts that are texts, by type; some contain others."""

_Texts = Annotated[tuple[TextPart, ...], parts(_TEXTS)]


class _PlainSource(Body):
    text: str = Field(validation_alias="data")


class _PartsSource(Body):
    text: Annotated[str, parts(_TEXTS), AfterValidator(join_parts)] = Field(validation_alias="content")


_SOURCES = {"text": _PlainSource, "content": _PartsSource}


class _Document(TextPart):
    text: str = ""
    title: str = ""
    context: str = ""
    source: Annotated[Any, tagged("type", _SOURCES, "only text documents (type text or content) are supported")]

    @model_validator(mode="after")
    def _join(self) -> _Document:
        self.text = "\n".join([*filter(None, [self.title, self.context]), self.source.text])
        return self


class _SearchResult(TextPart):
    text: str = ""
    title: str
    source: str
    content: _Texts = ()

    @model_validator(mode="after")
    def _join(self) -> _SearchResult:
        self.text = "\n".join([self.title, self.source, *(part.text for part in self.content)])
        return self


class _ToolReference(TextPart):
    text: str = Field(validation_alias="tool_name")


_TEXTS |= {"document": _Document, "search_result": _SearchResult, "tool_reference": _ToolReference}


class _Result(Body):
    tool_use_id: Name
    is_error: bool = False
    content: _Texts = ()


class _Thinking(Body):
    thinking: str


class _Use(Body):
    input: dict[str, Any]
    id: Name
    name: Name


class _Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: _Texts


class _UserTurn(_Turn):
    content: Annotated[tuple[Any, ...], parts({**_TEXTS, "tool_result": _Result})]


# The block `redacted_thinking` is encrypted by another server, so it cannot be read.
_ANSWER_PARTS: Mapping[str, type[Body]] = {"thinking": _Thinking, "redacted_thinking": Body, "tool_use": _Use}


class _AssistantTurn(_Turn):
    content: Annotated[tuple[Any, ...], parts({**_TEXTS, **_ANSWER_PARTS})]


class _Tool(ToolFields):
    parameters: dict[str, Any] = Field(validation_alias="input_schema")


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _ToolChoice(NamedTool):
    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool = False


class _Format(Body):
    type: Literal["json_schema"]
    json_form: dict[str, Any] = Field(validation_alias="schema")


class _OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class ConversationBody(Generation, Chat):
    system: _Texts = ()
    messages: Items[Annotated[_Turn, tagged("role", {"user": _UserTurn, "assistant": _AssistantTurn}, _Turn)]]
    # Other tools, such as web search, run only on Anthropic's servers.
    tools: Items[Annotated[Body, tagged("type", {"": _Tool, "custom": _Tool}, Body)]] = ()
    tool_choice: _ToolChoice | None = None
    stop: Stop = Field((), validation_alias="stop_sequences")
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None  # older form of `output_config.format`
    thinking: Thinking | None = None

    def task(self, model: ServedModel) -> ChatTask:
        toolbox, choice, config = Toolbox(), self.tool_choice, self.output_config
        for number, tool in enumerate(self.tools):
            if isinstance(tool, _Tool):
                toolbox.add_tool(tool, "function", path=f"tools[{number}]")
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        if config is not None and config.effort is not None:
            variables["reasoning_effort"] = EFFORTS[config.effort]
        form = None
        if config is not None and config.format is not None:
            form = Constraint("output_config.format.schema", config.format.json_form)
        elif self.output_format is not None:
            form = Constraint("output_format.schema", self.output_format.json_form)
        if choice is not None:
            toolbox.choice = toolbox.find(choice) if choice.type == "tool" else _CHOICES[choice.type]
        return ChatTask(
            self,
            self._make_messages(),
            toolbox,
            parallel=choice is None or not choice.disable_parallel_tool_use,
            constraint=self.read_constraint(form),
            variables=variables,
            reasoning_budget=self.thinking.budget if self.thinking else None,
        )

    def _make_messages(self) -> list[dict[str, Any]]:
        transcript = Transcript()
        for part in self.system:
            transcript.add_system(_BILLING.sub("", part.text))
        for turn in self.messages:
            if turn.role == "system":
                for part in turn.content:
                    transcript.add_system(part.text)
                continue
            if turn.role == "assistant":
                transcript.add_message("assistant", "")
            # Templates require the results of calls directly after the calls.
            for part in sorted(turn.content, key=lambda part: not isinstance(part, _Result)):
                match part:
                    case _Result():
                        text = "Error: " * part.is_error + join_parts(part.content)
                        transcript.add_result(part.tool_use_id, text)
                    case _Thinking():
                        transcript.add_reasoning(part.thinking)
                    case _Use():
                        transcript.add_call(part.id, part.name, dump_arguments(part.input))
                    case TextPart():
                        transcript.add_message(turn.role, part.text)
        return transcript.messages


class MessageBody(ConversationBody):
    max_tokens: Annotated[int, whole()]


class MessageReply(Reply):
    head = NAMED

    def __init__(self, call: Call[MessageBody], answers: Sequence[Answer], _: Toolbox) -> None:
        super().__init__(call, answers)
        self._id = f"msg_{secrets.token_hex(12)}"
        # True if the text of reasoning is omitted
        self._hides = call.body.thinking is not None and call.body.thinking.display == "omitted"
        self._has_begun = False

    def events(self, answer: Answer) -> list[Event]:
        events = self._begin() if answer.steps or answer.done else []
        for kind, block, text, _ in answer.changes:
            at = {"index": block.index}
            if kind == "opened":
                events.append({"type": "content_block_start", **at, "content_block": _open(block)})
            elif kind == "grown":
                delta, field = _DELTAS[block.kind]
                if block.kind != "reasoning" or not self._hides:
                    events.append({"type": "content_block_delta", **at, "delta": {"type": delta, field: text}})
            else:
                if block.kind == "reasoning":
                    # Clients do not send blocks without a signature back, and the model would lose its reasoning.
                    signature = {"type": "signature_delta", "signature": "unsigned"}
                    events.append({"type": "content_block_delta", **at, "delta": signature})
                events.append({"type": "content_block_stop", **at})
        if answer.done is not None:
            usage = self._input_usage() | {
                "output_tokens": answer.done.stats.generated,
                "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
            }
            events.append({"type": "message_delta", "delta": _stop_fields(answer), "usage": usage})
            events.append({"type": "message_stop"})
        return events

    def fold(self, event: Event) -> None:
        match event:
            case {"message": message}:
                self.body = message
            case {"content_block": block}:
                self.body["content"].append(block)
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                merge(self.body["content"][index], {name: value for name, value in delta.items() if name != "type"})
            case {"type": "content_block_stop", "index": index}:
                block = self.body["content"][index]
                if block["type"] == "tool_use":  # a limit may have cut the arguments, which must not be used then
                    block["input"] = read_arguments(block.pop("partial_json", "")) or {}
            case {"delta": stop_fields, "usage": usage}:
                self.body |= stop_fields | {"usage": usage}

    def keepalive(self) -> str:
        return self.encode([*self._begin(), {"type": "ping"}])

    def _begin(self) -> list[Event]:
        """Return the first event, if it was not sent yet. It has the length of the prompt, unless a ping came first."""
        if self._has_begun:
            return []
        self._has_begun = True
        message: Event = {
            **{"id": self._id, "type": "message", "role": "assistant", "model": self.name, "content": []},
            **{"stop_reason": None, "stop_sequence": None, "usage": self._input_usage() | {"output_tokens": 0}},
        }
        return [{"type": "message_start", "message": message}]

    def _input_usage(self) -> dict[str, int]:
        (answer,) = self.answers
        return {
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.cached_tokens,
        }


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _open(block: Block) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _stop_fields(answer: Answer) -> dict[str, Any]:
    if answer.is_full:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    if answer.stop_string is not None and answer.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    return {"stop_reason": _REASONS[answer.reason], "stop_sequence": None}
