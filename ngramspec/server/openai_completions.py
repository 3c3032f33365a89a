"""OpenAI's `/v1/completions`, with `suffix` and `echo`, and readers of prompts that other endpoints use too."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from ngramspec.errors import ModelError
from ngramspec.fill_in import Limits, fill_in
from ngramspec.request import Request
from ngramspec.sampling.distribution import Logprobs
from ngramspec.sampling.settings import Sampling
from ngramspec.server.answer import End, Piece, TextEvent
from ngramspec.server.call import ApiError, Call, Fields, ServedModel, bad_field, dumped, overflow, shown
from ngramspec.server.common_fields import (
    MOST_ANSWERS,
    check_token,
    read_answers,
    read_format,
    read_max_tokens,
    read_sampling,
    read_shared,
    read_stop,
    read_usage_too,
    several_seeds,
)
from ngramspec.server.reasoning import refuse_budget
from ngramspec.server.reply import DONE, FINGERPRINT, Reply, finite, members, respond, token_text, totals


async def completions(call: Call) -> Response:
    """Continue one or more texts."""
    requests, echoes = await asyncio.to_thread(_read, call)
    return await respond(call, requests, CompletionReply(call, requests, echoes))


def _read(call: Call) -> tuple[list[Request], list[str]]:
    """Return a request for each answer, grouped by prompt, and the text that `echo` puts before each answer."""
    given, model = call.given, call.model
    answers = read_answers(given)
    if (given.whole("best_of", answers) or 0) != answers:
        raise bad_field("best_of", "best_of is not supported; remove it or set n")
    logprobs = _read_logprobs(given, model)
    if given.flag("post_sampling_probs"):
        raise given.refused("post_sampling_probs", "is not supported here; use /completion")
    echo = given.flag("echo")
    suffix = given.text("suffix")
    if echo and suffix and logprobs is not None:
        raise bad_field("echo", "echo with logprobs cannot be combined with suffix")
    if suffix:  # the answer is the text between `prompt` and the suffix, of which nothing is cut
        if not isinstance(given.data.get("prompt"), str):
            raise bad_field("suffix", "suffix requires a single string as prompt")
        prompts = [gap_prompt(model, given.data["prompt"], suffix)]
    else:
        prompts = read_prompts(model, given)
    sampling = read_sampling(call, schemas=False)
    if form := read_format(given):
        if sampling.grammar is not None:
            raise bad_field("response_format", "response_format cannot be combined with grammar")
        sampling = replace(sampling, grammar=form.grammar())
    requests = read_requests(call, prompts, sampling, logprobs, scored=echo and logprobs is not None)
    texts = _texts(model, given, prompts) if echo else [""] * len(prompts)
    return requests, [text for text in texts for _ in range(answers)]


def _read_logprobs(given: Fields, model: ServedModel) -> int | None:
    if isinstance(given.data.get("logprobs"), bool):  # the form of chat completions
        return (given.whole("top_logprobs", most=model.vocabulary.n_vocab) or 0) if given.flag("logprobs") else None
    return given.whole("logprobs", most=model.vocabulary.n_vocab)


def _texts(model: ServedModel, given: Fields, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of the prompts."""
    value = given.data["prompt"]
    if isinstance(value, str):
        return [value]
    if all(isinstance(item, str) for item in value):
        return list(value)
    return [b"".join(map(model.vocabulary.piece, prompt)).decode("utf-8", "replace") for prompt in prompts]


class CompletionReply(Reply):
    """A response with completions, or its stream."""

    def __init__(self, call: Call, requests: Sequence[Request], echoes: Sequence[str]) -> None:
        super().__init__(len(requests))
        self._model, self._requests, self._echoes = call.model, requests, echoes
        self._each = read_answers(call.given)  # number of answers to one prompt
        self._usage_too = read_usage_too(call)
        self._untold = dict(enumerate(echoes))  # text before each choice whose stream has not begun
        self._offsets = [0 for _ in self.answers]  # number of characters before the next logprobs of each text
        self._head = {
            "id": f"cmpl-{secrets.token_urlsafe(18)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": call.given.text("model") or self._model.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._begun = f"data: {dumped(self._head)[:-1]}"

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(number, self._echoes[number] + one.text(), one.logprobs, one.end, echoed=True)
            for number, one in enumerate(self.answers)
        ]
        return {**self._head, "choices": choices, **totals(self.answers, self._each)}

    def chunks(self, number: int, event: TextEvent) -> str:
        if not isinstance(event, Piece | End):
            return ""
        text = ""
        if echo := self._untold.pop(number, ""):
            text = self._chunk(self._choice(number, echo, (), None, echoed=True))
        if isinstance(event, End):
            last = all(answer.end for answer in self.answers) and not self._usage_too
            more = totals(self.answers, self._each, usage_too=False) if last else {}
            return text + self._chunk(self._choice(number, "", (), event), **more)
        content = event.text
        if content or event.logprobs:
            text += self._chunk(self._choice(number, content, event.logprobs, None))
        return text

    def last_chunks(self) -> str:
        usage = members({"choices": [], **totals(self.answers, self._each)}) if self._usage_too else ""
        return f"{self._begun}{usage}}}\n\n{DONE}" if usage else DONE

    def _chunk(self, choice: dict[str, Any], **more: Any) -> str:
        return f"{self._begun}{members({'choices': [choice], **more})}}}\n\n"

    def _choice(
        self, number: int, text: str, logprobs: Sequence[Logprobs], end: End | None, echoed: bool = False
    ) -> dict[str, Any]:
        """Return a choice, or a part of one; if `echoed`, it includes the prompt."""
        request, table = self._requests[number], None
        if request.logprobs is not None:
            before = [(request.prompt[0], None), *[(one.token, one) for one in self.answers[number].scored]]
            rows = [(one.token, one) for one in logprobs]
            table = self._table(number, [*before, *rows] if echoed and request.scored else rows)
        reason = None if end is None else end.reason
        return {"index": number, "text": text, "finish_reason": reason, "logprobs": table}

    def _table(self, number: int, rows: Sequence[tuple[int, Logprobs | None]]) -> dict[str, Any]:
        """Return OpenAI's table of logprobs, by column; the first token of a prompt has null instead of a value."""
        table: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, one in rows:
            top: dict[str, float] = {}
            for other, logprob in (*one.top, (token, one.logprob)) if one is not None else ():
                top.setdefault(token_text(self._model, other), finite(logprob))
            table["tokens"].append(token_text(self._model, token))
            table["token_logprobs"].append(None if one is None else finite(one.logprob))
            table["top_logprobs"].append(None if one is None else top)
            table["text_offset"].append(self._offsets[number])
            self._offsets[number] += len(self._model.vocabulary.piece(token).decode("utf-8", "ignore"))
        return table


# --------------------------------------------------------------------------- prompts


def read_prompts(model: ServedModel, given: Fields) -> list[list[int]]:
    """Return the token ids of each prompt. Control tokens in texts are parsed, because clients write them."""
    value = given.data.get("prompt")
    if value is None:
        raise bad_field("prompt", "prompt is missing")
    values = value if several(value) else [value]
    given.check_count("prompt", len(values), MOST_ANSWERS, "prompts")
    prompts = [read_tokens(model, one, "prompt") for one in values]
    if not prompts or not all(prompts):
        raise bad_field("prompt", "prompt must not be empty")
    return prompts


def several(value: Any) -> bool:
    """Return True if the value of `prompt` is a list of prompts, and not one prompt of tokens and texts."""
    if not isinstance(value, list):
        return False
    return any(isinstance(item, list | dict) for item in value) or all(isinstance(item, str) for item in value)


def read_tokens(model: ServedModel, value: Any, name: str, n_ctx: int | None = None) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        model: Model whose tokens they are.
        value: Text, list of token ids and texts, or llama-server's object.
        name: Name of the field, for error messages.
        n_ctx: Size of the context; `None` means that of a request.

    Raises:
        ApiError: The value is invalid, or too long for the context.
    """
    vocabulary = model.vocabulary
    if isinstance(value, dict):
        value = _object_text(Fields(value, f"{name}."))
    if isinstance(value, str):
        model.check_size(len(value), n_ctx)
        return list(vocabulary.tokenize(value, special=True))
    if not isinstance(value, list):
        raise bad_field(name, f"{name} must contain strings, token ids or lists of them, got {shown(value)}")
    room = model.n_ctx if n_ctx is None else n_ctx
    if len(value) > room:
        raise overflow(len(value), room)
    tokens: list[int] = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            model.check_size(len(item), n_ctx)
            tokens += vocabulary.tokenize(item, special=True, add_bos=i == 0)
        else:
            tokens.append(check_token(vocabulary, item, name))
        if len(tokens) > room:
            raise overflow(len(tokens), room)
    return tokens


def _object_text(given: Fields) -> str:
    """Return the text of llama-server's objects for prompts with images, of which only texts are supported."""
    if "content" in given:
        return "".join([_part_text(part) for part in given.objects("content")])
    if images := given.data.keys() - {"prompt_string"}:
        raise given.refused(min(images), "is not supported; the server accepts only text")
    return given.needed_text("prompt_string")


def _part_text(part: Fields) -> str:
    if part.text("type") != "text":
        raise part.wrong("type", "'text', the only supported type")
    return part.needed_text("text")


def read_requests(
    call: Call, prompts: Sequence[Sequence[int]], sampling: Sampling, logprobs: int | None, **more: Any
) -> list[Request]:
    """Return the requests for each prompt, one for each requested answer; `more` contains fields of `Request`."""
    given, count = call.given, read_answers(call.given, len(prompts))
    refuse_budget(given)
    shared = read_shared(call, sampling, read_max_tokens(given), read_stop(given))
    requests = [replace(shared, prompt=prompt, logprobs=logprobs, **more) for prompt in prompts]
    return [one for request in requests for one in several_seeds(request, count)]


def gap_prompt(
    model: ServedModel,
    before: str,
    after: str,
    prompt: str = "",
    others: Sequence[tuple[str, str]] = (),
    limits: Limits | None = None,
) -> list[int]:
    """Return the prompt for the text between two texts; see `ngramspec.fill_in.fill_in`."""
    first = model.suffix_first
    try:
        return fill_in(model.vocabulary, before, after, prompt=prompt, others=others, limits=limits, suffix_first=first)
    except ModelError as error:
        raise ApiError(400, str(error), type="not_supported_error") from error
