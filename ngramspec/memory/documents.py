"""What a memory is made of: files that were added, answers that were remembered, and how both are stored.

In the text of a snapshot each document is followed by one seam, so that no context runs from one into the next.

The journal at the end of a memory file holds the answers that were remembered since its snapshot was written. A
record is `_RECORD` and its tokens (int32). Records are appended in one write each, under the lock of
`ngramspec.memory.store`; a process that dies in the middle leaves a piece of one, which readers leave out and the
next writer writes over. Two checksums (CRC-32) tell a record that is there from one that is not: the record's own,
so that its length can be trusted, and that of the tokens, so that one damaged text costs no other.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from io import RawIOBase
from typing import Any, BinaryIO, Literal

import numpy as np

from ngramspec.drafting.token_index import SEAM
from ngramspec.memory.snapshot import Ints, unusable


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a memory."""

    kind: Literal["file", "answer"]  # a file that was added, or an answer that was remembered
    name: str  # the file's absolute path; an answer's date and time
    tokens: Ints  # of the text
    # size, mtime: the file's bytes and its time of modification (nanoseconds) when it was read; an answer: 0.
    size: int = 0
    mtime: int = 0


def answer(tokens: Ints, time: float) -> Document:
    """An answer remembered at `time`, seconds since the epoch."""
    return Document("answer", datetime.fromtimestamp(time).isoformat(sep=" ", timespec="seconds"), tokens)


def total(documents: Iterable[Document]) -> int:
    """Tokens of all of them."""
    return sum(len(document.tokens) for document in documents)


# --------------------------------------------------------------------------- in a snapshot


def joined(documents: Sequence[Document]) -> Ints:
    """One text with a seam after each."""
    tokens = np.full(total(documents) + len(documents), SEAM, np.int32)
    at = 0
    for document in documents:
        tokens[at : at + len(document.tokens)] = document.tokens
        at += len(document.tokens) + 1
    return tokens


def table_of(model: str, documents: Sequence[Document]) -> bytes:
    """The JSON of the documents in the order of the text, and the model whose tokenizer made them.

    Names that are no Unicode survive.
    """
    rows = [
        {"kind": one.kind, "name": one.name, "tokens": len(one.tokens), "size": one.size, "mtime": one.mtime}
        for one in documents
    ]
    return json.dumps({"model": model, "documents": rows}, separators=(",", ":")).encode("ascii")


def read_table(raw: bytes, tokens: Ints) -> tuple[str, list[Document]]:
    """The model, and the documents with their shares of the text, which are views of it.

    Raises:
        MemoryFileError: `raw` is no `table_of` this text; worded to follow the file's name.
    """
    found: list[Document] = []
    at = 0
    try:
        data = json.loads(raw)
        model = data["model"]
        for row in data["documents"]:
            document = Document(**row)
            count: Any = document.tokens
            numbers = (count, document.size, document.mtime)
            if document.kind not in ("file", "answer") or not isinstance(document.name, str):
                raise ValueError("no document")
            if not all(type(number) is int for number in numbers) or count < 0:
                raise ValueError("no numbers")
            found.append(replace(document, tokens=tokens[at : at + count]))
            at += count + 1
        if not isinstance(model, str) or at != len(tokens):
            raise ValueError("another text's")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise unusable("is damaged: its list of documents does not fit its text") from None
    return model, found


# --------------------------------------------------------------------------- in the journal

_RECORD = struct.Struct("=4sIdQII")
"""Magic, checksum of the tokens, time, number of tokens, nothing, checksum of the fields before."""
_MAGIC = b"NGSJ"
_LATEST = 2.0**36
"""Seconds since the epoch that a date can still be made of (the year 4147)."""


def record(tokens: Sequence[int], time: float) -> bytes:
    """The bytes of one record; `time`: seconds since the epoch."""
    body = array("i", tokens).tobytes()
    head = _RECORD.pack(_MAGIC, zlib.crc32(body), time, len(tokens), 0, 0)[:-4]
    return head + struct.pack("=I", zlib.crc32(head)) + body


def read_journal(file: BinaryIO, start: int, n_vocab: int) -> tuple[list[Document], int, int]:
    """The journal that begins at `start` of a file; what is incomplete or damaged is left out.

    Returns:
        The answers, oldest first; where the next record is to begin; and how many are whole in length and wrong in
        content.

    Raises:
        OSError: the file cannot be read.
    """
    file.seek(start)
    raw = file.read()
    answers: list[Document] = []
    at = damaged = 0
    while len(raw) - at >= _RECORD.size:
        magic, body_sum, time, count, _, own_sum = _RECORD.unpack_from(raw, at)
        body = at + _RECORD.size
        if magic != _MAGIC or own_sum != zlib.crc32(raw[at : body - 4]) or count > (len(raw) - body) // 4:
            break
        at = body + 4 * count
        tokens = np.array(array("i", raw[body:at]), np.int32)
        possible = tokens.min(initial=0) >= 0 and tokens.max(initial=0) < n_vocab and 0 <= time < _LATEST
        if possible and zlib.crc32(raw[body:at]) == body_sum:
            answers.append(answer(tokens, time))
        else:
            damaged += 1
    return answers, start + at, damaged


def append_record(file: RawIOBase, end: int, raw: bytes) -> None:
    """Write a record at `end` of an unbuffered file and see it on the disk, or leave the file as long as it was.

    Raises:
        OSError: it could not be written, for want of space, say.
    """
    left = memoryview(raw)
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
