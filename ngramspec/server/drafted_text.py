"""`DraftedText`: the accepted draft tokens in the text of an answer, for `return_drafts`."""

from __future__ import annotations

from collections.abc import Iterable

from ngramspec.steps import Step

Span = tuple[int, int]
"""First character of a part of a text, and the first one after it."""


class DraftedText:
    """Finds the texts that a parser returns, in order, in the text that it received, and so the tokens they consist of.

    Text that the parser changed is not found, and has no spans.
    """

    def __init__(self) -> None:
        self._text = ""  # text that `find` has not reached yet
        self._spans: list[Span] = []  # drafted parts of this text

    def add(self, steps: Iterable[Step]) -> None:
        """Add the text of steps."""
        for step in steps:
            # Text that a token held back comes out with the next token, and belongs to it.
            for i, text in enumerate(step.pieces):
                start = len(self._text)
                self._text += text
                if text and i < step.accepted:
                    self._spans.append((start, len(self._text)))

    def find(self, text: str) -> list[Span]:
        """Return the drafted spans of the next text; adjacent spans are merged."""
        at = self._text.find(text)
        if not text or at < 0:
            return []
        end = at + len(text)
        spans: list[Span] = []
        for first, last in self._spans:
            start, stop = max(first, at) - at, min(last, end) - at
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            elif start < stop:
                spans.append((start, stop))
        self._text = self._text[end:]
        self._spans = [(max(a - end, 0), b - end) for a, b in self._spans if b > end]
        return spans
