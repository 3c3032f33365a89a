"""OpenAI's `/v1/responses`, the newer API for chats, which Codex uses.

A conversation is a list of items: messages, reasoning, calls and their results. `ResponsesBody` converts them to
messages as in chat completions, and `ResponseReply` the answer to items again. The server stores nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field, PlainValidator, TypeAdapter, model_validator

from ngramspec.server.answer import Answer, Block
from ngramspec.server.body import (
    TEXT_PARTS,
    Body,
    FieldError,
    Items,
    Name,
    Refusal,
    TextPart,
    Typed,
    check_json,
    join_parts,
    parts,
    refuse,
    tagged,
    texts,
    whole,
)
from ngramspec.server.chat import (
    EFFORTS,
    NO_REASONING,
    Chat,
    ChatTask,
    FreeText,
    Prediction,
    Toolbox,
    ToolChoiceField,
    ToolFields,
    Transcript,
    free_text,
    function_name,
)
from ngramspec.server.generation import Alternatives, Constraint, Generation
from ngramspec.server.json_text import ApiError, Encoded, dump_arguments, encode_json
from ngramspec.server.reply import NAMED, Reply, logprobs_content, prediction_usage
from ngramspec.server.state import Call, ServedModel

_NOT_STORED = refuse("this server does not store responses; send the whole conversation as input")


_Texts = Annotated[tuple[TextPart, ...], parts({**TEXT_PARTS, "refusal": Refusal})]


class _Message(Body):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts


class _Reasoning(Body):
    summary: Items[TextPart] = ()
    content: Items[TextPart] = ()


class _Call(Body):
    call_id: Name
    name: Name
    namespace: str | None = None
    arguments: Annotated[str, AfterValidator(check_json)]


class _CustomCall(_Call):
    arguments: FreeText = Field(validation_alias="input")


class _ShellCall(Body):
    call_id: Name
    action: dict[str, Any]


class _Output(Body):
    call_id: Name = Field(validation_alias=AliasChoices("call_id", "id"))  # only calls of the shell may have `id`
    output: _Texts


class _Tool(ToolFields):
    type: Literal["function", "custom"]


_TOOLS: dict[str, type[Body]] = {"function": _Tool, "custom": _Tool}

# Others, such as web search, are provided only by OpenAI's servers or models.
_Tools = Items[Annotated[Any, tagged("type", _TOOLS, Typed)]]


class _Namespace(Body):
    """Functions and custom tools (Codex has one for each MCP server)."""

    name: Name
    tools: _Tools = ()


_TOOLS["namespace"] = _Namespace


class _MoreTools(Body):
    tools: _Tools = ()


class _Reference(Body):
    id: Annotated[Any, refuse("this server does not store items; send the item itself")]


_ITEMS: Mapping[str, type[Body]] = {
    "": _Message,
    "message": _Message,
    "reasoning": _Reasoning,
    "function_call": _Call,
    "custom_tool_call": _CustomCall,
    "local_shell_call": _ShellCall,
    "function_call_output": _Output,
    "custom_tool_call_output": _Output,
    "local_shell_call_output": _Output,
    "additional_tools": _MoreTools,
    "item_reference": _Reference,
    # Only OpenAI's servers create or can read these; they are ignored.
    **dict.fromkeys(("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"), Body),
    **dict.fromkeys(("computer_call", "mcp_list_tools", "tool_search_call", "tool_search_output"), Body),
    **dict.fromkeys(("compaction", "compaction_trigger"), Body),
}

_Item = Annotated[Any, tagged("type", _ITEMS, "unsupported item type {!r}")]
_LIST: TypeAdapter[tuple[Body, ...]] = TypeAdapter(Items[_Item])


def _read_input(value: Any) -> tuple[Body, ...]:
    return _LIST.validate_python([{"role": "user", "content": value}] if isinstance(value, str) else value)


class _Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_form: dict[str, Any] | None = Field(None, validation_alias="schema")
    strict: bool = False

    @model_validator(mode="after")
    def _check(self) -> _Format:
        if self.type == "json_schema" and self.json_form is None:
            raise FieldError("is missing", "schema")
        return self


class _TextForm(Body):
    format: _Format | None = None


class _Effort(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesBody(Generation, Chat):
    input: Annotated[tuple[Body, ...], PlainValidator(_read_input)]
    instructions: str = ""
    tools: _Tools = ()
    tool_choice: ToolChoiceField = "auto"
    parallel_tool_calls: bool = True
    text: _TextForm = _TextForm()
    reasoning: _Effort = _Effort()
    include: Annotated[tuple[str, ...], texts()] = ()
    top_logprobs: Alternatives = 0
    stop: Annotated[tuple[str, ...], PlainValidator(lambda _: ())] = ()  # not in this API
    max_tokens: Annotated[int, whole(1)] = Field(-1, validation_alias="max_output_tokens")
    prediction: Prediction | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: Annotated[Any, _NOT_STORED] = None
    conversation: Annotated[Any, _NOT_STORED] = None
    prompt: Annotated[Any, refuse("this server does not store prompts; send instructions and input")] = None
    background: Annotated[bool, refuse("background responses are not supported")] = False
    truncation: Literal["disabled"] = "disabled"

    def task(self, model: ServedModel) -> ChatTask:
        transcript, toolbox = Transcript(), Toolbox()
        _add_tools(toolbox, self.tools, "tools")
        transcript.add_system(self.instructions)
        for number, item in enumerate(self.input):
            if isinstance(item, _MoreTools):
                _add_tools(toolbox, item.tools, f"input[{number}].tools")
            else:
                _add_item(transcript, item)
        if not transcript.messages:
            transcript.add_message("user", "")  # Codex sends an empty input to check the connection
        variables: Mapping[str, Any] = {}
        if (effort := self.reasoning.effort) == "none":
            variables = NO_REASONING
        elif effort is not None:
            variables = {"enable_thinking": True, "reasoning_effort": EFFORTS.get(effort, "low")}
        format, form = self.text.format, None
        if format is not None and format.type != "text":
            schema = format.json_form if format.type == "json_schema" else None
            form = Constraint("text.format.schema", schema or {}, strict=format.strict)
        has_logprobs = "message.output_text.logprobs" in self.include
        toolbox.read_choice(self.tool_choice)
        return ChatTask(
            self,
            transcript.messages,
            toolbox,
            parallel=self.parallel_tool_calls,
            constraint=self.read_constraint(form),
            logprobs=self.top_logprobs or (0 if has_logprobs else None),
            variables=variables,
            prediction=self.prediction.text if self.prediction else "",
        )


def _add_tools(toolbox: Toolbox, tools: Sequence[Body], path: str, namespace: str | None = None) -> None:
    for number, tool in enumerate(tools):
        if isinstance(tool, _Tool):
            toolbox.add_tool(tool, tool.type, namespace, path=f"{path}[{number}]")
        elif isinstance(tool, _Namespace) and namespace is None:
            _add_tools(toolbox, tool.tools, f"{path}[{number}].tools", tool.name)


def _add_item(transcript: Transcript, item: Body) -> None:
    match item:
        case _Message():
            if item.role in ("user", "assistant"):
                transcript.add_message(item.role, join_parts(item.content))
            else:
                transcript.add_system(join_parts(item.content))
        case _Reasoning():
            if text := join_parts(item.content or item.summary):
                transcript.add_reasoning(text)
        case _Call():
            transcript.add_call(item.call_id, function_name(item.name, item.namespace), item.arguments or "{}")
        case _ShellCall():
            transcript.add_call(item.call_id, "local_shell", dump_arguments(item.action))
        case _Output():
            transcript.add_result(item.call_id, join_parts(item.output))


Event = dict[str, Any]

_KINDS = {
    "message": ("msg", "response.output_text"),
    "reasoning": ("rs", "response.reasoning_text"),
    "function_call": ("fc", "response.function_call_arguments"),
    "custom_tool_call": ("ctc", "response.custom_tool_call_input"),
}
"""Prefixes of the ids of items, and of the events of their content."""


class ResponseReply(Reply):
    """A response, or its stream of events.

    Each block of an answer becomes an item: text a "message", reasoning a "reasoning", and a call a "function_call" or
    a "custom_tool_call". For the text "Hi!" in two chunks, the events are:

        response.created, response.in_progress              `_begin`, before the first event of the answer
        response.output_item.added                          `_open`: the item, without content
        response.content_part.added                         `_open`: its only part, without text
        response.output_text.delta {"delta": "Hi"}
        response.output_text.delta {"delta": "!"}
        response.output_text.done {"text": "Hi!"}           `_close`
        response.content_part.done                          `_close`
        response.output_item.done                           `_close`: the complete item
        response.completed                                  the response as it is returned without a stream
    """

    head = NAMED

    def __init__(self, call: Call[ResponsesBody], answers: Sequence[Answer], toolbox: Toolbox) -> None:
        super().__init__(call, answers)
        self._toolbox = toolbox
        self._key = secrets.token_hex(12)  # part of the ids of the response and its items
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []  # items whose last events were sent
        self._has_begun, self._numbers = False, count()
        self._item: dict[str, Any] = {}  # item of the open block, which grows, and what its events have in common
        self._place: dict[str, Any] = {}
        self._closed: Block | None = None  # its last events are sent later, because it was cut only if nothing follows
        body, data = call.body, call.data
        format = (data.get("text") or {}).get("format") or {"type": "text"}
        self._echo = {  # the fields of the request that OpenAI's responses repeat, as they came
            "instructions": data.get("instructions"),
            "max_output_tokens": data.get("max_output_tokens"),
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning": {"effort": None, "summary": None} | (data.get("reasoning") or {}),
            "text": {"format": Encoded([encode_json(format)])},  # a stream has these three times
            "tool_choice": data.get("tool_choice") or "auto",
            "tools": Encoded.join(data.get("tools") or []),
        }

    def events(self, answer: Answer) -> list[Event]:
        more = self.telemetry[0].update(answer) if self.telemetry else {}
        events = self._begin() if answer.changes or answer.done or "prompt_progress" in more else []
        if "prompt_progress" in more:
            events.append(self._event("response.in_progress", response=self._response("in_progress"), **more))
        for kind, block, text, logprobs in answer.changes:
            if self._closed is not None:
                events += self._close(self._closed, cut=False)
            if kind == "opened":
                events += self._open(block)
            elif kind == "closed":
                self._closed = block
            elif (item := self._item["type"]) != "custom_tool_call":  # its input is sent at its end
                event: Event = {"type": f"{_KINDS[item][1]}.delta", **self._place, "delta": text}
                if block.kind == "text":
                    event |= {"logprobs": [], **more}
                if logprobs:
                    event["logprobs"] = logprobs_content(self.model, logprobs)
                    self._item["content"][0]["logprobs"].extend(event["logprobs"])
                event["sequence_number"] = next(self._numbers)
                events.append(event)
        if answer.done is not None:
            is_cut = answer.reason == "length"
            if self._closed is not None:
                events += self._close(self._closed, cut=is_cut)
            response = self._response("incomplete" if is_cut else "completed")
            generated, predicted = answer.done.stats.generated, answer.request.prediction
            response["usage"] = {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": generated,
                "output_tokens_details": {
                    "reasoning_tokens": answer.reasoning_tokens,
                    **prediction_usage(predicted, [answer.tokens]),
                },
                "total_tokens": answer.prompt_tokens + generated,
            }
            events.append(self._event(f"response.{response['status']}", response=response, **more))
        return events

    def fold(self, event: Event) -> None:
        self.body = event.get("response", self.body)

    def keepalive(self) -> str:
        return self.encode([*self._begin(), self._event("keepalive")])

    def error_chunk(self, error: ApiError) -> str:
        code = error.code if isinstance(error.code, str) else "server_error"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self.encode([*self._begin(), self._event("response.failed", response=response)])

    def _event(self, name: str, /, **fields: Any) -> Event:
        """Return an event; all have their type first and their number last."""
        return {"type": name, **fields, "sequence_number": next(self._numbers)}

    def _begin(self) -> list[Event]:
        """Return the first events, if they were not sent yet."""
        if self._has_begun:
            return []
        self._has_begun, response = True, self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _open(self, block: Block) -> list[Event]:
        name, namespace, tool = self._toolbox.origin(block.name)
        call_type = "custom_tool_call" if tool == "custom" else "function_call"
        kind = {"text": "message", "reasoning": "reasoning"}.get(block.kind, call_type)
        id = f"{_KINDS[kind][0]}_{self._key}_{block.index}"
        item: dict[str, Any] = {"id": id, "type": kind, "status": "in_progress"}
        self._item, self._place = item, {"item_id": id, "output_index": block.index}
        if block.kind == "call":
            item |= {"call_id": block.id, "name": name, "input" if kind == "custom_tool_call" else "arguments": ""}
            if namespace is not None:
                item["namespace"] = namespace
            return [self._event("response.output_item.added", output_index=block.index, item=dict(item))]
        self._place["content_index"] = 0
        item |= {"role": "assistant"} if kind == "message" else dict[str, Any](summary=[])
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": Encoded.join(())}
        item["content"] = [part]
        return [
            self._event("response.output_item.added", output_index=block.index, item={**item, "content": []}),
            self._event("response.content_part.added", **self._place, part=dict(part)),
        ]

    def _close(self, block: Block, *, cut: bool) -> list[Event]:
        item, place, (_, name) = self._item, self._place, _KINDS[self._item["type"]]
        self._closed, item["status"] = None, "incomplete" if cut else "completed"
        events, part = list[Event](), dict[str, Any]()
        if "content" in item:
            (part,) = item["content"]
            part["text"] = block.text
            done = {field: part[field] for field in ("text", "logprobs") if field in part}
        elif "arguments" in item:
            item["arguments"] = block.text
            done = {"name": item["name"], "arguments": block.text}
        else:  # the input of a custom tool is within the JSON of arguments, which is complete only now
            item["input"] = free_text(block.text)
            events.append(self._event(f"{name}.delta", **place, delta=item["input"]))
            done = {"input": item["input"]}
        events.append(self._event(f"{name}.done", **place, **done))
        if part:
            events.append(self._event("response.content_part.done", **place, part=part))
        self._output.append(item)
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _response(self, status: str) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = {"completed_at": int(time.time())} if status == "completed" else {}
        sampling = self.answers[0].request.sampling
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            **done,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "model": self.name,
            "output": list(self._output),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self._echo,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
