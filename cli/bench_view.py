"""Report and JSON document of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import RenderableType

from ngramspec.cost.paired import compare_pairs
from ngramspec.data import encode
from ngramspec.instruments.benchmark.figures import Summary, median_of, verdicts
from ngramspec.instruments.benchmark.report import speed
from ngramspec.instruments.benchmark.runs import Benchmark, Run
from ngramspec.instruments.benchmark.server_comparison import Pair, RemoteServer
from ngramspec.instruments.prompts import SkippedPrompt
from ngramspec.instruments.reports.report import OVERALL, Report, Table, figure
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling

from .info import load_settings, provenance
from .view import figures_table, format_skipped, limit_lines, print_report, section_parts


def show(
    benchmark: Benchmark, report: Report, heading: Sequence[str], skipped_prompts: Sequence[SkippedPrompt], verdict: str
) -> None:
    """Print the report to stdout below the lines of `heading`, with details such as the reason why texts differ."""
    parts: list[RenderableType] = [*heading, *section_parts(report.sections), "", *report.notes]
    if (prefills := benchmark.prefills) and report.sections:
        rate = median(prefill["tokens"] / prefill["seconds"] for prefill in prefills)
        length = median(prefill["tokens"] for prefill in prefills)
        parts.append(f"prefill, not counted above: median {length:.0f} tokens at {rate:.0f} tokens/s")
    parts += format_skipped(skipped_prompts)
    if benchmark.caveat is None:
        parts += _differences(benchmark)
        parts += _close_calls(benchmark)
    print_report([*parts, verdict])


def _differences(benchmark: Benchmark) -> list[str]:
    """Return lines on the positions at which texts differ.

    The last line explains the differences by the change of a logit with the batch size, which the probe measured.
    """
    several = len(benchmark.policies) > 1
    differences, probe = benchmark.differences, benchmark.drafted.kernels.probe
    lines = []
    for d in differences:
        line = f"{d['policy']}: " if several else ""
        line += f"{d['category']}/{d['prompt']} differs after {d['position']} equal tokens"
        if d["margin"] is not None:
            line += f", where the logits of both tokens are {d['margin']:.3g} apart"
        lines.append(line)
    lines = limit_lines(lines, f"{'outputs' if several else 'prompts'} differ in total")
    if differences and benchmark.drafted.exactness.bit_identical:
        lines.append("exact mode should rule this out; please report it as a bug")
    elif differences and probe:
        largest = probe.max_difference
        lines.append(
            f"(the batch size alone changes a logit by up to {largest:.3g} here, so two by up to {2 * largest:.3g};"
            " --exact on rules this out)"
        )
    return lines


def _close_calls(benchmark: Benchmark) -> list[str]:
    counters = [run.stats for run in benchmark.runs if run.kind == "drafted"]
    calls = sum(stats.close_calls for stats in counters)
    if not calls:
        return []
    tokens = sum(stats.generated for stats in counters)
    return [f"{calls} of {tokens} tokens with drafts were near-ties that rounding could have decided differently"]


def show_against(server: RemoteServer, pairs: Sequence[Pair], heading: Sequence[str], total: int) -> None:
    """Print the speeds of both sides to stdout by category; `total` counts all prompts, `pairs` the completed ones."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair["category"], []).append(pair)
    rows = [_against_row(name, group) for name, group in [*groups.items(), (OVERALL, pairs)]]
    headings = ["category", "prompts", "theirs", "ours", "ratio", "same text"]
    parts = [*heading, f"compared with {server.url}, alternating, each prompt once"]
    if len(pairs) < total:
        parts.append(f"INCOMPLETE: stopped after {len(pairs)} of {total} prompts")
    table = figures_table(Table(headings, rows, totals=1))
    result = compare_pairs([pair["ratio"] for pair in pairs if pair["ratio"] is not None])
    line = "no speed measured" if result is None else f"ngramspec, compared with this server: {result}"
    print_report([*parts, "", "Tokens per second of decoding, medians over prompts:", table, line])


def _against_row(name: str, pairs: Sequence[Pair]) -> list[str]:
    return [
        name,
        str(len(pairs)),
        *(speed(median_of(pair[side]["tokens_per_second"] for pair in pairs)) for side in ("theirs", "ours")),
        figure(median_of(pair["ratio"] for pair in pairs), ".2f", "x"),
        f"{sum(pair['same_text'] for pair in pairs)} of {len(pairs)}",
    ]


# --------------------------------------------------------------------------- JSON document


def document(
    target: Target,
    benchmark: Benchmark,
    summaries: Mapping[str, Sequence[Summary]],
    skipped_prompts: Sequence[SkippedPrompt],
    sampling: Sampling,
) -> dict[str, Any]:
    """Return all measurements and the conditions that they depend on."""
    decoder, kernels = benchmark.drafted, benchmark.drafted.kernels
    return {
        **provenance(target),
        "complete": benchmark.complete,
        "verdict": "\n".join(verdicts(summaries, benchmark.caveat)),
        "settings": {
            "max_tokens": benchmark.max_tokens,
            "repeat": benchmark.repeat,
            "sampling": encode(asdict(sampling)),
            "acceptance": benchmark.acceptance.rule(sampling),
            "lossy": benchmark.acceptance.lossy,
            "drafter": decoder.drafter.name if decoder.drafter else None,
            "policies": list(benchmark.policies),
            "exact": decoder.exact,
            "exact_sizes": kernels.exact_sizes,
            **load_settings(target),
            "decoder": "one with and one without drafts for all prompts, in order; each repeat starts untrained",
        },
        "pass_costs": {policy: decoder.times.to_json() for policy, decoder in benchmark.policies.items()},
        "probe": encode(kernels.probe),
        "summaries": [{"policy": policy, **s.to_json()} for policy, rows in summaries.items() for s in rows],
        "differences": benchmark.differences,
        "skipped": skipped_prompts,
        "prefills": benchmark.prefills,
        "runs": [_run(run) for run in benchmark.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    stats = asdict(run.stats)
    # In the counters `seconds` is the time of target passes. In the document it is the time of the run, and the
    # prefill is timed separately too.
    stats["pass_seconds"] = stats.pop("seconds")
    del stats["prefill_seconds"]
    own = ("category", "prompt", "kind", "policy", "repeat", "seconds", "prefill_seconds", "tokens_per_second")
    batches = {str(size): passes for size, passes in sorted(run.batches.items())}
    return {name: getattr(run, name) for name in own} | stats | {"batches": batches, "stop": run.stop}
