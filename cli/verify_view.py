"""How a self-check looks: a table, what differs, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ngramspec.prompts import Skipped
from ngramspec.selfcheck.check import SelfCheck
from ngramspec.selfcheck.report import Check, verdict
from ngramspec.selfcheck.texts import TextDifference

from .console import printable
from .view import LISTED, print_report, skipped_lines

_STYLES = {"passed": "green", "explained": "yellow", "failed": "bold red", "skipped": "dim"}


def show(found: SelfCheck, checks: Sequence[Check], heading: Sequence[str], skipped: Sequence[Skipped]) -> None:
    """Print the report to stdout."""
    parts: list[RenderableType] = [*heading, "", _table(checks), *_differences(found), *skipped_lines(skipped)]
    parts.append(verdict(checks, complete=found.complete))
    print_report(parts)


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("what must hold, and what was looked at", overflow="fold")
    table.add_column("seconds", justify="right", no_wrap=True)
    for check in checks:
        lines = [printable(line) for line in (check.claim, check.covered, check.reason, check.missing) if line]
        spent = f"{check.seconds:.1f}" if check.seconds else "-"
        table.add_row(check.name, Text(check.status, _STYLES[check.status]), Text("\n".join(lines)), spent)
    return table


def _differences(found: SelfCheck) -> list[str]:
    pairs = [(pair, pair.difference) for pair in found.pairs if pair.difference is not None]
    lines = [
        f"{pair.category}/{pair.prompt}, {pair.setting}: after {difference.position} equal tokens plain has"
        f" {_token(difference.plain, difference.plain_text, difference.plain_logit)}, drafted"
        f" {_token(difference.drafted, difference.drafted_text, difference.drafted_logit)}; {_why(difference)}"
        for pair, difference in pairs[:LISTED]
    ]
    if len(pairs) > LISTED:
        lines.append(f"{len(pairs)} texts differ in all")
    return lines


def _token(token: int | None, text: str, logit: float | None) -> str:
    return "no more tokens" if token is None else f"{token} {printable(repr(text))} (logit {logit:.4f})"


def _why(difference: TextDifference) -> str:
    if difference.needed is not None:
        need = "nothing" if difference.needed == 0 else f"{difference.needed:.2g}"
        return f"logits moved by {need} explain it, and the batch size moves them by up to {difference.bound:.2g}"
    if difference.bound == 0:
        return "no batch size explains it"
    return f"the batch size moves logits by up to {difference.bound:.2g}, which does not explain it"
