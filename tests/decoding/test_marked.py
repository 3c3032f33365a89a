"""A text in spans: what was drafted of it, and what became of that."""

from __future__ import annotations

from ngramspec.decoding.marked import MarkedText
from ngramspec.decoding.step import Step
from ngramspec.reports.report import Span

PIECES = {1: b"one ", 2: b"t\xc3", 3: b"three", 4: b"four"}


def test_refused_tokens_stand_before_what_the_model_chose() -> None:
    text = MarkedText(PIECES.__getitem__)
    text.add(Step((3,), ("three",)))
    text.add(Step((1, 4), ("one ", "four"), drafted=(1, 2, 3), accepted=1, batch=4))
    refused = Span("t\ufffdthree", "refused")
    assert text.spans == [Span("three"), Span("one ", "kept"), refused, Span("four", "corrected")]


def test_neighbours_with_one_mark_are_one_span_and_an_unread_rest_is_none() -> None:
    text = MarkedText(PIECES.__getitem__)
    text.add(Step((1, 3, 4), ("one ", "three", ""), drafted=(1, 3), accepted=2, batch=3))
    text.add(Step((1, 3), ("one ", "three"), drafted=(1, 3, 4), accepted=2, batch=4))
    assert text.spans == [Span("one threeone three", "kept")]
