"""`ngramspec tune`: the settings under which this model decodes and verifies fastest on this machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Annotated, Any

from rich.table import Table

from ngramspec.cpu.cores import logical_cores, physical_cores, read_cpu_seconds
from ngramspec.errors import NGramSpecError
from ngramspec.instruments.reports.report import Table as Figures
from ngramspec.instruments.tuning.candidates import advice, candidates
from ngramspec.instruments.tuning.search import FALSE_ALARMS, LEAST_GAIN, NO_TIME, TOGETHER, Comparison, Tuning
from ngramspec.llama.cache import UNQUANTISED
from ngramspec.llama.settings_timer import SettingsTimer
from ngramspec.llama.target import Target
from ngramspec.llama.trial_context import STRETCH
from ngramspec.loading import load as loading
from ngramspec.loading.load import tuned_file
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.machine import DRAFTS, SINGLE, Settings, Tuned, flags, keep, recalled
from ngramspec.models.gguf import read_header
from ngramspec.sampling.option import between, option, within

from .console import leave, note, signals_deferred, usage_error
from .info import model_lines, provenance
from .options import Model, find, open_target
from .output import Output, json_option
from .view import figures_table, print_report, run_timed

CONTEXT = 256
"""Tokens of the context that the model is opened with; what is timed has contexts of its own."""

BUSY = 0.1
"""What other programs may take of the cores without a word."""


def tune(
    load: Annotated[LoadSettings, LOADING],
    model: Model = None,
    seconds: float = option(60.0, help="Time to measure, once the model is loaded, about.", allowed=within(5, 86400)),
    depth: int = option(2048, help="Tokens of what counts as a long context.", allowed=between(STRETCH, 2**20)),
    apply: bool = option(False, help="Keep what is found: the other commands use it for this model here."),
    forget: bool = option(False, help="Measure nothing; take away what is kept."),
    as_json: str | None = json_option("all that was found"),
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
    output = Output(None if forget else as_json)
    source = find(model, load)
    file = tuned_file(source.path, load)
    if forget:
        note("what was kept is taken away" if file.exists() else "nothing is kept for this model and machine")
        file.unlink(missing_ok=True)
        return
    asked = replace(load, no_tuned=True, ctx_size=CONTEXT, exact="off")

    def opened(settings: Settings) -> Target:
        otherwise = replace(asked, no_mmap=not settings.mmap, no_repack=not settings.repack)
        with signals_deferred():
            return loading.open_target(source.path, otherwise)

    with ExitStack() as stack:
        target = stack.enter_context(open_target(source, asked))
        heading = _heading(target)
        # The long context: no longer than what the model was trained for, and what it will be run with.
        deep = min(depth, load.ctx_size or depth, target.n_ctx_train or depth)
        deep = max(STRETCH, deep // STRETCH * STRETCH)
        bench = stack.enter_context(closing(SettingsTimer(target, opened, deep)))
        tried = candidates(
            target.present,
            physical=physical_cores(),
            logical=logical_cores(),
            on_cpu=not (target.on_gpu and asked.gpu_layers < 0),
            flash_free=asked.cache_type_v in UNQUANTISED,
            quantised_cache=asked.cache_type_k == asked.cache_type_v == "f16" and asked.flash_attn != "off",
        )
        tuning = Tuning(bench.seconds, target.present, tried, seconds)
        note(f"timing {len(tuning.candidates)} settings for about {seconds:g} seconds")
        with _watched():
            ended = run_timed((name or "as it is" for name in tuning.run()), tuning.seconds)
        alike = _alike(bench, tuning)
    before = recalled(file)
    # Who only looks takes nothing away that is in use.
    if tuning.complete and (apply or before is None or not before.applied):
        today = datetime.now(UTC).date().isoformat()
        changes = tuning.found.changes(tuning.present) if tuning.found else {}
        ratio = tuning.gain.ratio if tuning.gain and changes else None
        keep(file, Tuned(changes, ratio, today, applied=apply and bool(changes)))
    quantisation = _quantisation(target, tuning)
    document = {"load": asdict(load), **_document(target, tuning, deep, alike, applied=apply)}
    document["advice"] = [*tuning.advised, *quantisation]
    output.write(
        lambda: print_report([*heading, *_table(document), *_conclusions(tuning, document), *quantisation]),
        lambda: document,
    )
    leave(ended)


@contextmanager
def _watched() -> Iterator[None]:
    """Tell if other programs had the cores during the block: what is fastest beside them need not be without them."""
    before, began = read_cpu_seconds(), time.monotonic()
    yield
    after, cores = read_cpu_seconds(), logical_cores()
    share = (after.system - before.system - (after.process - before.process)) / max(
        0.001, cores * (time.monotonic() - began)
    )
    if share > BUSY:
        note(f"other programs took {share:.0%} of this machine's cores meanwhile; measure again when they do not")


def _heading(target: Target) -> list[str]:
    """Model and machine, as they are before weights are loaded a second time."""
    cores, threads = physical_cores(), logical_cores()
    return [
        *model_lines(target),
        *([f"cores: {cores}, with {threads} hyper-threads"] if threads > cores else []),
        *([f"huge pages: {target.huge_pages}"] if target.huge_pages else []),
    ]


def _alike(bench: SettingsTimer, tuning: Tuning) -> bool | None:
    """Whether the recommended settings give the same bits as the present ones; None: that was not tried."""
    if tuning.found is not None:
        try:
            return bench.alike(tuning.present, tuning.found)
        except NGramSpecError as error:
            note(f"whether the bits stay could not be tried: {error}")
    return None


def _quantisation(target: Target, tuning: Tuning) -> list[str]:
    """A line on a quantisation that would be cheaper to verify with, if there is one."""
    times = tuning.times
    if target.on_gpu or not {SINGLE, DRAFTS[0]} <= times.keys():
        return []
    steep = times[DRAFTS[0]] / times[SINGLE]
    line = advice(read_header(target.path).types, platform.machine(), steep, amx=target.uses_amx)
    return [] if line is None else [line]


def _document(target: Target, tuning: Tuning, depth: int, alike: bool | None, *, applied: bool) -> dict[str, Any]:
    """Everything measured, and everything it depends on; `depth`: tokens of the long context."""
    found, gain = tuning.found, tuning.gain
    recommended = None
    if found is not None:
        changes = found.changes(tuning.present)
        recommended = {"options": flags(changes), "changes": changes, "same_bits": alike, "applied": applied}
    limits = {"seconds": tuning.seconds, "depth": depth, "least_gain": LEAST_GAIN, "false_alarms": FALSE_ALARMS}
    measures = sorted(tuning.times, key=lambda m: (m.deep, m))
    return {
        **provenance(target),
        "complete": tuning.complete,
        "settings": limits,
        "present": asdict(tuning.present),
        "present_seconds": {m.named(depth): tuning.times[m] for m in measures},
        "compared": {name: _comparison(c, depth) for name, c in tuning.compared.items()},
        "together": _comparison(gain, depth) if gain else None,
        "recommended": recommended,
        "trades": tuning.trades,
        "left_out": tuning.left_out,
    }


def _comparison(comparison: Comparison, depth: int) -> dict[str, Any]:
    return {
        **{name: getattr(comparison, name) for name in ("rounds", "ratio", "spread", "chance")},
        "each": {m.named(depth): ratio for m, ratio in comparison.each.items()},
        "faster": [m.named(depth) for m in comparison.faster],
        "slower": [m.named(depth) for m in comparison.slower],
    }


# --------------------------------------------------------------------------- as lines and a table


def _table(document: Mapping[str, Any]) -> list[str | Table]:
    times, compared = document["present_seconds"], document["compared"]
    if not times:
        return ["Interrupted before the first round: nothing can be said."]
    rows = [["as it is, ms", *(f"{seconds * 1e3:.2f}" for seconds in times.values()), "", ""]]
    shown = (
        compared if document["together"] is None else {**compared, f"{TOGETHER}, fresh rounds": document["together"]}
    )
    for name, one in shown.items():
        each = [f"{one['each'][measure]:.3f}" if measure in one["each"] else "" for measure in times]
        rows.append([name, *each, f"{one['ratio']:.3f}", f"{one['spread']:.3f}"])
    count = next(iter(compared.values()))["rounds"]
    return [
        figures_table(Figures(["time of the settings as they are = 1", *times, "in all", "+-"], rows)),
        f"Medians of {count} rounds; reading is per token, +- between the quartiles.",
    ]


def _conclusions(tuning: Tuning, document: Mapping[str, Any]) -> list[str]:
    compared, gain, recommended = document["compared"], document["together"], document["recommended"]
    lines: list[str] = []
    if not tuning.complete:
        lines.append("Interrupted: this is what was measured so far, and nothing is recommended of it.")
    elif recommended is not None:
        lines.append(
            f"Recommended: {recommended['options']}, {1 / gain['ratio']:.2f} times as fast where it acts, measured"
            f" again in {gain['rounds']} fresh rounds."
        )
        bits = {
            True: "On a sample it gave the same bits.",
            False: "It moves the last bits of logits, so texts may differ where two tokens are that close.",
            None: "It may move the last bits of logits.",
        }
        lines.append(f"{bits[recommended['same_bits']]} Which batch sizes agree is probed anew under it.")
        lines.append(
            "Kept: other commands use it for this model here; ngramspec tune --forget takes it away."
            if recommended["applied"]
            else "Not kept: --apply keeps it for this model and machine."
        )
    elif tuning.winners:
        lines.append(
            f"{' and '.join(tuning.winners.values())} looked faster, and was not when measured again; your settings are"
            " as good as any that were tried."
        )
    elif compared:
        lines.append(
            f"Your settings are as good as any that were tried: none saves {LEAST_GAIN:.0%} beyond noise and makes"
            " nothing slower."
        )
    else:
        lines.append("Nothing could be compared.")
    for name in document["trades"]:
        each = compared[name]["each"]
        faster, slower = (
            ", ".join(f"{measure} ({each[measure]:.2f})" for measure in compared[name][which])
            for which in ("faster", "slower")
        )
        lines.append(f"A trade, not recommended: {name} makes {faster} faster and {slower} slower.")
    lines += [f"{name} would be faster too, but changes the text; it is never kept." for name in tuning.advised]
    left_out = document["left_out"]
    lines += [f"Not compared: {name}: {reason}." for name, reason in left_out.items() if reason != NO_TIME]
    if late := [name for name, reason in left_out.items() if reason == NO_TIME]:
        lines.append(f"Not compared, as there was no time (--seconds gives more): {', '.join(late)}.")
    return lines
