"""`posted`: what a memory holds as a `Report`, out of the figures that `--json` tells."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.memory.statistics import Statistics
from ngramspec.reports.report import Bar, Bars, Report, Section, Table
from ngramspec.version import __version__

MOST_KINDS = 12
"""Kinds of files that have a bar of their own; the rest have one together."""


def posted(name: str, stores: Sequence[Statistics], command: str) -> Report:
    """The report on the memory `name`, with a line for each tokenizer; `command`: what was typed."""
    headings = ["tokenizer", "files", "tokens of files", "answers", "tokens of answers", "MiB", "bytes a token"]
    rows = [
        [
            one.model,
            f"{one.files:,}",
            f"{one.file_tokens:,}",
            f"{one.answers:,}",
            f"{one.answer_tokens:,}",
            f"{one.size_bytes / 2**20:.1f}",
            f"{one.bytes_per_token:.1f}",
        ]
        for one in stores
    ]
    table = Table(headings, rows)
    charts = [_bars(one) for one in stores]
    return Report(
        title=f"The memory {name!r}",
        table=table,
        bars=charts[0] if charts else Bars("nothing", ()),
        origin=f"ngramspec {__version__}",
        command=command,
        sections=[Section("What it holds", "Texts that drafts are looked up in.", [table, *charts])],
    )


def _bars(one: Statistics) -> Bars:
    """Tokens by kind of file, and of answers."""
    kinds = list(one.kinds.items())
    found = [(kind or "no suffix", tokens) for kind, tokens in kinds[:MOST_KINDS]]
    if rest := sum(tokens for _, tokens in kinds[MOST_KINDS:]):
        found.append((f"{len(kinds) - MOST_KINDS} other kinds", rest))
    if one.answers:
        found.append(("answers", one.answer_tokens))
    return Bars(
        f"Tokens by kind of file, for the tokenizer of {one.model}",
        [Bar(kind, tokens, None, None, f"{tokens:,}") for kind, tokens in found],
    )
