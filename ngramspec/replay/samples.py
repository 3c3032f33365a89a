"""`Samples`: how recorded answers were drafted, in text: of each category the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ngramspec.decoding.marked import MarkedText, Piece
from ngramspec.decoding.step import Step
from ngramspec.decoding.text import TextStream
from ngramspec.replay.recording import Recording
from ngramspec.reports.report import Passage


class Samples:
    """Watches replays.

    Args:
        piece: the bytes of a token; a record has tokens only.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._texts: dict[str, tuple[str, MarkedText]] = {}

    def watch(self, recording: Recording) -> Callable[[Step], None] | None:
        """What is told of a recording's steps, where there is none of its category yet."""
        if recording.category in self._texts:
            return None
        stream, text = TextStream(), MarkedText(self._piece)
        self._texts[recording.category] = recording.id, text

        def told(step: Step) -> None:
            text.add(replace(step, pieces=tuple(stream.push(self._piece(token)) for token in step.tokens)))

        return told

    @property
    def passages(self) -> list[Passage]:
        """What was seen so far."""
        return [Passage(f"{category}: {name}", text.spans) for category, (name, text) in self._texts.items()]
