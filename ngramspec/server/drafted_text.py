"""`DraftedText`: which of an answer's characters were accepted drafts, after a parser made content of its text."""

from __future__ import annotations

from ngramspec.server.generate import Piece
from ngramspec.tool_calls.deltas import CallBegin, Delta, Span


class DraftedText:
    """Finds what a parser tells in the text that it was given, in order, and so the tokens that it is of.

    A parser drops marks and white space and keeps the order of the rest. What it tells in other words than it read is
    not found, and nothing is said of it.
    """

    def __init__(self) -> None:
        self._text = ""  # that nothing was told of yet
        self._spans: list[Span] = []  # of this text

    def mark(self, piece: Piece) -> list[Delta]:
        """The deltas of a further piece, with the spans of their texts that were drafted."""
        if piece.step is not None:
            # A token's text that is held back comes out with the next one's, and is its.
            for i, text in enumerate(piece.step.pieces):
                start = len(self._text)
                self._text += text
                if text and i < piece.step.accepted:
                    self._spans.append((start, len(self._text)))
        return [self._marked(delta) for delta in piece.deltas]

    def _marked(self, delta: Delta) -> Delta:
        if isinstance(delta, CallBegin):
            return delta
        at = self._text.find(delta.text)
        if at < 0:
            return delta
        end = at + len(delta.text)
        found = _joined([(max(a, at) - at, min(b, end) - at) for a, b in self._spans if a < end and b > at])
        self._text = self._text[end:]
        self._spans = [(max(a - end, 0), b - end) for a, b in self._spans if b > end]
        return delta._replace(drafted=found)


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    """Spans in order, those that touch as one."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)
