"""What answers tell of themselves in the words of OpenAI and llama-server: usage, timings, logprobs, drafts."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.call import ServedModel
from ngramspec.server.generate import Piece
from ngramspec.server.reply import Answer
from ngramspec.steps import Stats
from ngramspec.tool_calls.deltas import Delta
from ngramspec.version import __version__

Span = tuple[int, int]  # where a part of a text begins and ends, in characters

FINGERPRINT = f"ngramspec-{__version__}"


def timings(prompt_tokens: int, stats: Stats, cached: int, prompt_seconds: float, seconds: float) -> dict[str, Any]:
    """llama-server's `timings`; what was drafted is told only where something was, and so are close calls.

    `gain` is the time that the tokens would have taken one by one, by the cost curve, over the time they took.
    """
    told = {
        "cache_n": cached,
        **_rates("prompt", prompt_tokens - cached, prompt_seconds),
        **_rates("predicted", stats.generated, seconds),
    }
    if stats.drafted:
        told |= {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted}
    if stats.estimated_gain is not None:
        told["gain"] = stats.estimated_gain
    if stats.close_calls:
        told["close_calls"] = stats.close_calls
    return told


def prediction_usage(model: ServedModel, prediction: str, texts: Sequence[Sequence[int]]) -> dict[str, int]:
    """How many tokens of a prediction came in the texts, and how many did not; nothing where there is none."""
    if not prediction:
        return {}
    tokens = model.vocabulary.tokenize(prediction, add_bos=False)
    blocks = [block for text in texts for block in SequenceMatcher(None, tokens, text).get_matching_blocks()]
    accepted = sum([block.size for block in blocks])
    rejected = len(tokens) * len(texts) - accepted
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def _rates(what: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{what}_n": tokens,
        f"{what}_ms": 1000 * seconds,
        f"{what}_per_token_ms": 1000 * seconds / tokens if tokens else 0.0,
        f"{what}_per_second": tokens / seconds if seconds else 0.0,
    }


def totals(answers: Sequence[Answer], each: int, usage_too: bool = True) -> dict[str, Any]:
    """What is told once, when all have ended: the last one's timings, and the usage; `each`: answers to one prompt."""
    ends = [answer.end for answer in answers if answer.end is not None]
    told: dict[str, Any] = {"timings": timings(answers[-1].prompt_tokens, *ends[-1].done[1:])}
    if usage_too:
        cached = sum(min(end.done.cached for end in ends[i : i + each]) for i in range(0, len(ends), each))
        prompt_tokens = sum(answer.prompt_tokens for answer in answers[::each])
        generated = sum(end.done.stats.generated for end in ends)
        told["usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
    return told


def logprobs_content(model: ServedModel, found: Sequence[Logprobs]) -> list[dict[str, Any]]:
    """Logprobs as a chat tells them, with llama-server's ids."""
    return [
        _token(model, one.token, one.logprob) | {"top_logprobs": [_token(model, *other) for other in one.top]}
        for one in found
    ]


def _token(model: ServedModel, token: int, logprob: float) -> dict[str, Any]:
    raw = model.vocabulary.shown(token)
    return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": finite(logprob)}


def finite(logprob: float) -> float:
    """A logprob that JSON can hold: that of a token which cannot come is OpenAI's, -9999."""
    return max(logprob, -9999.0)


def token_text(model: ServedModel, token: int) -> str:
    """A token as a key of a table: half a character is spelled in bytes, as OpenAI does it."""
    raw: bytes = model.vocabulary.shown(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


# --------------------------------------------------------------------------- drafts


class DraftedText:
    """Finds what a parser tells in the text that it was given, in order, and so the tokens that it is of.

    What it tells in other words than it read is not found, and nothing is said of it.
    """

    def __init__(self) -> None:
        self._text = ""  # that nothing was told of yet
        self._spans: list[Span] = []  # of this text

    def mark(self, piece: Piece) -> list[tuple[Delta, list[Span]]]:
        """The deltas of a further piece, each with the spans of its text that were drafted, in order."""
        if piece.step is not None:
            # A token's text that is held back comes out with the next one's, and is its.
            for i, text in enumerate(piece.step.pieces):
                start = len(self._text)
                self._text += text
                if text and i < piece.step.accepted:
                    self._spans.append((start, len(self._text)))
        return [(delta, self._found(delta.text)) for delta in piece.deltas]

    def _found(self, text: str) -> list[Span]:
        """What was drafted of the text that comes next; spans that touch are one."""
        at = self._text.find(text)
        if not text or at < 0:
            return []
        end = at + len(text)
        joined: list[Span] = []
        for first, last in self._spans:
            start, stop = max(first, at) - at, min(last, end) - at
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            elif start < stop:
                joined.append((start, stop))
        self._text = self._text[end:]
        self._spans = [(max(a - end, 0), b - end) for a, b in self._spans if b > end]
        return joined
