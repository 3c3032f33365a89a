"""`write_gguf`: a writer for small synthetic GGUF files, version 3; `gguf.py` describes the layout."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ngramspec.models.gguf import MAGIC

_ALIGNMENT = 32
_U32, _F32, _STRING = 4, 6, 8  # types of metadata values
_CHUNK = 2**24  # maximum number of bytes in one write


@dataclass(frozen=True, slots=True)
class Repeated:
    """A tensor whose rows repeat a few given ones."""

    kind: int  # ggml type
    shape: tuple[int, ...]  # number of columns, then of rows
    pattern: bytes  # one or more whole rows
    size: int  # number of bytes; the last repetition may be cut

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces of limited size."""
        large = self.pattern * max(1, min(_CHUNK, self.size) // len(self.pattern))
        for start in range(0, self.size, len(large)):
            yield large[: self.size - start]


def write_gguf(path: Path, metadata: Mapping[str, str | int | float], tensors: Mapping[str, Repeated]) -> None:
    """Write a file; numbers become u32 or f32.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for name, tensor in tensors.items():
            count = len(tensor.shape)
            file.write(_string(name) + struct.pack(f"<I{count}QIQ", count, *tensor.shape, tensor.kind, offset))
            offset += tensor.size + _padding(tensor.size)
        _pad(file)
        for tensor in tensors.values():
            for piece in tensor.pieces():
                file.write(piece)
            _pad(file)


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    return struct.pack("<II", _U32, value) if isinstance(value, int) else struct.pack("<If", _F32, value)


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(_padding(file.tell())))
