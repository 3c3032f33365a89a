"""OpenAI's `/v1/completions`, with `suffix` and `echo`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from encodings import utf_8
from typing import Annotated, Any

from pydantic import PlainValidator, TypeAdapter
from starlette.responses import Response

from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.answer import Answer
from ngramspec.server.body import FieldError, PromptField, check_count, refuse, whole
from ngramspec.server.generation import (
    Alternatives,
    ResponseFormat,
    TextGeneration,
    fill_in_prompt,
    make_text_answers,
    read_logprobs,
    read_prompts,
)
from ngramspec.server.json_text import ApiError, Encoded, encode_json
from ngramspec.server.limits import MAX_SCORED
from ngramspec.server.reply import ChunkReply, clamp_logprob, respond, token_text
from ngramspec.server.state import Call


def _read_count(value: Any) -> int | bool:
    """Return the value of `logprobs`, which is true or false in the form of chat completions."""
    return value if isinstance(value, bool) else _ALTERNATIVES.validate_python(value)


_ALTERNATIVES: TypeAdapter[int] = TypeAdapter(Alternatives)


class CompletionBody(TextGeneration):
    prompt: PromptField | None = None
    suffix: str = ""
    echo: bool = False
    best_of: Annotated[int, whole()] | None = None
    logprobs: Annotated[int | bool | None, PlainValidator(_read_count)] = None
    top_logprobs: Alternatives = 0
    response_format: ResponseFormat = ResponseFormat()
    post_sampling_probs: Annotated[bool, refuse("is not supported here; use /completion")] = False


async def completions(call: Call[CompletionBody]) -> Response:
    return await respond(lambda: _read_request(call))


def _read_request(call: Call[CompletionBody]) -> CompletionReply:
    """Return a reply with an answer for each choice, grouped by prompt, and the text that `echo` puts before each."""
    body, model = call.body, call.model
    if body.best_of not in (None, body.n):
        raise ApiError(400, "best_of is not supported; remove it or set n", param="best_of")
    logprobs = read_logprobs(body.logprobs, body.top_logprobs) if isinstance(body.logprobs, bool) else body.logprobs
    scored = body.echo and logprobs is not None
    if scored and body.suffix:
        raise ApiError(400, "echo with logprobs cannot be combined with suffix", param="echo")
    if body.suffix:  # the answer is the text between `prompt` and the suffix, of which nothing is cut
        text = body.prompt.values[0] if body.prompt is not None and not body.prompt.is_list else None
        if not isinstance(text, str):
            raise FieldError("requires a single string as prompt", "suffix")
        prompts = [fill_in_prompt(model, text, body.suffix)]
    else:
        prompts = read_prompts(model, body.prompt)
    if scored:
        n_scored = sum(map(len, prompts)) * body.n * (1 + (logprobs or 0))
        check_count(n_scored, MAX_SCORED, "log-probabilities of all prompts", "logprobs")
    answers = make_text_answers(call, body, prompts, body.response_format.read(), logprobs=logprobs, scored=scored)
    echoes = [""] * len(answers)
    if body.echo and body.prompt is not None:
        texts = [
            item if isinstance(item, str) else b"".join(map(model.vocabulary.piece, prompt)).decode("utf-8", "replace")
            for item, prompt in zip(body.prompt.values, prompts, strict=True)
        ]
        echoes = [text for text in texts for _ in range(body.n)]
    return CompletionReply(call, answers, echoes)


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


class CompletionReply(ChunkReply):
    """A response with completions, or its stream. `echoes` are the texts before each answer."""

    def __init__(self, call: Call[CompletionBody], answers: Sequence[Answer], echoes: Sequence[str]) -> None:
        super().__init__(call, answers, "cmpl", {"object": "text_completion"}, {})
        self._pending_echoes = dict(enumerate(echoes))  # text before each answer of which nothing was sent
        self._offsets = [_Offsets(len(echo)) for echo in echoes]

    def events(self, answer: Answer) -> list[dict[str, Any]]:
        events, number, more = [], answer.number, {}
        if (answer.changes or answer.scored or answer.done) and number in self._pending_echoes:
            echo, prompt, scored = self._pending_echoes.pop(number), list[_Row](), answer.request.scored
            if scored:
                starts = _find_offsets(self.model.vocabulary, answer.request.prompt, echo)
                prompt += zip(answer.request.prompt, starts, (None, *answer.scored), strict=True)
            if echo or scored:
                events.append(self._event(answer, echo, prompt))
        text = answer.new_text
        if text or answer.logprobs:
            offsets, piece = self._offsets[number], self.model.vocabulary.piece
            rows = ((entry.token, offsets.add(piece(entry.token)), entry) for entry in answer.logprobs)
            events.append(self._event(answer, text, rows))
        if answer.done is not None:
            if not self.has_usage_event and all(answer.done for answer in self.answers):
                more = self.timings()
            events += [self._event(answer, "", (), answer.reason) | more, *self.last_events()]
        return events

    def _event(self, answer: Answer, text: str, rows: Iterable[_Row], reason: str | None = None) -> dict[str, Any]:
        table = None if answer.request.logprobs is None else self._table(rows)
        choice = {"index": answer.number, "text": text, "finish_reason": reason, "logprobs": table}
        return {**self.chunk, "choices": [choice]}

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
