"""`Statistics`: what a memory holds for one tokenizer, counted, and `report` on it; without names or texts of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ngramspec.instruments.reports.report import Bar, Bars, Report, Section, Table
from ngramspec.memory.documents import total
from ngramspec.memory.store import Contents
from ngramspec.version import __version__

MOST_KINDS = 12
"""Kinds of files that have a bar of their own; the rest have one together."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """The counts of one file of a memory.

    Attributes:
        model: whose tokenizer.
        files, file_tokens: that were added.
        answers, answer_tokens: that were remembered.
        size_bytes: of the file.
        kinds: tokens of files by the ends of their names (".py"; "" without one), the most first.
    """

    model: str
    files: int
    file_tokens: int
    answers: int
    answer_tokens: int
    size_bytes: int
    kinds: dict[str, int]

    @property
    def tokens(self) -> int:
        """Of files and answers."""
        return self.file_tokens + self.answer_tokens

    @property
    def bytes_per_token(self) -> float:
        """What a token takes on the disk."""
        return self.size_bytes / max(1, self.tokens)

    @classmethod
    def of(cls, contents: Contents) -> Statistics:
        """Count what a store holds, of which there must be a file."""
        assert contents.path
        documents = contents.documents()
        files = [d for d in documents if d.kind == "file"]
        answers = [d for d in documents if d.kind == "answer"]
        kinds = Counter[str]()
        for file in files:
            kinds[PurePath(file.name).suffix.lower()] += file.tokens
        return cls(
            model=contents.model,
            files=len(files),
            file_tokens=total(files),
            answers=len(answers),
            answer_tokens=total(answers),
            size_bytes=contents.path.stat().st_size,
            kinds=dict(kinds.most_common()),
        )


def report(name: str, stores: Sequence[Statistics], command: str) -> Report:
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
