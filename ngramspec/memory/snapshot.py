"""The snapshot in a memory file: the texts of a memory as tokens, with their index and a list of what they are.

Layout, in the machine's own byte order, every section padded to 4096 bytes:

    header      see `_HEADER`; its last 16 bytes are the BLAKE2b of those before
    tokens      int32 x size      each document's, then one seam (a negative token): no context runs into the next
    links       int32 x size      see `ngramspec.drafting.token_index`
    heads       int32 x chains    a power of two
    documents   JSON: the documents in the order of the text, and the model whose tokenizer made them

What follows is the journal (`ngramspec.memory.store`). The sections are used where they lie, in a private
mapping of the file: 10 million tokens open in some 20 ms, all of which goes into checking them. The checksum
is the BLAKE2b of the sums of the 64-bit words of each 4096 bytes: numpy makes it as fast as RAM is read, and no byte
can change without changing it. It guards against accidents, not against forgers, so the ranges of all numbers are
checked too: no file can lead a reader outside its arrays.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.token_index import ORDER, SEAM, TokenIndex
from ngramspec.errors import NGramSpecError

MAGIC = b"NGSPECM\n"
VERSION = 1
BLOCK = 4096
MAX_TOKENS = 2**31 - 1

_HEADER = struct.Struct("=8sIIIIQQQ16s16s16s")
"""Magic, version, byte order, ORDER, vocabulary size, tokens, chains, bytes of documents, vocabulary hash,
checksum of the sections, checksum of the header."""
_ORDER_MARK = 0x01020304
_DIGEST = 16
_CHUNK = 1 << 16
_PLACES = np.arange(_CHUNK, dtype=np.int32)

Ints = NDArray[np.int32]


class MemoryFileError(NGramSpecError):
    """A memory file cannot be used or written."""


def _unusable(name: str, what: str) -> MemoryFileError:
    """The error for a file that is only good for deleting."""
    return MemoryFileError(f"{name} {what}; delete it (ngramspec memory clear) and add your files again")


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a memory."""

    kind: Literal["file", "answer"]  # a file that was added, or an answer that was remembered
    name: str  # the file's absolute path; an answer's date and time
    tokens: Ints  # of the text
    # size, mtime: the file's bytes and its time of modification (nanoseconds) when it was read; an answer: 0.
    size: int = 0
    mtime: int = 0


def total(documents: Iterable[Document]) -> int:
    """Tokens of all of them."""
    return sum(len(document.tokens) for document in documents)


def read_table(name: str, raw: bytes, tokens: Ints) -> tuple[str, list[Document]]:
    """The model, and the documents with their shares of the text, which are views of it.

    Raises:
        MemoryFileError: `raw`, of the file `name`, is no list of this text's documents.
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
        raise _unusable(name, "is damaged: its list of documents does not fit its text") from None
    return model, found


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a snapshot says of itself."""

    n_vocab: int  # size of the vocabulary
    size: int  # tokens in it, seams included
    chains: int  # length of `heads`
    documents: int  # bytes of the documents' JSON
    vocabulary: bytes  # 16 bytes, see `Vocabulary.vocabulary_hash`
    checksum: bytes = bytes(_DIGEST)  # of the sections

    def sections(self) -> list[int]:
        """Offsets of tokens, links, heads and documents, and where the snapshot ends."""
        offsets = [BLOCK]
        for length in (4 * self.size, 4 * self.size, 4 * self.chains, self.documents):
            offsets.append(offsets[-1] + -(-length // BLOCK) * BLOCK)
        return offsets

    def pack(self) -> bytes:
        """Its first block."""
        numbers = VERSION, _ORDER_MARK, ORDER, self.n_vocab, self.size, self.chains, self.documents
        raw = _HEADER.pack(MAGIC, *numbers, self.vocabulary, self.checksum, bytes(_DIGEST))[:-_DIGEST]
        return (raw + _digest(raw)).ljust(BLOCK, b"\0")


def chains_for(size: int, documents: int) -> int:
    """The most chains with which `size` tokens take at most 12 bytes each on disk, and at least a block of them."""
    least, room = BLOCK // 4, (4 * size - documents - 5 * BLOCK) // 4
    return max(least, 1 << (room.bit_length() - 1)) if room > 0 else least


def write_snapshot(file: BinaryIO, vocabulary: bytes, n_vocab: int, model: str, documents: Sequence[Document]) -> None:
    """Index documents, tokens of the model's tokenizer, and write the snapshot of them.

    Raises:
        MemoryFileError: there are more tokens than 32-bit positions.
        OSError: the file cannot be written.
    """
    size = total(documents) + len(documents)
    if size > MAX_TOKENS:
        raise MemoryFileError(f"{size:,} tokens are more than a memory holds ({MAX_TOKENS:,})")
    seam = np.full(1, SEAM, np.int32)
    tokens = np.concatenate([np.zeros(0, np.int32), *(part for one in documents for part in (one.tokens, seam))])
    rows = [
        {"kind": one.kind, "name": one.name, "tokens": len(one.tokens), "size": one.size, "mtime": one.mtime}
        for one in documents
    ]
    # In ASCII, so that names that are no Unicode survive.
    table = json.dumps({"model": model, "documents": rows}, separators=(",", ":")).encode("ascii")
    index = TokenIndex.build(tokens.data, chains_for(size, len(table)))
    checksum = hashlib.blake2b(digest_size=_DIGEST)
    file.write(bytes(BLOCK))
    for section in (index.tokens, index.links, index.heads, table):
        for block in _blocks(memoryview(section)):
            checksum.update(_sums(np.frombuffer(block, np.uint64)))
            file.write(block)
    file.seek(0)
    file.write(FileHeader(n_vocab, size, len(index.heads), len(table), vocabulary, checksum.digest()).pack())
    file.seek(0, os.SEEK_END)


def _blocks(section: memoryview) -> Iterator[bytes | memoryview]:
    """The section in pieces of whole blocks, the last one padded."""
    if not section.nbytes:
        return
    raw = section.cast("B")
    whole = len(raw) // BLOCK * BLOCK
    for start in range(0, whole, BLOCK * 1024):
        yield raw[start : min(whole, start + BLOCK * 1024)]
    if whole < len(raw):
        yield bytes(raw[whole:]).ljust(BLOCK, b"\0")


def read_header(file: IO[bytes], vocabulary: bytes) -> FileHeader:
    """The header at the start of a file, whose snapshot is there to its end; `vocabulary`: the hash that it must have.

    Raises:
        MemoryFileError: the file is none of these; the message names it.
        OSError: it cannot be read.
    """
    name, start = file.name, file.read(BLOCK)
    if len(start) < _HEADER.size:
        raise _unusable(name, "is truncated: not even its header is whole")
    raw = start[: _HEADER.size]
    magic, version, mark, order, n_vocab, size, chains, documents, found, checksum, own = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise MemoryFileError(f"{name} is not a memory file of ngramspec")
    if mark != _ORDER_MARK:
        raise MemoryFileError(f"{name} was made on a machine of another byte order, or is damaged")
    if version > VERSION:
        raise MemoryFileError(f"{name} has format {version}, and this ngramspec reads {VERSION}: update ngramspec")
    if own != _digest(raw[:-_DIGEST]) or start[_HEADER.size :].strip(b"\0"):
        raise _unusable(name, "is damaged: its header's checksum is wrong")
    if version != VERSION or order != ORDER:
        raise MemoryFileError(f"{name} has format {version}.{order}, which this ngramspec no longer reads")
    if found != vocabulary:
        raise MemoryFileError(f"{name} was made with another tokenizer")
    if size > MAX_TOKENS or not 0 < chains < 2**31 or chains & (chains - 1) or documents > 2**40:
        raise _unusable(name, "is damaged: its header speaks of impossible sizes")
    header = FileHeader(n_vocab, size, chains, documents, found, checksum)
    there, end = os.fstat(file.fileno()).st_size, header.sections()[-1]
    if there < end:
        raise _unusable(name, f"is truncated: {there:,} of {end:,} bytes are there")
    return header


class Snapshot:
    """A snapshot in a file, checked and mapped: its text, shape (size,), and the same with its chains.

    The mapping is private: what is written to it stays in the process. The file may be closed afterwards.

    Raises:
        MemoryFileError: the file is damaged, truncated, foreign, or of another vocabulary; the message names it.
        OSError: the file cannot be read.
    """

    def __init__(self, file: BinaryIO, vocabulary: bytes) -> None:
        self.header = header = read_header(file, vocabulary)
        self._name = file.name
        at_tokens, at_links, at_heads, self._at_documents, end = header.sections()
        self._mapped = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_COPY)
        words = np.frombuffer(self._mapped, np.uint64, offset=BLOCK)
        if _digest(_sums(words)) != header.checksum:
            raise _unusable(file.name, "is damaged: its checksum is wrong")
        self.tokens: Ints = self._ints(at_tokens, header.size)
        links, heads = self._ints(at_links, header.size), self._ints(at_heads, header.chains)
        if not _sound(self.tokens, links, heads, header.n_vocab):
            raise _unusable(file.name, "is damaged: it holds impossible numbers")
        self.index = TokenIndex.over(self.tokens.data, links.data, heads.data, header.size)

    def _ints(self, offset: int, count: int) -> Ints:
        return np.frombuffer(self._mapped, np.int32, count, offset)

    def table(self) -> tuple[str, list[Document]]:
        """See `read_table`."""
        raw = self._mapped[self._at_documents : self._at_documents + self.header.documents]
        return read_table(self._name, raw, self.tokens)


def _sound(tokens: Ints, links: Ints, heads: Ints, n_vocab: int) -> bool:
    """Whether every token is below `n_vocab`, every link below its own position, every head below the size.

    -1 is allowed everywhere; a position is else at least ORDER, so that its context lies inside.
    """
    size = len(tokens)
    below = np.empty(_CHUNK, np.int32)
    # In pieces that stay in the cache.
    for start in range(0, size, _CHUNK):
        token, link = tokens[start : start + _CHUNK], links[start : start + _CHUNK]
        if token.min() < -1 or token.max() >= n_vocab or not _positions(link):
            return False
        if np.subtract(link, _PLACES[: len(link)], out=below[: len(link)]).max() >= start:
            return False
    pieces = (heads[start : start + _CHUNK] for start in range(0, len(heads), _CHUNK))
    return all(_positions(piece) and piece.max() < size for piece in pieces)


def _positions(numbers: Ints) -> bool:
    """Whether each is -1 or at least ORDER; as an unsigned number -1 is the largest."""
    return bool(numbers.min() >= -1 and numbers.view(np.uint32).min() >= ORDER)


def _sums(words: NDArray[np.uint64]) -> Any:
    """The sum of the words of each block, modulo 2**64."""
    return words.reshape(-1, BLOCK // 8).sum(axis=1, dtype=np.uint64)


def _digest(raw: Any) -> bytes:
    return hashlib.blake2b(raw, digest_size=_DIGEST).digest()
