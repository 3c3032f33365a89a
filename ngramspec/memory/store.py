"""`Store`: what a memory keeps for one tokenizer, shared by any number of processes.

    FOLDER/HASH.memory    the documents: an SQLite database, which locks, and is changed whole or not at all
    FOLDER/HASH.index     the documents in one text, with its `TokenIndex`, to be mapped

The index is made of the documents, and made again where it is missing, damaged, or of another generation than the
database. Answers that were remembered since are not in it: each reader indexes them, until they are many.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal
from urllib.parse import quote
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.token_index import ORDER, SEAM, TokenIndex
from ngramspec.errors import NGramSpecError
from ngramspec.storage import replacing

VERSION = 1
MAX_TOKENS = 2**31 - 1

PATIENCE = 60.0
"""Seconds to wait for another process that writes: the largest memory is written in a few."""

TURN = 0.2  # seconds of that at once

LONG_JOURNAL = 1 << 17
"""Tokens of answers after which they go into the index file: indexing them takes each process some milliseconds."""

MOST_ANSWERS = 1 << 24
"""Tokens of remembered answers that are kept, about 200 MB with their index; beyond it the oldest are dropped."""

_NAME = re.compile(r"[0-9a-f]{32}\.memory")
_TABLES = (
    "CREATE TABLE memory (version INTEGER, vocabulary BLOB, model TEXT, generation TEXT, indexed INTEGER)",
    "CREATE TABLE documents (id INTEGER PRIMARY KEY, kind TEXT, name BLOB, size INTEGER, mtime INTEGER, tokens BLOB)",
)

Ints = NDArray[np.int32]


class MemoryFileError(NGramSpecError):
    """A memory file cannot be used or written."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a memory."""

    kind: Literal["file", "answer"]  # a file that was added, or an answer that was remembered
    name: str  # the file's absolute path; an answer's date and time
    tokens: Ints  # of the text
    # size, mtime: the file's bytes and its time of modification (nanoseconds) when it was read; an answer: 0.
    size: int = 0
    mtime: int = 0
    id: int = 0  # in the store, in the order of adding; 0: not there yet


def total(documents: Iterable[Document]) -> int:
    """Tokens of all of them."""
    return sum(len(document.tokens) for document in documents)


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a store."""

    generation: str = ""  # changes with whatever is in `index`; "": there is no file yet
    model: str = ""  # whose tokenizer made the tokens
    index: TokenIndex | None = None  # of all documents but `answers`; mapped, and private to the process
    answers: Sequence[Document] = ()  # what was remembered since


NOTHING = Contents()


class Store:
    """The memory of one tokenizer in one folder, which is made when something is written.

    Its methods raise MemoryFileError, which names the file, where it cannot be used or written; it is then as before.

    Args:
        vocabulary: the tokenizer's `vocabulary_hash`, 16 bytes.
        model: name of the model for people; needed to make the file only.
    """

    def __init__(self, folder: Path, vocabulary: bytes, model: str = "") -> None:
        self.vocabulary, self.model = vocabulary, model
        self.path = folder / f"{vocabulary.hex()}.memory"
        self._index_path = self.path.with_suffix(".index")

    @classmethod
    def all_in(cls, folder: Path) -> list[Store]:
        """The stores of all tokenizers in a folder, by hash."""
        names = sorted(path.stem for path in folder.glob("*.memory") if _NAME.fullmatch(path.name))
        return [cls(folder, bytes.fromhex(name)) for name in names]

    def read(self) -> Contents:
        """Read the current contents."""
        with self._reading() as db:
            if db is None:
                return NOTHING
            model, generation, indexed = db.execute("SELECT model, generation, indexed FROM memory").fetchone()
            index = _load_index(self._index_path, generation)
            if index is None:
                documents = [one for one in _documents(db) if one.id <= indexed]
                index = _write_index(self._index_path, generation, documents)
            return Contents(generation, model, index, _documents(db, after=indexed))

    def documents(self) -> list[Document]:
        """All of them, what was added last at the end."""
        with self._reading() as db:
            return [] if db is None else _documents(db)

    def generation(self) -> str:
        """See `Contents.generation`."""
        with self._reading() as db:
            return "" if db is None else str(db.execute("SELECT generation FROM memory").fetchone()[0])

    def size(self) -> int:
        """Bytes on the disk."""
        return sum(path.stat().st_size for path in (self.path, self._index_path) if path.exists())

    def update(self, change: Callable[[list[Document]], Sequence[Document]]) -> None:
        """Replace all documents by what `change` makes of them (some of these, and new ones), whole or not at all."""
        with self._writing() as db:
            _change(db, change)
        self.read()  # makes the index
        for path in self._left_behind():
            with suppress(OSError):
                path.unlink()

    def append(self, tokens: Sequence[int]) -> None:
        """Remember an answer."""
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        with self._writing() as db:
            _insert(db, [Document("answer", now, np.array(tokens, np.int32))])
            indexed = db.execute("SELECT indexed FROM memory").fetchone()[0]
            long = total(_documents(db, after=indexed)) > LONG_JOURNAL
            if long:
                _change(db, _newest)
        if long:
            self.read()

    def clear(self) -> None:
        """Delete the files, whatever is in them."""
        for path in (self.path, Path(f"{self.path}-journal"), self._index_path, *self._left_behind()):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise MemoryFileError(f"cannot delete {path}: {error.strerror or error}") from error

    def _left_behind(self) -> list[Path]:
        """Halves of an index, with texts in them, of processes that died; one that is being written is made again."""
        return list(self.path.parent.glob(f"{_prefix(self._index_path)}*.tmp"))

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """A transaction; None where there is no memory, as where its first writer died."""
        with self._refusing("read"):
            if not self.path.exists():
                yield None
                return
            with self._connected() as db:
                _patiently(db, "BEGIN")
                if made := _made(db):
                    self._check(db)
                yield db if made else None
                _patiently(db, "COMMIT")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, of no effect if the block raises; the memory is made where there is none."""
        with self._refusing("write"):
            # The user's own texts are nobody else's business.
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.touch(mode=0o600)
            with self._connected() as db:
                # What is removed shall not stay in the file, and readers shall not wait before all is ready to be
                # written.
                db.execute("PRAGMA secure_delete = ON")
                db.execute("PRAGMA cache_spill = OFF")
                if not _made(db):
                    _patiently(db, "PRAGMA auto_vacuum = FULL")
                _patiently(db, "BEGIN IMMEDIATE")
                if not _made(db):
                    for table in _TABLES:
                        db.execute(table)
                    row = VERSION, self.vocabulary, self.model, uuid4().hex
                    db.execute("INSERT INTO memory VALUES (?, ?, ?, ?, 0)", row)
                self._check(db)
                yield db
                _patiently(db, "COMMIT")

    def _connected(self) -> AbstractContextManager[sqlite3.Connection]:
        # Not read-only: what a writer that died left half done is undone first. Not `as_uri`: it names the host of a
        # shared folder on Windows; SQLite takes none.
        uri = f"file:{quote(os.fsencode(self.path.absolute()))}?mode=rw"
        return closing(sqlite3.connect(uri, uri=True, timeout=TURN, isolation_level=None))

    @contextmanager
    def _refusing(self, what: Literal["read", "write"]) -> Iterator[None]:
        """Raise errors of the block as MemoryFileError."""
        path = self.path
        kept = "; the memory is unchanged" if what == "write" else ""
        try:
            yield
        except OSError as error:
            raise MemoryFileError(f"cannot {what} {path}: {error.strerror or error}{kept}") from error
        except (sqlite3.Error, zlib.error, UnicodeError) as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code == sqlite3.SQLITE_BUSY:
                raise MemoryFileError(
                    f"another process has been writing to this memory for {PATIENCE:.0f} seconds ({path}); try again"
                ) from None
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
                raise MemoryFileError(
                    f"{path} is damaged; delete it (ngramspec memory clear) and add your files again"
                ) from error
            raise MemoryFileError(f"cannot {what} {path}: {error}{kept}") from error

    def _check(self, db: sqlite3.Connection) -> None:
        version, vocabulary = db.execute("SELECT version, vocabulary FROM memory").fetchone() or (VERSION, b"")
        if version > VERSION:
            raise MemoryFileError(
                f"{self.path} has format {version}, but this version of ngramspec reads {VERSION}; update ngramspec"
            )
        if vocabulary != self.vocabulary:
            raise MemoryFileError(f"{self.path} was created with another tokenizer")


def _made(db: sqlite3.Connection) -> bool:
    """Whether it has tables."""
    return _patiently(db, "SELECT name FROM sqlite_master").fetchone() is not None


def _patiently(db: sqlite3.Connection, statement: str) -> sqlite3.Cursor:
    """Execute what may have to wait for other processes, in turns: while SQLite waits, Ctrl-C does not come through."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return db.execute(statement)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise


def _documents(db: sqlite3.Connection, after: int = 0) -> list[Document]:
    rows = db.execute("SELECT kind, name, size, mtime, tokens, id FROM documents WHERE id > ? ORDER BY id", (after,))
    return [
        Document(kind, os.fsdecode(name), np.frombuffer(zlib.decompress(tokens), np.int32), size, mtime, id)
        for kind, name, size, mtime, tokens, id in rows
    ]


def _insert(db: sqlite3.Connection, documents: Iterable[Document]) -> None:
    # Compressed for the checksum, too, which tells where tokens are damaged.
    rows = ((d.kind, os.fsencode(d.name), d.size, d.mtime, zlib.compress(d.tokens.tobytes(), 1)) for d in documents)
    db.executemany("INSERT INTO documents (kind, name, size, mtime, tokens) VALUES (?, ?, ?, ?, ?)", rows)


def _change(db: sqlite3.Connection, change: Callable[[list[Document]], Sequence[Document]]) -> None:
    before = _documents(db)
    after = change(before)
    if (size := total(after) + len(after)) > MAX_TOKENS:
        raise MemoryFileError(f"{size:,} tokens exceed the maximum size of a memory ({MAX_TOKENS:,})")
    gone = {one.id for one in before} - {one.id for one in after}
    db.executemany("DELETE FROM documents WHERE id = ?", [(id,) for id in gone])
    _insert(db, [one for one in after if not one.id])
    db.execute(
        "UPDATE memory SET generation = ?, indexed = (SELECT coalesce(max(id), 0) FROM documents)", (uuid4().hex,)
    )


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


# --------------------------------------------------------------------------- the index file
# A block with a header in JSON, then three arrays of int32: the text (each document's tokens, then one seam: no context
# runs into the next), the links, the heads. They are used where they lie. The checksum is the BLAKE2b of the sums of
# the 64-bit words of each 4096 bytes: numpy makes it as fast as RAM is read.

_BLOCK = 4096


def _write_index(path: Path, generation: str, documents: Sequence[Document]) -> TokenIndex:
    """Index documents, and keep that for other processes if the file can be written."""
    seam = np.full(1, SEAM, np.int32)
    tokens = np.concatenate([np.zeros(0, np.int32), *(part for one in documents for part in (one.tokens, seam))])
    index = TokenIndex.build(tokens.data, _chains_for(len(tokens)))
    numbers = np.concatenate([tokens, np.asarray(index.links), np.asarray(index.heads)])
    header = {"generation": generation, "size": len(tokens), "checksum": _checksum(generation, len(tokens), numbers)}
    # Windows replaces no file that another process has mapped.
    with suppress(OSError), replacing(path, _prefix(path)) as file:
        file.write(json.dumps(header).encode().ljust(_BLOCK))
        file.write(numbers.data)
    return index


def _prefix(path: Path) -> str:
    """How the names of this index begin that are not whole yet."""
    return f".ngramspec-{path.stem}-"


def _load_index(path: Path, generation: str) -> TokenIndex | None:
    """The index in a file; None if it is not this generation's whole one."""
    with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header, numbers = json.loads(mapped[:_BLOCK]), np.frombuffer(mapped, np.int32, offset=_BLOCK)
        size = header["size"]
        if header["generation"] == generation and header["checksum"] == _checksum(generation, size, numbers):
            tokens, links, heads = np.split(numbers, [size, 2 * size])
            return TokenIndex.over(tokens.data, links.data, heads.data, size)
    return None


def _chains_for(size: int) -> int:
    """The most chains with which `size` tokens take at most 12 bytes each in the file, and at least a block of them."""
    return max(_BLOCK // 4, 1 << size.bit_length() >> 1)


def _checksum(generation: str, size: int, numbers: Ints) -> str:
    sums = np.add.reduceat(numbers.view(np.uint64), np.arange(0, len(numbers) // 2, _BLOCK // 8))
    meant = f"{VERSION} {ORDER} {sys.byteorder} {generation} {size}".encode()
    return hashlib.blake2b(meant + sums.tobytes(), digest_size=16).hexdigest()
