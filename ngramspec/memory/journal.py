"""The journal at the end of a memory file: texts that were remembered since its snapshot was written.

A record is `_RECORD` and its tokens (int32). Records are appended in one write each, under the lock of
`ngramspec.memory.store`; a process that dies in the middle leaves a piece of one, which readers leave out and the
next writer writes over. Two checksums (CRC-32) tell a record that is there from one that is not: the record's own,
so that its length can be trusted, and that of the tokens, so that one damaged text costs no other.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import RawIOBase
from typing import BinaryIO

import numpy as np

_RECORD = struct.Struct("=4sIdQII")
"""Magic, checksum of the tokens, time, number of tokens, nothing, checksum of the fields before."""
_MAGIC = b"NGSJ"
_LATEST = 2.0**36
"""Seconds since the epoch that a date can still be made of (the year 4147)."""


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal holds.

    Attributes:
        texts: (seconds since the epoch, tokens) of each record, oldest first.
        end: where the last whole record ends, and the next one is to begin.
        damaged: records that are whole in length and wrong in content; left out.
    """

    texts: tuple[tuple[float, array[int]], ...]
    end: int
    damaged: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens its texts have together."""
        return sum(len(tokens) for _, tokens in self.texts)


EMPTY = Journal((), 0)


def record(tokens: Sequence[int], time: float) -> bytes:
    """The bytes of one record."""
    body = array("i", tokens).tobytes()
    head = _RECORD.pack(_MAGIC, zlib.crc32(body), time, len(tokens), 0, 0)[:-4]
    return head + struct.pack("=I", zlib.crc32(head)) + body


def read_journal(file: BinaryIO, start: int, n_vocab: int) -> Journal:
    """The journal that begins at `start` of a file; what is incomplete or damaged is left out.

    Raises:
        OSError: the file cannot be read.
    """
    file.seek(start)
    raw = file.read()
    texts: list[tuple[float, array[int]]] = []
    at = damaged = 0
    while len(raw) - at >= _RECORD.size:
        magic, body_sum, time, count, _, own_sum = _RECORD.unpack_from(raw, at)
        body = at + _RECORD.size
        if magic != _MAGIC or own_sum != zlib.crc32(raw[at : body - 4]) or count > (len(raw) - body) // 4:
            break
        at = body + 4 * count
        tokens = array("i", raw[body:at])
        if zlib.crc32(raw[body:at]) != body_sum or not _sound(tokens, n_vocab) or not 0 <= time < _LATEST:
            damaged += 1
            continue
        texts.append((time, tokens))
    return Journal(tuple(texts), start + at, damaged)


def append_records(file: RawIOBase, end: int, records: bytes) -> None:
    """Write records at `end` of an unbuffered file and see them on the disk, or leave the file as long as it was.

    Raises:
        OSError: they could not be written, for want of space, say.
    """
    left = memoryview(records)
    try:
        # What a process that died left behind.
        with suppress(OSError):
            file.truncate(end)
        file.seek(end)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except BaseException:
        # Where even that fails, the piece is left out by every reader.
        with suppress(OSError):
            file.truncate(end)
        raise


def _sound(tokens: array[int], n_vocab: int) -> bool:
    numbers = np.frombuffer(tokens, np.int32) if tokens else np.zeros(1, np.int32)
    return bool(0 <= numbers.min() <= numbers.max() < n_vocab)
