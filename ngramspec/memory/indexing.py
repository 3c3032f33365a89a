"""Adding files to a memory: new files are tokenized and stored in a single update."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np

from ngramspec.backend import Progress
from ngramspec.memory.files import (
    BINARY,
    IN_GITIGNORE,
    NOT_UTF8,
    UNREADABLE,
    Times,
    find_files,
    read_text,
)
from ngramspec.memory.store import Document, MemoryFileError, Store, total
from ngramspec.tokens import Tokenizer

PIECE = 1 << 16
"""Maximum number of characters tokenized at once, because time or stack of some tokenizers grows more than linearly."""


@dataclass(frozen=True, slots=True)
class AddResult:
    """Result of adding files."""

    # These are the numbers of files by their change relative to the memory.
    new: int
    changed: int
    unchanged: int
    removed: int
    tokens: int  # number of tokens in the new and the changed files
    skipped: Mapping[str, int]  # number of skipped files by reason


def add_files(
    store: Store,
    tokenizer: Tokenizer,
    paths: Sequence[Path],
    *,
    threads: int = 1,
    progress: Progress | None = None,
) -> AddResult:
    """Add files and folders to a memory.

    A file whose size and time of modification have not changed is not read again, and a changed file is replaced. A
    file of the memory that is no longer in the folder, or no longer text, is dropped. Nothing is written until
    everything has been read, so the memory is unchanged if anything fails before. `progress` is called with the bytes
    done and the bytes in all.

    Raises:
        MemoryFileError: A path does not exist or contains no text, or the store cannot be used or written.
    """
    stored_times = {d.name: (d.size, d.mtime) for d in store.documents() if d.kind == "file"}
    roots = [path.resolve() for path in paths]
    all_times: dict[str, Times] = {}
    left_out: dict[str, str] = {}
    for root in roots:
        try:
            files, passed_over = find_files(root)
        except FileNotFoundError:
            raise MemoryFileError(f"{root}: no such file or folder") from None
        except OSError as error:
            raise MemoryFileError(f"cannot read {root}: {error.strerror or error}") from error
        all_times.update((str(path), times) for path, times in files.items())
        left_out.update((str(path), why) for path, why in passed_over.items())
    # One root may be a file that is skipped in another root.
    reasons_by_name = {name: why for name, why in left_out.items() if name not in all_times}
    fresh = {name: times for name, times in all_times.items() if stored_times.get(name) != times}
    texts: dict[str, Document] = {}
    for name, text in _tokenize_files(fresh, tokenizer, threads, progress):
        if isinstance(text, str):
            reasons_by_name[name] = text
        else:
            texts[name] = text
    for root in roots:
        if not any(_below(name, root) for name in all_times.keys() - reasons_by_name.keys()):
            reasons = Counter(why for name, why in reasons_by_name.items() if _below(name, root))
            raise MemoryFileError(f"{root}: no text files to add{list_skipped(reasons)}")
    removals = {name for name in stored_times if _is_gone(name, all_times, reasons_by_name, roots)}
    if texts or removals:
        # The newest files come last, because chains begin there.
        store.update(lambda before: [*_without(before, {*texts, *removals}), *texts.values()])
    n_changed = sum(name in stored_times for name in texts)
    return AddResult(
        new=len(texts) - n_changed,
        changed=n_changed,
        unchanged=len(all_times) - len(fresh),
        removed=len(removals),
        tokens=total(texts.values()),
        skipped=Counter(reasons_by_name.values()),
    )


def remove_files(store: Store, path: Path) -> int:
    """Drop the file `path`, or all files below it, from a memory, even if they no longer exist; return their number.

    Raises:
        MemoryFileError: The store cannot be used or written.
    """
    root = Path(os.path.abspath(path))
    names = {d.name for d in store.documents() if d.kind == "file"}
    removals = {name for name in names if _below(name, root) or _below(name, path.resolve())}
    if removals:
        store.update(lambda before: _without(before, removals))
    return len(removals)


def _below(name: str, root: Path) -> bool:
    return Path(name).is_relative_to(root)


def _without(documents: Sequence[Document], files: set[str]) -> list[Document]:
    return [document for document in documents if document.kind != "file" or document.name not in files]


def _is_gone(name: str, times: Mapping[str, Times], reasons: Mapping[str, str], roots: Sequence[Path]) -> bool:
    """Return True if a stored file below the roots is no longer text, is not allowed in a memory, or does not exist.

    A stored file that .gitignore names was added by its own name, so it stays.
    """
    if name in reasons:
        return reasons[name] not in (UNREADABLE, IN_GITIGNORE)
    if name in times or not any(_below(name, root) for root in roots):
        return False
    unreadable = any(reasons.get(str(folder)) == UNREADABLE for folder in Path(name).parents)
    return not unreadable and not os.path.isfile(name)


def list_skipped(counts: Mapping[str, int]) -> str:
    """Return the skipped files by reason, for a message in brackets; "" without any."""
    return f" (skipped: {', '.join(f'{n} {why}' for why, n in sorted(counts.items()))})" if counts else ""


def _tokenize_files(
    files: Mapping[str, Times], tokenizer: Tokenizer, threads: int, progress: Progress | None
) -> Iterator[tuple[str, Document | str]]:
    """Yield the name of each file with its document, or with the reason why it was skipped."""
    stop = Event()
    total, done = sum(size for size, _ in files.values()), 0
    pool = ThreadPoolExecutor(threads)
    try:
        futures = {name: pool.submit(_tokenize, name, times, tokenizer, stop) for name, times in files.items()}
        for name, future in futures.items():
            yield name, future.result()
            done += files[name][0]
            if progress is not None:
                progress(done, total)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _tokenize(name: str, times: Times, tokenizer: Tokenizer, stop: Event) -> Document | str:
    try:
        text = read_text(Path(name))
    except OSError:
        return UNREADABLE
    except UnicodeError:
        return NOT_UTF8
    if text is None:
        return BINARY
    tokens = array("i")
    for piece in _pieces(text):
        if stop.is_set():
            break
        tokens.extend(tokenizer.tokenize(piece, add_bos=False))
    return Document("file", name, np.frombuffer(tokens, np.int32) if tokens else np.zeros(0, np.int32), *times)


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces of at most PIECE characters, which end at the end of a line if possible."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            line = text.rfind("\n", start, end) + 1
            end = line if line > start else end
        yield text[start:end]
        start = end
