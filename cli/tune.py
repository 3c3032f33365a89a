"""`ngramspec tune`: the settings under which this model decodes and verifies fastest on this machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ngramspec import machine
from ngramspec.errors import NGramSpecError
from ngramspec.llama.kv_cache import UNQUANTISED
from ngramspec.llama.target import Target
from ngramspec.llama.trial import STRETCH
from ngramspec.llama.workbench import Workbench
from ngramspec.models.find import ModelSource
from ngramspec.models.gguf import read_header
from ngramspec.tuning.candidates import DRAFTS, SINGLE, Candidate, Measure, advice, candidates
from ngramspec.tuning.kept import Kept, keep, recalled
from ngramspec.tuning.settings import Settings
from ngramspec.tuning.tuning import FALSE_ALARMS, LEAST_GAIN, Comparison, Tuning

from .about import model_lines, provenance
from .console import Outcome, guarded_stdout, leave, note, outcome, signals_deferred, usage_error
from .json_output import JsonOutput, json_option
from .options import LoadOptions, Model
from .tune_view import Report, show
from .view import timed_bar

CONTEXT = 256
"""Tokens of the context that the model is opened with; what is timed has contexts of its own."""

BUSY = 0.1
"""What other programs may take of the cores without a word."""


def tune(
    load: LoadOptions,
    model: Model = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=5, max=86400, help="Time to measure, once the model is loaded, about.")
    ] = 60.0,
    depth: Annotated[
        int, typer.Option("--depth", min=STRETCH, max=2**20, help="Tokens of what counts as a long context.")
    ] = 2048,
    apply: Annotated[
        bool, typer.Option("--apply", help="Keep what is found: the other commands use it for this model here.")
    ] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Measure nothing; take away what is kept.")] = False,
    as_json: Annotated[str | None, json_option("all that was found")] = None,
) -> None:
    """Find the settings under which a model is fastest here: ngramspec tune model.gguf --apply

    Tried are, where the machine has them: numbers of threads for single tokens and for batches (prompts, and drafts
    that are checked), flash attention, how many tokens of a prompt are read at once, weights in the file's order and
    weights read into memory, and a KV cache of 8 bits, which is only told of, since it changes the text. The settings
    take turns; in each round each is compared with those that the options say. T(4) is a pass over four tokens.

    A setting is recommended only if it saves 3 % of what it acts on, in so many rounds that equally fast settings would
    look like that in one run of 20 at most; if it makes nothing else slower; and if what won, all together, wins again
    on fresh times. After Ctrl-C what was measured so far is shown, and nothing is kept.

    --apply keeps the recommendation for this model, build and machine: chat, complete, serve, bench and the others then
    use it where their options do not say otherwise, and a line on stderr says so. Without a recommendation it takes an
    earlier one away. Settings may move the last bits of a text: whether these do is tried, and what is known of which
    batch sizes agree is kept by settings, so that it is measured anew.
    """
    if apply and forget:
        usage_error("--apply and --forget exclude each other")
    with JsonOutput(None if forget else as_json) as output:
        source = load.find(model)
        file = load.tuned_file(source.path)
        if forget:
            note("what was kept is taken away" if file.exists() else "nothing is kept for this model and machine")
            file.unlink(missing_ok=True)
            return
        asked = replace(load, no_tuned=True, ctx_size=CONTEXT, exact="off")
        with ExitStack() as stack:
            target = stack.enter_context(asked.load(source))
            heading = _heading(target)
            deep = _depth(depth, load.ctx_size, target.n_ctx_train)
            bench = stack.enter_context(closing(Workbench(target, _loader(asked, source), deep)))
            tuning = Tuning(bench.seconds, target.present, _candidates(target, asked), seconds)
            note(f"timing {len(tuning.candidates)} settings for about {seconds:g} seconds")
            with _watched():
                ended = _run(tuning)
            report = _report(target, tuning, bench, deep, heading)
        before = recalled(file)
        # Who only looks takes nothing away that is in use.
        if tuning.complete and (apply or before is None or not before.applied):
            today = datetime.now(UTC).date().isoformat()
            changes = tuning.found.changes(tuning.present) if tuning.found else {}
            ratio = tuning.gain.ratio if tuning.gain and changes else None
            keep(file, Kept(changes, ratio, today, applied=apply and bool(changes)))
        try:
            if as_json != "-":
                with guarded_stdout():
                    show(tuning, report, applied=apply)
        finally:
            # Even where the reader of the table has gone, as head does.
            if as_json is not None:
                output.write({"load": asdict(load), **_document(target, tuning, report, applied=apply)})
    leave(ended)


def _loader(asked: LoadOptions, source: ModelSource) -> Callable[[Settings], Target]:
    def load(settings: Settings) -> Target:
        otherwise = replace(asked, no_mmap=not settings.mmap, no_repack=not settings.repack)
        with signals_deferred():
            return Target(source.path, **otherwise.settings(None), exact="off")

    return load


def _depth(asked: int, context: int | None, trained: int) -> int:
    """The long context's length: no longer than what the model was trained for, and what it will be run with."""
    most = min(context or asked, trained or asked)
    return max(STRETCH, min(asked, most) // STRETCH * STRETCH)


def _candidates(target: Target, asked: LoadOptions) -> dict[str, Candidate]:
    return candidates(
        target.present,
        physical=machine.physical_cores(),
        logical=machine.logical_cores(),
        on_cpu=not (target.on_gpu and asked.gpu_layers < 0),
        flash_free=asked.cache_type_v in UNQUANTISED,
        quantised_cache=asked.cache_type_k == asked.cache_type_v == "f16" and asked.flash_attn != "off",
    )


@contextmanager
def _watched() -> Iterator[None]:
    """Tell if other programs had the cores during the block: what is fastest beside them need not be without them."""
    (whole, own), began = machine.busy_seconds(), time.monotonic()
    yield
    (whole_now, own_now), cores = machine.busy_seconds(), machine.logical_cores()
    share = (whole_now - whole - (own_now - own)) / max(0.001, cores * (time.monotonic() - began))
    if share > BUSY:
        note(f"other programs took {share:.0%} of this machine's cores meanwhile; measure again when they do not")


def _run(tuning: Tuning) -> Outcome:
    """Measure; what was found before an interruption stays in `tuning`."""
    with outcome() as ended, timed_bar(tuning.seconds) as doing:
        for name in tuning.run():
            doing(name or "as it is")
    return ended


def _heading(target: Target) -> list[str]:
    """Model and machine, as they are before weights are loaded a second time."""
    cores, threads = machine.physical_cores(), machine.logical_cores()
    return [
        *model_lines(target),
        *([f"cores: {cores}, with {threads} hyper-threads"] if threads > cores else []),
        *([f"huge pages: {target.huge_pages}"] if target.huge_pages else []),
    ]


def _report(target: Target, tuning: Tuning, bench: Workbench, depth: int, heading: Sequence[str]) -> Report:
    found = tuning.found
    alike: bool | None = None
    if found is not None:
        try:
            alike = bench.alike(tuning.present, found)
        except NGramSpecError as error:
            note(f"whether the bits stay could not be tried: {error}")
    times = tuning.times
    steep = times[DRAFTS[0]] / times[SINGLE] if {SINGLE, DRAFTS[0]} <= times.keys() else None
    line = None
    if steep is not None and not target.on_gpu:
        line = advice(read_header(target.path).types, platform.machine(), steep, amx=target.uses_amx)
    return Report(heading, depth, alike, line)


def _document(target: Target, tuning: Tuning, report: Report, *, applied: bool) -> dict[str, Any]:
    """Everything measured, and everything it depends on."""
    found, gain = tuning.found, tuning.gain
    counts: dict[str, Any] = {name: _comparison(c, report.depth) for name, c in tuning.compared.items()}
    return {
        **provenance(target),
        "complete": tuning.complete,
        "settings": {
            "seconds": tuning.seconds,
            "depth": report.depth,
            "least_gain": LEAST_GAIN,
            "false_alarms": FALSE_ALARMS,
        },
        "present": asdict(tuning.present),
        "present_seconds": {m.named(report.depth): value for m, value in tuning.times.items()},
        "compared": counts,
        "together": _comparison(gain, report.depth) if gain else None,
        "recommended": None
        if found is None
        else {
            "options": found.flags(tuning.present),
            "changes": found.changes(tuning.present),
            "same_bits": report.alike,
            "applied": applied,
        },
        "trades": tuning.trades,
        "advice": tuning.advised + ([report.quantisation] if report.quantisation else []),
        "left_out": tuning.left_out,
    }


def _comparison(comparison: Comparison, depth: int) -> dict[str, Any]:
    def named(measures: tuple[Measure, ...]) -> list[str]:
        return [m.named(depth) for m in measures]

    return {
        "rounds": comparison.rounds,
        "ratio": comparison.ratio,
        "spread": comparison.spread,
        "chance": comparison.chance,
        "each": {m.named(depth): ratio for m, ratio in comparison.each.items()},
        "faster": named(comparison.faster),
        "slower": named(comparison.slower),
    }
