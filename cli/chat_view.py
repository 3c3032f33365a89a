"""Output of a chat: streamed answers, drafts in colour and the statistics of the session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ngramspec.chat.stream import Delta
from ngramspec.instruments.reports.report import Mark, Piece, spans_of
from ngramspec.steps import Stats, Step, StopReason

from .console import printable, stderr, write_stdout
from .markdown_stream import LiveRows, MarkdownStream
from .view import ACCEPTED, CORRECTION, REFUSED, facts_table

NARROW, LOW = 20, 5
"""Minimum number of columns and lines of a terminal for Markdown; smaller terminals show plain text."""

_STYLES: dict[Mark, str] = {"": "", "kept": ACCEPTED, "refused": REFUSED, "corrected": CORRECTION}


def format_step(step: Step, piece: Piece) -> Text:
    """Return the text of a step with its draft: accepted tokens, rejected tokens and the target's token in their place.

    Rejected tokens are not part of the text, so a line break in them is shown as a symbol.
    """
    text = Text(tab_size=4)
    for words, mark in spans_of(step, piece):
        visible = words.replace("\n", "⏎").replace("\t", " ") if mark == "refused" else words
        text.append(printable(visible), _STYLES[mark])
    return text


class AnswerView:
    """Writer of answers to stdout while they are generated.

    A terminal shows rendered Markdown, or, if it cannot render it (see `can_render`), the text without control
    characters; reasoning is dimmed. A file or a pipe gets the unchanged content, and stderr the reasoning. With
    `drafts`, all tokens are shown, including the control tokens around reasoning.
    """

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._screen = LiveRows(write_stdout, _size)
        self._open_line = False
        self._renders = False  # whether the answer is rendered as Markdown
        self._stream: MarkdownStream | None = None
        self._kind = ""  # "reasoning" or "text", as in `Delta`; "" before an answer
        self.drafts = False
        self.markdown = True
        self.ending: StopReason | None = None  # stop reason if the view ends the answer

    @property
    def can_show_drafts(self) -> bool:
        """True if stdout is a terminal; in other output rejected tokens would look like the answer."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    @property
    def can_render(self) -> bool:
        """True if stdout is a large enough terminal with styles and cursor movement."""
        if not sys.stdout.isatty() or not self.can_show_drafts:
            return False
        if self._console.no_color or self._console.legacy_windows:
            return False
        columns, lines = _size()
        return columns >= NARROW and lines >= LOW

    def begin(self) -> None:
        """Prepare for the next answer."""
        self._kind, self._stream = "", None
        self._renders = self.markdown and not self.drafts and self.can_render

    def show(self, step: Step, deltas: Iterable[Delta], piece: Piece) -> None:
        """Write a step, which adds `deltas` to the answer; `piece` returns the bytes of a token."""
        if self.drafts:
            self._print(format_step(step, piece))
        else:
            self.write(deltas)

    def write(self, deltas: Iterable[Delta]) -> None:
        """Write pieces of an answer, with a blank line between reasoning and content."""
        for delta in deltas:
            if delta.kind != self._kind:
                self._end_part()
                if self._kind and sys.stdout.isatty():
                    write_stdout("\n")
                self._kind = delta.kind
            self._write_part(delta.text, "dim" if delta.kind == "reasoning" else "")

    def end(self) -> None:
        """End the answer and its last line."""
        self._end_part()
        self._kind = ""

    def _write_part(self, text: str, style: str) -> None:
        if self._renders:
            self._stream = self._stream or MarkdownStream(self._screen, _size, style=style)
            self._stream.push(text)
        elif not style:
            write_stdout(printable(text) if sys.stdout.isatty() else text)
            self._open_line = not text.endswith("\n")
        elif sys.stdout.isatty():
            self._print(Text(printable(text), style))
        else:
            with suppress(OSError):  # a failing stderr must not end the program
                stderr.print(printable(text), style=style, end="", markup=False, soft_wrap=True)

    def _print(self, text: Text) -> None:
        """Write styled text to the terminal."""
        with self._console.capture() as capture:
            self._console.print(text, end="", soft_wrap=True)
        if text:
            write_stdout(capture.get())
            self._open_line = not text.plain.endswith("\n")

    def _end_part(self) -> None:
        """End the last line of the reasoning or the content."""
        if self._stream is not None:
            self._stream.finish()
            self._stream = None
        elif self._kind == "reasoning" and not sys.stdout.isatty():
            with suppress(OSError):
                stderr.print()
        elif self._open_line:
            write_stdout("\n")
        self._open_line = False


class HiddenView(AnswerView):
    """View that shows the reasoning of an answer, and only the number of tokens of its content.

    Args:
        expected: Expected number of tokens of the content.
        limit: Number of tokens of the content that ends the answer.
        on_tokens: Function that is called with the number of tokens and the expected one, which may grow.
        is_complete: Function that returns True if the rest of the content is not needed; its arguments are the content
            and the start of the lines in it that are new.
    """

    def __init__(
        self, expected: int, limit: int, on_tokens: Callable[[int, int], None], is_complete: Callable[[str, int], bool]
    ) -> None:
        super().__init__()
        self._expected, self._limit, self._on_tokens, self._is_complete = expected, limit, on_tokens, is_complete
        self._n_tokens, self._content = 0, ""

    def show(self, step: Step, deltas: Iterable[Delta], piece: Piece) -> None:
        """Count the tokens of a step and show the reasoning in `deltas`."""
        super().show(step, deltas, piece)
        if text := "".join(delta.text for delta in deltas if delta.kind == "text"):
            start = self._content.rfind("\n") + 1
            self._content += text
            self._n_tokens += len(step.tokens)
            self._on_tokens(self._n_tokens, max(self._expected, self._n_tokens + 1))
            if "\n" in text and self._is_complete(self._content, start):
                self.ending = "stop"
            elif self._n_tokens >= self._limit:
                self.ending = "length"

    def write(self, deltas: Iterable[Delta]) -> None:
        """Write the reasoning in pieces of an answer."""
        super().write(delta for delta in deltas if delta.kind == "reasoning")


def _size() -> os.terminal_size:
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    # Some terminals do not know their size and report 0.
    return os.terminal_size((columns or 80, lines or 24))


def totals(stats: Stats, facts: dict[str, str]) -> list[Table]:
    """Return the statistics of the session: `facts` with the counters, and acceptance by position in the draft."""
    rows = dict(facts)
    rows["tokens"] = f"{stats.generated} generated, prompts processed in {stats.prefill_seconds:.1f} s"
    if stats.tokens_per_second is not None:
        rows["speed"] = f"{stats.tokens_per_second:.1f} tokens/s, {stats.tokens_per_pass:.2f} tokens per pass"
    if stats.passes:
        share = stats.passes_without_draft / stats.passes
        rows["passes"] = f"{stats.passes}, {share:.0%} of them without a draft"
    if stats.acceptance_rate is not None:
        rows["drafts"] = f"{stats.accepted} of {stats.drafted} drafted tokens accepted ({stats.acceptance_rate:.0%})"
    if stats.estimated_gain is not None:
        rows["gain"] = f"about {stats.estimated_gain:.2f}x plain decoding (estimated from the costs of passes here)"
    table = facts_table(rows)
    counts = [(i, n) for i, n in enumerate(stats.tested_at) if n]
    if not counts:
        return [table]
    positions = Table(title="Acceptance by position in the draft", title_justify="left")
    for heading in ("position", "drafted", "tested", "accepted", "rate"):
        positions.add_column(heading, justify="right")
    for i, n in counts:
        n_accepted = stats.accepted_at[i]
        positions.add_row(str(i + 1), str(stats.drafted_at[i]), str(n), str(n_accepted), f"{n_accepted / n:.0%}")
    return [table, positions]
