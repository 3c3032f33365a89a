"""What a benchmark shows when it is done, and writes as JSON: tables, a verdict, every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from ngramspec.instruments.benchmark.against import Pair, Rival
from ngramspec.instruments.benchmark.alpha import AlphaOfOrder
from ngramspec.instruments.benchmark.figures import Spread, Summary, verdicts
from ngramspec.instruments.benchmark.runs import Benchmark, Run
from ngramspec.instruments.prompts import Skipped
from ngramspec.instruments.reports.report import OVERALL, figure
from ngramspec.json_data import encode
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling

from .about import load_settings, provenance
from .view import LISTED, figures_table, print_report, skipped_lines

POSITIONS = 6
"""Draft positions shown; --json has all."""


def show(
    benchmark: Benchmark,
    summaries: Mapping[str, Sequence[Summary]],
    heading: Sequence[str],
    skipped: Sequence[Skipped],
    more: Sequence[RenderableType],
) -> None:
    """Print the report to stdout.

    Args:
        benchmark: what was run.
        summaries: its figures by policy, of each the overall ones last; may be empty.
        heading: lines above the tables.
        skipped: prompts that were not run.
        more: goes before the verdict.
    """
    comparable = benchmark.caveat is None
    drafting = benchmark.drafted.drafter is not None
    parts: list[RenderableType] = [*heading]
    if not benchmark.complete:
        parts.append(f"INCOMPLETE: stopped after {len(benchmark.runs)} of {benchmark.total} runs")
    measured = {policy: rows for policy, rows in summaries.items() if rows}
    if measured:
        first = next(iter(measured.values()))
        parts += _several(measured) if len(summaries) > 1 else _one(first, comparable, drafting)
        if any(s.exact_price for s in first):
            parts += ["", "The price of exact mode, plain tokens per second:", _prices(first)]
        parts.append("")
    parts += _prefill(benchmark)
    parts += skipped_lines(skipped)
    if comparable:
        parts += _differences(benchmark, several=len(summaries) > 1)
        parts += _close_calls(benchmark)
    if not drafting:
        parts.append("drafting is off: plain decoding was compared with itself, a ratio shows how far runs scatter")
    parts += more
    parts += verdicts(summaries, benchmark.caveat)
    print_report(parts)


def _one(summaries: Sequence[Summary], comparable: bool, drafting: bool) -> list[RenderableType]:
    """The tables of one policy."""
    parts: list[RenderableType] = ["", "Tokens per second of decoding, medians over prompts and repeats:"]
    parts.append(_speeds(summaries, comparable))
    parts.append("ratio: drafted / plain, run by run, so its median need not be that of the two speeds beside it")
    if drafting and (idle := [s.category for s in summaries if not s.stats.drafted]):
        parts.append(
            f"nothing was drafted in {', '.join(idle)}: how far those ratios are from 1 is this machine's noise"
        )
    if drafting:
        parts += ["", "Passes and drafts, and acceptance by position in the draft, of those tested:"]
        parts.append(_drafts(summaries))
    return parts


def _several(summaries: Mapping[str, Sequence[Summary]]) -> list[RenderableType]:
    """A table per figure, with a column per policy."""
    # An interrupted benchmark may know more categories of some policies than of others.
    furthest = max(summaries.values(), key=len)
    known = [{s.category: s for s in rows} for rows in summaries.values()]

    def column_per_policy(cell: Callable[[Summary], str], speed: bool = False) -> Table:
        rows = []
        for s in furthest:
            cells = [cell(k[s.category]) if s.category in k else "-" for k in known]
            rows.append([s.category, *([_speed(s.plain)] if speed else []), *cells])
        headings = ["category", *(["plain"] if speed else []), *summaries]
        return figures_table(headings, rows, totals=1)

    return [
        "",
        "Tokens per second: plain, and drafted / plain, medians over prompts and repeats:",
        column_per_policy(lambda s: _spread(s.ratio)[0], speed=True),
        "",
        "Tokens per pass:",
        column_per_policy(lambda s: f"{s.stats.tokens_per_pass:.2f}"),
        "",
        "Accepted of the drafted tokens:",
        column_per_policy(lambda s: figure(s.stats.acceptance_rate, ".0%")),
    ]


def _speeds(summaries: Sequence[Summary], comparable: bool) -> Table:
    headings = [
        "category",
        "prompts",
        "plain",
        "drafted",
        "ratio",
        "from-to",
        "theory",
        *(["identical"] if comparable else []),
    ]
    rows = []
    for s in summaries:
        cells = [str(s.prompts), _speed(s.plain), _speed(s.drafted), *_spread(s.ratio)]
        cells.append(figure(s.predicted, ".2f", "x"))
        if comparable:
            cells.append(f"{s.identical} of {s.prompts}")
        rows.append([s.category, *cells])
    return figures_table(headings, rows, totals=1)


def _drafts(summaries: Sequence[Summary]) -> Table:
    shown = min(POSITIONS, len(summaries[-1].acceptance_by_position))
    headings = ["category", "tokens per pass", "accepted", "no draft", *(str(i) for i in range(1, shown + 1))]
    rows = []
    for s in summaries:
        rates = [*s.acceptance_by_position, *[None] * shown][:shown]
        cells = [f"{s.stats.tokens_per_pass:.2f}", figure(s.stats.acceptance_rate, ".0%")]
        cells += [figure(s.without_draft, ".0%"), *(figure(rate, ".2f") for rate in rates)]
        rows.append([s.category, *cells])
    return figures_table(headings, rows, totals=1)


def _prices(summaries: Sequence[Summary]) -> Table:
    rows = [[s.category, _speed(s.default), _speed(s.plain), *_spread(s.exact_price)] for s in summaries]
    return figures_table(["category", "without", "exact", "ratio", "from-to"], rows, totals=1)


def _prefill(benchmark: Benchmark) -> list[str]:
    if not benchmark.prefills:
        return []
    speed = median(p.tokens / p.seconds for p in benchmark.prefills)
    length = median(p.tokens for p in benchmark.prefills)
    return [f"prefill, not counted above: median {length:.0f} tokens at {speed:.0f} tokens/s"]


def _differences(benchmark: Benchmark, *, several: bool) -> list[str]:
    """Where texts differ, and what explains it: how far the probe saw batch sizes move a logit."""
    differences, probe = benchmark.differences, benchmark.drafted.calibration.probe
    lines = []
    for d in differences[:LISTED]:
        line = f"{d.policy}: " if several else ""
        line += f"{d.category}/{d.prompt} differs after {d.position} equal tokens"
        if d.margin is not None:
            line += f", where the logits of both tokens are {d.margin:.3g} apart"
        lines.append(line)
    if len(differences) > LISTED:
        lines.append(f"{len(differences)} {'outputs' if several else 'prompts'} differ in all")
    if differences and benchmark.drafted.exactness.same:
        lines.append("exact mode was to rule this out: please report it as a defect")
    elif differences and probe:
        largest = probe.max_difference
        lines.append(
            f"(batch sizes alone change a logit by up to {largest:.3g} here, so two by up to {2 * largest:.3g};"
            " --exact on rules that out)"
        )
    return lines


def _close_calls(benchmark: Benchmark) -> list[str]:
    """How many drafted tokens rounding could have decided, where any could."""
    drafted = [run.stats for run in benchmark.runs if run.kind == "drafted"]
    calls = sum(stats.close_calls for stats in drafted)
    if not calls:
        return []
    tokens = sum(stats.generated for stats in drafted)
    return [f"{calls} of {tokens} tokens with drafts were so close that rounding could have decided otherwise"]


def _speed(speed: Spread | None) -> str:
    value = None if speed is None else speed.median
    return figure(value, ".1f" if value is not None and value < 100 else ".0f")


def _spread(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    return f"{spread.median:.2f}x", f"{spread.low:.2f}-{spread.high:.2f}"


def show_against(rival: Rival, pairs: Sequence[Pair], heading: Sequence[str], total: int) -> None:
    """Print both sides' speeds to stdout, by category; `total`: the prompts that were to be asked."""
    categories = dict.fromkeys(pair.case.category for pair in pairs)
    groups = {category: [pair for pair in pairs if pair.case.category == category] for category in categories}
    rows = [_against_row(name, group) for name, group in [*groups.items(), (OVERALL, pairs)]]
    headings = ["category", "prompts", "theirs", "ours", "ratio", "from-to", "same text"]
    parts = [*heading, f"against {rival.url}, in turns, each prompt asked once"]
    if len(pairs) < total:
        parts.append(f"INCOMPLETE: stopped after {len(pairs)} of {total} prompts")
    table = figures_table(headings, rows, totals=1)
    print_report([*parts, "", "Tokens per second of decoding, medians over prompts:", table])


def _against_row(name: str, pairs: Sequence[Pair]) -> list[str]:
    theirs = Spread.of([speed for pair in pairs if (speed := pair.theirs.tokens_per_second) is not None])
    ours = Spread.of([speed for pair in pairs if (speed := pair.ours.tokens_per_second) is not None])
    ratio = Spread.of([pair.ratio for pair in pairs if pair.ratio is not None])
    same = sum(pair.ours.text == pair.theirs.text for pair in pairs)
    return [
        name,
        str(len(pairs)),
        *("-" if speed is None else f"{speed.median:.2f}" for speed in (theirs, ours)),
        *(["-", "-"] if ratio is None else [f"{ratio.median:.2f}x", f"{ratio.low:.2f}-{ratio.high:.2f}"]),
        f"{same} of {len(pairs)}",
    ]


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


# --------------------------------------------------------------------------- as data


def document(
    target: Target,
    benchmark: Benchmark,
    summaries: Mapping[str, Sequence[Summary]],
    skipped: Sequence[Skipped],
    sampling: Sampling,
) -> dict[str, Any]:
    """Everything measured, and everything it depends on."""
    decoder, calibration = benchmark.drafted, benchmark.drafted.calibration
    rule = benchmark.acceptance.resolve(sampling)
    return {
        **provenance(target),
        "complete": benchmark.complete,
        "verdict": "\n".join(verdicts(summaries, benchmark.caveat)),
        "settings": {
            "max_tokens": benchmark.max_tokens,
            "repeat": benchmark.repeat,
            "sampling": encode(asdict(sampling)),
            "verify": rule.name,
            "lossy": rule.lossy,
            "drafter": decoder.drafter.name if decoder.drafter else None,
            "policies": list(benchmark.policies),
            "exact": decoder.exact,
            "exact_sizes": calibration.exact_sizes,
            **load_settings(target),
            "decoder": "one of each kind for all prompts, in order; at each repeat it has learnt nothing",
        },
        "cost_curve_seconds": {
            policy: drafted.calibration.curve.to_json() if drafted.calibration.curve else None
            for policy, drafted in benchmark.policies.items()
        },
        "probe": calibration.probe.to_json() if calibration.probe else None,
        "summaries": [{"policy": policy, **s.to_json()} for policy, rows in summaries.items() for s in rows],
        "differences": [asdict(d) for d in benchmark.differences],
        "skipped": [asdict(s) for s in skipped],
        "prefills": [asdict(p) for p in benchmark.prefills],
        "runs": [_run(run) for run in benchmark.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    stats = asdict(run.stats)
    # In the counters `seconds` is that of target passes, here that of the run; and its prefill is timed outside too.
    stats["pass_seconds"] = stats.pop("seconds")
    del stats["prefill_seconds"]
    return {
        "category": run.category,
        "prompt": run.prompt,
        "kind": run.kind,
        "policy": run.policy,
        "repeat": run.repeat,
        "seconds": run.seconds,
        "prefill_seconds": run.prefill_seconds,
        "tokens_per_second": run.tokens_per_second,
        **stats,
        "batches": {str(size): passes for size, passes in sorted(run.batches.items())},
        "stop": run.stop,
    }


def alpha_json(orders: Sequence[AlphaOfOrder]) -> list[dict[str, Any]]:
    """The same figures as `alpha_parts`."""
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


def against_json(rival: Rival, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Both sides' figures, prompt by prompt."""
    return {
        "against": rival.url,
        "pairs": [
            {
                "category": pair.case.category,
                "prompt": pair.case.id,
                "ratio": pair.ratio,
                "same_text": pair.ours.text == pair.theirs.text,
                **{
                    side: {"tokens": one.tokens, "seconds": one.seconds, "tokens_per_second": one.tokens_per_second}
                    for side, one in (("ours", pair.ours), ("theirs", pair.theirs))
                },
            }
            for pair in pairs
        ],
    }
