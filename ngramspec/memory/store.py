"""`Store`: the file in which a memory keeps what it knows for one tokenizer, shared by any number of processes.

    FOLDER/HASH-GENERATION.memory     a snapshot and its journal; of several generations the highest counts
    FOLDER/HASH.lock                  held by whoever writes

A snapshot never changes. Rewriting makes the next generation under a temporary name, sees it on the disk, renames
it and only then deletes the one before; so a reader takes no lock, nothing is half there after a crash, and on
Windows, which deletes no mapped file, the old generation stays until a later writer can.

The answers that are remembered in between are appended to the journal at the end of the highest generation. A record is
`_RECORD` and its tokens (int32), appended in one write under the lock; a process that dies in the middle leaves a piece
of one, which readers leave out and the next writer writes over. Two checksums (CRC-32) tell a record that is there from
one that is not: the record's own, so that its length can be trusted, and that of the tokens, so that one damaged text
costs no other.
"""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from ngramspec.memory.snapshot import Document, Ints, MemoryFileError, Snapshot, read_header, total, write_snapshot
from ngramspec.storage import replacing

PATIENCE = 60.0
"""Seconds to wait for another process that writes: the largest memory is written in a few."""

LONG_JOURNAL = 1 << 17
"""Tokens in a journal after which it goes into the snapshot: indexing them takes each process some milliseconds."""

MOST_ANSWERS = 1 << 24
"""Tokens of remembered answers that are kept, some 200 MB with their index; beyond it the oldest are dropped."""

_NAME = re.compile(r"([0-9a-f]{32})-(\d{6,})\.memory")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a store holds."""

    path: Path | None = None  # the file; None if there is none yet
    snapshot: Snapshot | None = None  # mapped and checked; None if there is no file yet
    answers: Sequence[Document] = ()  # what was remembered since
    damaged: int = 0  # how many answers were left out, as they are damaged
    inode: int = 0  # of the file; with the path it tells the file from one that took its name

    @property
    def model(self) -> str:
        """The model whose tokenizer made the tokens; "" if there is no file."""
        return self.snapshot.table()[0] if self.snapshot is not None else ""

    def documents(self) -> list[Document]:
        """All of them, what was remembered last at the end."""
        return [*(self.snapshot.table()[1] if self.snapshot is not None else ()), *self.answers]


NOTHING = Contents()


class Store:
    """The memory file of one tokenizer in one folder, which is made when something is written.

    Its methods raise MemoryFileError, which names the file, where it cannot be used or written; it is then as before.

    Args:
        vocabulary: the tokenizer's `vocabulary_hash`, 16 bytes.
        n_vocab: size of its vocabulary; needed to make the first file only.
        model: name of the model for people; likewise.
    """

    def __init__(self, folder: Path, vocabulary: bytes, n_vocab: int = 0, model: str = "") -> None:
        self.folder, self.vocabulary, self.n_vocab, self.model = folder, vocabulary, n_vocab, model

    @classmethod
    def all_in(cls, folder: Path) -> list[Store]:
        """The stores of all tokenizers in a folder, by hash."""
        return [cls(folder, bytes.fromhex(name)) for name in sorted({name for name, _, _ in _files(folder)})]

    def path(self) -> Path | None:
        """The file that counts, or None."""
        generations = self._generations()
        return generations[max(generations)] if generations else None

    def _generations(self) -> dict[int, Path]:
        return {number: path for name, number, path in _files(self.folder) if name == self.vocabulary.hex()}

    def read(self) -> Contents:
        """What is there now; takes no lock."""
        tried: Path | None = None
        while (path := self.path()) is not None:
            with _naming(path, "read"):
                try:
                    with path.open("rb") as file:
                        snapshot = Snapshot(file, self.vocabulary)
                        end, n_vocab = snapshot.header.sections()[-1], snapshot.header.n_vocab
                        answers, _, damaged = read_journal(file, end, n_vocab)
                        return Contents(path, snapshot, answers, damaged, os.fstat(file.fileno()).st_ino)
                except FileNotFoundError:
                    # Replaced by the next generation since the folder was listed.
                    if path == tried:
                        raise
                    tried = path
        return NOTHING

    def is_current(self, contents: Contents) -> bool:
        """Whether the file that was read is still the one that counts; what was remembered since does not matter."""
        path = self.path()
        try:
            return path == contents.path and (path is None or path.stat().st_ino == contents.inode)
        except OSError:
            return False

    def update(self, change: Callable[[list[Document]], Sequence[Document]]) -> None:
        """Replace all documents by what `change` makes of them, whole or not at all."""
        with self._lock():
            now = self.read()
            self._write(now, change(now.documents()))

    def append(self, tokens: Sequence[int]) -> None:
        """Remember an answer."""
        with self._lock():
            path = self.path()
            if path is None:
                self._write(NOTHING, [_answer(np.array(tokens, np.int32), time.time())])
                return
            with _naming(path, "write"), path.open("r+b", buffering=0) as file:
                # Not the whole snapshot: what it holds is no matter here.
                header = read_header(file, self.vocabulary)
                answers, end, _ = read_journal(file, header.sections()[-1], header.n_vocab)
                append_record(file, end, record(tokens, time.time()))
            if total(answers) + len(tokens) > LONG_JOURNAL:
                # The answer is safe; a snapshot that cannot be written now will be later.
                with suppress(MemoryFileError):
                    now = self.read()
                    self._write(now, _newest(now.documents()))

    def _write(self, now: Contents, documents: Sequence[Document]) -> None:
        """The next generation; the lock is held."""
        before, name = self._generations(), self.vocabulary.hex()
        path = self.folder / f"{name}-{max(before, default=0) + 1:06d}.memory"
        n_vocab = now.snapshot.header.n_vocab if now.snapshot else self.n_vocab
        with _naming(path, "write"):
            # Left by a writer that died.
            for left in self.folder.glob(f"{name}-*.tmp"):
                left.unlink()
            with replacing(path, prefix=f"{name}-") as file:
                write_snapshot(file, self.vocabulary, n_vocab, now.model or self.model, documents)
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self.folder)
        for old in before.values():
            # Windows keeps a file that another process has mapped.
            with suppress(OSError):
                old.unlink()

    def clear(self) -> None:
        """Delete the file, whatever is in it."""
        with self._lock():
            for path in self._generations().values():
                with _naming(path, "delete"):
                    path.unlink(missing_ok=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        name = self.folder / f"{self.vocabulary.hex()}.lock"
        lock = FileLock(name, timeout=PATIENCE)
        with _naming(name, "write"):
            # The user's own texts are nobody else's business.
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                lock.acquire()
            except Timeout:
                raise MemoryFileError(
                    f"another ngramspec has been writing to this memory for {PATIENCE:.0f} seconds ({name}); try again"
                ) from None
        try:
            yield
        finally:
            lock.release()


def _newest(documents: Sequence[Document]) -> list[Document]:
    """Those in the order of their age without the oldest answers beyond MOST_ANSWERS; files are never dropped."""
    kept, left = [], MOST_ANSWERS
    for document in reversed(documents):
        if document.kind == "answer":
            left -= len(document.tokens)
            if left < 0:
                continue
        kept.append(document)
    return kept[::-1]


def _files(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """(hash, generation, path) of each memory file in a folder."""
    with _naming(folder, "read"), suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if name := _NAME.fullmatch(path.name):
                yield name[1], int(name[2]), path


@contextmanager
def _naming(path: Path, what: str) -> Iterator[None]:
    """Name the file in errors of the system in the block, which does to it `what`."""
    try:
        yield
    except OSError as error:
        kept = "; the memory is as it was" if what == "write" else ""
        raise MemoryFileError(f"cannot {what} {path}: {error.strerror or error}{kept}") from error


def _sync_folder(folder: Path) -> None:
    """See a rename on the disk, where the system can."""
    with suppress(OSError, AttributeError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --------------------------------------------------------------------------- the journal

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
            answers.append(_answer(tokens, time))
        else:
            damaged += 1
    return answers, start + at, damaged


def _answer(tokens: Ints, time: float) -> Document:
    return Document("answer", datetime.fromtimestamp(time).isoformat(sep=" ", timespec="seconds"), tokens)


def append_record(file: RawIOBase, end: int, raw: bytes) -> None:
    """Write a record at `end` of an unbuffered file and see it on the disk, or leave the file as long as it was."""
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
