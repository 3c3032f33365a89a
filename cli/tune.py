"""`ngramspec tune`: search for the settings with which a model decodes and verifies fastest on this machine.

With --quants it measures the cost of each quantisation instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from ngramspec.cost.paired import CHANCE
from ngramspec.cpu.cores import logical_cores, machine_name, physical_cores, process_load, usable_cores
from ngramspec.data import ModelError, NGramSpecError
from ngramspec.instruments.reports.report import Report
from ngramspec.instruments.tuning.search import MIN_GAIN, Tuning, candidates, conclusions, table_section
from ngramspec.llama.devices import quantisation
from ngramspec.llama.trial import DRAFTS, SINGLE, STRETCH, SettingsTimer
from ngramspec.loading.load import find, model_tuning_path, open_alone
from ngramspec.loading.settings import LOADING, LoadSettings, Tuned, save_tuned
from ngramspec.model_settings import UNQUANTISED, flags
from ngramspec.models.gguf import read_header
from ngramspec.quants import costs as quant_costs
from ngramspec.quants.models import SHAPES, Shape, SyntheticModels, is_shape, parse_shape, shape_of
from ngramspec.sampling.settings import allow_int_range, allow_range, option, options

from .conditions import Conditions, Load, describe_program
from .console import defer_signals, fail, note, usage_error, usage_errors
from .options import DISPLAY, Model
from .show import Output, command_line, run_pieces

DEPTH = 2048  # default number of tokens in the long context
QUANTS_DEPTH = 256  # default number of tokens in the context before each pass of --quants

_QUANTS = frozenset({"hf_repo", "offline", "gpu_layers", "threads", "threads_batch", "flash_attn", "cache_type_k"})
_QUANTS |= {"cache_type_v", "no_mmap", "no_repack", "ignore_tuned"}
"""Load settings that have an effect on the synthetic models of --quants."""


def tune(
    load: Annotated[LoadSettings, LOADING],
    output: Annotated[Output, ("as_json",)],
    model: Model = None,
    quants: bool = option(
        False, help="Compare quantisations of MODEL, or of a shape, instead of settings; weights are random."
    ),
    time_limit: float = option(
        60.0, help="Maximum measuring time in seconds, after loading the model.", allowed=allow_range(5, 86400)
    ),
    context_depth: int | None = option(
        None,
        help=f"Number of tokens in the long context; default: {DEPTH}, or {QUANTS_DEPTH} with --quants.",
        allowed=allow_int_range(STRETCH, 2**20),
    ),
    apply: bool = option(False, help="Save the recommended settings; other commands then use them for this model."),
    reset: bool = option(False, help="Delete all that tune saved for MODEL, without measuring."),
) -> None:
    """Find the settings under which a model is fastest here.

    Example: ngramspec tune model.gguf --apply

    The command tries the following, if the machine supports them: thread counts for single tokens and for batches
    (prompts and drafts), flash attention, the number of prompt tokens per decode call, weights without rearrangement,
    weights read into memory, and an 8-bit KV cache, which is only reported because it changes the text. Each candidate
    and the current settings are timed in pairs, in random order. T(4) is a pass over four tokens.

    A setting is recommended only under three conditions. It is at least 1.03 times as fast for the passes that it
    affects, in more pairs than chance would explain (at most one false alarm in 50 runs). It makes nothing else slower.
    All winners together win again in new pairs. If the times of the current settings vary too much, the command ends
    with an error. Ctrl-C shows the results so far and saves nothing.

    --apply saves a recommendation for this model, build and machine, unless other programs used the cores meanwhile.
    Other commands then use it, unless their options override it, and print a note. ngramspec tune MODEL --reset deletes
    it, and the results of --quants. Without a recommendation, nothing changes. Settings can change the rounding of
    logits, so batch sizes are compared again for new settings.

    --quants answers another question: which file of a model to download. It measures what each quantisation costs on
    this machine, from Q4_0 to Q8_0, and recommends one. MODEL may be the name of a shape, such as qwen2.5-1.5b or
    llama-3.1-8b, or a list of dimensions: layers=28,embd=1536,ff=8960,heads=12,kv_heads=2,vocab=151936,tied=yes.
    """
    if apply and (reset or quants):
        usage_error(f"--apply cannot be combined with {'--reset' if reset else '--quants'}")
    if reset and output.as_json is not None:
        usage_error("--json cannot be combined with --reset")
    output.check()
    if reset:
        _reset(load, model)
        return
    if quants:
        _tune_quants(load, model, time_limit, context_depth or QUANTS_DEPTH, output)
        return
    source = find(model, load, DISPLAY)
    # Measurements use separate contexts, so that of the model is small.
    base_load = replace(load, ignore_tuned=True, ctx_size=256, exact="off")
    start = time.monotonic()
    with ExitStack() as stack:
        target = stack.enter_context(open_alone(source, base_load, DISPLAY))
        load_seconds = time.monotonic() - start
        conditions = Conditions(target, source.label, "off")
        # The long context exceeds neither the training context of the model nor the context size of later runs.
        deep = context_depth or DEPTH
        deep = min(deep, load.ctx_size or deep, target.weights.n_ctx_train or deep)
        deep = max(STRETCH, deep // STRETCH * STRETCH)
        bench = stack.enter_context(closing(SettingsTimer(target.weights, deep, defer_signals)))
        present = target.settings
        trials = candidates(
            present,
            physical=physical_cores(),
            logical=logical_cores(),
            on_cpu=not target.weights.plan.all_on_gpu,
            flash_free=base_load.cache_type_v in UNQUANTISED,
            quantised_cache=base_load.cache_type_k == base_load.cache_type_v == "f16" and base_load.flash_attn != "off",
        )
        others = process_load()
        others.wait()
        tuning = Tuning(bench.seconds, present, trials, time_limit, load_seconds, is_quiet=lambda: others.is_quiet)
        note(f"timing up to {len(trials)} settings for at most {time_limit:g} seconds")
        outcome = run_pieces(tuning.run(), seconds=time_limit)
    if isinstance(outcome.error, NGramSpecError):
        outcome.reraise()
    best, together, times = tuning.best_settings, tuning.together, tuning.times
    changes = None if best is None else best.changes(tuning.present)
    is_saved = apply and changes is not None and not conditions.load.is_high
    if is_saved and changes is not None and together is not None and together.speed is not None:
        tuned = Tuned(changes, 1 / together.speed.median, datetime.now(UTC).date().isoformat())
        save_tuned(model_tuning_path(source.path, load), tuned)
    own = {"--time-limit": time_limit, "--context-depth": context_depth, "--apply": apply}
    command = command_line("tune", [model], own, load)
    advice = [
        f"{name} would also be faster, but changes the text; it is never saved."
        for name in tuning.find_gaining(advice=True)
    ]
    if {SINGLE, DRAFTS[0]} <= times.keys() and not conditions.load.is_high:
        line = quant_costs.quant_note(target.weights, load.gpu_layers, times[DRAFTS[0]] / times[SINGLE])
        advice += [] if line is None else [line]
    report = Report(
        "Speed of settings",
        command,
        sections=[table_section(tuning, deep)] if times else [],
        setup=[*conditions.lines, *([f"huge pages: {pages}"] if (pages := target.weights.huge_pages) else [])],
        details=[*conclusions(tuning, advice, applied=is_saved)],
    )
    document = {
        **conditions.to_json(command, load),
        "complete": tuning.complete,
        "settings": {"seconds": time_limit, "depth": deep, "least_gain": MIN_GAIN, "false_alarms": CHANCE},
        "present": asdict(tuning.present),
        "present_seconds": {m.label(deep): seconds for m, seconds in times.items()},
        "compared": {name: comparison.to_json(deep) for name, comparison in tuning.comparisons.items()},
        "together": together.to_json(deep) if together else None,
        "recommended": changes and {"options": flags(changes), "changes": changes, "applied": is_saved},
        "left_out": tuning.left_out,
        "advice": advice,
    }
    output.write(report, document, outcome)
    if apply and changes is not None and not is_saved:
        fail(f"the settings are not saved, because {conditions.load}; run tune --apply again on an idle machine")


def _reset(load: LoadSettings, model: str | None) -> None:
    """Delete the settings and the costs of quantisations that are saved for a model or a shape."""
    files = list[Path]()
    if model is None or not is_shape(model):
        source = find(model, load, DISPLAY)
        files.append(model_tuning_path(source.path, load))
        with suppress(ModelError):  # such as a mixture of experts, whose quantisations are not compared
            files.append(quant_costs.costs_path(shape_of(source.path), load.gpu_layers))
    else:
        files.append(quant_costs.costs_path(parse_shape(model), load.gpu_layers))
    is_saved = any(file.exists() for file in files)
    for file in files:
        file.unlink(missing_ok=True)
    note("deleted what tune saved" if is_saved else "nothing is saved for this model and machine")


def _tune_quants(load: LoadSettings, model: str | None, time_limit: float, depth: int, output: Output) -> None:
    """Measure the quantisations of a model or of a shape, show the results, and store them for `quant_note`."""
    for name in LOADING:
        if name not in _QUANTS and getattr(load, name) != getattr(LoadSettings(), name):
            usage_error(f"{options(LoadSettings)[name].flags[0]} cannot be combined with --quants")
    label, shape, path = _find_shape(load, model)
    threads = load.threads or usable_cores()
    settings = replace(load.of_target, threads=threads, threads_batch=load.threads_batch or threads)
    deadline = time.monotonic() + time_limit
    kind = None if path is None else read_header(path).metadata.get("general.file_type")
    own = quantisation(kind) if isinstance(kind, int) else None
    names = [*dict.fromkeys([*quant_costs.QUANTISATIONS, *([own] if own in quant_costs.PRECISION else [])])]
    note(f"measuring {len(names)} quantisations for at most about {time_limit:g} seconds")
    others = Load()
    with SyntheticModels(shape, names, settings, n_gpu_layers=load.gpu_layers, depth=depth) as models:
        timing = quant_costs.QuantTiming(models, shape.layers, deadline)
        outcome = run_pieces(_steps(models, timing), seconds=time_limit)
    costs = timing.costs()
    if not costs and isinstance(outcome.error, NGramSpecError):
        outcome.reraise()
    is_steady = timing.spread <= quant_costs.MAX_SPREAD and not others.is_high
    if not is_steady:
        note(
            f"warning: passes lasted up to {timing.spread:.0%} longer than the fastest, and {others};"
            " nothing is recommended or saved; measure on an idle machine"
        )
    elif costs and outcome.error is None:
        quant_costs.keep_costs(quant_costs.costs_path(shape, load.gpu_layers), costs)
    conclusions = [quant_costs.recommend(costs)] if costs and is_steady else []
    steepness = next((cost.steepness for cost in costs if cost.name == own), 0.0)
    if is_steady and (line := quant_costs.advise(own, steepness, costs)):
        conclusions.append(line)
    batches = "" if settings.threads_batch == threads else f" ({settings.threads_batch} for batches)"
    values = {"--quants": True, "--time-limit": time_limit, "--context-depth": depth}
    report = Report(
        "Quantisations",
        command_line("tune", [model], values, load),
        sections=[quant_costs.table_section(timing, costs)] if costs else [],
        setup=[
            f"{label}: {shape.layers} layers, {shape.parameters / 1e9:.2f} B parameters, {shape.text}",
            f"{machine_name()}; {threads} threads{batches}, {depth} tokens of context; {others}",
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


def _steps(models: SyntheticModels, timing: quant_costs.QuantTiming) -> Iterator[str]:
    preparing = models.prepare()
    while True:
        with defer_signals():
            name = next(preparing, None)
        if name is None:
            break
        yield name
    yield from timing.run()
