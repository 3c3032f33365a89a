"""What `ngramspec tune` shows: every setting beside the present ones, and what to conclude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ngramspec.tuning.candidates import Measure
from ngramspec.tuning.tuning import LEAST_GAIN, NO_TIME, TOGETHER, Comparison, Tuning

from .view import figures_table, print_report


@dataclass(frozen=True, slots=True)
class Report:
    """What a tuning's own figures do not say.

    Attributes:
        heading: model and machine.
        depth: tokens of the long context.
        alike: whether the recommended settings gave the same bits as the present ones; None: not tried.
        quantisation: a line on a quantisation that would be cheaper to verify with.
    """

    heading: Sequence[str]
    depth: int
    alike: bool | None
    quantisation: str | None


def show(tuning: Tuning, report: Report, *, applied: bool) -> None:
    """Print it all to stdout."""
    print_report([*report.heading, *_table(tuning, report.depth), *_conclusions(tuning, report, applied=applied)])


def _table(tuning: Tuning, depth: int) -> list[str | Table]:
    times, compared = tuning.times, tuning.compared
    if not times:
        return ["Interrupted before the first round: nothing can be said."]
    measures = sorted(times, key=lambda m: (m.deep, m))
    headings = ["time of the settings as they are = 1", *(m.named(depth) for m in measures), "in all", "+-"]
    rows = [["as it is, ms", *(f"{times[m] * 1e3:.2f}" for m in measures), "", ""]]
    rows += [[name, *_cells(c, measures)] for name, c in compared.items()]
    if tuning.gain is not None:
        rows.append([f"{TOGETHER}, fresh rounds", *_cells(tuning.gain, measures)])
    count = next(iter(compared.values())).rounds
    return [
        figures_table(headings, rows),
        f"Medians of {count} rounds; reading is per token, +- between the quartiles.",
    ]


def _cells(comparison: Comparison, measures: Sequence[Measure]) -> list[str]:
    each = (f"{comparison.each[m]:.3f}" if m in comparison.each else "" for m in measures)
    return [*each, f"{comparison.ratio:.3f}", f"{comparison.spread:.3f}"]


def _conclusions(tuning: Tuning, report: Report, *, applied: bool) -> list[str]:
    found, gain = tuning.found, tuning.gain
    lines: list[str] = []
    if not tuning.complete:
        lines.append("Interrupted: this is what was measured so far, and nothing is recommended of it.")
    elif found is not None and gain is not None:
        lines.append(
            f"Recommended: {found.flags(tuning.present)}, {1 / gain.ratio:.2f} times as fast where it acts, measured"
            f" again in {gain.rounds} fresh rounds."
        )
        bits = {
            True: "On a sample it gave the same bits.",
            False: "It moves the last bits of logits, so texts may differ where two tokens are that close.",
            None: "It may move the last bits of logits.",
        }
        lines.append(f"{bits[report.alike]} Which batch sizes agree is probed anew under it.")
        lines.append(
            "Kept: other commands use it for this model here; ngramspec tune --forget takes it away."
            if applied
            else "Not kept: --apply keeps it for this model and machine."
        )
    elif tuning.winners:
        lines.append(
            f"{' and '.join(tuning.winners.values())} looked faster, and was not when measured again; your settings are"
            " as good as any that were tried."
        )
    elif tuning.compared:
        lines.append(
            f"Your settings are as good as any that were tried: none saves {LEAST_GAIN:.0%} beyond noise and makes"
            " nothing slower."
        )
    else:
        lines.append("Nothing could be compared.")
    compared = tuning.compared
    for name in tuning.trades:
        faster, slower = (_ratios(compared[name], which, report.depth) for which in ("faster", "slower"))
        lines.append(f"A trade, not recommended: {name} makes {faster} faster and {slower} slower.")
    lines += [f"{name} would be faster too, but changes the text; it is never kept." for name in tuning.advised]
    if report.quantisation:
        lines.append(report.quantisation)
    late = [name for name, reason in tuning.left_out.items() if reason == NO_TIME]
    lines += [f"Not compared: {name}: {reason}." for name, reason in tuning.left_out.items() if reason != NO_TIME]
    if late:
        lines.append(f"Not compared, as there was no time (--seconds gives more): {', '.join(late)}.")
    return lines


def _ratios(comparison: Comparison, which: str, depth: int) -> str:
    return ", ".join(f"{m.named(depth)} ({comparison.each[m]:.2f})" for m in getattr(comparison, which))
