"""`ngramspec tune --quants`: the cost of each quantisation of a model on this machine, and advice derived from it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

import ngramspec
from ngramspec import machine
from ngramspec.cpu.cores import usable_cores
from ngramspec.data import ModelError, NGramSpecError
from ngramspec.instruments.reports.report import Table as Figures
from ngramspec.instruments.tuning.quants import (
    MAX_SPREAD,
    PRECISION,
    QUANTISATIONS,
    SIZES,
    QuantCost,
    QuantTiming,
    advice,
    keep_costs,
    load_costs,
    recommend,
)
from ngramspec.llama.devices import build, quantisation
from ngramspec.llama.synthetic import PROMPT, SyntheticModels, measurement_path
from ngramspec.llama.target import Target
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.machine import Settings
from ngramspec.models.gguf import read_header
from ngramspec.models.shape import SHAPES, Shape, is_shape, parse_shape, shape_of
from ngramspec.sampling.option import options

from .conditions import Load
from .console import defer_signals, note, reraise, usage_error
from .options import find
from .output import Output, command_line
from .view import figures_table, print_report, run_timed

DEPTH = 256
"""Default number of tokens in the context before each pass."""

_USED = frozenset({"hf_repo", "offline", "gpu_layers", "threads", "threads_batch", "flash_attn", "cache_type_k"})
_USED |= {"cache_type_v", "no_mmap", "no_repack", "ignore_tuned"}
"""Load settings that have an effect on synthetic models."""


def tune_quants(load: LoadSettings, model: str | None, time_limit: float, depth: int, output: Output) -> None:
    """Measure the quantisations of a model or of a shape, show the results, and store them for `quant_note`."""
    _check(load)
    label, shape, path = _find_shape(load, model)
    threads = load.threads or usable_cores()
    settings = Settings(
        threads,
        load.threads_batch or threads,
        load.flash_attn or "auto",
        mmap=not load.no_mmap,
        repack=not load.no_repack,
        cache_types=(load.cache_type_k, load.cache_type_v),
    )
    deadline = time.monotonic() + time_limit
    own = None if path is None else _own(path)
    names = [*QUANTISATIONS, *([own] if own in PRECISION and own not in QUANTISATIONS else [])]
    note(f"measuring {len(names)} quantisations for at most about {time_limit:g} seconds")
    others = Load()
    with SyntheticModels(shape, names, settings, n_gpu_layers=load.gpu_layers, depth=depth) as models:
        timing = QuantTiming(
            models.seconds, models.files, models.outputs, shape.layers, models.layers, PROMPT, deadline
        )
        outcome = run_timed(_steps(models, timing), time_limit)
    costs = timing.costs()
    if not costs and isinstance(outcome.error, NGramSpecError):
        reraise(outcome)
    is_steady = timing.spread <= MAX_SPREAD and not others.is_high
    if not is_steady:
        note(
            f"warning: passes lasted up to {timing.spread:.0%} longer than the fastest, and {others};"
            " nothing is recommended or saved; measure on an idle machine"
        )
    elif costs and outcome.error is None:
        keep_costs(measurement_path(shape, load.gpu_layers), costs)
    conclusions = [recommend(costs)] if costs and is_steady else []
    steepness = next((cost.steepness for cost in costs if cost.name == own), 0.0)
    if is_steady and (line := advice(own, steepness, costs)):
        conclusions.append(line)
    heading = [
        f"{label}: {shape.layers} layers, {shape.parameters / 1e9:.2f} B parameters, {shape.text}",
        f"{machine.name()}; {_threads(settings)}, {depth} tokens of context; {others}",
        command_line("tune", [model], {"--quants": True, "--time-limit": time_limit, "--context-depth": depth}, load),
    ]
    document = {
        "ngramspec": ngramspec.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.name(),
        "build": build(),
        "model": label,
        "shape": asdict(shape),
        "settings": asdict(settings) | {"gpu_layers": load.gpu_layers, "depth": depth, "seconds": time_limit},
        "complete": outcome.error is None,
        "timed_layers": models.layers,
        "steady": is_steady,
        "other_cores": others.cores,
        "command": heading[-1],
        "rounds": timing.rounds,
        "spread": timing.spread,
        "quantisations": {cost.name: _figures(cost) for cost in costs},
        "conclusions": conclusions,
    }
    output.write(lambda: print_report([*heading, *_table(timing, costs), *conclusions]), lambda: document)
    reraise(outcome)


def quant_note(target: Target, gpu_layers: int, steepness: float) -> str | None:
    """Return a note if the quantisation of a loaded model is slow in batches here; `steepness` is T(4) / T(1)."""
    try:
        shape = shape_of(target.weights.path)
    except ModelError:  # such as a mixture of experts, whose batches are expensive in every quantisation
        return None
    return advice(target.weights.quantisation, steepness, load_costs(measurement_path(shape, gpu_layers)))


def _check(load: LoadSettings) -> None:
    """End the program if a setting of another kind is changed, because it would have no effect."""
    plain, specs = LoadSettings(), options(LoadSettings)
    for name in LOADING:
        if name not in _USED and getattr(load, name) != getattr(plain, name):
            usage_error(f"{specs[name].flags[0]} cannot be combined with --quants")


def _find_shape(load: LoadSettings, model: str | None) -> tuple[str, Shape, Path | None]:
    """Return a name for the user, the shape, and the file of the model if one was named."""
    if model is not None and is_shape(model):
        if load.hf_repo is not None:
            usage_error(f"a shape and a model were given: {model} and -hf {load.hf_repo}; remove one")
        try:
            return model if model in SHAPES else "shape", parse_shape(model), None
        except ValueError as error:
            usage_error(str(error))
    try:
        source = find(model, load)
    except ModelError as error:
        if model is not None and not Path(model).suffix:
            raise ModelError(f"{error}; the shapes with names are {', '.join(SHAPES)}") from error
        raise
    return source.label, shape_of(source.path), source.path


def _steps(models: SyntheticModels, timing: QuantTiming) -> Iterator[str]:
    """Do all work, and yield the name of each step."""
    preparing = models.prepare()
    while True:
        with defer_signals():
            name = next(preparing, None)
        if name is None:
            break
        yield name
    yield from timing.run()


def _own(path: Path) -> str | None:
    kind = read_header(path).metadata.get("general.file_type")
    return quantisation(kind) if isinstance(kind, int) else None


def _threads(settings: Settings) -> str:
    batches = "" if settings.threads_batch == settings.threads else f" ({settings.threads_batch} for batches)"
    return f"{settings.threads} threads{batches}"


# --------------------------------------------------------------------------- output


def _figures(cost: QuantCost) -> dict[str, Any]:
    return {
        "size_bytes": cost.size_bytes,
        "seconds": {str(size): seconds for size, seconds in cost.seconds.items()},
        "tokens_per_second": cost.speed,
        "tokens_per_second_with_drafts": cost.draft_speed,
        "prompt_tokens_per_second": 1 / cost.prompt_seconds,
    }


def _table(timing: QuantTiming, costs: Sequence[QuantCost]) -> list[str | Table]:
    if not costs:
        return ["Interrupted before the end of the first round: no results."]
    ratios = SIZES[1:]
    headings = ["quantisation", "MiB", "tokens/s", "with drafts", *(f"T({n})/T(1)" for n in ratios), "prompt tokens/s"]
    rows = [
        [
            cost.name,
            f"{cost.size_bytes / 2**20:,.0f}",
            f"{cost.speed:,.1f}",
            f"{cost.draft_speed:,.1f}",
            *(f"{cost.seconds[n] / cost.seconds[1]:.2f}" for n in ratios),
            f"{1 / cost.prompt_seconds:,.0f}",
        ]
        for cost in costs
    ]
    return [
        figures_table(Figures(headings, rows)),
        f"T(n) is the time of a pass over n tokens. Measured with random weights in {timing.timed_layers} of"
        f" {timing.layers} layers and in the output layer: minima of {timing.rounds} rounds; medians are up to"
        f" {timing.spread:.0%} higher. With drafts: modelled, for text that repeats as much as typical answers.",
    ]
