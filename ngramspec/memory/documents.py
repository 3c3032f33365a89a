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
from dataclasses import asdict, dataclass
from datetime import datetime
from io import RawIOBase
from typing import Any, BinaryIO, Literal

import numpy as np

from ngramspec.drafting.token_index import SEAM
from ngramspec.memory.snapshot import Ints, unusable


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a memory.

    Attributes:
        kind: a file that was added, or an answer that was remembered.
        name: the file's absolute path; an answer's date and time.
        tokens: how many.
        size, mtime: the file's bytes and its time of modification (nanoseconds) when it was read; an answer: 0.
    """

    kind: Literal["file", "answer"]
    name: str
    tokens: int
    size: int = 0
    mtime: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """A document and its tokens."""

    document: Document
    tokens: Ints


def answer(tokens: Ints, time: float) -> Text:
    """An answer remembered at `time`, seconds since the epoch."""
    name = datetime.fromtimestamp(time).isoformat(sep=" ", timespec="seconds")
    return Text(Document("answer", name, len(tokens)), tokens)


def total(documents: Iterable[Document]) -> int:
    """Tokens of all of them."""
    return sum(d.tokens for d in documents)


# --------------------------------------------------------------------------- in a snapshot


def joined(texts: Sequence[Text]) -> Ints:
    """One text with a seam after each."""
    tokens = np.full(sum(len(t.tokens) + 1 for t in texts), SEAM, np.int32)
    at = 0
    for text in texts:
        tokens[at : at + len(text.tokens)] = text.tokens
        at += len(text.tokens) + 1
    return tokens


def table_of(model: str, texts: Sequence[Text]) -> bytes:
    """The JSON of the documents in the order of the text, and the model whose tokenizer made them.

    Names that are no Unicode survive.
    """
    documents = [asdict(t.document) for t in texts]
    return json.dumps({"model": model, "documents": documents}, separators=(",", ":")).encode("ascii")


def read_table(raw: bytes, tokens: Ints) -> tuple[str, list[Text]]:
    """The model, and the documents with their shares of the text, which are views of it.

    Raises:
        MemoryFileError: `raw` is no `table_of` this text; worded to follow the file's name.
    """
    try:
        data = json.loads(raw)
        model, documents = data["model"], [_document(d) for d in data["documents"]]
        sound = isinstance(model, str) and total(documents) + len(documents) == len(tokens)
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise unusable("is damaged: its list of documents does not fit its text")
    found, at = [], 0
    for document in documents:
        found.append(Text(document, tokens[at : at + document.tokens]))
        at += document.tokens + 1
    return model, found


def _document(data: dict[str, Any]) -> Document:
    document = Document(**data)
    numbers = (document.tokens, document.size, document.mtime)
    if document.kind not in ("file", "answer") or not isinstance(document.name, str):
        raise ValueError("no document")
    if not all(type(n) is int for n in numbers) or document.tokens < 0:
        raise ValueError("no numbers")
    return document


# --------------------------------------------------------------------------- in the journal

_RECORD = struct.Struct("=4sIdQII")
"""Magic, checksum of the tokens, time, number of tokens, nothing, checksum of the fields before."""
_MAGIC = b"NGSJ"
_LATEST = 2.0**36
"""Seconds since the epoch that a date can still be made of (the year 4147)."""


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal holds.

    Attributes:
        texts: the answers, oldest first.
        end: where the last whole record ends, and the next one is to begin.
        damaged: records that are whole in length and wrong in content; left out.
    """

    texts: tuple[Text, ...] = ()
    end: int = 0
    damaged: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all its texts."""
        return sum(len(text.tokens) for text in self.texts)


EMPTY = Journal()


def record(tokens: Sequence[int], time: float) -> bytes:
    """The bytes of one record; `time`: seconds since the epoch."""
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
    texts = []
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
            texts.append(answer(tokens, time))
        else:
            damaged += 1
    return Journal(tuple(texts), start + at, damaged)


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
