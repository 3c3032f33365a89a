"""`Store`: the file in which a memory keeps what it knows for one tokenizer, shared by any number of processes.

    FOLDER/HASH-GENERATION.memory     a snapshot and its journal; of several generations the highest counts
    FOLDER/HASH.lock                  held by whoever writes

A snapshot never changes. Rewriting makes the next generation under a temporary name, sees it on the disk, renames
it and only then deletes the one before; so a reader takes no lock, nothing is half there after a crash, and on
Windows, which deletes no mapped file, the old generation stays until a later writer can. What is remembered in
between is appended to the journal of the highest generation.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from ngramspec.memory.documents import (
    Document,
    answer,
    append_record,
    joined,
    read_journal,
    read_table,
    record,
    table_of,
    total,
)
from ngramspec.memory.snapshot import BLOCK, MemoryFileError, Snapshot, check_length, read_header, write_snapshot
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

    def _table(self) -> tuple[str, list[Document]]:
        if self.snapshot is None:
            return "", []
        try:
            return read_table(self.snapshot.documents, self.snapshot.tokens)
        except MemoryFileError as error:
            raise MemoryFileError(f"{self.path} {error}") from None

    @property
    def model(self) -> str:
        """The model whose tokenizer made the tokens; "" if there is no file."""
        return self._table()[0]

    def documents(self) -> list[Document]:
        """All of them, what was remembered last at the end."""
        return [*self._table()[1], *self.answers]


NOTHING = Contents()


class Store:
    """The memory file of one tokenizer in one folder, which is made when something is written.

    Args:
        vocabulary: the tokenizer's `vocabulary_hash`, 16 bytes.
        n_vocab: size of its vocabulary; needed to make the first file only.
        model: name of the model for people; likewise.
    """

    def __init__(self, folder: Path, vocabulary: bytes, n_vocab: int = 0, model: str = "") -> None:
        self.folder = folder
        self.vocabulary = vocabulary
        self.n_vocab = n_vocab
        self.model = model

    @classmethod
    def all_in(cls, folder: Path) -> list[Store]:
        """The stores of all tokenizers in a folder, by hash."""
        names = (_NAME.fullmatch(path.name) for path in _files(folder))
        return [cls(folder, bytes.fromhex(h)) for h in sorted({name[1] for name in names if name})]

    def path(self) -> Path | None:
        """The file that counts, or None."""
        generations = self._generations()
        return generations[max(generations)] if generations else None

    def _generations(self) -> dict[int, Path]:
        names = ((path, _NAME.fullmatch(path.name)) for path in _files(self.folder))
        return {int(name[2]): path for path, name in names if name and name[1] == self.vocabulary.hex()}

    def read(self) -> Contents:
        """What is there now; takes no lock.

        Raises:
            MemoryFileError: the file cannot be used; the message names it.
        """
        tried: Path | None = None
        while True:
            path = self.path()
            if path is None:
                return Contents()
            try:
                with path.open("rb") as file:
                    snapshot = Snapshot(file, self.vocabulary)
                    end, n_vocab = snapshot.header.sections()[-1], snapshot.header.n_vocab
                    answers, _, damaged = read_journal(file, end, n_vocab)
                    return Contents(path, snapshot, answers, damaged, os.fstat(file.fileno()).st_ino)
            except FileNotFoundError as error:
                # Replaced by the next generation since the folder was listed.
                if path == tried:
                    raise _cannot("read", path, error) from error
                tried = path
            except MemoryFileError as error:
                raise MemoryFileError(f"{path} {error}") from None
            except OSError as error:
                raise _cannot("read", path, error) from error

    def is_current(self, contents: Contents) -> bool:
        """Whether the file that was read is still the one that counts; what was remembered since does not matter.

        Raises:
            MemoryFileError: the folder cannot be read.
        """
        path = self.path()
        try:
            return path == contents.path and (path is None or path.stat().st_ino == contents.inode)
        except OSError:
            return False

    def update(self, change: Callable[[list[Document]], Sequence[Document]]) -> None:
        """Replace all documents by what `change` makes of them, whole or not at all.

        Raises:
            MemoryFileError: the old file cannot be used, or the new one not be written; the old one stays.
        """
        with self._lock():
            now = self.read()
            self._write(now, change(now.documents()))

    def append(self, tokens: Sequence[int]) -> None:
        """Remember an answer.

        Raises:
            MemoryFileError: the file cannot be used or written; it is as before.
        """
        with self._lock():
            path = self.path()
            if path is None:
                self._write(Contents(), [answer(np.array(tokens, np.int32), time.time())])
                return
            try:
                with path.open("r+b", buffering=0) as file:
                    # Not the whole snapshot: what it holds is no matter here.
                    header = read_header(file.read(BLOCK), self.vocabulary)
                    end = header.sections()[-1]
                    check_length(file, end)
                    answers, end, _ = read_journal(file, end, header.n_vocab)
                    append_record(file, end, record(tokens, time.time()))
            except MemoryFileError as error:
                raise MemoryFileError(f"{path} {error}") from None
            except OSError as error:
                raise _cannot("write", path, error) from error
            if total(answers) + len(tokens) > LONG_JOURNAL:
                # The answer is safe; a snapshot that cannot be written now will be later.
                with suppress(MemoryFileError):
                    now = self.read()
                    self._write(now, _newest(now.documents()))

    def _write(self, now: Contents, documents: Sequence[Document]) -> None:
        """The next generation; the lock is held."""
        before = self._generations()
        generation = max(before, default=0) + 1
        path = self.folder / f"{self.vocabulary.hex()}-{generation:06d}.memory"
        n_vocab = now.snapshot.header.n_vocab if now.snapshot else self.n_vocab
        try:
            # Left by a writer that died.
            for left in self.folder.glob(f"{self.vocabulary.hex()}-*.tmp"):
                left.unlink()
            with replacing(path, prefix=f"{self.vocabulary.hex()}-") as file:
                table = table_of(now.model or self.model, documents)
                write_snapshot(file, self.vocabulary, n_vocab, joined(documents), table)
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self.folder)
        except OSError as error:
            raise _cannot("write", path, error) from error
        for old in before.values():
            # Windows keeps a file that another process has mapped.
            with suppress(OSError):
                old.unlink()

    def clear(self) -> None:
        """Delete the file, whatever is in it.

        Raises:
            MemoryFileError: it cannot be deleted.
        """
        with self._lock():
            for path in self._generations().values():
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise _cannot("delete", path, error) from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        name = self.folder / f"{self.vocabulary.hex()}.lock"
        lock = FileLock(name, timeout=PATIENCE)
        try:
            # The user's own texts are nobody else's business.
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock.acquire()
        except Timeout:
            raise MemoryFileError(
                f"another ngramspec has been writing to this memory for {PATIENCE:.0f} seconds ({name}); try again"
            ) from None
        except OSError as error:
            raise _cannot("write", name, error) from error
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


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _cannot("read", folder, error) from error


def _cannot(what: str, path: Path, error: OSError) -> MemoryFileError:
    kept = "; the memory is as it was" if what == "write" else ""
    return MemoryFileError(f"cannot {what} {path}: {error.strerror or error}{kept}")


def _sync_folder(folder: Path) -> None:
    """See a rename on the disk, where the system can."""
    with suppress(OSError, AttributeError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
