"""The snapshot in a memory file: a text as tokens with its index, and the documents it is made of.

Layout, in the machine's own byte order, every section padded to 4096 bytes:

    header      see `_HEADER`; its last 16 bytes are the BLAKE2b of those before
    tokens      int32 x size      negative: a seam between two documents
    links       int32 x size      see `ngramspec.drafting.token_index`
    heads       int32 x chains    a power of two
    documents   JSON, see `ngramspec.memory.documents`

What follows is the journal (`ngramspec.memory.documents`). The sections are used where they lie, in a private
mapping of the file: 10 million tokens open in some 20 ms, all of which goes into checking them. The checksum
is the BLAKE2b of the sums of the 64-bit words of each 4096 bytes: numpy makes it as fast as RAM is read, and no byte
can change without changing it. It guards against accidents, not against forgers, so the ranges of all numbers are
checked too: no file can lead a reader outside its arrays.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.token_index import ORDER, TokenIndex
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


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a snapshot says of itself."""

    n_vocab: int  # size of the vocabulary
    size: int  # tokens in it, seams included
    chains: int  # length of `heads`
    documents: int  # bytes of the documents' JSON
    vocabulary: bytes  # 16 bytes, see `Vocabulary.vocabulary_hash`
    checksum: bytes = bytes(_DIGEST)  # of the sections

    def sections(self) -> tuple[int, int, int, int, int]:
        """Offsets of tokens, links, heads and documents, and where the snapshot ends."""
        offsets = [BLOCK]
        for length in (4 * self.size, 4 * self.size, 4 * self.chains, self.documents):
            offsets.append(offsets[-1] + _padded(length))
        return offsets[0], offsets[1], offsets[2], offsets[3], offsets[4]

    def pack(self) -> bytes:
        """Its first block."""
        raw = _HEADER.pack(
            MAGIC,
            VERSION,
            _ORDER_MARK,
            ORDER,
            self.n_vocab,
            self.size,
            self.chains,
            self.documents,
            self.vocabulary,
            self.checksum,
            bytes(_DIGEST),
        )[:-_DIGEST]
        return (raw + _digest(raw)).ljust(BLOCK, b"\0")


def chains_for(size: int, documents: int) -> int:
    """The most chains with which `size` tokens take at most 12 bytes each on disk, and at least a block of them."""
    least, room = BLOCK // 4, (4 * size - documents - 5 * BLOCK) // 4
    return max(least, 1 << (room.bit_length() - 1)) if room > 0 else least


def write_snapshot(file: BinaryIO, vocabulary: bytes, n_vocab: int, tokens: Ints, documents: bytes) -> None:
    """Index `tokens` and write the snapshot of them.

    Raises:
        MemoryFileError: there are more tokens than 32-bit positions.
        OSError: the file cannot be written.
    """
    if len(tokens) > MAX_TOKENS:
        raise MemoryFileError(f"{len(tokens):,} tokens are more than a memory holds ({MAX_TOKENS:,})")
    index = TokenIndex.build(tokens.data, chains_for(len(tokens), len(documents)))
    checksum = hashlib.blake2b(digest_size=_DIGEST)
    header = FileHeader(n_vocab, len(tokens), len(index.heads), len(documents), vocabulary)
    file.write(bytes(BLOCK))
    for section in (index.tokens, index.links, index.heads, documents):
        for block in _blocks(memoryview(section)):
            checksum.update(_sums(np.frombuffer(block, np.uint64)))
            file.write(block)
    header = FileHeader(n_vocab, header.size, header.chains, header.documents, vocabulary, checksum.digest())
    file.seek(0)
    file.write(header.pack())
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


def read_header(start: bytes, vocabulary: bytes | None) -> FileHeader:
    """The header in the first block of a file, or in what there is of it; `vocabulary`: the hash that it must have.

    Raises:
        MemoryFileError: worded to follow the name of the file.
    """
    if len(start) < _HEADER.size:
        raise unusable("is truncated: not even its header is whole")
    raw = start[: _HEADER.size]
    magic, version, mark, order, n_vocab, size, chains, documents, found, checksum, own = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise MemoryFileError("is not a memory file of ngramspec")
    if mark != _ORDER_MARK:
        raise MemoryFileError("was made on a machine of another byte order, or is damaged")
    if version > VERSION:
        raise MemoryFileError(f"has format {version}, and this ngramspec reads {VERSION}: update ngramspec")
    if own != _digest(raw[:-_DIGEST]) or start[_HEADER.size :].strip(b"\0"):
        raise unusable("is damaged: its header's checksum is wrong")
    if version != VERSION or order != ORDER:
        raise MemoryFileError(f"has format {version}.{order}, which this ngramspec no longer reads")
    if vocabulary is not None and found != vocabulary:
        raise MemoryFileError("was made with another tokenizer")
    if size > MAX_TOKENS or not 0 < chains < 2**31 or chains & (chains - 1) or documents > 2**40:
        raise unusable("is damaged: its header speaks of impossible sizes")
    return FileHeader(n_vocab, size, chains, documents, found, checksum)


def check_length(file: IO[bytes], end: int) -> None:
    """Check that a snapshot which ends at `end` is there to its end.

    Raises:
        MemoryFileError: it is not; worded to follow the name of the file.
    """
    there = os.fstat(file.fileno()).st_size
    if there < end:
        raise unusable(f"is truncated: {there:,} of {end:,} bytes are there")


class Snapshot:
    """A snapshot in a file, checked and mapped: its text, shape (size,), and the same with its chains.

    The mapping is private: what is written to it stays in the process. The file may be closed afterwards.

    Raises:
        MemoryFileError: the file is damaged, truncated, foreign, or of another vocabulary; worded to follow its name.
        OSError: the file cannot be read.
    """

    def __init__(self, file: BinaryIO, vocabulary: bytes | None = None) -> None:
        file.seek(0)
        self.header = header = read_header(file.read(BLOCK), vocabulary)
        at_tokens, at_links, at_heads, self._at_documents, end = header.sections()
        check_length(file, end)
        self._mapped = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_COPY)
        words = np.frombuffer(self._mapped, np.uint64, offset=BLOCK)
        if hashlib.blake2b(_sums(words), digest_size=_DIGEST).digest() != header.checksum:
            raise unusable("is damaged: its checksum is wrong")
        self.tokens: Ints = self._ints(at_tokens, header.size)
        links, heads = self._ints(at_links, header.size), self._ints(at_heads, header.chains)
        if not _sound(self.tokens, links, heads, header.n_vocab):
            raise unusable("is damaged: it holds impossible numbers")
        self.index = TokenIndex.over(self.tokens.data, links.data, heads.data, header.size)

    def _ints(self, offset: int, count: int) -> Ints:
        return np.frombuffer(self._mapped, np.int32, count, offset)

    @property
    def documents(self) -> bytes:
        """The JSON of its documents."""
        return self._mapped[self._at_documents : self._at_documents + self.header.documents]


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


def unusable(what: str) -> MemoryFileError:
    """The error for a file that is only good for deleting."""
    return MemoryFileError(f"{what}; delete it (ngramspec memory clear) and add your files again")


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=_DIGEST).digest()
