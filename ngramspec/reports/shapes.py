"""Charts and tables that reports of several kinds have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngramspec.reports.report import Lines, Section, Series, Table

POSITIONS = 16
"""Draft positions in a table; a chart has all."""


def figure(value: float | None, form: str, unit: str = "") -> str:
    """A figure for a cell; a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def acceptance(rates: Mapping[str, Sequence[float | None]], about: str, *, totals: int) -> Section:
    """Acceptance by position in the draft.

    Args:
        rates: by name, those of the chart in the last `totals` ones.
        about: what a rate is.
        totals: how many of them, from below, sum up the others.
    """
    names = list(rates)
    shown = min(POSITIONS, max(map(len, rates.values()), default=0))
    rows = [[name, *(figure(rate, ".2f") for rate in [*rates[name], *[None] * shown][:shown])] for name in names]
    series = [
        Series(name, [(n, rate) for n, rate in enumerate(rates[name], 1) if rate is not None])
        for name in names[len(names) - totals :]
    ]
    chart = Lines("Accepted, by position in the draft", "position in the draft", "accepted", series)
    table = Table(["", *map(str, range(1, shown + 1))], rows, totals=totals)
    return Section("Acceptance by position", about, [chart, table])


def costs(curves: Mapping[str, Mapping[int, float]]) -> Section:
    """What a pass costs by its size, in passes over one token; by the name of the curve."""
    series = [Series(name, sorted(ratios.items())) for name, ratios in curves.items()]
    sizes = sorted({size for ratios in curves.values() for size in ratios})
    rows = [[name, *(figure(ratios.get(size), ".2f") for size in sizes)] for name, ratios in curves.items()]
    about = (
        "The time of a pass of the model over so many tokens, in times of a pass over one: drafts pay where it is low."
    )
    chart = Lines("Cost of a pass", "tokens in the pass", "times a single token", series)
    return Section("What a pass costs", about, [chart, Table(["", *map(str, sizes)], rows)])


def calibration(cells: Sequence[Mapping[str, Any]], about: str) -> Section:
    """How right the odds were that drafts were given: `cells` as `Reliability.to_json` tells them."""
    known = [cell for cell in cells if cell["count"]]
    series = [
        Series("as it came", [(cell["predicted"], cell["observed"]) for cell in known]),
        Series("if the odds were always right", [(0.0, 0.0), (1.0, 1.0)], guide=True),
    ]
    rows = [
        [f"{c['from']:.1f}-{c['to']:.1f}", str(c["count"]), f"{c['predicted']:.3f}", f"{c['observed']:.3f}"]
        for c in known
    ]
    chart = Lines("Odds of acceptance", "predicted", "observed", series)
    return Section("Calibration of the odds", about, [chart, Table(["odds", "positions", "mean", "observed"], rows)])
