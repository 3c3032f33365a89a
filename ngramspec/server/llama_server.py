"""llama-server's endpoints `/completion`, `/infill`, `/tokenize`, `/detokenize` and `/apply-template`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from ngramspec.fill_in import Limits
from ngramspec.request import Request
from ngramspec.server.answer import End, Piece, TextEvent
from ngramspec.server.call import MAX_ITEMS, Call, json_answer
from ngramspec.server.chat import chat_prompt
from ngramspec.server.common_fields import check_token, read_format, read_max_tokens, read_sampling
from ngramspec.server.native_answer import native_answer
from ngramspec.server.openai_chat import read_chat
from ngramspec.server.openai_completions import gap_prompt, read_prompts, read_requests, several
from ngramspec.server.reply import Reply, chunk, logprobs_content, respond
from ngramspec.server.telemetry import read_telemetry
from ngramspec.tool_calls.deltas import Delta


async def completion(call: Call) -> Response:
    """Continue one prompt, or several."""
    prompts = await asyncio.to_thread(read_prompts, call.model, call.given)
    return await continue_prompts(call, prompts, listed=several(call.given.data["prompt"]))


async def continue_prompts(call: Call, prompts: Sequence[Sequence[int]], *, listed: bool = False) -> Response:
    """Continue each prompt, once for each requested answer; if `listed`, the response is a list even for one answer."""
    given = call.given
    n_probs = given.whole(given.name("n_probs", "logprobs"), 0, most=call.model.vocabulary.n_vocab) or None
    cache_prompt = given.flag("cache_prompt", True)
    sampling = await asyncio.to_thread(read_sampling, call)
    requests = read_requests(
        call, prompts, sampling, n_probs, cache_prompt=cache_prompt, post_sampling=given.flag("post_sampling_probs")
    )
    milliseconds = given.whole("t_max_predict_ms", -1, least=-(2**31)) or 0
    seconds, indent = milliseconds / 1000 if milliseconds > 0 else None, given.whole("n_indent", 0) or 0
    limits = [LineLimits(seconds, indent) for _ in requests] if seconds is not None or indent else []
    reply = NativeReply(call, requests, listed or len(requests) > 1)
    return await respond(call, requests, reply, limits)


class NativeReply(Reply):
    """A response with completions, or its stream; if `listed`, the response is a list."""

    def __init__(self, call: Call, requests: Sequence[Request], listed: bool) -> None:
        super().__init__(len(requests))
        given = call.given
        self._call, self._model, self._requests, self._listed = call, call.model, requests, listed
        self._tokens_too = given.flag("return_tokens")
        self._shown = given.texts("response_fields", most=256)  # names of the fields to return; empty means all
        self._telemetry = [read_telemetry(call) for _ in requests]

    def whole(self) -> Any:
        told = [self._end(number, streamed=False) for number in range(len(self.answers))]
        return told if self._listed else told[0]

    def chunks(self, number: int, event: TextEvent) -> str:
        telemetry = self._telemetry[number]
        more = telemetry.update(event) if telemetry else {}
        if isinstance(event, End):
            return chunk(self._end(number, streamed=True))
        if isinstance(event, Piece):
            return self._piece(number, event, more)
        if "prompt_progress" in more:
            return chunk({"index": number, "content": "", "tokens": [], "stop": False, **more})
        return ""

    def _piece(self, number: int, piece: Piece, more: Mapping[str, Any]) -> str:
        answer, text = self.answers[number], piece.text
        if not (text or piece.steps):
            return ""
        told = {
            "index": number,
            "content": text,
            "tokens": [token for step in piece.steps for token in step.tokens],
            "stop": False,
            "id_slot": answer.slot,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": answer.prompt_tokens,
            **more,
        }
        if self._requests[number].logprobs is not None:
            told["completion_probabilities"] = logprobs_content(
                self._model, piece.logprobs, self._requests[number].post_sampling
            )
        return chunk(told)

    def _end(self, number: int, *, streamed: bool) -> dict[str, Any]:
        """Return the answer, or the last chunk of a stream."""
        answer, request = self.answers[number], self._requests[number]
        has_prompt = not self._shown or "prompt" in self._shown
        result = native_answer(self._call, request, answer, has_prompt=has_prompt) | {"index": number}
        if streamed:
            result["content"] = ""
        if streamed or not self._tokens_too:
            result["tokens"] = []
        if request.logprobs is not None and not streamed:
            result["completion_probabilities"] = logprobs_content(self._model, answer.logprobs, request.post_sampling)
        return _chosen(result, self._shown) if self._shown else result


def _chosen(told: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields with these names, where "a/b" is the field b of a; unknown names are ignored."""
    found: dict[str, Any] = {}
    for name in names:
        value: Any = told
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            found[name] = value
    return found


# --------------------------------------------------------------------------- text to tokens and back

MAX_TEXT = 1_000_000
"""Maximum number of characters to tokenize."""


async def tokenize(call: Call) -> Response:
    """Return the token ids of a text, or of a list of texts and token ids.

    If `with_pieces` is set, each token has its text, or its bytes if they are not UTF-8.
    """
    given, vocabulary = call.given, call.model.vocabulary
    mixed = isinstance(given.data.get("content"), list)
    special, bos = given.flag("parse_special", True), given.flag("add_special")
    pieces = given.list("content") if mixed else [given.text("content") or ""]
    given.check_count("content", sum(isinstance(one, str) for one in pieces), MAX_ITEMS, "strings")
    given.check_count("content", sum(len(one) if isinstance(one, str) else 1 for one in pieces), MAX_TEXT, "characters")

    def read() -> list[Any]:
        tokens: list[int] = []
        for i, piece in enumerate(pieces):
            if isinstance(piece, str):
                tokens += vocabulary.tokenize(piece, special=special, add_bos=bos and i == 0)
            else:
                tokens.append(check_token(vocabulary, piece, "content"))
        if not given.flag("with_pieces"):
            return tokens
        return [{"id": token, "piece": _piece(vocabulary.shown(token))} for token in tokens]

    return json_answer({"tokens": await asyncio.to_thread(read)})


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(call: Call) -> Response:
    """Return the text of token ids, with the names of control tokens, so that `/tokenize` returns the same tokens."""
    vocabulary, given = call.model.vocabulary, call.given

    def join() -> str:
        tokens = [check_token(vocabulary, token, "tokens") for token in given.list("tokens")]
        pieces = {token: vocabulary.shown(token) for token in set(tokens)}  # lists may be long
        return b"".join([pieces[token] for token in tokens]).decode("utf-8", "replace")

    return json_answer({"content": await asyncio.to_thread(join)})


async def apply_template(call: Call) -> Response:
    """Return the prompt of a chat as text, without the first control token if `/completion` adds it."""
    model, (task, _) = call.model, await asyncio.to_thread(read_chat, call.given)
    task = replace(task, form=read_format(call.given))
    prompt = await asyncio.to_thread(chat_prompt, model, task)
    vocabulary = model.vocabulary
    bos = vocabulary.ends[0]
    adds_bos = vocabulary.tokenize("")[:1] == vocabulary.tokenize(bos, special=True, add_bos=False)
    return json_answer({"prompt": prompt.text.removeprefix(bos) if adds_bos else prompt.text})


# --------------------------------------------------------------------------- fill-in-the-middle


NEAR = 2048  # maximum number of tokens of prefix and suffix: the size of a batch in llama-server

_NAMELESS = "tmp"  # llama-server's name for a file without a name


async def infill(call: Call) -> Response:
    """Generate the text between a prefix and a suffix, for llama.vim and llama.vscode; `/completion`'s fields apply.

    `input_extra` contains parts of the project's other files. The model sees them, and drafts come from them.
    `t_max_prompt_ms` is ignored, as in llama-server: an editor disconnects if it no longer needs a suggestion, and the
    next request would have to read the rest of the prompt anyway.
    """
    return await continue_prompts(call, [await asyncio.to_thread(_prompt, call)])


def _prompt(call: Call) -> list[int]:
    """Return the token ids of the prompt."""
    given, model = call.given, call.model
    before, after = given.needed_text("input_prefix"), given.needed_text("input_suffix")
    others = [
        (_NAMELESS if (name := item.text("filename")) is None else name, item.needed_text("text"))
        for item in given.objects("input_extra")
    ]
    prompt = given.text("prompt") or ""
    limits = Limits.within(model.n_ctx, near=NEAR, n_predict=read_max_tokens(given) or 0)
    return gap_prompt(model, before, after, prompt, others, limits)


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
        self._began: float | None = None
        self._at_margin = False
        self._held = ""

    def push(self, text: str) -> list[Delta]:
        """Return the text that can be shown after `text` was generated; call it for tokens without text too."""
        if self.ended:
            return []
        now = self._clock()
        if self._began is None:
            self._began = now
        line_end = text.find("\n")
        if self._seconds is not None and now - self._began > self._seconds and line_end >= 0:
            self.ended = True
            text = text[: line_end + 1]
        text = self._indented(text) if self._indent else text
        return [Delta("text", text)] if text else []

    def finish(self, cut: bool = False) -> list[Delta]:
        """Return the held-back text at the end of the response."""
        rest, self._held = self._held, ""
        return [Delta("text", rest)] if rest and not self.ended else []

    def _indented(self, text: str) -> str:
        text, self._held = self._held + text, ""
        line = 0
        while True:
            if self._at_margin:
                margin = len(text) - line - len(text[line:].lstrip(" \t"))
                if line + margin == len(text):
                    self._held = text[line:]
                    return text[:line]
                if margin < self._indent:
                    self.ended = True
                    return text[:line]
            line_end = text.find("\n", line)
            self._at_margin = line_end >= 0
            if not self._at_margin:
                return text
            line = line_end + 1
