"""What a report says about its model and machine, in lines and as data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import ngramspec
from ngramspec import machine
from ngramspec.drafting import uncompiled
from ngramspec.llama.devices import build
from ngramspec.llama.target import Target


def model_lines(target: Target) -> list[str]:
    """Model and machine, a line each."""
    return [
        f"{target.name}: {target.architecture}, {target.description}, {target.size_bytes / 2**20:.0f} MiB",
        f"{machine.name()}; {target.threads} threads, context {target.n_ctx}",
    ]


def exact_mode(sizes: Sequence[int] | None) -> str:
    """Exact mode in words, with its batch sizes; None or an empty sequence means single tokens."""
    return f"exact mode, in batches of {' '.join(str(n) for n in sizes or ()) or '1'}"


def columns(target: Target) -> dict[str, str]:
    """llama-bench's columns of what figures are measured on, by their headings."""
    size, parameters = target.size_bytes, target.n_params
    return {
        "model": target.description,
        "size": f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB",
        "params": f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M",
        "backend": _backend(target),
        "threads": str(target.threads),
    }


def origin(target: Target, name: str) -> str:
    """Model, machine, backend and build in a line; `name`: the model's, for people."""
    version, _, features = build().partition(";")
    with_these = " ".join(dict.fromkeys(re.findall(r"(\w+) = [1-9]", features)))
    built = f"{version} ({with_these})" if with_these else version
    own = f"ngramspec {ngramspec.__version__}" + (", its core not compiled" if uncompiled() else "")
    return f"{name} ({target.description}); {machine.name()}; {_backend(target)}; {built}; {own}"


def _backend(target: Target) -> str:
    """What computes: CPU, or the kinds of GPU."""
    gpus = dict.fromkeys(device.name.rstrip("0123456789") for device in target.devices if device.is_gpu)
    return ", ".join(gpus) if target.on_gpu else "CPU"


def provenance(target: Target) -> dict[str, Any]:
    """Program, date, machine, build and model."""
    return {
        "ngramspec": ngramspec.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.name(),
        "devices": [asdict(device) for device in target.devices],
        "build": build(),
        "drafting_core": "plain Python" if uncompiled() else "compiled",
        "model": {
            "path": str(target.path),
            "name": target.name,
            "architecture": target.architecture,
            "description": target.description,
            "size_bytes": target.size_bytes,
            "parameters": target.n_params,
            "can_rollback": target.can_rollback,
        },
    }


def load_settings(target: Target) -> dict[str, Any]:
    """How the model was loaded, as far as that was settled by loading it."""
    return {
        "context": target.n_ctx,
        "threads": target.threads,
        "threads_batch": target.threads_batch,
        "micro_batch": target.n_batch,
        "flash_attn": target.flash_attn,
        "cache_types": target.cache_types,
    }
