"""OpenAI's `/v1/completions`, with `suffix` and `echo`, and readers of prompts that other endpoints use too."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from encodings import utf_8
from typing import Any

from starlette.responses import Response

from ngramspec.data import ModelError
from ngramspec.fill_in import fill_in
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.request import Request
from ngramspec.sampling.distribution import Logprobs
from ngramspec.sampling.settings import Sampling
from ngramspec.server.answer import Answer
from ngramspec.server.call import Call
from ngramspec.server.constraint_fields import read_response_format
from ngramspec.server.errors import ApiError, bad_field, context_length_error
from ngramspec.server.fields import Fields, describe_value
from ngramspec.server.json_text import Encoded, encode_json
from ngramspec.server.openai_chat import read_logprobs
from ngramspec.server.reasoning import refuse_budget
from ngramspec.server.reply import DONE, FINGERPRINT, Reply, clamp_logprob, respond, token_text, totals
from ngramspec.server.request_fields import (
    MAX_ALTERNATIVES,
    MAX_ANSWERS,
    has_usage_chunk,
    read_max_tokens,
    read_n_answers,
    read_shared_fields,
    read_stop,
    repeat_with_seeds,
)
from ngramspec.server.sampling_fields import check_token, read_sampling
from ngramspec.server.state import ServedModel

MAX_SCORED = 2**22
"""Maximum number of log-probabilities of prompts in a response; each takes about 100 bytes until it is sent."""


async def completions(call: Call) -> Response:
    """Continue one or more texts."""
    requests, echoes = await asyncio.to_thread(_read_request, call)
    answers = [Answer(request, number) for number, request in enumerate(requests)]
    return await respond(call, CompletionReply(call, answers, echoes))


def _read_request(call: Call) -> tuple[list[Request], list[str]]:
    """Return a request for each answer, grouped by prompt, and the text that `echo` puts before each answer."""
    fields, model = call.fields, call.model
    answers = read_n_answers(fields)
    if (fields.integer("best_of", answers) or 0) != answers:
        raise bad_field("best_of", "best_of is not supported; remove it or set n")
    logprobs = _read_logprobs(fields)
    if fields.boolean("post_sampling_probs"):
        raise fields.field_error("post_sampling_probs", "is not supported here; use /completion")
    echo = fields.boolean("echo")
    suffix = fields.string("suffix")
    if echo and suffix and logprobs is not None:
        raise bad_field("echo", "echo with logprobs cannot be combined with suffix")
    if suffix:  # the answer is the text between `prompt` and the suffix, of which nothing is cut
        if not isinstance(fields.data.get("prompt"), str):
            raise bad_field("suffix", "suffix requires a single string as prompt")
        prompts = [fill_in_prompt(model, fields.data["prompt"], suffix)]
    else:
        prompts = read_prompts(model, fields)
    scored = echo and logprobs is not None
    if scored:
        n_scored = sum(map(len, prompts)) * answers * (1 + (logprobs or 0))
        fields.check_count("logprobs", n_scored, MAX_SCORED, "log-probabilities of all prompts")
    sampling = read_sampling(call, schemas=False)
    if form := read_response_format(fields):
        if sampling.grammar is not None:
            raise bad_field("response_format", "response_format cannot be combined with grammar")
        sampling = replace(sampling, grammar=form.make_grammar())
    requests = read_requests(call, prompts, sampling, logprobs, scored=scored)
    texts = _decode_prompts(model, fields, prompts) if echo else [""] * len(prompts)
    return requests, [text for text in texts for _ in range(answers)]


def _read_logprobs(fields: Fields) -> int | None:
    if isinstance(fields.data.get("logprobs"), bool):  # the form of chat completions
        return read_logprobs(fields)
    return fields.integer("logprobs", maximum=MAX_ALTERNATIVES)


def _decode_prompts(model: ServedModel, fields: Fields, prompts: Sequence[Sequence[int]]) -> list[str]:
    value = fields.data["prompt"]
    values = value if is_prompt_list(value) else [value]
    return [
        item if isinstance(item, str) else b"".join(map(model.vocabulary.piece, prompt)).decode("utf-8", "replace")
        for item, prompt in zip(values, prompts, strict=True)
    ]


_Row = tuple[int, int, Logprobs | None]
"""A token, its offset in the text, and its logprobs."""


class _Offsets:
    """Counts the characters before each token of a text; `start` is the number of characters before the first token."""

    def __init__(self, start: int = 0) -> None:
        self._count, self._decoder = start, utf_8.IncrementalDecoder("replace")

    def add(self, piece: bytes) -> int:
        """Return the offset of the next token; a token that begins within a character has the offset of that."""
        offset = self._count
        self._count += len(self._decoder.decode(piece))
        return offset


def _find_offsets(vocabulary: Vocabulary, prompt: Sequence[int], text: str) -> list[int]:
    """Return the offset of each token of a prompt in its text.

    The tokens may begin with a start token and a space that the text lacks. A text that was made of tokens also lacks
    the names of control tokens.
    """
    for read in (vocabulary.display_piece, vocabulary.piece):
        pieces = [read(token) for token in prompt]
        shown = b"".join(pieces).decode("utf-8", "replace")
        if shown.endswith(text):
            break
    offsets = _Offsets(len(text) - len(shown))
    return [max(0, offsets.add(piece)) for piece in pieces]


class CompletionReply(Reply):
    """A response with completions, or its stream. `echoes` are the texts before each answer."""

    ending = DONE

    def __init__(self, call: Call, answers: Sequence[Answer], echoes: Sequence[str]) -> None:
        super().__init__(call, answers)
        self._n_answers = read_n_answers(call.fields)  # number of answers to one prompt
        self._has_usage_event = has_usage_chunk(call) or not call.streamed
        self._pending_echoes = dict(enumerate(echoes))  # text before each answer of which nothing was sent
        self._offsets = [_Offsets(len(echo)) for echo in echoes]
        self._head = {
            "id": f"cmpl-{secrets.token_urlsafe(18)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": call.fields.string("model") or self.model.name,
            "system_fingerprint": FINGERPRINT,
        }
        self.body = self._head | {"choices": [{"index": answer.number} for answer in answers]}

    def events(self, answer: Answer) -> list[dict[str, Any]]:
        events, number, more = [], answer.number, {}
        if (answer.changes or answer.scored or answer.done) and number in self._pending_echoes:
            echo = self._pending_echoes.pop(number)
            if echo or answer.request.scored:
                events.append(self._event(number, echo, self._echo_table(answer, echo)))
        text = answer.new_text
        if text or answer.logprobs:
            events.append(self._event(number, text, self._answer_table(answer, answer.logprobs)))
        if answer.done is not None:
            if not self._has_usage_event and all(answer.done for answer in self.answers):
                more = totals(self.answers, self._n_answers, with_usage=False)
            events.append(self._event(number, "", self._answer_table(answer, ()), answer.reason) | more)
        return events

    def last_events(self) -> list[dict[str, Any]]:
        return [{**self._head, "choices": [], **totals(self.answers, self._n_answers)}] if self._has_usage_event else []

    def _event(self, number: int, text: str, table: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": number, "text": text, "finish_reason": reason, "logprobs": table}
        return {**self._head, "choices": [choice]}

    def _echo_table(self, answer: Answer, echo: str) -> dict[str, Any] | None:
        """Return the logprobs of the prompt, of which the first token has none."""
        request = answer.request
        if not request.scored:
            return None if request.logprobs is None else self._table(())
        offsets = _find_offsets(self.model.vocabulary, request.prompt, echo)
        return self._table(zip(request.prompt, offsets, (None, *answer.scored), strict=True))

    def _answer_table(self, answer: Answer, logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        if answer.request.logprobs is None:
            return None
        offsets, piece = self._offsets[answer.number], self.model.vocabulary.piece
        return self._table((entry.token, offsets.add(piece(entry.token)), entry) for entry in logprobs)

    def _table(self, rows: Iterable[_Row]) -> dict[str, Any]:
        """Return OpenAI's table of logprobs, by column; the first token of a prompt has null instead of a value."""
        table: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, offset, entry in rows:
            top: dict[str, float] = {}
            for alternative, logprob in (*entry.top, (token, entry.logprob)) if entry is not None else ():
                top.setdefault(token_text(self.model, alternative), clamp_logprob(logprob))
            table["tokens"].append(token_text(self.model, token))
            table["token_logprobs"].append(None if entry is None else clamp_logprob(entry.logprob))
            table["top_logprobs"].append(None if entry is None else Encoded([encode_json(top)]))
            table["text_offset"].append(offset)
        return table


# --------------------------------------------------------------------------- prompts


def read_prompts(model: ServedModel, fields: Fields) -> list[list[int]]:
    """Return the token ids of each prompt. Control tokens in texts are parsed, because clients write them."""
    value = fields.data.get("prompt")
    if value is None:
        raise bad_field("prompt", "prompt is missing")
    values = value if is_prompt_list(value) else [value]
    fields.check_count("prompt", len(values), MAX_ANSWERS, "prompts")
    prompts = [read_tokens(model, prompt, "prompt") for prompt in values]
    if not prompts or not all(prompts):
        raise bad_field("prompt", "prompt must not be empty")
    return prompts


def is_prompt_list(value: Any) -> bool:
    """Return True if the value of `prompt` is a list of prompts, and not one prompt of tokens and texts."""
    if not isinstance(value, list):
        return False
    return any(isinstance(item, list | dict) for item in value) or all(isinstance(item, str) for item in value)


def read_tokens(model: ServedModel, value: Any, name: str, n_ctx: int | None = None) -> list[int]:
    """Return the token ids of a prompt: a text, a list of token ids and texts, or llama-server's object.

    `name` is the field for error messages, and `n_ctx` the size of the context; `None` means that of a request.
    """
    vocabulary = model.vocabulary
    if isinstance(value, dict):
        value = _read_object(Fields(value, f"{name}."))
    if isinstance(value, str):
        model.check_size(len(value), n_ctx)
        return list(vocabulary.tokenize(value, special=True))
    if not isinstance(value, list):
        raise bad_field(name, f"{name} must contain strings, token ids or lists of them, got {describe_value(value)}")
    room = model.n_ctx if n_ctx is None else n_ctx
    if len(value) > room:
        raise context_length_error(len(value), room)
    tokens: list[int] = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            model.check_size(len(item), n_ctx)
            tokens += vocabulary.tokenize(item, special=True, add_bos=i == 0)
        else:
            tokens.append(check_token(vocabulary, item, name))
        if len(tokens) > room:
            raise context_length_error(len(tokens), room)
    return tokens


def _read_object(fields: Fields) -> str:
    """Return the text of llama-server's objects for prompts with images, of which only texts are supported."""
    if "content" in fields:
        return "".join([_read_part(part) for part in fields.objects("content")])
    if "multimodal_data" in fields:
        raise fields.field_error("multimodal_data", "is not supported; the server accepts only text")
    return fields.require_string("prompt_string")


def _read_part(part: Fields) -> str:
    if part.string("type") != "text":
        raise part.value_error("type", "'text', the only supported type")
    return part.require_string("text")


def read_requests(
    call: Call, prompts: Sequence[Sequence[int]], sampling: Sampling, logprobs: int | None, **more: Any
) -> list[Request]:
    """Return the requests for each prompt, one for each requested answer; `more` contains fields of `Request`."""
    fields, count = call.fields, read_n_answers(call.fields, len(prompts))
    refuse_budget(fields)
    common = read_shared_fields(call, sampling, read_max_tokens(fields), read_stop(fields))
    choices = repeat_with_seeds(replace(common, logprobs=logprobs, **more), count, len(prompts))
    return [replace(choice, prompt=prompt) for prompt in prompts for choice in choices]


def fill_in_prompt(model: ServedModel, before: str, after: str, **more: Any) -> list[int]:
    """Return the prompt for the text between two texts; `more` contains further arguments of `fill_in`."""
    try:
        return fill_in(model.vocabulary, before, after, suffix_first=model.suffix_first, **more)
    except ModelError as error:
        raise ApiError(400, str(error), type="not_supported_error") from error
