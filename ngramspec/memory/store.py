"""`Store`: the stored documents of a memory for one tokenizer, shared by any number of processes.

    FOLDER/HASH.memory    the documents: an SQLite database, which locks, and is changed entirely or not at all
    FOLDER/HASH.index     the tokens of all documents with their `TokenIndex`, to be mapped

The index is built from the documents. It is rebuilt if it is missing, damaged, or belongs to another generation than
the database. It does not contain answers that were remembered later: each reader indexes them, until they are many.
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

from ngramspec.data import NGramSpecError
from ngramspec.drafting.token_index import ORDER, SEAM, TokenIndex
from ngramspec.storage import atomic_write

VERSION = 1
MAX_TOKENS = 2**31 - 1

PATIENCE = 60.0  # seconds to wait for another process that writes; writing the largest memory takes a few
TURN = 0.2  # seconds of one wait, after which Ctrl-C has an effect
LONG_JOURNAL = 1 << 17  # tokens above which answers move to the index file; indexing them takes a few milliseconds
MAX_ANSWER_TOKENS = 1 << 24  # about 200 MB with their index; the oldest answers are dropped

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
    """A file that was added to a memory, or an answer that was remembered."""

    kind: Literal["file", "answer"]
    name: str  # the file's absolute path, or the answer's date and time
    tokens: Ints
    size: int = 0  # the file's size in bytes when it was read
    mtime: int = 0  # the file's time of modification in nanoseconds
    id: int = 0  # id in the store, in the order of adding; 0 means not stored yet


def total(documents: Iterable[Document]) -> int:
    return sum(len(document.tokens) for document in documents)


@dataclass(frozen=True, slots=True)
class Contents:
    generation: str = ""  # changes with the contents of `index`; "" means that there is no file yet
    model: str = ""  # model with whose tokenizer the tokens were made
    index: TokenIndex | None = None  # of all documents except `answers`; mapped, and private to the process
    answers: Sequence[Document] = ()  # answers that were remembered after the index was built


NOTHING = Contents()


class Store:
    """The memory of one tokenizer in a folder, which the first write creates.

    Its methods raise MemoryFileError with the name of the file if it cannot be used or written; it is then unchanged.
    `vocabulary` is the tokenizer's `vocabulary_hash`, 16 bytes; `model` is needed only to create the file.
    """

    def __init__(self, folder: Path, vocabulary: bytes, model: str = "") -> None:
        self.vocabulary, self.model = vocabulary, model
        self.path = folder / f"{vocabulary.hex()}.memory"
        self._index_path = self.path.with_suffix(".index")

    @classmethod
    def all_in(cls, folder: Path) -> list[Store]:
        """Return the stores of all tokenizers in a folder, in the order of their hashes."""
        names = sorted(path.stem for path in folder.glob("*.memory") if _NAME.fullmatch(path.name))
        return [cls(folder, bytes.fromhex(name)) for name in names]

    def read(self) -> Contents:
        with self._read_transaction() as db:
            if db is None:
                return NOTHING
            model, generation, last_indexed = db.execute("SELECT model, generation, indexed FROM memory").fetchone()
            index = _load_index(self._index_path, generation)
            if index is None:
                documents = [document for document in _documents(db) if document.id <= last_indexed]
                index = _write_index(self._index_path, generation, documents)
            return Contents(generation, model, index, _documents(db, after=last_indexed))

    def documents(self) -> list[Document]:
        """Return all documents; the last added ones come last."""
        with self._read_transaction() as db:
            return [] if db is None else _documents(db)

    def generation(self) -> str:
        with self._read_transaction() as db:
            return "" if db is None else str(db.execute("SELECT generation FROM memory").fetchone()[0])

    def update(self, change: Callable[[list[Document]], Sequence[Document]]) -> None:
        """Replace all documents, entirely or not at all, by the result of `change`: some of them, and new ones."""
        with self._write_transaction() as db:
            _replace_documents(db, change)
        self.read()  # builds the index
        for path in self._find_incomplete_files():
            with suppress(OSError):
                path.unlink()

    def append(self, tokens: Sequence[int]) -> None:
        """Remember an answer."""
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        with self._write_transaction() as db:
            _insert(db, [Document("answer", now, np.array(tokens, np.int32))])
            last_indexed = db.execute("SELECT indexed FROM memory").fetchone()[0]
            long = total(_documents(db, after=last_indexed)) > LONG_JOURNAL
            if long:
                _replace_documents(db, _drop_oldest_answers)
        if long:
            self.read()

    def clear(self) -> None:
        """Delete the files, also damaged ones."""
        for path in (self.path, Path(f"{self.path}-journal"), self._index_path, *self._find_incomplete_files()):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise MemoryFileError(f"cannot delete {path}: {error.strerror or error}") from error

    def _find_incomplete_files(self) -> list[Path]:
        """Return incomplete index files of processes that died, because they contain the user's text."""
        # A file that another process is writing may be among them; it is built again.
        return list(self.path.parent.glob(f"{_prefix(self._index_path)}*.tmp"))

    @contextmanager
    def _read_transaction(self) -> Iterator[sqlite3.Connection | None]:
        """Open a transaction for reading; `None` if there is no memory, for example because its first writer died."""
        with self._convert_errors("read"):
            if not self.path.exists():
                yield None
                return
            with self._connect() as db:
                _execute_with_retries(db, "BEGIN")
                if has_tables := _has_tables(db):
                    self._check(db)
                yield db if has_tables else None
                _execute_with_retries(db, "COMMIT")

    @contextmanager
    def _write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction for writing, which has no effect if the block raises; create the memory if necessary."""
        with self._convert_errors("write"):
            # Other users must not read the user's own texts.
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.touch(mode=0o600)
            with self._connect() as db:
                # Removed documents must not stay in the file, and readers must not wait until all is ready to be
                # written.
                db.execute("PRAGMA secure_delete = ON")
                db.execute("PRAGMA cache_spill = OFF")
                if not _has_tables(db):
                    _execute_with_retries(db, "PRAGMA auto_vacuum = FULL")
                _execute_with_retries(db, "BEGIN IMMEDIATE")
                if not _has_tables(db):
                    for table in _TABLES:
                        db.execute(table)
                    row = VERSION, self.vocabulary, self.model, uuid4().hex
                    db.execute("INSERT INTO memory VALUES (?, ?, ?, ?, 0)", row)
                self._check(db)
                yield db
                _execute_with_retries(db, "COMMIT")

    def _connect(self) -> AbstractContextManager[sqlite3.Connection]:
        # The mode is not read-only, because SQLite first rolls back what a writer that died left incomplete. `as_uri`
        # would name the host of a shared folder on Windows, which SQLite does not accept.
        uri = f"file:{quote(os.fsencode(self.path.absolute()))}?mode=rw"
        return closing(sqlite3.connect(uri, uri=True, timeout=TURN, isolation_level=None))

    @contextmanager
    def _convert_errors(self, what: Literal["read", "write"]) -> Iterator[None]:
        path, suffix = self.path, "; the memory is unchanged" if what == "write" else ""
        try:
            yield
        except OSError as error:
            raise MemoryFileError(f"cannot {what} {path}: {error.strerror or error}{suffix}") from error
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
            raise MemoryFileError(f"cannot {what} {path}: {error}{suffix}") from error

    def _check(self, db: sqlite3.Connection) -> None:
        version, vocabulary = db.execute("SELECT version, vocabulary FROM memory").fetchone() or (VERSION, b"")
        if version > VERSION:
            raise MemoryFileError(
                f"{self.path} has format {version}, but this version of ngramspec reads {VERSION}; update ngramspec"
            )
        if vocabulary != self.vocabulary:
            raise MemoryFileError(f"{self.path} was created with another tokenizer")


def _has_tables(db: sqlite3.Connection) -> bool:
    return _execute_with_retries(db, "SELECT name FROM sqlite_master").fetchone() is not None


def _execute_with_retries(db: sqlite3.Connection, statement: str) -> sqlite3.Cursor:
    """Execute a statement that may wait for other processes, in short waits, because Ctrl-C has no effect in SQLite."""
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
    # Compression also adds a checksum, which detects damaged tokens.
    rows = ((d.kind, os.fsencode(d.name), d.size, d.mtime, zlib.compress(d.tokens.tobytes(), 1)) for d in documents)
    db.executemany("INSERT INTO documents (kind, name, size, mtime, tokens) VALUES (?, ?, ?, ?, ?)", rows)


def _replace_documents(db: sqlite3.Connection, change: Callable[[list[Document]], Sequence[Document]]) -> None:
    before = _documents(db)
    after = change(before)
    if (size := total(after) + len(after)) > MAX_TOKENS:
        raise MemoryFileError(f"{size:,} tokens exceed the maximum size of a memory ({MAX_TOKENS:,})")
    removed_ids = {document.id for document in before} - {document.id for document in after}
    db.executemany("DELETE FROM documents WHERE id = ?", [(id,) for id in removed_ids])
    _insert(db, [document for document in after if not document.id])
    db.execute(
        "UPDATE memory SET generation = ?, indexed = (SELECT coalesce(max(id), 0) FROM documents)", (uuid4().hex,)
    )


def _drop_oldest_answers(documents: Sequence[Document]) -> list[Document]:
    """Return the documents in order, without the oldest answers beyond MAX_ANSWER_TOKENS; files are never dropped."""
    result, room = [], MAX_ANSWER_TOKENS
    for document in reversed(documents):
        if document.kind == "answer":
            room -= len(document.tokens)
            if room < 0:
                continue
        result.append(document)
    return result[::-1]


# The index file contains a block with a header in JSON, then three arrays of int32: the tokens, the links, the heads.
# The tokens of each document are followed by one seam, so that no context extends into the next document. The arrays
# are used in the mapped file. The checksum is the BLAKE2b of the sums of the 64-bit words of each 4096 bytes: numpy
# computes it as fast as RAM is read.
_BLOCK = 4096


def _write_index(path: Path, generation: str, documents: Sequence[Document]) -> TokenIndex:
    """Index documents, and save the index for other processes if the file can be written."""
    seam = np.full(1, SEAM, np.int32)
    tokens = np.concatenate(
        [np.zeros(0, np.int32), *(part for document in documents for part in (document.tokens, seam))]
    )
    index = TokenIndex.build(tokens.data, _chains_for(len(tokens)))
    numbers = np.concatenate([tokens, np.asarray(index.links), np.asarray(index.heads)])
    header = {"generation": generation, "size": len(tokens), "checksum": _checksum(generation, len(tokens), numbers)}
    # Windows does not replace a file that another process has mapped.
    with suppress(OSError), atomic_write(path, _prefix(path)) as file:
        file.write(json.dumps(header).encode().ljust(_BLOCK))
        file.write(numbers.data)
    return index


def _prefix(path: Path) -> str:
    """Return the prefix of the names of incomplete files of this index."""
    return f".ngramspec-{path.stem}-"


def _load_index(path: Path, generation: str) -> TokenIndex | None:
    """Return the index in a file; `None` if it is incomplete or belongs to another generation."""
    with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header, numbers = json.loads(buffer[:_BLOCK]), np.frombuffer(buffer, np.int32, offset=_BLOCK)
        size = header["size"]
        if header["generation"] == generation and header["checksum"] == _checksum(generation, size, numbers):
            tokens, links, heads = np.split(numbers, [size, 2 * size])
            return TokenIndex.from_arrays(tokens.data, links.data, heads.data, size)
    return None


def _chains_for(size: int) -> int:
    """Return the maximum number of chains with at most 12 bytes per token in the file, but at least a block of them."""
    return max(_BLOCK // 4, 1 << size.bit_length() >> 1)


def _checksum(generation: str, size: int, numbers: Ints) -> str:
    sums = np.add.reduceat(numbers.view(np.uint64), np.arange(0, len(numbers) // 2, _BLOCK // 8))
    header = f"{VERSION} {ORDER} {sys.byteorder} {generation} {size}".encode()
    return hashlib.blake2b(header + sums.tobytes(), digest_size=16).hexdigest()
