"""Damaged model files."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np


def mutate_gguf(path: Path, rng: random.Random) -> None:
    """Change a few values of the metadata or of the tensor descriptions of a GGUF file, or a few of its bytes."""
    reader = gguf.GGUFReader(path, "r+")
    descriptions = [part for tensor in reader.tensors for part in tensor.field.parts[1:]]
    scalars = [field.parts[-1] for field in reader.fields.values() if len(field.data) == 1]
    lists = [field.parts[i] for field in reader.fields.values() if field.data[1:] for i in rng.choices(field.data, k=9)]
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        kind, parts = rng.random(), rng.choice([scalars, scalars, lists, lists, descriptions])
        part = rng.choice([part for part in parts if len(part)])
        at = rng.randrange(len(part))
        if kind < 0.5 and part.dtype != np.uint8:
            value = rng.choice([0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, part[at] + 1])
            part[at : at + 1] = np.array([value]).astype(part.dtype)
        elif kind < 0.9:
            raw = part.view(np.uint8)
            at = rng.randrange(len(raw))
            raw[at] = rng.choice([0, 0xFF, 0x80, raw[at] ^ 1 << rng.randrange(8), rng.randrange(256)])
        else:
            header = reader.data[4 : reader.data_offset]
            header[rng.randrange(len(header))] = rng.randrange(256)
    reader.data.flush()
    if rng.random() < 0.05:
        with path.open("r+b") as file:
            file.truncate(rng.randrange(4, path.stat().st_size))
