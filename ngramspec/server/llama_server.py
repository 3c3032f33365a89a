"""llama-server's endpoints `/completion`, `/infill`, `/tokenize`, `/detokenize` and `/apply-template`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from ngramspec.chat.stream import Delta
from ngramspec.chat.template import ChatPrompt
from ngramspec.fill_in import Limits
from ngramspec.grammars.lark import MAX_SIZE
from ngramspec.request import Request
from ngramspec.server.answer import Answer
from ngramspec.server.call import Call
from ngramspec.server.chat import render_prompt
from ngramspec.server.constraint_fields import read_response_format
from ngramspec.server.fields import MAX_ITEMS
from ngramspec.server.json_text import Encoded, JsonResponse
from ngramspec.server.openai_chat import read_chat
from ngramspec.server.openai_completions import fill_in_prompt, is_prompt_list, read_prompts, read_requests
from ngramspec.server.reply import Reply, logprobs_content, merge, native_answer, read_telemetry, respond
from ngramspec.server.request_fields import MAX_ALTERNATIVES, read_max_tokens
from ngramspec.server.sampling_fields import check_token, read_sampling


async def completion(call: Call) -> Response:
    """Continue one prompt, or several."""
    prompts = await asyncio.to_thread(read_prompts, call.model, call.fields)
    return await continue_prompts(call, prompts, as_list=is_prompt_list(call.fields.data["prompt"]))


async def continue_prompts(call: Call, prompts: Sequence[Sequence[int]], *, as_list: bool = False) -> Response:
    """Continue each prompt, once for each requested answer; with `as_list`, the response is always a list."""
    fields = call.fields
    name = fields.name("n_probs", "logprobs")
    n_probs = fields.integer(name, 0) or None
    cache_prompt = fields.boolean("cache_prompt", True)
    sampling = await asyncio.to_thread(read_sampling, call)
    requests = read_requests(
        call, prompts, sampling, n_probs, cache_prompt=cache_prompt, post_sampling=fields.boolean("post_sampling_probs")
    )
    _check_sizes(call, requests, name)
    milliseconds = fields.integer("t_max_predict_ms", -1, minimum=-(2**31)) or 0
    seconds, indent = milliseconds / 1000 if milliseconds > 0 else None, fields.integer("n_indent", 0) or 0
    has_limits = seconds is not None or indent
    answers = [
        Answer(request, number, LineLimits(seconds, indent) if has_limits else None)
        for number, request in enumerate(requests)
    ]
    return await respond(call, NativeReply(call, answers, as_list=as_list or len(requests) > 1))


MAX_LOGPROBS = 10_000
"""Maximum number of alternatives in a response with more than `MAX_ALTERNATIVES` of them for each token."""


def _check_sizes(call: Call, requests: Sequence[Request], name: str) -> None:
    """Raise an ApiError for a response that would be too large; `name` is the field with the number of alternatives."""
    fields, count = call.fields, requests[0].logprobs or 0
    n_tokens = sum(min(request.max_tokens, call.model.n_ctx) for request in requests)
    if count > MAX_ALTERNATIVES and count * n_tokens > MAX_LOGPROBS:
        problem = f"must be at most {MAX_ALTERNATIVES}, or {MAX_LOGPROBS:,} divided by the number of tokens to generate"
        raise fields.field_error(name, f"{problem} ({n_tokens:,}), got {count:,}")
    # Each answer has all settings.
    n_characters = len(requests[0].sampling.grammar or "") * len(requests)
    fields.check_count("grammar", n_characters, MAX_SIZE, "characters for all answers together")


class NativeReply(Reply):
    """A response with completions, or its stream; if `as_list`, the response is a list."""

    def __init__(self, call: Call, answers: Sequence[Answer], *, as_list: bool) -> None:
        super().__init__(call, answers)
        self._call, self._as_list = call, as_list
        self._returns_tokens = call.fields.boolean("return_tokens")
        # Names of the fields to return; empty means all.
        self._response_fields = call.fields.string_list("response_fields", max_strings=256)
        self._telemetry = read_telemetry(call, answers)
        self._results: list[dict[str, Any]] = [{} for _ in answers]  # of a response that is not streamed

    def events(self, answer: Answer) -> list[dict[str, Any]]:
        more = self._telemetry[answer.number].update(answer) if self._telemetry else {}
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
            has_prompt = not self._response_fields or "prompt" in self._response_fields
            result = native_answer(self._call, answer, has_prompt=has_prompt)
            result |= {"index": answer.number, "content": "", "tokens": []}
            events.append(self._select(result) if self._call.streamed else result)
        return events

    def fold(self, event: dict[str, Any]) -> None:
        merge(self._results[event["index"]], event)

    def whole(self) -> Any:
        for answer, result in zip(self.answers, self._results, strict=True):
            if not self._returns_tokens:
                result["tokens"] = []
            if answer.request.logprobs is not None:
                result.setdefault("completion_probabilities", [])
        results = list(map(self._select, self._results))
        return results if self._as_list else results[0]

    def _select(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the requested fields of a result, where "a/b" is the field b of a; unknown names are ignored."""
        if not self._response_fields:
            return result
        fields: dict[str, Any] = {}
        for name in self._response_fields:
            value: Any = result
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                fields[name] = value
        return fields


# --------------------------------------------------------------------------- text to tokens and back

MAX_TEXT = 1_000_000
"""Maximum number of characters to tokenize."""


async def tokenize(call: Call) -> Response:
    """Return the token ids of a text, or of a list of texts and token ids.

    If `with_pieces` is set, each token has its text, or its bytes if they are not UTF-8.
    """
    fields, vocabulary = call.fields, call.model.vocabulary
    is_list = isinstance(fields.data.get("content"), list)
    special, bos = fields.boolean("parse_special", True), fields.boolean("add_special")
    pieces = fields.list("content") if is_list else [fields.string("content") or ""]
    fields.check_count("content", sum(isinstance(item, str) for item in pieces), MAX_ITEMS, "strings")
    fields.check_count(
        "content", sum(len(item) if isinstance(item, str) else 1 for item in pieces), MAX_TEXT, "characters"
    )

    def respond_with_tokens() -> Response:
        tokens: list[int] = []
        for i, piece in enumerate(pieces):
            if isinstance(piece, str):
                tokens += vocabulary.tokenize(piece, special=special, add_bos=bos and i == 0)
            else:
                tokens.append(check_token(vocabulary, piece, "content"))
        if not fields.boolean("with_pieces"):
            return JsonResponse({"tokens": tokens})
        shown = ({"id": token, "piece": _decode_piece(vocabulary.display_piece(token))} for token in tokens)
        return JsonResponse({"tokens": Encoded.join(shown)})

    return await asyncio.to_thread(respond_with_tokens)


def _decode_piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(call: Call) -> Response:
    """Return the text of token ids, with the names of control tokens, so that `/tokenize` returns the same tokens."""
    vocabulary, fields = call.model.vocabulary, call.fields

    def join() -> str:
        tokens = [check_token(vocabulary, token, "tokens") for token in fields.list("tokens")]
        pieces = {token: vocabulary.display_piece(token) for token in set(tokens)}  # lists may be long
        return b"".join([pieces[token] for token in tokens]).decode("utf-8", "replace")

    return JsonResponse({"content": await asyncio.to_thread(join)})


async def apply_template(call: Call) -> Response:
    """Return the prompt of a chat as text, without the first control token if `/completion` adds it."""
    vocabulary = call.model.vocabulary

    def render() -> ChatPrompt:
        task, _ = read_chat(call.fields)
        return render_prompt(call.model, replace(task, json_format=read_response_format(call.fields)))

    prompt = await asyncio.to_thread(render)
    bos = vocabulary.ends[0]
    adds_bos = vocabulary.tokenize("")[:1] == vocabulary.tokenize(bos, special=True, add_bos=False)
    return JsonResponse({"prompt": prompt.text.removeprefix(bos) if adds_bos else prompt.text})


# --------------------------------------------------------------------------- fill-in-the-middle


NEAR = 2048  # maximum number of tokens of prefix and suffix: the size of a batch in llama-server

_NAMELESS = "tmp"  # llama-server's name for a file without a name


async def infill(call: Call) -> Response:
    """Generate the text between a prefix and a suffix, for llama.vim and llama.vscode; `/completion`'s fields apply.

    `input_extra` contains parts of the project's other files. The model sees them, and drafts come from them.
    `t_max_prompt_ms` is ignored, as in llama-server: an editor disconnects if it no longer needs a suggestion, and the
    next request would have to read the rest of the prompt anyway.
    """
    return await continue_prompts(call, [await asyncio.to_thread(_make_infill_prompt, call)])


def _make_infill_prompt(call: Call) -> list[int]:
    fields, model = call.fields, call.model
    before, after = fields.require_string("input_prefix"), fields.require_string("input_suffix")
    extra_files = [
        (_NAMELESS if (name := item.string("filename")) is None else name, item.require_string("text"))
        for item in fields.objects("input_extra")
    ]
    limits = Limits.for_context(model.n_ctx, near=NEAR, n_predict=read_max_tokens(fields) or 0)
    prompt = fields.string("prompt") or ""
    return fill_in_prompt(model, before, after, prompt=prompt, other_files=extra_files, limits=limits)


class LineLimits:
    """Limits that end an editor's suggestion before the model does.

    The indentation of a line is known only when its first other character arrives. Until then the line is held back, so
    that the text does not depend on the lengths of tokens and drafts.

    Args:
        seconds: Seconds after the first token, after which the text ends with the next line end (`t_max_predict_ms`).
        indent: Minimum number of spaces and tabs at the start of each line except the first (`n_indent`). The text ends
            before a line with fewer. A blank line has 0, so it ends the text, as in llama-server.
        clock: Function that returns the time in seconds.
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
