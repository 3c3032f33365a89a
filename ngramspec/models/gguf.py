"""The header of a GGUF file: its metadata and the size that its tensors require, without reading weights.

Layout (ggml/docs/gguf.md, versions 2 and 3, all little-endian): "GGUF", version u32, tensor count
u64, metadata count u64; metadata as key string, type u32, value; per tensor its name string, number
of dimensions u32, the dimensions u64 each, type u32, offset u64; then, aligned, the tensor data.
A string is a u64 length and bytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ngramspec.data import ModelError

MAGIC = b"GGUF"
Scalar = str | int | float | bool

BLOCKS: Mapping[int, tuple[int, int]] = {
    # ggml type: (weights per block, bytes per block); names as in ggml.h, without GGML_TYPE_.
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 40),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {
    kind: struct.Struct("<" + code)
    for kind, code in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    tensors: int  # number of tensors in the file
    metadata: Mapping[str, Scalar]  # values that are strings, numbers or booleans; no arrays (vocabulary, merges)
    vocabulary: bytes  # hash of the vocabulary (16 bytes): of the texts of all its tokens, each with its length
    required_bytes: int  # minimum bytes of the file for its header and every tensor whose type is in `BLOCKS`
    shapes: Mapping[str, tuple[int, ...]]  # shapes of the tensors by name, in ggml's order: rows are the last dimension
    places: Mapping[str, tuple[int, int]]  # (ggml type, position of the first byte in the file) of the tensors by name

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the tensors by name, 0 if `BLOCKS` lacks the type."""
        return {name: _size(self.shapes[name], kind) for name, (kind, _) in self.places.items()}


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a non-empty file that begins with `MAGIC`; a ModelError means that it is not supported."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse(_Reader(path, data))


class _Reader:
    """A position in the file that moves forward; moving it past the end raises ModelError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self.data = path, data
        self.position = len(MAGIC)

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self._path} {what}")

    def corruption_error(self, what: str) -> ModelError:
        return self.error(f"has a corrupt header: {what}; download the file again")

    def skip(self, size: int) -> int:
        """Move forward by `size` bytes and return the position of the first."""
        start = self.position
        if start + size > len(self.data):
            end = len(self.data)
            raise self.error(f"is truncated: it ends inside its header, after {end:,} bytes; download it again")
        self.position = start + size
        return start

    def number(self, layout: struct.Struct = _U64) -> Any:
        return layout.unpack_from(self.data, self.skip(layout.size))[0]

    def string(self) -> str:
        size = self.number()
        start = self.skip(size)
        return self.data[start : start + size].decode("utf-8", errors="replace")

    def skip_strings(self, count: int) -> None:
        """Skip strings in the only hot loop: a vocabulary and its merges are hundreds of thousands of strings."""
        length_at, data, position = _U64.unpack_from, self.data, self.position
        try:
            for _ in range(count):
                position += 8 + length_at(data, position)[0]
        except (struct.error, IndexError, OverflowError):
            position = len(data) + 1  # position past the end, so that `skip` raises
        self.skip(position - self.position)


def _parse(reader: _Reader) -> GGUFHeader:
    version = reader.number(_U32)
    if version not in {2, 3}:
        raise reader.error(_describe_version(version))
    tensors, entries = reader.number(), reader.number()
    metadata: dict[str, Scalar] = {}
    tokens = b""
    for _ in range(entries):
        key = reader.string()
        start = reader.position
        value = _value(reader, key)
        if value is not None:
            metadata[key] = value
        elif key == "tokenizer.ggml.tokens":
            tokens = reader.data[start : reader.position]

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.corruption_error(f"alignment {alignment!r}")
    end, shapes, offsets = 0, dict[str, tuple[int, ...]](), dict[str, tuple[int, int]]()
    for _ in range(tensors):
        name, count = reader.string(), reader.number(_U32)
        if count > 4:  # GGML_MAX_DIMS
            raise reader.corruption_error(f"tensor {name!r} has {count} dimensions")
        shapes[name] = shape = tuple(reader.number() for _ in range(count))
        offsets[name] = kind, offset = reader.number(_U32), reader.number()
        end = max(end, offset + _size(shape, kind)) if kind in BLOCKS else end
    data_start = -(-reader.position // alignment) * alignment
    required_bytes = data_start + end if end else reader.position
    vocabulary = blake2b(tokens, digest_size=16).digest()
    places = {name: (kind, data_start + offset) for name, (kind, offset) in offsets.items()}
    return GGUFHeader(tensors, metadata, vocabulary, required_bytes, shapes, places)


def _describe_version(version: int) -> str:
    big_endian_version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if 1 <= big_endian_version <= 3:
        return "is a big-endian GGUF file; use the little-endian version of the model"
    if version == 1:
        return "is GGUF version 1, which is no longer supported; convert the original model again"
    return f"is GGUF version {version}; this release of ngramspec reads versions 2 and 3"


def _value(reader: _Reader, key: str) -> Scalar | None:
    """Return the next metadata value; `None` for an array, which is skipped."""
    kind = reader.number(_U32)
    if kind == _STRING:
        return reader.string()
    if kind in _SCALARS:
        value: Scalar = reader.number(_SCALARS[kind])
        return value
    if kind != _ARRAY:
        raise reader.corruption_error(f"{key!r} has the unknown type {kind}")
    item, count = reader.number(_U32), reader.number()
    if item == _STRING:
        reader.skip_strings(count)
    elif item in _SCALARS:
        reader.skip(count * _SCALARS[item].size)
    else:  # llama.cpp rejects arrays of arrays too
        raise reader.corruption_error(f"{key!r} is an array of type {item}")
    return None


def _size(shape: tuple[int, ...], kind: int) -> int:
    weights, size = BLOCKS.get(kind, (1, 0))
    return math.prod(shape) // weights * size
