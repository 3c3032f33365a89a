"""`ngramspec bench --alpha`: how often drafts from n-gram counts would be accepted, by order, measured and inferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from ngramspec.benchmark.alpha import ORDERS, AlphaMeasurement, AlphaOfOrder
from ngramspec.prompts import Case
from ngramspec.reports.shapes import figure

from .console import Outcome, outcome
from .view import counting_bar, figures_table

GAMMA = 4


def measure_alpha(measurement: AlphaMeasurement, cases: Sequence[Case], max_tokens: int) -> Outcome:
    """Decode every prompt with every order; what was measured before an interruption stays."""
    with outcome() as ended, counting_bar(len(cases) * len(ORDERS), "warming up", still=True) as done:
        for case in cases:
            for result in measurement.run(case.tokens, max_tokens):
                done(f"{case.category}/{case.id}, order {result.order}")
    return ended


def alpha_parts(orders: Sequence[AlphaOfOrder], *, greedy: bool) -> list[RenderableType]:
    """A table with a row per order, and its heading."""
    how = "greedy" if greedy else "rejection sampling"
    rows = [
        [
            {1: "1 (unigram)", 2: "2 (bigram)"}.get(one.order, str(one.order)),
            figure(one.measured, ".3f"),
            figure(one.inferred, ".3f"),
            str(one.judged),
            f"{one.coverage:.0%}",
            f"{one.stats.tokens_per_pass:.2f}",
        ]
        for one in orders
    ]
    headings = ["order", "measured", "inferred", "judged", "passes with a draft", "tokens per pass"]
    heading = f"Alpha of n-gram counts by order ({how}, drafts of up to {orders[0].gamma}):"
    return ["", heading, figures_table(headings, rows), ""]


def alpha_json(orders: Sequence[AlphaOfOrder]) -> list[dict[str, Any]]:
    """The same as data."""
    return [
        {
            "order": one.order,
            "gamma": one.gamma,
            "measured": one.measured,
            "inferred": one.inferred,
            "judged": one.judged,
            "drafted": one.stats.drafted,
            "accepted": one.stats.accepted,
            "passes": one.stats.passes,
            "passes_without_draft": one.stats.passes_without_draft,
            "tokens_per_pass": one.stats.tokens_per_pass,
        }
        for one in orders
    ]
