"""`ngramspec tune`: search for the settings with which a model decodes and verifies fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from ngramspec.cost.paired import CHANCE, NO_DIFFERENCE
from ngramspec.cpu.cores import logical_cores, physical_cores, process_load
from ngramspec.data import ModelError, NGramSpecError
from ngramspec.instruments.reports.report import Table as Figures
from ngramspec.instruments.tuning.candidates import candidates
from ngramspec.instruments.tuning.search import MIN_GAIN, NO_TIME, TOGETHER, Comparison, Tuning
from ngramspec.llama.cache import UNQUANTISED
from ngramspec.llama.settings_timer import SettingsTimer
from ngramspec.llama.synthetic import measurement_path
from ngramspec.llama.target import Target
from ngramspec.llama.trial_context import STRETCH
from ngramspec.loading import load as loading
from ngramspec.loading.load import model_tuning_path
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.machine import DRAFTS, SINGLE, Settings, Tuned, flags, save_tuned
from ngramspec.models.shape import is_shape, parse_shape, shape_of
from ngramspec.sampling.option import allow_int_range, allow_range, option

from .conditions import Conditions
from .console import defer_signals, fail, note, reraise, usage_error
from .info import provenance
from .options import Model, find, open_target
from .output import Output, command_line, json_option
from .tune_quants import DEPTH as QUANTS_DEPTH
from .tune_quants import quant_note, tune_quants
from .view import figures_table, print_report, run_timed

CONTEXT = 256
"""Context size in tokens for opening the model; measurements use separate contexts."""

RESET = "ngramspec tune --reset"

DEPTH = 2048
"""Default number of tokens in the long context."""


def tune(
    load: Annotated[LoadSettings, LOADING],
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
    as_json: str | None = json_option("all results"),
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
    if apply and reset:
        usage_error("--apply cannot be combined with --reset")
    if quants and apply:
        usage_error("--apply cannot be combined with --quants")
    if reset:
        _reset(load, model)
        return
    output = Output(as_json)
    if quants:
        tune_quants(load, model, time_limit, context_depth or QUANTS_DEPTH, output)
        return
    source = find(model, load)
    base_load = replace(load, ignore_tuned=True, ctx_size=CONTEXT, exact="off")

    def open_with(settings: Settings) -> Target:
        trial_load = replace(base_load, no_mmap=not settings.mmap, no_repack=not settings.repack)
        # The memory of the first copy is not free, so a fit would place this copy differently.
        with defer_signals():
            return loading.open_target(source.path, trial_load, **target.weights.plan.arguments)

    start = time.monotonic()
    with ExitStack() as stack:
        target = stack.enter_context(open_target(source, base_load))
        load_seconds = time.monotonic() - start
        conditions = Conditions(target, source.label, "off")
        # The long context exceeds neither the training context of the model nor the context size of later runs.
        deep = context_depth or DEPTH
        deep = min(deep, load.ctx_size or deep, target.weights.n_ctx_train or deep)
        deep = max(STRETCH, deep // STRETCH * STRETCH)
        bench = stack.enter_context(closing(SettingsTimer(target, open_with, deep)))
        trials = candidates(
            target.weights.present,
            physical=physical_cores(),
            logical=logical_cores(),
            on_cpu=not target.weights.plan.all_on_gpu,
            flash_free=base_load.cache_type_v in UNQUANTISED,
            quantised_cache=base_load.cache_type_k == base_load.cache_type_v == "f16" and base_load.flash_attn != "off",
        )
        load_of_others = process_load()
        load_of_others.wait()
        tuning = Tuning(bench.seconds, target.weights.present, trials, time_limit, load_seconds)
        tuning.is_quiet = lambda: load_of_others.is_quiet
        note(f"timing up to {len(trials)} settings for at most {time_limit:g} seconds")
        outcome = run_timed(tuning.run(), tuning.seconds)
    if isinstance(outcome.error, NGramSpecError):
        reraise(outcome)
    best, together = tuning.best_settings, tuning.together
    is_saved = apply and best is not None and not conditions.load.is_high
    if is_saved and best is not None and together is not None and together.speed is not None:
        tuned = Tuned(best.changes(tuning.present), 1 / together.speed.median, datetime.now(UTC).date().isoformat())
        save_tuned(model_tuning_path(source.path, load), tuned)
    own = {"--time-limit": time_limit, "--context-depth": context_depth, "--apply": apply}
    command = command_line("tune", [model], own, load)
    document = {
        "load": asdict(load),
        **_document(target, tuning, deep, applied=is_saved),
        "conditions": conditions.to_json(command),
        "advice": _advice(target, tuning, load, conditions),
    }
    pages = [f"huge pages: {target.weights.huge_pages}"] if target.weights.huge_pages else []
    output.write(
        lambda: print_report([*conditions.lines, *pages, command, *_table(document), *_conclusions(tuning, document)]),
        lambda: document,
    )
    if apply and best is not None and not is_saved:
        fail(f"the settings are not saved, because {conditions.load}; run tune --apply again on an idle machine")
    reraise(outcome)


def _reset(load: LoadSettings, model: str | None) -> None:
    """Delete the settings and the costs of quantisations that are saved for a model or a shape."""
    files = list[Path]()
    if model is None or not is_shape(model):
        source = find(model, load)
        files.append(model_tuning_path(source.path, load))
        with suppress(ModelError):  # such as a mixture of experts, whose quantisations are not compared
            files.append(measurement_path(shape_of(source.path), load.gpu_layers))
    else:
        files.append(measurement_path(parse_shape(model), load.gpu_layers))
    is_saved = any(file.exists() for file in files)
    for file in files:
        file.unlink(missing_ok=True)
    note("deleted what tune saved" if is_saved else "nothing is saved for this model and machine")


def _document(target: Target, tuning: Tuning, depth: int, *, applied: bool) -> dict[str, Any]:
    """Return all measurements and their conditions; `depth` is the number of tokens in the long context."""
    best = tuning.best_settings
    changes = None if best is None else best.changes(tuning.present)
    limits = {"seconds": tuning.seconds, "depth": depth, "least_gain": MIN_GAIN, "false_alarms": CHANCE}
    return {
        **provenance(target),
        "complete": tuning.complete,
        "settings": limits,
        "present": asdict(tuning.present),
        "present_seconds": {m.label(depth): seconds for m, seconds in tuning.times.items()},
        "compared": {name: _comparison(one, depth) for name, one in tuning.comparisons.items()},
        "together": _comparison(tuning.together, depth) if tuning.together else None,
        "recommended": changes and {"options": flags(changes), "changes": changes, "applied": applied},
        "left_out": tuning.left_out,
    }


def _comparison(comparison: Comparison, depth: int) -> dict[str, Any]:
    """Return the speed relative to the present settings, of the request and of each measure."""
    return {
        "speed": asdict(comparison.speed) if comparison.speed else None,
        "each": {m.label(depth): asdict(paired) for m, paired in comparison.each.items()},
        "gains": comparison.gains,
    }


# --------------------------------------------------------------------------- lines and a table


def _table(document: Mapping[str, Any]) -> list[str | Table]:
    times, together = document["present_seconds"], document["together"]
    if not times:
        return []
    rows = [["current settings, ms", *(f"{seconds * 1e3:.2f}" for seconds in times.values()), "", "", ""]]
    for name, one in (document["compared"] | ({f"{TOGETHER}, new pairs": together} if together else {})).items():
        if (speed := one["speed"]) is not None:
            each = [f"{one['each'][measure]['median']:.2f}" if measure in one["each"] else "" for measure in times]
            ends = "-" if speed["interval"] is None else "{:.2f}-{:.2f}".format(*speed["interval"])
            rows.append([name, *each, f"{speed['median']:.2f}", ends, str(speed["pairs"])])
    return [
        figures_table(Figures(["speed (current = 1)", *times, "overall", "from-to", "pairs"], rows)),
        "Medians of pairs; prefill is per token; from-to is the interval for the median of many more pairs.",
    ]


def _advice(target: Target, tuning: Tuning, load: LoadSettings, conditions: Conditions) -> list[str]:
    """Return lines on settings that change the text, and on the model's quantisation."""
    lines = [f"{name} would also be faster, but changes the text; it is never saved." for name in tuning.advice_names]
    if {SINGLE, DRAFTS[0]} <= (times := tuning.times).keys() and not conditions.load.is_high:
        line = quant_note(target, load.gpu_layers, times[DRAFTS[0]] / times[SINGLE])
        lines += [] if line is None else [line]
    return lines


def _conclusions(tuning: Tuning, document: Mapping[str, Any]) -> list[str]:
    """Return lines on what was left out, the advice, and at the end the recommendation."""
    recommendation, left_out = document["recommended"], document["left_out"]
    lines = [f"Not compared: {name}: {reason}." for name, reason in left_out.items() if reason != NO_TIME]
    if late := [name for name, reason in left_out.items() if reason == NO_TIME]:
        lines.append(f"Not compared for lack of time (raise --time-limit): {', '.join(late)}.")
    lines += document["advice"]
    if not tuning.complete:
        lines.append("Interrupted: these are the results so far; there is no recommendation.")
    elif recommendation is not None and tuning.together is not None:
        lines.append("The recommendation may change the rounding of logits, and so texts at near-ties of two tokens.")
        lines.append(f"Recommended: {recommendation['options']}, {tuning.together.speed} where it matters.")
        lines.append(
            f"Saved: other commands use it for this model; {RESET} deletes it."
            if recommendation["applied"]
            else "Not saved: --apply saves it for this model and machine."
        )
    elif document["compared"]:
        lines.append(f"{NO_DIFFERENCE.capitalize()}, so nothing is recommended or saved.")
    else:
        lines.append("No settings could be compared.")
    return lines
