"""What a report says about its model and machine, in lines and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import ngramspec
from ngramspec import machine
from ngramspec.drafting import uncompiled
from ngramspec.instruments.benchmark.report import Setup
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


def setup(target: Target, name: str) -> Setup:
    """What figures are measured on; `name`: the model's, for people."""
    gpus = dict.fromkeys(device.name.rstrip("0123456789") for device in target.devices if device.is_gpu)
    return Setup(
        name=name,
        model=target.description,
        size_bytes=target.size_bytes,
        parameters=target.n_params,
        backend=", ".join(gpus) if target.on_gpu else "CPU",
        threads=target.threads,
        machine=machine.name(),
        build=build(),
        compiled=not uncompiled(),
    )


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
