"""`ngramspec bench`: how much faster drafting makes a model here, by kind of text, and whether the text stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

import ngramspec
from ngramspec import machine
from ngramspec.benchmark import Benchmark, Run, Skipped, prepare
from ngramspec.benchmark_report import Summary, summarise, verdict
from ngramspec.decoder import SpeculativeDecoder
from ngramspec.memory.names import DEFAULT
from ngramspec.prompts_io import Prompt, load_prompts
from ngramspec.sampling import Sampling
from ngramspec.target import Target, build

from .bench_view import bench_bar, show
from .console import fail, guarded_stdout, note, outcome, usage_error
from .json_output import JsonOutput
from .options import DraftOptions, LoadOptions, Model, SamplingOptions


def bench(
    load: LoadOptions,
    sampling: SamplingOptions,
    draft: DraftOptions,
    model: Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="DIR|FILE", help="Your own prompts; default: those of ngramspec.", show_default=False
        ),
    ] = None,
    category: Annotated[
        list[str] | None, typer.Option("--category", help="Only this category; may be repeated.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Most prompts per category; default: all.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs of each kind per prompt.")] = 3,
    predict: Annotated[int, typer.Option("-n", "--predict", min=2, help="Most tokens per run.")] = 128,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE|-", help="Write every run as JSON; -: to stdout, and no table.", show_default=False
        ),
    ] = None,
) -> None:
    """Measure plain against drafted decoding, interleaved, on the same prompts.

    A ratio of 1.20x means that drafting emits 1.2 times as many tokens per second. "theory" is what Leviathan et
    al.'s formula expects from the measured acceptance and cost of a pass, drafts being free.

    With --exact both sides run in exact mode, and its price against ordinary plain decoding is measured too.
    --no-draft compares plain decoding with itself: how far the machine's own noise moves the ratios.
    """
    chosen = sampling.sampling()
    verify = None if chosen.greedy else sampling.verify
    selected = _select(load_prompts(prompts), category or [], limit)
    with JsonOutput(as_json) as output:
        found = load.find(model)
        target = load.load(found)
        memory = draft.open_memory(target, keep=False)
        if memory is not None and memory.stored:
            note(f"drafting from a memory of {memory.stored} tokens too; --no-memory leaves it out")
        decoder = draft.decoder(target, memory)
        cases, skipped = prepare(target, selected, predict)
        if not cases:
            first = skipped[0]
            fail(f"no prompt left of {len(selected)}; {first.category}/{first.id}: {first.reason}")
        default = None
        if target.exact:
            ordinary = replace(load, exact=False, ctx_size=target.n_ctx).load(found)
            default = SpeculativeDecoder(ordinary, drafter=None)
        benchmark = Benchmark(decoder, cases, predict, repeat, chosen, verify, default)
        note(
            f"{benchmark.total} runs of up to {predict} tokens; prompts: {len(cases)}"
            + (f", skipped: {len(skipped)}" if skipped else "")
        )
        code, error = _measure(benchmark)
        summaries = summarise(benchmark.runs, decoder.calibration.curve)
        try:
            if as_json != "-":
                _show(target, benchmark, summaries, skipped, chosen)
        finally:
            # Even where the reader of the table has gone, as head does.
            if as_json is not None:
                selection = {"prompts": str(prompts) if prompts else None, "categories": category, "limit": limit}
                document = _document(target, benchmark, summaries, skipped, chosen)
                remembered = {"name": draft.memory or DEFAULT, "tokens": memory.stored} if memory else None
                output.write({"selection": selection, "load": asdict(load), "memory": remembered, **document})
    if error is not None:
        fail(error)
    if code:
        raise typer.Exit(code)


def _select(prompts: Sequence[Prompt], categories: Sequence[str], limit: int | None) -> list[Prompt]:
    known = list(dict.fromkeys(p.category for p in prompts))
    for category in categories:
        if category not in known:
            usage_error(f"no category {category!r}; there are: {', '.join(known)}")
    wanted = [c for c in known if not categories or c in categories]
    return [p for c in wanted for p in [p for p in prompts if p.category == c][:limit]]


def _measure(benchmark: Benchmark) -> tuple[int, str | None]:
    """Make the runs; (exit code, error message), and what was measured before stays in `benchmark`."""
    with outcome() as ended, bench_bar(benchmark.total) as done:
        benchmark.warm_up()
        for run in benchmark.measure():
            done(f"{run.category}/{run.prompt}")
    return ended.code, ended.error


def _show(
    target: Target,
    benchmark: Benchmark,
    summaries: Sequence[Summary],
    skipped: Sequence[Skipped],
    sampling: Sampling,
) -> None:
    probe = benchmark.drafted.calibration.probe
    heading = _heading(target, benchmark, sampling)
    with guarded_stdout():
        show(benchmark, summaries, heading, skipped, largest_difference=probe.max_difference if probe else None)


def _heading(target: Target, benchmark: Benchmark, sampling: Sampling) -> list[str]:
    decoder = benchmark.drafted
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature}, seed {sampling.seed}"
    drafter = decoder.drafter.name if decoder.drafter else "none"
    lines = [
        f"{target.name}: {target.architecture}, {target.description}, {target.size_bytes / 2**20:.0f} MiB",
        f"{machine.name()}; {target.threads} threads, context {target.n_ctx}",
        f"{how}; drafter {drafter}, policy {decoder.policy.name}; up to {benchmark.max_tokens} tokens per run,"
        f" {benchmark.repeat} of each kind per prompt in alternating order, one drafted decoder for all prompts",
    ]
    if decoder.exact:
        sizes = " ".join(str(n) for n in decoder.calibration.exact_sizes or ())
        lines.append(f"exact mode, in batches of {sizes or '1'}")
    return lines


def _document(
    target: Target,
    benchmark: Benchmark,
    summaries: Sequence[Summary],
    skipped: Sequence[Skipped],
    sampling: Sampling,
) -> dict[str, Any]:
    """Everything measured, and everything it depends on."""
    decoder, calibration = benchmark.drafted, benchmark.drafted.calibration
    return {
        "ngramspec": ngramspec.__version__,
        "complete": benchmark.complete,
        "verdict": verdict(summaries, comparable=benchmark.comparable),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.name(),
        "devices": [asdict(device) for device in target.devices],
        "build": build(),
        "model": {
            "path": str(target.path),
            "name": target.name,
            "architecture": target.architecture,
            "description": target.description,
            "size_bytes": target.size_bytes,
            "parameters": target.n_params,
            "can_rollback": target.can_rollback,
        },
        "settings": {
            "max_tokens": benchmark.max_tokens,
            "repeat": benchmark.repeat,
            "sampling": asdict(sampling),
            "verify": "greedy" if sampling.greedy else benchmark.verify,
            "drafter": decoder.drafter.name if decoder.drafter else None,
            "policy": decoder.policy.name,
            "exact": decoder.exact,
            "exact_sizes": calibration.exact_sizes,
            "context": target.n_ctx,
            "threads": target.threads,
            "flash_attn": target.flash_attn,
            "cache_types": target.cache_types,
            "decoder": "one for all prompts, in order",
        },
        "cost_curve_seconds": calibration.curve.to_json() if calibration.curve else None,
        "probe": calibration.probe.to_json() if calibration.probe else None,
        "summaries": [s.to_json() for s in summaries],
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
        "repeat": run.repeat,
        "seconds": run.seconds,
        "prefill_seconds": run.prefill_seconds,
        "tokens_per_second": run.tokens_per_second,
        **stats,
        "batches": {str(size): passes for size, passes in sorted(run.batches.items())},
        "stop": run.stop,
    }
