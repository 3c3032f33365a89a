"""`ngramspec tune`: the settings under which this model decodes and verifies fastest on this machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from ngramspec import machine
from ngramspec.errors import NGramSpecError
from ngramspec.instruments.reports.report import Table as Figures
from ngramspec.instruments.tuning.candidates import Candidate, advice, candidates
from ngramspec.instruments.tuning.search import FALSE_ALARMS, LEAST_GAIN, NO_TIME, TOGETHER, Comparison, Tuning
from ngramspec.llama.cache import UNQUANTISED
from ngramspec.llama.settings_timer import SettingsTimer
from ngramspec.llama.target import Target
from ngramspec.llama.trial_context import STRETCH
from ngramspec.loading import load as loading
from ngramspec.loading.load import tuned_file
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.machine_settings import DRAFTS, SINGLE, Measure, Settings, Tuned, keep, recalled
from ngramspec.models.find import ModelSource
from ngramspec.models.gguf import read_header

from .about import model_lines, provenance
from .console import leave, note, signals_deferred, usage_error
from .options import Model, Only, find, open_target
from .output import Output, json_option
from .view import figures_table, print_report, run_timed

CONTEXT = 256
"""Tokens of the context that the model is opened with; what is timed has contexts of its own."""

BUSY = 0.1
"""What other programs may take of the cores without a word."""


@dataclass(frozen=True, slots=True)
class _Report:
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


def tune(
    load: Annotated[LoadSettings, Only(LOADING)],
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
    with Output(None if forget else as_json) as output:
        source = find(model, load).model
        file = tuned_file(source.path, load)
        if forget:
            note("what was kept is taken away" if file.exists() else "nothing is kept for this model and machine")
            file.unlink(missing_ok=True)
            return
        asked = replace(load, no_tuned=True, ctx_size=CONTEXT, exact="off")
        with ExitStack() as stack:
            target = stack.enter_context(open_target(source, asked))
            heading = _heading(target)
            deep = _depth(depth, load.ctx_size, target.n_ctx_train)
            bench = stack.enter_context(closing(SettingsTimer(target, _loader(asked, source), deep)))
            tuning = Tuning(bench.seconds, target.present, _candidates(target, asked), seconds)
            note(f"timing {len(tuning.candidates)} settings for about {seconds:g} seconds")
            with _watched():
                ended = run_timed((name or "as it is" for name in tuning.run()), tuning.seconds)
            report = _report(target, tuning, bench, deep, heading)
        before = recalled(file)
        # Who only looks takes nothing away that is in use.
        if tuning.complete and (apply or before is None or not before.applied):
            today = datetime.now(UTC).date().isoformat()
            changes = tuning.found.changes(tuning.present) if tuning.found else {}
            ratio = tuning.gain.ratio if tuning.gain and changes else None
            keep(file, Tuned(changes, ratio, today, applied=apply and bool(changes)))
        output.write(
            lambda: _show(tuning, report, applied=apply),
            lambda: {"load": asdict(load), **_document(target, tuning, report, applied=apply)},
        )
    leave(ended)


def _loader(asked: LoadSettings, source: ModelSource) -> Callable[[Settings], Target]:
    def load(settings: Settings) -> Target:
        otherwise = replace(asked, no_mmap=not settings.mmap, no_repack=not settings.repack)
        with signals_deferred():
            return loading.open_target(source.path, otherwise)

    return load


def _depth(asked: int, context: int | None, trained: int) -> int:
    """The long context's length: no longer than what the model was trained for, and what it will be run with."""
    most = min(context or asked, trained or asked)
    return max(STRETCH, min(asked, most) // STRETCH * STRETCH)


def _candidates(target: Target, asked: LoadSettings) -> dict[str, Candidate]:
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


def _heading(target: Target) -> list[str]:
    """Model and machine, as they are before weights are loaded a second time."""
    cores, threads = machine.physical_cores(), machine.logical_cores()
    return [
        *model_lines(target),
        *([f"cores: {cores}, with {threads} hyper-threads"] if threads > cores else []),
        *([f"huge pages: {target.huge_pages}"] if target.huge_pages else []),
    ]


def _report(target: Target, tuning: Tuning, bench: SettingsTimer, depth: int, heading: Sequence[str]) -> _Report:
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
    return _Report(heading, depth, alike, line)


def _document(target: Target, tuning: Tuning, report: _Report, *, applied: bool) -> dict[str, Any]:
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


# --------------------------------------------------------------------------- as lines and a table


def _show(tuning: Tuning, report: _Report, *, applied: bool) -> None:
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
        figures_table(Figures(headings, rows)),
        f"Medians of {count} rounds; reading is per token, +- between the quartiles.",
    ]


def _cells(comparison: Comparison, measures: Sequence[Measure]) -> list[str]:
    each = (f"{comparison.each[m]:.3f}" if m in comparison.each else "" for m in measures)
    return [*each, f"{comparison.ratio:.3f}", f"{comparison.spread:.3f}"]


def _conclusions(tuning: Tuning, report: _Report, *, applied: bool) -> list[str]:
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
