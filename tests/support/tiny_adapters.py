"""LoRA adapters with random matrices, written by gguf-py, and models into which they are merged by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_SIZE = 0.2


def write_adapter(
    path: Path,
    model: Path,
    names: Sequence[str],
    *,
    rank: int = 4,
    alpha: Any = 6.0,
    seed: int = 0,
    architecture: str | None = None,
    kind: str = "lora",
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    letters: str = "ab",
    dtype: Any = np.float32,
    switched_on_by: Sequence[int] = (),
) -> Path:
    """Write an adapter for the tensors of a model whose names contain given parts.

    The arguments after `seed` make damaged adapters: `letters` one of the two matrices, or other `shapes`.
    """
    reader = gguf.GGUFReader(model)
    model_architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture or model_architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", kind)
    writer.add_key_value("adapter.lora.alpha", alpha, _TYPES[type(alpha)])
    if switched_on_by:
        kinds = gguf.GGUFValueType
        writer.add_key_value("adapter.alora.invocation_tokens", list(switched_on_by), kinds.ARRAY, kinds.UINT32)
    rng = np.random.default_rng(seed)
    for tensor in reader.tensors:
        if not any(name in tensor.name for name in names):
            continue
        n_in, n_out = map(int, tensor.shape[:2])
        pair = ((n_out, rank), (n_in, rank)) if tensor.name.startswith("token_embd") else ((rank, n_in), (n_out, rank))
        for letter, shape in zip("ab", shapes or pair, strict=True):
            if letter in letters:
                data = rng.normal(0, _SIZE, shape).astype(dtype)
                writer.add_tensor(f"{tensor.name}.lora_{letter}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_TYPES = {float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32}


def merge(path: Path, model: Path, lora: Sequence[tuple[Path, float]]) -> Path:
    """Write a copy of a model of 32-bit floats with adapters in its weights: W + scale * alpha / rank * B A."""
    path.write_bytes(model.read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    weights = {tensor.name: tensor.data for tensor in reader.tensors}
    for file, scale in lora:
        adapter = gguf.GGUFReader(file)
        alpha = adapter.fields["adapter.lora.alpha"].contents()
        parts = {tensor.name: tensor.data for tensor in adapter.tensors}
        for name in {part.rpartition(".")[0] for part in parts}:
            a, b = (parts[f"{name}.lora_{letter}"] for letter in "ab")
            product = a @ b.T if name.startswith("token_embd") else b @ a
            assert weights[name].dtype == np.float32
            weights[name] += scale * alpha / min(a.shape) * product
    reader.data.flush()
    return path
