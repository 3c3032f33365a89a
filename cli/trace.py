"""`ngramspec trace`: the passes of a traced generation, to read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ngramspec.trace import BrokenLine, TracedPass, read_trace

from .console import fail, guarded_stdout, note, outcome, usage_error
from .trace_view import TraceView

LISTED = 10
"""Broken lines named; the rest are counted."""

LONGEST = 1 << 26
"""Bytes of a line that are read at once, so that a file that is not a trace cannot fill the memory."""


def trace(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="What --trace wrote; -: from stdin.")],
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Below each pass: p, q and what else decided on each token.")
    ] = False,
) -> None:
    """Show a trace, one line a pass: ngramspec trace run.jsonl

    A trace is what chat and complete write with --trace, each pass a line of JSON: position, context, draft with q and
    source, p of each token, what was accepted or refused and why, batch, seconds. The format is described in
    ngramspec/trace.py.

    Drafted tokens are green where they were accepted and struck through in red where they were refused; the model's
    own token is blue. Without colours (not a terminal, NO_COLOR): [+accepted] [-refused] [.behind a refused one]
    [>the model's own] [~behind the end of the text]. Broken lines are named and skipped; of a trace that was cut
    short, what is there is shown.
    """
    name = "standard input" if file == "-" else file
    broken, cut = 0, False
    with guarded_stdout():
        view = TraceView(numbers=numbers)
        with outcome() as ended:
            for item in read_trace(_lines(file, name)):
                if isinstance(item, TracedPass):
                    view.show(item)
                elif not isinstance(item, BrokenLine):
                    view.header(item)
                elif item.cut:
                    cut = True
                    note(f"{name}: line {item.number}, the last, is cut short: what wrote it did not get to its end")
                else:
                    broken += 1
                    if broken <= LISTED:
                        note(f"{name}: skipped line {item.number}: {item.reason}")
        view.total()
    if broken > LISTED:
        note(f"{name}: skipped {broken} broken lines in all")
    if ended.error is not None:
        fail(f"{name}: {ended.error}")
    if ended.code:
        raise typer.Exit(ended.code)
    if view.open and not cut:
        note(f"{name}: the last text has no end: its generation was interrupted, or goes on")


def _lines(file: str, name: str) -> Iterator[bytes]:
    if file == "-" and (sys.stdin is None or sys.stdin.isatty()):
        usage_error("no trace on standard input: pipe a file in")
    try:
        with sys.stdin.buffer if file == "-" else Path(file).open("rb") as lines:
            while line := lines.readline(LONGEST):
                yield line
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        fail(f"cannot read {name}: {getattr(error, 'strerror', None) or error}")
