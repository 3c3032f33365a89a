"""llama-server's endpoints `/completion`, `/infill`, `/tokenize`, `/detokenize` and `/apply-template`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import field_validator
from starlette.responses import Response

from ngramspec.chat.stream import Delta
from ngramspec.fill_in import Limits
from ngramspec.grammars.lark import MAX_SIZE
from ngramspec.server.answer import Answer
from ngramspec.server.body import (
    Body,
    FieldError,
    Items,
    PromptField,
    Tokens,
    check_count,
    describe_value,
    texts,
    whole,
)
from ngramspec.server.chat import render_prompt
from ngramspec.server.generation import TextGeneration, check_token, fill_in_prompt, make_text_answers, read_prompts
from ngramspec.server.json_text import Encoded, JsonResponse
from ngramspec.server.limits import MAX_ALTERNATIVES, MAX_ITEMS, MAX_LOGPROBS, MAX_TEXT
from ngramspec.server.openai_chat import ChatBody
from ngramspec.server.reply import Reply, logprobs_content, merge, native_answer, respond
from ngramspec.server.state import Call


class _NativeBody(TextGeneration):
    n_probs: Annotated[int, whole()] = 0
    logprobs: Annotated[int, whole()] = 0  # another name of `n_probs`
    cache_prompt: bool = True
    t_max_predict_ms: Annotated[int, whole(-(2**31))] = -1
    n_indent: Annotated[int, whole()] = 0
    return_tokens: bool = False
    # Names of the fields to return; empty means all.
    response_fields: Annotated[tuple[str, ...], texts(max_strings=256)] = ()


class PromptBody(_NativeBody):
    prompt: PromptField


async def completion(call: Call[PromptBody]) -> Response:
    def prepare() -> NativeReply:
        prompts = read_prompts(call.model, call.body.prompt)
        return _make_reply(call, prompts, as_list=call.body.prompt.is_list)

    return await respond(prepare)


def _make_reply(call: Call[Any], prompts: Sequence[Sequence[int]], *, as_list: bool = False) -> NativeReply:
    """Return the reply with an answer to each prompt, or several; raise an ApiError if it would be too large."""
    body: _NativeBody = call.body
    answers = make_text_answers(
        call,
        body,
        prompts,
        logprobs=body.n_probs or body.logprobs or None,
        cache_prompt=body.cache_prompt,
        post_sampling=body.post_sampling_probs,
    )
    request = answers[0].request
    count, n_tokens = request.logprobs or 0, len(answers) * min(request.max_tokens, call.model.n_ctx)
    if count > MAX_ALTERNATIVES and count * n_tokens > MAX_LOGPROBS:
        limit = f"{MAX_ALTERNATIVES}, or {MAX_LOGPROBS:,} divided by the number of tokens to generate ({n_tokens:,})"
        raise FieldError(f"must be at most {limit}, got {count:,}", "n_probs" if body.n_probs else "logprobs")
    # Each answer has all settings.
    n_characters = len(request.sampling.grammar or "") * len(answers)
    check_count(n_characters, MAX_SIZE, "characters for all answers together", "grammar")
    seconds = body.t_max_predict_ms / 1000 if body.t_max_predict_ms > 0 else None
    if seconds is not None or body.n_indent:
        for answer in answers:
            answer.reader = LineLimits(seconds, body.n_indent)
    return NativeReply(call, answers, as_list=as_list or len(answers) > 1)


class NativeReply(Reply):
    """A response with completions, or its stream; if `as_list`, the response is a list."""

    def __init__(self, call: Call[_NativeBody], answers: Sequence[Answer], *, as_list: bool) -> None:
        super().__init__(call, answers)
        self._as_list = as_list
        self._names = call.body.response_fields  # of the fields to return; empty means all
        self._results: list[dict[str, Any]] = [{} for _ in answers]  # of a response that is not streamed

    def events(self, answer: Answer) -> list[dict[str, Any]]:
        more = self.telemetry[answer.number].update(answer) if self.telemetry else {}
        events: list[dict[str, Any]] = []
        event = {"index": answer.number, "content": answer.new_text, "tokens": [], "stop": False}
        if "prompt_progress" in more:
            events.append(event | more)
        elif event["content"] or answer.steps:
            event["tokens"] = [token for step in answer.steps for token in step.tokens]
            event["id_slot"], event["tokens_predicted"] = answer.slot, len(answer.tokens)
            event["tokens_evaluated"] = answer.prompt_tokens
            if answer.request.logprobs is not None:
                event["completion_probabilities"] = logprobs_content(
                    self.model, answer.logprobs, answer.request.post_sampling
                )
            events.append(event | more)
        if answer.done is not None:
            result = native_answer(self.call, answer, has_prompt=not self._names or "prompt" in self._names)
            result |= {"index": answer.number, "content": "", "tokens": []}
            events.append(self._select(result) if self.call.body.stream else result)
        return events

    def fold(self, event: dict[str, Any]) -> None:
        merge(self._results[event["index"]], event)

    def whole(self) -> Any:
        for answer, result in zip(self.answers, self._results, strict=True):
            if not self.call.body.return_tokens:
                result["tokens"] = []
            if answer.request.logprobs is not None:
                result.setdefault("completion_probabilities", [])
        results = list(map(self._select, self._results))
        return results if self._as_list else results[0]

    def _select(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the requested fields of a result, where "a/b" is the field b of a; unknown names are ignored."""
        if not self._names:
            return result
        fields: dict[str, Any] = {}
        for name in self._names:
            value: Any = result
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                fields[name] = value
        return fields


class TokenizeBody(Body):
    content: Any = ("",)
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    @field_validator("content")
    @classmethod
    def _check(cls, content: Any) -> list[Any]:
        pieces = content if isinstance(content, list) else [content]
        if not isinstance(content, str | list):
            raise FieldError(f"must be a string, got {describe_value(content)}")
        check_count(sum(isinstance(item, str) for item in pieces), MAX_ITEMS, "strings")
        check_count(sum(len(item) if isinstance(item, str) else 1 for item in pieces), MAX_TEXT, "characters")
        return pieces


async def tokenize(call: Call[TokenizeBody]) -> Response:
    """Return the token ids of a text, or of a list of texts and token ids; pieces that are not UTF-8 are bytes."""
    body, vocabulary = call.body, call.model.vocabulary

    def respond_with_tokens() -> Response:
        tokens: list[int] = []
        for i, piece in enumerate(body.content):
            if isinstance(piece, str):
                tokens += vocabulary.tokenize(piece, special=body.parse_special, add_bos=body.add_special and i == 0)
            else:
                tokens.append(check_token(vocabulary, piece, "content"))
        if not body.with_pieces:
            return JsonResponse({"tokens": tokens})
        shown = ({"id": token, "piece": _decode_piece(vocabulary.display_piece(token))} for token in tokens)
        return JsonResponse({"tokens": Encoded.join(shown)})

    return await asyncio.to_thread(respond_with_tokens)


def _decode_piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


class DetokenizeBody(Body):
    tokens: Tokens = ()


async def detokenize(call: Call[DetokenizeBody]) -> Response:
    """Return the text of token ids, with the names of control tokens, so that `/tokenize` returns the same tokens."""
    vocabulary = call.model.vocabulary

    def join() -> str:
        tokens = [check_token(vocabulary, token, "tokens") for token in call.body.tokens]
        pieces = {token: vocabulary.display_piece(token) for token in set(tokens)}  # lists may be long
        return b"".join([pieces[token] for token in tokens]).decode("utf-8", "replace")

    return JsonResponse({"content": await asyncio.to_thread(join)})


async def apply_template(call: Call[ChatBody]) -> Response:
    """Return the prompt of a chat as text, without the first control token if `/completion` adds it."""
    vocabulary = call.model.vocabulary
    prompt = await asyncio.to_thread(lambda: render_prompt(call.model, call.body.task(call.model)))
    bos = vocabulary.ends[0]
    adds_bos = vocabulary.tokenize("")[:1] == vocabulary.tokenize(bos, special=True, add_bos=False)
    return JsonResponse({"prompt": prompt.text.removeprefix(bos) if adds_bos else prompt.text})


NEAR = 2048  # maximum number of tokens of prefix and suffix: the size of a batch in llama-server


class _ExtraFile(Body):
    filename: str = "tmp"  # llama-server's name for a file without a name
    text: str


class InfillBody(_NativeBody):
    input_prefix: str
    input_suffix: str
    input_extra: Items[_ExtraFile] = ()
    prompt: str = ""


async def infill(call: Call[InfillBody]) -> Response:
    """Generate the text between a prefix and a suffix, for llama.vim and llama.vscode; `/completion`'s fields apply."""
    body = call.body

    def prepare() -> NativeReply:
        prompt = fill_in_prompt(
            call.model,
            body.input_prefix,
            body.input_suffix,
            prompt=body.prompt,
            other_files=[(file.filename, file.text) for file in body.input_extra],
            limits=Limits.for_context(call.model.n_ctx, near=NEAR, n_predict=max(0, body.max_tokens)),
        )
        return _make_reply(call, [prompt])

    return await respond(prepare)


class LineLimits:
    """Limits that end an editor's suggestion: at a line end after `seconds`, or before a line with a smaller `indent`.

    The indentation of a line is known only when its first other character arrives. Until then the line is held back, so
    that the text does not depend on the lengths of tokens and drafts. A blank line has none, as in llama-server.
    """

    def __init__(
        self, seconds: float | None = None, indent: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ended: bool | None = False  # whether the text has ended; later text is dropped
        self._seconds, self._indent, self._clock = seconds, indent, clock
        self._started_at: float | None = None
        self._at_margin = False
        self._held_text = ""

    def push(self, text: str) -> list[Delta]:
        """Return the text that can be shown after `text` was generated; call it for tokens without text too."""
        if self.ended:
            return []
        now = self._clock()
        if self._started_at is None:
            self._started_at = now
        line_end = text.find("\n")
        if self._seconds is not None and now - self._started_at > self._seconds and line_end >= 0:
            self.ended = True
            text = text[: line_end + 1]
        text = self._cut_at_margin(text) if self._indent else text
        return [Delta("text", text)] if text else []

    def finish(self, cut: bool = False) -> list[Delta]:
        """Return the held-back text at the end of the response."""
        rest, self._held_text = self._held_text, ""
        return [Delta("text", rest)] if rest and not self.ended else []

    def _cut_at_margin(self, text: str) -> str:
        text, self._held_text = self._held_text + text, ""
        line = 0
        while True:
            if self._at_margin:
                margin = len(text) - line - len(text[line:].lstrip(" \t"))
                if line + margin == len(text):
                    self._held_text = text[line:]
                    return text[:line]
                if margin < self._indent:
                    self.ended = True
                    return text[:line]
            line_end = text.find("\n", line)
            self._at_margin = line_end >= 0
            if not self._at_margin:
                return text
            line = line_end + 1
