"""`ngramspec info`: the costs of drafts, the model and the machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from shutil import get_terminal_size
from typing import Annotated

from ngramspec.cost import times as pass_times
from ngramspec.cost.bits import ExactnessSelector, KernelClasses
from ngramspec.cost.fixed_curves import freeze
from ngramspec.cost.store import StoredTimes, time_passes
from ngramspec.cost.times import FEW, SIZES, STEEP, PassTimes
from ngramspec.cpu.cores import logical_cores, machine_name, process_load
from ngramspec.drafting import find_uncompiled_modules
from ngramspec.llama.bindings import init_backend
from ngramspec.llama.devices import build, devices
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.requantize import prefers_q4_0
from ngramspec.llama.target import Target
from ngramspec.loading.load import find, open_alone
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.models.find import QUANTISATION
from ngramspec.quants.costs import quant_note, typical_gain
from ngramspec.sampling.settings import option

from .conditions import Load, tuning_line
from .console import MAX_COLUMNS, note, pluralize, printable, write_stdout
from .options import DISPLAY, Model
from .show import print_report

_SHOWN = (2, 4, 8, 16)  # batch sizes whose costs are shown
_NO_GAIN = 1.05  # speed from which on drafts gain something


def info(
    load: Annotated[LoadSettings, LOADING],
    model: Model = None,
    details: bool = option(False, "-v", "--verbose", help="Also show the build, the file and the rounding of batches."),
    remeasure: bool = option(False, help="Compare and time again instead of showing stored results."),
    list_devices: bool = option(False, help="Only list the devices of the build, with their free memory."),
) -> None:
    """Show what drafts cost with a model on this machine, what to expect of them, and which file would be better.

    The facts that decide this follow: the model, the devices of its layers, its threads and the present load. T(n) is
    the time of a decode call over n tokens relative to one token. It comes from pairs of calls, one with a draft and
    one without; a model that hardly ever drafted is timed for a few seconds first.

    With -v, the output also contains the build, the properties of the file, the costs of all batch sizes, and the sizes
    whose logits are bit-identical.
    """
    if list_devices:
        print_report(_device_lines())
        return
    source = find(model, load, DISPLAY)
    target = open_alone(source, load, DISPLAY)
    sequence = target.sequences[0]
    stored, kernels = StoredTimes(sequence), KernelClasses.load(sequence)
    auto = ExactnessSelector(target.trials) if target.exact == "auto" and sequence.exact_rollback else None
    if remeasure:
        stored.forget()
        kernels.forget()
        if auto is not None:
            auto.forget()
    facts = _facts(target, source.label) | {"tuned": tuning_line(source.path, load)}
    facts |= _details(target) if details else {}
    # Each size needs a few pairs of calls.
    is_disturbed, is_timed = False, sequence.can_rollback and stored.times.pairs < FEW * len(SIZES[1:])
    if is_timed:
        note("timing batches of this model; this takes a few seconds")
        text = target.vocabulary.tokenize(pass_times.__doc__ or "")
        sequence.prefill(text[:1])
        other_programs = Load()
        time_passes(sequence, text[1:], stored.times)
        is_disturbed = other_programs.is_high
        if not is_disturbed:
            stored.save()
    lines = [line for sentence in _verdict(target, load, stored.times, is_disturbed) for line in _wrap(sentence)]
    lines += ["", *(line for name, value in facts.items() for line in _wrap(value, name))]
    if sequence.can_rollback and not is_disturbed:
        lines += ["", *_costs(target, stored.times, is_timed=is_timed)]
    if sequence.can_rollback and details:
        lines += _batches(target, None if is_disturbed else stored.times, kernels, auto)
    write_stdout("".join(f"{printable(line)}\n" for line in lines))


def _verdict(target: Target, load: LoadSettings, times: PassTimes, is_disturbed: bool) -> Iterator[str]:
    """Yield a sentence on the costs of drafts and their gain, and one on the file."""
    if not target.sequences[0].can_rollback:
        yield f"Drafting is off: {_rollback(target).partition(':')[0]}."
        return
    cost, most = times.ratio(4) - 1, max(size / times.ratio(size) for size in _SHOWN)
    price = f"Here a draft of 3 tokens costs {cost:.1f} tokens' time"
    if is_disturbed:
        yield "Other programs disturbed the timing of drafts; run this command again on an idle machine."
    elif most < _NO_GAIN:
        yield f"{price}, so drafts gain nothing and are hardly ever sent."
    else:
        typical = typical_gain(freeze(times))
        gain = f"{typical:.2f} times the speed" if typical >= _NO_GAIN else "no gain"
        yield f"{price}: expect {gain} on typical answers, and up to {most:.1f} times the speed on copied text."
    name = target.weights.quantisation or "of unknown type"
    if cost + 1 < STEEP and not is_disturbed:
        yield f"Batches are cheap with this file ({name}), so no other type is needed."
    elif name != QUANTISATION and prefers_q4_0(load):
        yield (
            f"A {QUANTISATION} file of this model would be faster, because llama.cpp reorders its weights for this CPU;"
            " ngramspec tune --quants compares the types."
        )
    elif not is_disturbed and (line := quant_note(target.weights, load.gpu_layers, cost + 1)):
        sentence = line.removeprefix("note: ")
        yield f"{sentence[0].upper()}{sentence[1:]}."
    else:
        yield f"No type is known to be faster than this one ({name}); ngramspec tune --quants compares them."


def _wrap(value: str, name: str = "") -> list[str]:
    """Return a text, or a fact with its name, in lines of at most 100 columns; a path remains whole for copying."""
    start = f"{name:<15}" if name else ""
    width = min(MAX_COLUMNS, get_terminal_size((MAX_COLUMNS, 24)).columns) - len(start)
    lines = [value] if name == "file" else textwrap.wrap(value, max(20, width))
    return [f"{' ' * len(start) if number else start}{line}" for number, line in enumerate(lines)]


def _costs(target: Target, times: PassTimes, *, is_timed: bool) -> list[str]:
    where = "earlier runs, with the threads that other programs left them; --remeasure times them now"
    if is_timed:
        where = f"this run, with {pluralize(target.governor.state.threads_batch, 'thread')}"
    return [
        "  ".join(f"{f'T({size})':>5}" for size in _SHOWN),
        "  ".join(f"{times.ratio(size):>5.2f}" for size in _SHOWN),
        *_wrap(f"These costs come from {pluralize(times.pairs, 'pair')} of calls in {where}."),
    ]


def _batches(
    target: Target, times: PassTimes | None, kernels: KernelClasses, auto: ExactnessSelector | None
) -> list[str]:
    """Return the costs of all batch sizes if they are known, and which sizes round alike."""
    if kernels.probe is None:
        note("comparing the logits of batch sizes; this takes a few seconds, once per model, machine and settings")
    sizes, report = kernels.ensure_exact(target.sequences[0]), kernels.probe
    assert report is not None
    table, sentences = list[str](), list[str]()
    if times is not None:
        table = ["", f"{'tokens':>6}  {'T(n)':>5}  per token"]
        table += [f"{n:>6}  {times.ratio(n):>5.2f}  {times.ratio(n) / n:>9.2f}" for n in report.sizes]
        change = f"{times.change:.2f} calls over one token" if times.change else "nothing that was seen"
        speed = f"A call over one token takes {times.level * 1e3:.2f} ms now. " if times.level else ""
        sentences.append(f"{speed}A change of batch size costs {change}.")
    depths = " and ".join(map(str, report.depths))
    sentences += [
        f"Sizes with bit-identical logits: {'; '.join(' '.join(map(str, same)) for same in report.classes)}.",
        f"Largest logit difference from single tokens: {report.max_difference:.3g} (contexts of {depths}).",
        f"Exact mode here uses batches of {' '.join(map(str, sizes))}.",
    ]
    if target.exact != "auto":
        sentences.append(_advice(target, len(report.classes)))
    elif auto is not None:
        auto.compare()
        is_same = auto.exactness(auto.setting).bit_identical
        meaning = "bit-identical output with and without drafts" if is_same else "the fastest settings"
        sentences.append(f"--exact auto: {meaning}.")
    return [*table, "", *(line for sentence in sentences for line in _wrap(sentence))]


def _facts(target: Target, name: str) -> dict[str, str]:
    process_load().wait()
    weights, state = target.weights, target.governor.state
    size = f"{weights.n_params / 1e6:,.1f} M parameters, {weights.size_bytes / 2**20:,.0f} MiB"
    others = state.other_cores
    used = "not known yet" if others is None else f"other programs use {others:.1f} of {logical_cores()} cores"
    threads = f"{state.threads} for one token, {state.threads_batch} for drafts, {state.threads_prompt} for prompts"
    facts = {
        "model": f"{name}: {weights.quantisation or 'unknown type'}, {size}",
        "file": str(weights.path),
        "placement": _layers(target) or "not reported by this build",
        "threads": threads if state.reason == used else f"{threads}: {state.reason}",
        "load": used,
    }
    if any(device.is_gpu for device in weights.devices):
        facts["devices"] = _devices(target)
    return facts | ({"drafting": _core()} if find_uncompiled_modules() else {})


def _details(target: Target) -> dict[str, str]:
    weights, settings = target.weights, target.settings
    batches = "" if settings.threads_batch == settings.threads else f" ({settings.threads_batch} for batches)"
    details = {
        "name in file": weights.name,
        "architecture": f"{weights.architecture}, {weights.description}",
        "context": f"{target.n_ctx} tokens (the model's: {weights.n_ctx_train})",
        "vocabulary": f"{target.vocabulary.n_vocab} tokens",
        "chat template": "the model's own" if target.vocabulary.chat_template else "none in the file; ChatML is used",
        "KV cache": _rollback(target),
        "settings": f"{settings.threads} threads{batches}, flash attention {settings.flash_attn},"
        f" KV cache {'/'.join(settings.cache_types)}",
        "build": build() + ("; its AMX kernels are broken and not used" if weights.amx_broken else ""),
        "drafting": _core(),
        "devices": _devices(target) or "not reported by this build",
        "machine": machine_name(),
    }
    return details | ({"huge pages": weights.huge_pages} if weights.huge_pages else {})


def _device_lines() -> list[str]:
    init_backend()
    return [
        f"{device.name}: {device.description} ({device.total / 2**20:.0f} MiB, {device.free / 2**20:.0f} MiB free)"
        for device in devices()
    ] or ["this build does not report its devices"]


def _devices(target: Target) -> str:
    names = [device.name for device in target.weights.plan.gpus]
    parts = []
    for device in target.weights.devices:
        suffix = ", not used" if device.is_gpu and device.name not in names else ""
        parts.append(f"{device.name} ({device.description}, {device.total / 2**30:.1f} GiB{suffix})")
    return ", ".join(parts)


def _layers(target: Target) -> str:
    """Return how many layers are on which device in words; "" if llama.cpp does not report it."""
    in_ram = [device.name for device in target.weights.devices if not device.is_gpu]
    parts = [f"{count} on {name}" for name, count in target.weights.layers.items() if name not in in_ram]
    if count := sum(target.weights.layers[name] for name in in_ram):
        parts.append(f"{count} in RAM")
    experts = f"; experts of the first {count} layers in RAM" if (count := target.weights.plan.cpu_experts) else ""
    return f"{', '.join(parts)} (including the output layer){experts}" if parts else ""


def _core() -> str:
    if not find_uncompiled_modules():
        return "compiled core"
    return (
        "core in plain Python, about 40 times slower than compiled: install a C compiler, then reinstall ngramspec"
        " with pip install --force-reinstall --no-deps --no-cache-dir"
    )


def _rollback(target: Target) -> str:
    if not target.sequences[0].can_rollback:
        return "recurrent state without rollback: drafting is off"
    if target.sequences[0].replays:
        return "recurrent state without snapshots: tokens are evaluated again after a rejected draft"
    if (longest := target.sequences[0].max_batch) < MAX_EVALUATE:
        return f"recurrent state with snapshots: drafts of up to {longest - 1} tokens can be rolled back"
    return "drafts of any length can be rolled back"


def _advice(target: Target, classes: int) -> str:
    if classes == 1:
        return "All batch sizes agree: drafts cannot change the output of this model here, with or without exact mode."
    if target.weights.on_gpu:
        return "On a GPU, --exact on pads every pass to one class of sizes; the table shows their cost."
    if target.exact == "off":
        return "--exact on turns flash attention off, and more sizes agree; see ngramspec info --exact on."
    return (
        "In a CPU build without llamafile's kernels, more sizes agree:"
        ' CMAKE_ARGS="-DGGML_LLAMAFILE=off" pip install --force-reinstall --no-cache-dir llama-cpp-python'
    )
