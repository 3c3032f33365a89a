"""Output of a chat: streamed answers, drafts in colour, the statistics of the session and a tip."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ngramspec.chat.stream import Delta
from ngramspec.instruments.reports.report import Mark, Piece, spans_of
from ngramspec.memory.memory import settings_path
from ngramspec.steps import Stats, Step, StopReason
from ngramspec.storage import FOLDERS

from .console import guard_stdout, note, print_stdout, printable, stderr, write_stdout
from .markdown import THEME, MarkdownStream
from .show import ACCEPTED, CORRECTION, REFUSED, names_table

_STYLES: dict[Mark, str] = {"": "", "kept": ACCEPTED, "refused": REFUSED, "corrected": CORRECTION}


def format_step(step: Step, piece: Piece) -> Text:
    text = Text(tab_size=4)
    for words, mark in spans_of(step, piece):
        # Rejected tokens are not part of the text, so a line break in them is shown as a symbol.
        visible = words.replace("\n", "⏎").replace("\t", " ") if mark == "refused" else words
        text.append(printable(visible), _STYLES[mark])
    return text


class AnswerView:
    """Writer of answers to stdout while they are generated.

    A terminal shows rendered Markdown, or, if it cannot render it (see `can_render`), the text without control
    characters; reasoning is dimmed. A file or a pipe gets the unchanged content, and stderr the reasoning. With
    `drafts`, all tokens are shown, including the control tokens around reasoning.
    """

    def __init__(self, *, markdown: bool = True) -> None:
        self._console = Console(highlight=False, theme=THEME)
        self._open_line = False
        self._renders = False  # whether the answer is rendered as Markdown
        self._stream: MarkdownStream | None = None
        self._kind = ""  # "reasoning" or "text", as in `Delta`; "" before an answer
        self.drafts = False
        self.markdown = markdown
        self.ending: StopReason | None = None  # stop reason if the view ends the answer

    @property
    def can_show_drafts(self) -> bool:
        """True if stdout is a terminal; in other output rejected tokens would look like the answer."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    @property
    def can_render(self) -> bool:
        """True if stdout is a large enough terminal with styles and cursor movement."""
        console = self._console
        if not (sys.stdout.isatty() and self.can_show_drafts) or console.no_color or console.legacy_windows:
            return False
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        # Some terminals do not know their size and report 0.
        return (columns or 80) >= 20 and (lines or 24) >= 10

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Show an answer in the block, and end its last line."""
        self._kind, self._stream = "", None
        self._renders = self.markdown and not self.drafts and self.can_render
        with guard_stdout():  # rich writes to stdout too
            try:
                yield
            finally:
                self._end_part()
                self._kind = ""

    def show(self, step: Step, deltas: Iterable[Delta], piece: Piece) -> None:
        """Write a step, which adds `deltas` to the answer; `piece` returns the bytes of a token."""
        if self.drafts:
            self._print(format_step(step, piece))
        else:
            self.write(deltas)

    def write(self, deltas: Iterable[Delta]) -> None:
        """Write pieces of an answer, with a blank line between reasoning and content."""
        is_terminal = sys.stdout.isatty()
        for delta in deltas:
            kind, text = delta.kind, delta.text
            if kind != self._kind:
                self._end_part()
                if self._kind and is_terminal:
                    write_stdout("\n")
                self._kind = kind
            style = "dim" if kind == "reasoning" else ""
            if self._renders:
                self._stream = self._stream or MarkdownStream(self._console, style)
                self._stream.push(text)
            elif not style:
                write_stdout(printable(text) if is_terminal else text)
                self._open_line = not text.endswith("\n")
            elif is_terminal:
                self._print(Text(printable(text), style))
            else:
                with suppress(OSError):  # a failing stderr must not end the program
                    stderr.print(printable(text), style=style, end="", markup=False, soft_wrap=True)

    def _print(self, text: Text) -> None:
        if text:
            print_stdout(self._console, text, end="", soft_wrap=True)
            self._open_line = not text.plain.endswith("\n")

    def _end_part(self) -> None:
        if self._stream is not None:
            self._stream.finish()
            self._stream = None
        elif self._kind == "reasoning" and not sys.stdout.isatty():
            with suppress(OSError):
                stderr.print()
        elif self._open_line:
            write_stdout("\n")
        self._open_line = False


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
    counts = [(i, n) for i, n in enumerate(stats.tested_at) if n]
    if not counts:
        return [names_table(rows.items())]
    positions = Table(title="Acceptance by position in the draft", title_justify="left")
    for heading in ("position", "drafted", "tested", "accepted", "rate"):
        positions.add_column(heading, justify="right")
    for i, n in counts:
        n_accepted = stats.accepted_at[i]
        positions.add_row(str(i + 1), str(stats.drafted_at[i]), str(n), str(n_accepted), f"{n_accepted / n:.0%}")
    return [names_table(rows.items()), positions]


class MemoryTip:
    """Suggestion to save answers, shown once per machine to a user whose answers repeat each other.

    An answer counts if a quarter of its tokens are in runs of 16 or more tokens that an earlier answer of the session
    contains; shorter phrases recur by chance. A user who has decided on saving answers sees no tip.
    """

    RUN, SHARE = 16, 0.25

    def __init__(self) -> None:
        self._runs: set[tuple[int, ...]] = set()  # runs of tokens in earlier answers

    def show_after(self, answer: Sequence[int], *, is_retry: bool = False) -> None:
        """Show the tip if an answer repeats earlier ones; with `is_retry`, it replaces the one that it repeats."""
        starts = range(len(answer) - self.RUN + 1)
        runs = [tuple(answer[start : start + self.RUN]) for start in starts]
        repeats = {i for start in starts if runs[start] in self._runs for i in range(start, start + self.RUN)}
        self._runs.update(runs)
        if is_retry or not repeats or len(repeats) < self.SHARE * len(answer) or settings_path().exists():
            return
        marker = FOLDERS.user_state_path / "memory-tip-shown"
        # If the marker exists or cannot be written, skip the tip rather than repeat it in every chat.
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch(exist_ok=False)
            note(
                f"tip: {len(repeats) / len(answer):.0%} of this answer repeats earlier ones;"
                " 'ngramspec memory save-answers on' saves answers to speed up later chats"
            )
