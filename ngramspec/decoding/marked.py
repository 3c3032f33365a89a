"""`MarkedText`: a text in spans, each with what became of its tokens: drafted and kept, refused, corrected."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ngramspec.decoding.step import Step
from ngramspec.reports.report import Span

Piece = Callable[[int], bytes]
"""The bytes that a token stands for."""


class MarkedText:
    """Collects the steps of a text.

    Args:
        piece: of a token.

    Attributes:
        spans: neighbours with one mark are one span; none is empty.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self.spans: list[Span] = []

    def add(self, step: Step) -> None:
        """Take in a step."""
        for text, mark in spans_of(step, self._piece):
            if self.spans and self.spans[-1].mark == mark:
                self.spans[-1] = Span(self.spans[-1].text + text, mark)
            elif text:
                self.spans.append(Span(text, mark))


def spans_of(step: Step, piece: Piece) -> Iterator[Span]:
    """A step's text, token by token. Refused tokens never were text; what is no whole character in them is U+FFFD."""
    # A text that ended inside its draft has no token at index `accepted`: the rest was not refused, only unread.
    for i, released in enumerate(step.pieces):
        refused = i == step.accepted and step.refused
        if refused:
            yield Span(b"".join(map(piece, step.refused)).decode(errors="replace"), "refused")
        yield Span(released, "kept" if i < step.accepted else "corrected" if refused else "")
