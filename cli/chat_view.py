"""What chat shows: answers as they come, drafts in colour, and the session's statistics."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ngramspec.decoding.step import Stats, Step

from .console import printable, write_stdout
from .view import ACCEPTED, CORRECTION, REFUSED, facts_table


def marked(step: Step, piece: Callable[[int], bytes]) -> Text:
    """A step's text with its draft: accepted tokens, refused ones, and the target's token in their place.

    `piece` gives a token's bytes. Refused tokens never were text, so a character they broke shows as U+FFFD and
    a line break as a symbol.
    """
    text = Text(tab_size=4)
    # A text that ended inside its draft has no token at index `accepted`: the rest was not refused, only unread.
    for i, released in enumerate(step.pieces):
        style = ACCEPTED if i < step.accepted else ""
        if i == step.accepted and step.refused:
            refused = b"".join(map(piece, step.refused)).decode(errors="replace")
            text.append(printable(refused.replace("\n", "⏎").replace("\t", " ")), REFUSED)
            style = CORRECTION
        text.append(printable(released), style)
    return text


class AnswerView:
    """Writes answers to stdout as they come.

    A terminal gets them without control characters and, if asked, with the drafts; a file or a pipe gets the
    text as it is.

    Attributes:
        drafts: whether drafts are shown.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._console = Console(highlight=False)
        self._open_line = False
        self.drafts = False

    @property
    def can_show_drafts(self) -> bool:
        """Whether stdout is a terminal: elsewhere nothing would tell a refused token from the answer."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def show(self, step: Step) -> None:
        """Write what a step released."""
        if self.drafts:
            text = marked(step, self._piece)
            with self._console.capture() as captured:
                self._console.print(text, end="", soft_wrap=True)
            shown, plain = captured.get(), text.plain
        else:
            shown = plain = printable(step.text) if sys.stdout.isatty() else step.text
        if plain:
            write_stdout(shown)
            self._open_line = not plain.endswith("\n")

    def end(self) -> None:
        """Close the answer's last line."""
        if self._open_line:
            write_stdout("\n")
        self._open_line = False


def totals(stats: Stats, facts: dict[str, str]) -> list[Table]:
    """The session's statistics: `facts` and the counters, then acceptance by position in the draft."""
    rows = dict(facts)
    rows["tokens"] = f"{stats.generated} generated, prompts read in {stats.prefill_seconds:.1f} s"
    if stats.tokens_per_second is not None:
        rows["speed"] = f"{stats.tokens_per_second:.1f} tokens/s, {stats.tokens_per_pass:.2f} tokens per target pass"
    if stats.passes:
        share = stats.passes_without_draft / stats.passes
        rows["passes"] = f"{stats.passes}, {share:.0%} of them without a draft"
    if stats.acceptance_rate is not None:
        rows["drafts"] = f"{stats.accepted} of {stats.drafted} drafted tokens accepted ({stats.acceptance_rate:.0%})"
    if stats.drafted and stats.estimated_gain is not None:
        rows["gain"] = f"about {stats.estimated_gain:.2f}x plain decoding, by this machine's measured costs"
    table = facts_table(rows)
    tested = [(i, n) for i, n in enumerate(stats.tested_at) if n]
    if not tested:
        return [table]
    positions = Table(title="Acceptance by position in the draft", title_justify="left")
    for heading in ("position", "drafted", "tested", "accepted", "rate"):
        positions.add_column(heading, justify="right")
    for i, n in tested:
        accepted = stats.accepted_at[i]
        positions.add_row(str(i + 1), str(stats.drafted_at[i]), str(n), str(accepted), f"{accepted / n:.0%}")
    return [table, positions]
