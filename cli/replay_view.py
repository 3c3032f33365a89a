"""How a replay looks: tables when it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table

from ngramspec.replay.report import Figures
from ngramspec.reports.shapes import figure

from .view import figures_table, print_report

POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Draft positions shown; --json has all."""


def show(
    heading: Sequence[str],
    sections: Mapping[str, tuple[str, Mapping[str, Figures]]],
    oracle: Mapping[str, Mapping[str, float]],
) -> None:
    """Print the report to stdout.

    Args:
        heading: lines above the tables.
        sections: for each curve that was drafted by, its name: what to say of it, and the figures by category.
        oracle: speedups of the copy-oracle by category and curve; may be empty.
    """
    parts: list[RenderableType] = [*heading]
    for name, (about, rows) in sections.items():
        limits = {category: speedups[name] for category, speedups in oracle.items() if name in speedups}
        parts += ["", f"Curve {name}: {about}", _gains(rows, name, limits)]
        if rows and rows["overall"]["max_draft"]:
            parts += ["", "Acceptance by position in the draft, of the drafts that reach so far:", _positions(rows)]
        if rows and rows["overall"]["calibration_error"] is not None:
            error = rows["overall"]["calibration_error"]
            parts += ["", f"Predicted against observed acceptance; expected calibration error {error:.4f}:"]
            parts.append(_reliability(rows["overall"]))
    print_report(parts)


def _gains(rows: Mapping[str, Figures], curve: str, limits: Mapping[str, float]) -> Table:
    """What was gained, and what it took."""
    headings = ["tokens", "per\npass", "accepted", "no\ndraft", "speedup", *(["copy-\noracle"] if limits else [])]
    headings += ["us per\npass", "us per\nprompt\ntoken"]
    lines = []
    for category, row in rows.items():
        # A mean of counts tells nothing that their sum does not.
        cells = ["" if category == "macro" else f"{row['tokens']:.0f}", f"{row['tokens_per_pass']:.2f}"]
        cells += [figure(row["acceptance"], ".0%"), f"{row['no_draft_share']:.0%}"]
        cells.append(f"{row['speedup'][curve]:.3f}x")
        if limits:
            cells.append(figure(limits.get(category), ".3f", "x"))
        cells += [f"{row['cpu_us_per_pass']:.1f}", f"{row['start_us_per_prompt_token']:.2f}"]
        lines.append([category, *cells])
    return figures_table(["category", *headings], lines, totals=2)


def _positions(rows: Mapping[str, Figures]) -> Table:
    shown = [p for p in POSITIONS if p <= rows["overall"]["max_draft"]]
    lines = []
    for category, row in rows.items():
        if category == "macro":
            continue
        rates = row["accept_by_position"]
        cells = [f"{row['drafted_per_pass']:.2f}", *(f"{rates[p - 1]:.2f}" if p <= len(rates) else "-" for p in shown)]
        lines.append([category, *cells])
    return figures_table(["category", "drafted", *map(str, shown)], lines, totals=1)


def _reliability(row: Figures) -> Table:
    lines = [
        [
            f"{cell['from']:.1f} - {cell['to']:.1f}",
            str(cell["count"]),
            figure(cell["predicted"], ".3f"),
            figure(cell["observed"], ".3f"),
        ]
        for cell in row["reliability"]
    ]
    return figures_table(["predicted", "positions", "mean", "observed"], lines, totals=0)
