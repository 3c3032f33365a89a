"""What the decoding loop fills its steps with: the text that tokens release, and what was asked for besides."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.acceptance.rules import Judgement
from ngramspec.backend import Logits, TargetProtocol
from ngramspec.decoding.step import Detail, StopReason
from ngramspec.decoding.text import TextStream
from ngramspec.drafting.draft import Draft
from ngramspec.sampling.logprobs import Logprobs, logprobs


class GenerationText:
    """The text of one generation: its pieces, and when and why it ends."""

    def __init__(self, target: TargetProtocol, stop: Sequence[str], limit: int, out_of: StopReason) -> None:
        self._target = target
        self._stream = TextStream(stop)
        self._out_of = out_of
        self.left = limit
        self.stop: StopReason | None = None

    @property
    def stop_string(self) -> str | None:
        return self._stream.stopped

    def take(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """One piece of text per token, up to the token that ends the text."""
        pieces = []
        for token in tokens:
            self.left -= 1
            eog = self._target.is_eog(token)
            piece = "" if eog else self._stream.push(self._target.piece(token))
            if not eog and self.left > 0 and self._stream.stopped is None:
                pieces.append(piece)
                continue
            if self._stream.stopped is None:
                piece += self._stream.finish()
            self.stop = "stop" if self._stream.stopped else "eog" if eog else self._out_of
            pieces.append(piece)
            break
        return tuple(pieces)


class StepReport:
    """What a step tells besides, where it was asked for."""

    def __init__(self, logprobs: int | None, watched: list[Judgement] | None) -> None:
        self._count = logprobs
        self._watched = watched

    def logprobs(self, rows: Logits, tokens: Sequence[int]) -> tuple[Logprobs, ...]:
        if self._count is None:
            return ()
        return tuple(logprobs(row, token, self._count) for row, token in zip(rows, tokens, strict=False))

    def detail(self, position: int, judged: Draft) -> Detail | None:
        if self._watched is None:
            return None
        judgements = tuple(self._watched)
        self._watched.clear()
        return Detail(position, judged, judgements)
