"""OpenAI's `/v1/chat/completions`, with llama-server's additional fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field, PlainValidator, model_validator

from ngramspec.chat.template import check_variables
from ngramspec.server.answer import Answer, Block
from ngramspec.server.body import (
    TEXT_PARTS,
    Body,
    Content,
    FieldError,
    Items,
    Refusal,
    TextPart,
    check_json,
    describe_value,
    join_parts,
    parts,
    tagged,
    whole,
)
from ngramspec.server.chat import (
    NO_REASONING,
    Chat,
    ChatTask,
    FreeText,
    Prediction,
    Thinking,
    Toolbox,
    ToolChoiceField,
    ToolFields,
    free_text,
)
from ngramspec.server.generation import Alternatives, Generation, ResponseFormat, read_logprobs
from ngramspec.server.json_text import ApiError, dump_arguments
from ngramspec.server.reply import ChunkReply, logprobs_content, native_answer, prediction_usage
from ngramspec.server.state import Call, ServedModel


class _Reasoning(TextPart):
    """Reasoning in a part of an assistant's message."""


class _Thinking(_Reasoning):
    """Reasoning in Mistral's API, which has parts."""

    text: Annotated[str, parts(TEXT_PARTS), AfterValidator(join_parts)] = Field(validation_alias="thinking")


# The part `redacted_thinking` is encrypted by another server, so it cannot be read.
_ANSWER_PARTS = {"refusal": Refusal, "thinking": _Thinking, "reasoning": _Reasoning, "redacted_thinking": Body}


def _read_arguments(value: Any) -> str:
    if isinstance(value, dict):  # not OpenAI's form, but what some clients keep
        return dump_arguments(value)
    if not isinstance(value, str):
        raise FieldError(f"must be a string, got {describe_value(value)}")
    return check_json(value) or "{}"


class _Function(Body):
    name: str
    arguments: Annotated[str, PlainValidator(_read_arguments)] = "{}"


class _CustomCall(Body):
    name: str
    arguments: FreeText = Field(validation_alias="input")


class _Call(Body):
    id: str = ""
    function: _Function | None = None
    custom: _CustomCall | None = None

    @model_validator(mode="after")
    def _check(self) -> _Call:
        if self.custom is None:
            self.require("function")
        return self


class _Message(Body):
    role: Literal["system", "user", "assistant", "tool", "developer", "function"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


class _Answer(_Message):
    """A message of the assistant. Servers return reasoning in one of two fields, or in parts of the content."""

    content: Annotated[tuple[Any, ...], parts({**TEXT_PARTS, **_ANSWER_PARTS})] = ()
    refusal: str = ""
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: Items[_Call] = ()
    function_call: _Function | None = None


class _Tool(Body):
    type: Literal["function", "custom"] = "function"
    function: ToolFields | None = None
    custom: ToolFields | None = None

    @model_validator(mode="after")
    def _check(self) -> _Tool:
        self.require(self.type)
        return self


class _Effort(Body):
    """OpenRouter's `reasoning`."""

    effort: str = ""
    enabled: bool | None = None
    max_tokens: Annotated[int, whole()] | None = None


def _read_think(value: Any) -> str | bool:
    if not isinstance(value, str | bool):
        raise FieldError(f"must be true or false, got {describe_value(value)}")
    return value


class ChatBody(Generation, Chat):
    messages: Items[Annotated[_Message, tagged("role", {"assistant": _Answer}, _Message)]]
    tools: Items[_Tool] = ()
    functions: Items[ToolFields] | None = None  # older form of tools
    tool_choice: ToolChoiceField = Field("auto", validation_alias=AliasChoices("tool_choice", "function_call"))
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat = ResponseFormat()
    logprobs: bool = False
    top_logprobs: Alternatives = 0
    prediction: Prediction | None = None
    return_drafts: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Other switches of reasoning override that of the template. Of several, the first has priority.
    reasoning_effort: str = ""
    reasoning: _Effort | None = None  # OpenRouter's
    thinking: Thinking | None = None  # Anthropic's
    think: Annotated[str | bool | None, PlainValidator(_read_think)] = None  # Ollama's
    enable_thinking: bool | None = None  # Qwen's

    def task(self, model: ServedModel) -> ChatTask:
        toolbox = Toolbox()
        for item in self.tools:
            if (tool := item.custom if item.type == "custom" else item.function) is not None:
                toolbox.add_tool(tool, item.type)
        for tool in self.functions or ():
            toolbox.add_tool(tool, "function")
        messages = [_to_template(message, number) for number, message in enumerate(self.messages)]
        can_continue = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        wants_new_turn = bool(self.add_generation_prompt)  # the request explicitly asks for a separate turn
        continues_message = self.continue_final_message
        if continues_message is None:
            continues_message = can_continue and not wants_new_turn
        if continues_message and not can_continue:
            raise FieldError("the last message must be an assistant message with text", "continue_final_message")
        if continues_message and len(messages) > 1 and messages[-2]["role"] == "assistant":
            problem = "must not end with two assistant messages, of which one could be continued"
            raise ApiError(400, f"messages: {problem}", param="messages")
        if continues_message and wants_new_turn:
            problem = "cannot be combined with continue_final_message"
            raise ApiError(400, f"add_generation_prompt: {problem}", param="add_generation_prompt")
        toolbox.read_choice(self.tool_choice)
        parallel, reasoning = self.parallel_tool_calls, self.reasoning
        budget = reasoning.max_tokens if reasoning is not None else None
        return ChatTask(
            self,
            messages,
            toolbox,
            parallel=self.functions is None if parallel is None else parallel,
            constraint=self.read_constraint(self.response_format.read()),
            logprobs=read_logprobs(self.logprobs, self.top_logprobs),
            post_sampling=self.post_sampling_probs,
            variables=self._read_variables(),
            prediction=self.prediction.text if self.prediction else "",
            reasoning_budget=self.thinking.budget if budget is None and self.thinking else budget,
            continues_message=continues_message,
            starts_answer=self.add_generation_prompt is not False,
            n_answers=self.n,
        )

    def _read_variables(self) -> dict[str, Any]:
        variables = self.chat_template_kwargs or {}
        try:
            check_variables(variables)
        except ValueError as error:
            raise ApiError(400, f"chat_template_kwargs: {error}", param="chat_template_kwargs") from error
        reasoning, thinking = self.reasoning, self.thinking
        switches = (
            self.reasoning_effort or None,
            reasoning and (reasoning.effort or reasoning.enabled),
            thinking and thinking.type != "disabled",
            self.think,
            self.enable_thinking,
        )
        match next((switch for switch in switches if switch is not None), None):
            case None:
                return variables
            case True:
                return variables | {"enable_thinking": True}
            case False | "none":
                return variables | NO_REASONING
            case effort:
                return variables | {"reasoning_effort": effort}


def _to_template(message: _Message, number: int) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    texts = [part.text for part in message.content if isinstance(part, TextPart) and not isinstance(part, _Reasoning)]
    result: dict[str, Any] = {"role": role}
    if isinstance(message, _Answer):
        texts = texts if any(texts) else [message.refusal]
        reasoning = [part.text for part in message.content if isinstance(part, _Reasoning)]
        if reasoning or message.reasoning_content is not None:
            result["reasoning_content"] = "\n".join(filter(None, [message.reasoning_content, *reasoning]))
        calls = [_to_call(call.id, call.custom or call.function) for call in message.tool_calls]
        if message.function_call is not None:
            calls.append(_to_call(f"call_{number}", message.function_call))
        if calls:
            result["tool_calls"] = calls
    # Several parts remain parts, because templates join them differently.
    result["content"] = "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]
    if message.role == "function":
        result["tool_call_id"] = f"call_{number - 1}"
    elif message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    return result


def _to_call(id: str, function: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": function.arguments}}


class ChatReply(ChunkReply):
    """A chat completion, or its stream: the role, the deltas and the finish of each choice; then usage and timings."""

    def __init__(self, call: Call[ChatBody], answers: Sequence[Answer], toolbox: Toolbox) -> None:
        super().__init__(call, answers, "chatcmpl", {}, {"object": "chat.completion.chunk"})
        self._toolbox, self._uses_functions = toolbox, call.body.functions is not None
        self._drafts = [DraftedText() for _ in answers] if call.body.return_drafts else []
        self._begun = set[int]()  # choices whose role was sent

    def events(self, answer: Answer) -> list[dict[str, Any]]:
        number = answer.number
        more = self.telemetry[number].update(answer) if self.telemetry else {}
        choices = self._deltas(answer)
        if answer.done is not None:
            has_function = self._uses_functions and answer.reason == "tool_calls"
            choices.append({"delta": {}, "finish_reason": "function_call" if has_function else answer.reason})
            if not self.has_usage_event and all(answer.done for answer in self.answers):
                more = self.timings()
        elif not choices and "prompt_progress" in more:
            choices.append({"delta": {}})
        events: list[dict[str, Any]] = []
        if choices and number not in self._begun:
            self._begun.add(number)
            begin = {"index": number, "finish_reason": None, "delta": {"role": "assistant", "content": None}}
            events.append({**self.chunk, "choices": [begin]})
        for choice in choices:
            fields = {"index": number, "finish_reason": None, **choice}
            events.append({**self.chunk, "choices": [fields], **more})
        return events + self.last_events() if answer.done is not None else events

    def usage(self) -> dict[str, Any]:
        reasoning = sum(answer.reasoning_tokens for answer in self.answers)
        predicted = prediction_usage(self.answers[0].request.prediction, [answer.tokens for answer in self.answers])
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": reasoning, **predicted}}

    def whole(self) -> dict[str, Any]:
        for choice, answer in zip(self.body["choices"], self.answers, strict=True):
            message = choice["message"] = choice.pop("delta")
            message["content"] = message["content"] or ""
            # A limit may have cut off the last call.
            calls = [
                {name: value for name, value in call.items() if name != "index"}
                for call in message.pop("tool_calls", [])[: len(answer.calls)]
            ]
            if calls:
                message["tool_calls"] = calls
            elif not answer.calls:
                message.pop("function_call", None)
            if answer.request.logprobs is not None:
                choice.setdefault("logprobs", {"content": []})
            if self._drafts:
                choice["drafted"] = self._drafts[answer.number].content_spans
        body, call = {**self.body, "object": "chat.completion"}, self.call
        if call.server.is_verbose if call.body.verbose is None else call.body.verbose:
            body["__verbose"] = native_answer(call, self.answers[0])
        return body

    def _deltas(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the fields of the choice in each event of an event."""
        choices: list[dict[str, Any]] = []
        spans = self._drafts[answer.number].mark(answer) if self._drafts else ()
        for place, (kind, block, text, _) in enumerate(answer.changes):
            if block.kind == "call":
                if delta := self._call_delta(kind, block, text):
                    choices.append({"delta": delta})
            elif text:
                choices.append({"delta": {"content" if block.kind == "text" else "reasoning_content": text}})
                if spans:
                    choices[-1]["drafted"] = spans[place]
        if answer.logprobs:
            if not (choices and "content" in choices[-1]["delta"]):
                choices.append({"delta": {"content": ""}} | ({"drafted": []} if self._drafts else {}))
            content = logprobs_content(self.model, answer.logprobs, answer.request.post_sampling)
            choices[-1]["logprobs"] = {"content": content}
        return choices

    def _call_delta(self, kind: str, block: Block, text: str) -> dict[str, Any]:
        """Return the delta of a call: its name once, then only its arguments; the input of a custom tool at its end."""
        _, _, call_type = self._toolbox.origin(block.name)
        field = "input" if call_type == "custom" else "arguments"
        if kind == "opened":
            delta = {"id": block.id, "type": call_type, call_type: {"name": block.name, field: ""}}
        elif kind == "closed" and call_type == "custom":
            delta = {"custom": {"input": free_text(block.text)}}  # the input is within JSON, which is complete only now
        elif kind == "grown" and call_type == "function":
            delta = {"function": {"arguments": text}}
        else:
            return {}
        if self._uses_functions:
            return {"function_call": delta["function"]} if block.call == 0 else {}
        return {"tool_calls": [{"index": block.call, **delta}]}


Span = tuple[int, int]
"""First character of a part of a text, and the first one after it."""


class DraftedText:
    """Finds the accepted draft tokens in the text of an answer, for `return_drafts`.

    It searches the texts that a parser returns, in order, in the text that the parser received.
    """

    def __init__(self) -> None:
        self.content_spans: list[Span] = []  # drafted spans of the content
        self._content_length = 0
        self._text = self._marks = ""  # text that was not found yet, and a "d" for each drafted character of it

    def mark(self, answer: Answer) -> list[list[Span]]:
        """Return the drafted spans of the text of each change."""
        for step in answer.steps:
            # Text that a token held back comes out with the next token, and belongs to it.
            for i, text in enumerate(step.pieces):
                self._text += text
                self._marks += ("d" if i < step.accepted else " ") * len(text)
        result = list[list[Span]]()
        for _, block, text, _ in answer.changes:
            at, spans = self._text.find(text) if text else -1, list[Span]()
            if at >= 0:
                end = at + len(text)
                spans = [match.span() for match in re.finditer("d+", self._marks[at:end])]
                self._text, self._marks = self._text[end:], self._marks[end:]
            result.append(spans)
            if block.kind == "text":
                before = self._content_length
                self.content_spans += [(before + start, before + stop) for start, stop in spans]
                self._content_length += len(text)
        return result
