"""`ngramspec tune --quants`: the cost of each quantisation of a model on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from ngramspec import machine
from ngramspec.cpu.cores import usable_cores
from ngramspec.data import ModelError, NGramSpecError
from ngramspec.instruments.reports.report import Report
from ngramspec.llama.devices import quantisation
from ngramspec.loading.load import find
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.models.gguf import read_header
from ngramspec.quants.costs import (
    MAX_SPREAD,
    PRECISION,
    QUANTISATIONS,
    QuantTiming,
    advise,
    costs_path,
    keep_costs,
    recommend,
    table_section,
)
from ngramspec.quants.models import SyntheticModels
from ngramspec.quants.shape import SHAPES, Shape, is_shape, parse_shape, shape_of
from ngramspec.sampling.settings import options

from .conditions import Load, describe_program
from .console import defer_signals, note, usage_error, usage_errors
from .options import DISPLAY
from .show import Output, command_line, run_pieces

DEPTH = 256  # default number of tokens in the context before each pass

_USED = frozenset({"hf_repo", "offline", "gpu_layers", "threads", "threads_batch", "flash_attn", "cache_type_k"})
_USED |= {"cache_type_v", "no_mmap", "no_repack", "ignore_tuned"}
"""Load settings that have an effect on synthetic models."""


def tune_quants(load: LoadSettings, model: str | None, time_limit: float, depth: int, output: Output) -> None:
    """Measure the quantisations of a model or of a shape, show the results, and store them for `quant_note`."""
    for name in LOADING:
        if name not in _USED and getattr(load, name) != getattr(LoadSettings(), name):
            usage_error(f"{options(LoadSettings)[name].flags[0]} cannot be combined with --quants")
    label, shape, path = _find_shape(load, model)
    threads = load.threads or usable_cores()
    settings = replace(load.of_target, threads=threads, threads_batch=load.threads_batch or threads)
    deadline = time.monotonic() + time_limit
    kind = None if path is None else read_header(path).metadata.get("general.file_type")
    own = quantisation(kind) if isinstance(kind, int) else None
    names = [*QUANTISATIONS, *([own] if own in PRECISION and own not in QUANTISATIONS else [])]
    note(f"measuring {len(names)} quantisations for at most about {time_limit:g} seconds")
    others = Load()
    with SyntheticModels(shape, names, settings, n_gpu_layers=load.gpu_layers, depth=depth) as models:
        timing = QuantTiming(models, shape.layers, deadline)
        outcome = run_pieces(_steps(models, timing), seconds=time_limit)
    costs = timing.costs()
    if not costs and isinstance(outcome.error, NGramSpecError):
        outcome.reraise()
    is_steady = timing.spread <= MAX_SPREAD and not others.is_high
    if not is_steady:
        note(
            f"warning: passes lasted up to {timing.spread:.0%} longer than the fastest, and {others};"
            " nothing is recommended or saved; measure on an idle machine"
        )
    elif costs and outcome.error is None:
        keep_costs(costs_path(shape, load.gpu_layers), costs)
    conclusions = [recommend(costs)] if costs and is_steady else []
    steepness = next((cost.steepness for cost in costs if cost.name == own), 0.0)
    if is_steady and (line := advise(own, steepness, costs)):
        conclusions.append(line)
    batches = "" if settings.threads_batch == threads else f" ({settings.threads_batch} for batches)"
    values = {"--quants": True, "--time-limit": time_limit, "--context-depth": depth}
    report = Report(
        "Quantisations",
        command_line("tune", [model], values, load),
        sections=[table_section(timing, costs)] if costs else [],
        setup=[
            f"{label}: {shape.layers} layers, {shape.parameters / 1e9:.2f} B parameters, {shape.text}",
            f"{machine.name()}; {threads} threads{batches}, {depth} tokens of context; {others}",
        ],
        details=conclusions if costs else ["Interrupted before the end of the first round: no results."],
    )
    document = {
        **describe_program(),
        "model": label,
        "shape": asdict(shape),
        "settings": asdict(settings) | {"gpu_layers": load.gpu_layers, "depth": depth, "seconds": time_limit},
        "complete": outcome.error is None,
        "timed_layers": models.layers,
        "steady": is_steady,
        "other_cores": others.cores,
        "command": report.command,
        "rounds": timing.rounds,
        "spread": timing.spread,
        "quantisations": {cost.name: cost.to_json() for cost in costs},
        "conclusions": conclusions,
    }
    output.write(report, document, outcome)


def _find_shape(load: LoadSettings, model: str | None) -> tuple[str, Shape, Path | None]:
    """Return a name for the user, the shape, and the file of the model if one was named."""
    if model is not None and is_shape(model):
        if load.hf_repo is not None:
            usage_error(f"a shape and a model were given: {model} and -hf {load.hf_repo}; remove one")
        with usage_errors():
            return model if model in SHAPES else "shape", parse_shape(model), None
    try:
        source = find(model, load, DISPLAY)
    except ModelError as error:
        if model is not None and not Path(model).suffix:
            raise ModelError(f"{error}; the shapes with names are {', '.join(SHAPES)}") from error
        raise
    return source.label, shape_of(source.path), source.path


def _steps(models: SyntheticModels, timing: QuantTiming) -> Iterator[str]:
    preparing = models.prepare()
    while True:
        with defer_signals():
            name = next(preparing, None)
        if name is None:
            break
        yield name
    yield from timing.run()
