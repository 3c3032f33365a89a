"""Statistics of a memory for one tokenizer, and a report on them; both omit names and texts of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from ngramspec.data import __version__
from ngramspec.instruments.reports.report import Bar, Bars, Report, Section, Table
from ngramspec.memory.store import Store, total

MAX_KINDS = 12
"""Maximum number of file types with a separate bar; the other types share one bar."""


Statistics = dict[str, Any]
"""The counts of one file of a memory, as JSON: "model" (that of the tokenizer), "files", "file_tokens", "answers",
"answer_tokens", "size_bytes", and "kinds": the number of tokens of files by suffix (".py"; "" without one), largest
first."""


def statistics(store: Store) -> Statistics:
    """Return the statistics of a store, whose file must exist."""
    documents = store.documents()
    files = [document for document in documents if document.kind == "file"]
    answers = [document for document in documents if document.kind == "answer"]
    kinds = Counter[str]()
    for file in files:
        kinds[PurePath(file.name).suffix.lower()] += len(file.tokens)
    return {
        "model": store.read().model,
        "files": len(files),
        "file_tokens": total(files),
        "answers": len(answers),
        "answer_tokens": total(answers),
        "size_bytes": store.size(),
        "kinds": dict(kinds.most_common()),
    }


def bytes_per_token(figures: Statistics) -> float:
    """Return the number of bytes on the disk per token."""
    size: float = figures["size_bytes"] / max(1, figures["file_tokens"] + figures["answer_tokens"])
    return size


def report(name: str, stores: Sequence[Statistics], command: str) -> Report:
    """Return the report on a memory, with one row for each tokenizer."""
    headings = ["tokenizer", "files", "tokens of files", "answers", "tokens of answers", "MiB", "bytes per token"]
    counts = ("files", "file_tokens", "answers", "answer_tokens")
    rows = [
        [
            figures["model"],
            *(f"{figures[count]:,}" for count in counts),
            f"{figures['size_bytes'] / 2**20:.1f}",
            f"{bytes_per_token(figures):.1f}",
        ]
        for figures in stores
    ]
    table = Table(headings, rows)
    charts = [_bars(figures) for figures in stores]
    sections = [Section("Contents", "Texts that are used for drafting.", [table, *charts])]
    first = charts[0] if charts else Bars("nothing", ())
    return Report(f"The memory {name!r}", table, first, f"ngramspec {__version__}", command, sections)


def _bars(figures: Statistics) -> Bars:
    kinds = list(figures["kinds"].items())
    counts = [(kind or "no suffix", tokens) for kind, tokens in kinds[:MAX_KINDS]]
    if rest := sum(tokens for _, tokens in kinds[MAX_KINDS:]):
        counts.append((f"{len(kinds) - MAX_KINDS} other types", rest))
    if figures["answers"]:
        counts.append(("answers", figures["answer_tokens"]))
    bars = [Bar(kind, tokens, None, None, f"{tokens:,}") for kind, tokens in counts]
    return Bars(f"Tokens by file type, for the tokenizer of {figures['model']}", bars)
