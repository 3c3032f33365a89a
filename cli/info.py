"""`ngramspec info`: the build, the model and the costs of batches; parts of other reports on model and machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

import ngramspec
from ngramspec import machine
from ngramspec.cost import times as pass_times
from ngramspec.cost.bits import ExactnessSelector, KernelClasses
from ngramspec.cost.store import StoredTimes
from ngramspec.cost.times import PassTimes
from ngramspec.cost.trial_passes import time_passes
from ngramspec.cpu.cores import process_load
from ngramspec.drafting import find_uncompiled_modules
from ngramspec.llama.bindings import init_backend
from ngramspec.llama.devices import build, devices
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.target import Target
from ngramspec.loading.load import model_tuning_path
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.machine import load_tuned
from ngramspec.sampling.option import option

from .console import guard_stdout, note
from .options import Model, find, open_target
from .tune_quants import quant_note
from .view import facts_table, print_report, report_console, tuning_line


def info(
    load: Annotated[LoadSettings, LOADING],
    model: Model = None,
    remeasure: bool = option(False, help="Compare and time again instead of showing stored results."),
    list_devices: bool = option(False, help="Only list the devices of the build, with their free memory."),
) -> None:
    """Show the build, the model, the costs of its passes and its bit-identical batch sizes.

    The output contains the build and its devices, and how many layers are on which device; the model's architecture,
    size, context and vocabulary, and whether its KV cache can be rolled back; the cost of a pass by batch size, and of
    a change of size, and on how many pairs of passes it rests; the batch sizes with bit-identical logits; and the
    choice of --exact auto. A pass is one decode call of the model.
    """
    if list_devices:
        print_report(_device_lines())
        return
    source = find(model, load)
    tuning = load_tuned(model_tuning_path(source.path, load))
    target = open_target(source, load)
    sequence = target.sequences[0]
    stored, kernels = StoredTimes(sequence), KernelClasses.load(sequence)
    auto = ExactnessSelector(target.trials) if target.exact == "auto" and sequence.exact_rollback else None
    if remeasure:
        stored.forget()
        kernels.forget()
        if auto is not None:
            auto.forget()
    console = report_console()
    with guard_stdout():
        pages = {"huge pages": target.weights.huge_pages} if target.weights.huge_pages else {}
        _show(console, _facts(target) | pages | {"tuned": tuning_line(tuning, left_out=load.ignore_tuned)})
        if not target.sequences[0].can_rollback:
            return
        if kernels.probe is None:
            note("comparing the logits of batch sizes; this takes a few seconds, once per model and machine")
        sizes, report, times = kernels.ensure_exact(sequence), kernels.probe, stored.times
        assert report is not None
        if not times.pairs:
            text = target.vocabulary.tokenize(pass_times.__doc__ or "")
            sequence.prefill(text[:1])
            time_passes(sequence, text[1:], times)
            stored.save()
        table = Table(title="Cost of a target pass by batch size", title_justify="left")
        for heading in ("tokens", "T(n) / T(1)", "per token", "logits identical to sizes"):
            table.add_column(heading, justify="right")
        for size in report.sizes:
            same = " ".join(str(n) for n in report.class_of(size))
            table.add_row(str(size), f"{times.ratio(size):.2f}", f"{times.ratio(size) / size:.2f}", same)
        console.print(table)
        console.print(_evidence(times), soft_wrap=True)
        if line := quant_note(target, load.gpu_layers, times.ratio(4)):
            console.print(line, soft_wrap=True)
        depths = " and ".join(str(d) for d in report.depths)
        console.print(
            f"Largest logit difference from single tokens: {report.max_difference:.3g} (contexts of {depths})"
        )
        console.print(f"Exact mode here uses batches of {' '.join(str(n) for n in sizes)}.")
        if target.exact != "auto":
            console.print(_advice(target, len(report.classes)))
            return
        if auto is not None:
            auto.compare()
            is_same = auto.exactness(auto.setting).bit_identical
            meaning = "bit-identical output with and without drafts" if is_same else "the fastest settings"
            console.print(f"--exact auto: {meaning}")


def _evidence(times: PassTimes) -> str:
    """Return what the costs of passes rest on."""
    change = f"{times.change:.2f} passes over one token" if times.change else "nothing that was seen"
    speed = f"; such a pass takes {times.level * 1e3:.2f} ms now" if times.level else ""
    return f"Seen in {times.pairs} pairs of passes{speed}. A change of batch size costs {change}."


def _show(console: Console, facts: dict[str, str]) -> None:
    if console.is_terminal:
        console.print(facts_table(facts))
        return
    for name, value in facts.items():
        console.print(f"{name:<15}{value}", soft_wrap=True)


def _facts(target: Target) -> dict[str, str]:
    settings = target.weights.present
    batches = "" if settings.threads_batch == settings.threads else f" ({settings.threads_batch} for batches)"
    return {
        "model": f"{target.weights.name}, {target.weights.path}",
        "architecture": f"{target.weights.architecture}, {target.weights.description}",
        "size": f"{target.weights.size_bytes / 2**20:.0f} MiB, {target.weights.n_params / 1e6:.1f} M parameters",
        "context": f"{target.n_ctx} tokens (the model's: {target.weights.n_ctx_train})",
        "vocabulary": f"{target.vocabulary.n_vocab} tokens",
        "chat template": "the model's own" if target.vocabulary.chat_template else "none in the file; ChatML is used",
        "KV cache": _rollback(target),
        "settings": f"{settings.threads} threads{batches}, flash attention {target.flash_attn},"
        f" KV cache {'/'.join(settings.cache_types)}",
        "threads now": _threads(target),
        "build": build() + ("; its AMX kernels are broken and not used" if target.weights.amx_broken else ""),
        "drafting": _core(),
        "devices": _devices(target) or "not reported by this build",
        "layers": _layers(target) or "not reported by this build",
        "machine": machine.name(),
    }


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


def _threads(target: Target) -> str:
    process_load().wait()
    state = target.governor.state
    return (
        f"{state.threads} for one token, {state.threads_batch} for drafts, {state.threads_prompt} for prompts:"
        f" {state.reason}"
    )


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


# --------------------------------------------------------------------------- in other reports


def model_lines(target: Target) -> list[str]:
    """Return one line about the model and one about the machine."""
    weights = target.weights
    return [
        f"{weights.name}: {weights.architecture}, {weights.description}, {weights.size_bytes / 2**20:.0f} MiB",
        f"{machine.name()}; {weights.present.threads} threads, context {target.n_ctx}",
    ]


def exact_mode(sizes: Sequence[int] | None) -> str:
    """Describe exact mode with its batch sizes; `None` or an empty sequence means single tokens."""
    return f"exact mode, in batches of {' '.join(str(n) for n in sizes or ()) or '1'}"


def columns(target: Target) -> dict[str, str]:
    """Return llama-bench's columns about the model and the machine, by their headings."""
    size, parameters = target.weights.size_bytes, target.weights.n_params
    return {
        "model": target.weights.description,
        "size": f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB",
        "params": f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M",
        "backend": _backend(target),
        "threads": str(target.weights.present.threads),
    }


def origin(target: Target, name: str) -> str:
    """Describe model, machine, backend and build in one line; `name` is the name of the model to show."""
    version, _, features = build().partition(";")
    enabled = " ".join(dict.fromkeys(re.findall(r"(\w+) = [1-9]", features)))
    build_text = f"{version} ({enabled})" if enabled else version
    own = f"ngramspec {ngramspec.__version__}" + (", its core not compiled" if find_uncompiled_modules() else "")
    return f"{name} ({target.weights.description}); {machine.name()}; {_backend(target)}; {build_text}; {own}"


def _backend(target: Target) -> str:
    """Return the kinds of GPU that the model uses, or "CPU"."""
    gpus = dict.fromkeys(device.name.rstrip("0123456789") for device in target.weights.plan.gpus)
    return ", ".join(gpus) if target.weights.on_gpu else "CPU"


def provenance(target: Target) -> dict[str, Any]:
    """Return the program, date, machine, build and model as JSON."""
    return {
        "ngramspec": ngramspec.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.name(),
        "devices": [asdict(device) for device in target.weights.devices],
        "placement": target.weights.plan.summary(target.weights.layers),
        "build": build(),
        "drafting_core": "plain Python" if find_uncompiled_modules() else "compiled",
        "model": {
            "path": str(target.weights.path),
            "name": target.weights.name,
            "architecture": target.weights.architecture,
            "description": target.weights.description,
            "size_bytes": target.weights.size_bytes,
            "parameters": target.weights.n_params,
            "can_rollback": target.sequences[0].can_rollback,
        },
    }


def load_settings(target: Target) -> dict[str, Any]:
    """Return the settings that loading the model determined as JSON."""
    return {
        "context": target.n_ctx,
        "threads": target.weights.present.threads,
        "threads_batch": target.weights.present.threads_batch,
        "threads_now": target.governor.state._asdict(),
        "micro_batch": target.n_batch,
        "flash_attn": target.flash_attn,
        "cache_types": target.weights.present.cache_types,
    }
