"""Files of a memory: the search for text files, without ignored ones and probable secrets, and their tokens."""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np
from pathspec import GitIgnoreSpec

from ngramspec.backend import Progress
from ngramspec.memory.store import Document, MemoryFileError, Store, total
from ngramspec.storage import is_utf16, utf8
from ngramspec.tokens import Tokenizer

MAX_BYTES = 8 << 20  # maximum size of a file; larger ones are skipped, because they are data, logs or dumps
PIECE = 1 << 16  # characters tokenized at once: time or stack of some tokenizers grows more than linearly

BINARY, NOT_UTF8, UNREADABLE, SPECIAL = "binary", "not UTF-8 text, convert to UTF-8", "unreadable", "not a regular file"
HUGE = f"larger than {MAX_BYTES >> 20} MiB"
IN_GITIGNORE, LINK, SECRET = "in .gitignore", "symbolic link", "looks like a secret"

# Patterns, as in .gitignore, of files and folders whose names suggest passwords and keys.
_SECRET_NAMES = """
.env .env.* !.env.example !.env.sample !.env.template .envrc .netrc _netrc .npmrc .pypirc .pgpass .my.cnf .htpasswd
.git-credentials .dockercfg .docker/config.json .kube/config .aws/ .azure/ .gnupg/ .ssh/ .password-store/
*.pem *.key *.p8 *.p12 *.pfx *.ppk *.jks *.keystore *.kdbx *.gpg *.age id_rsa* id_dsa* id_ecdsa* id_ed25519* !id_*.pub
credentials.json secrets.json secrets.toml secrets.yaml secrets.yml *.tfstate *.tfvars service-account*.json
client_secret*.json
"""
_SECRETS = GitIgnoreSpec.from_lines(_SECRET_NAMES.split())

Times = tuple[int, int]  # size of a file in bytes, and its time of modification in nanoseconds
_Rules = tuple[tuple[Path, GitIgnoreSpec], ...]  # of .gitignore files, outermost first, each with its folder


def find_files(path: Path) -> tuple[dict[Path, Times], dict[Path, str]]:
    """Return the files below `path` that may contain text, and the skipped files and folders with the reason.

    `path` itself is included even if it is ignored or may be secret. Links and the folders of version control are not
    followed, and empty files are left out without a reason.
    """
    files: dict[Path, Times] = {}
    reasons: dict[Path, str] = {}

    def add(file: Path, stat: os.stat_result) -> None:
        if not os.path.isfile(file):
            reasons[file] = SPECIAL
        elif stat.st_size > MAX_BYTES:
            reasons[file] = HUGE
        elif stat.st_size:
            files[file] = stat.st_size, stat.st_mtime_ns

    if not path.is_dir():
        add(path, path.stat())
        return files, reasons
    os.scandir(path).close()
    # An explicit stack is used, because trees may be deeper than Python's stack.
    stack = [(path, _rules_above(path))]
    while stack:
        folder, rules = stack.pop()
        rules = (*rules, *_read_rules(folder, folder / ".gitignore"))
        try:
            with os.scandir(folder) as entries:
                sorted_entries = sorted(entries, key=lambda e: e.name)
        except OSError:
            reasons[folder] = UNREADABLE
            continue
        inner = []
        for entry in sorted_entries:
            child = folder / entry.name
            try:
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder and entry.name in {".git", ".hg", ".svn"}:
                    continue
                if reason := LINK if entry.is_symlink() else _reason(child, rules, folder=is_folder):
                    reasons[child] = reason
                elif is_folder:
                    inner.append((child, rules))
                else:
                    add(child, entry.stat(follow_symlinks=False))
            except OSError:
                reasons[child] = UNREADABLE
        stack += reversed(inner)
    return files, reasons


def read_text(path: Path) -> str | None:
    """Return the text of a file; `None` if it is binary (contains a zero byte). It may raise a UnicodeError."""
    raw = path.read_bytes()
    return None if b"\0" in raw and not is_utf16(raw) else utf8(raw)


def _rules_above(folder: Path) -> _Rules:
    """Return the rules of the folders above `folder`, up to the root of its repository, if it is in one."""
    around = [folder, *folder.parents]
    root = next((i for i, f in enumerate(around) if (f / ".git").exists()), 0)
    exclude = around[root] / ".git" / "info" / "exclude"
    rules: list[tuple[Path, GitIgnoreSpec]] = [*_read_rules(around[root], exclude)]
    for outer in reversed(around[1 : root + 1]):
        rules += _read_rules(outer, outer / ".gitignore")
    return tuple(rules)


def _read_rules(folder: Path, file: Path) -> _Rules:
    """Return the rules in a file, without lines that are not valid patterns, which git skips too."""
    try:
        lines = file.read_bytes().decode("utf-8-sig", "surrogateescape").splitlines() if file.is_file() else []
    except OSError:
        return ()
    patterns: list[str] = []
    for line in lines:
        with suppress(ValueError, re.error):
            if line.strip() and not line.startswith("#") and len(GitIgnoreSpec.from_lines([line])) == 1:
                patterns.append(line)
    return ((folder, GitIgnoreSpec.from_lines(patterns)),) if patterns else ()


def _reason(path: Path, rules: _Rules, *, folder: bool) -> str | None:
    """Return the reason to skip `path`, by the innermost rule that matches and by its name; `None` to include it."""
    for base, spec in reversed(rules):
        is_ignored = spec.check_file(path.relative_to(base).as_posix() + "/" * folder).include
        if is_ignored:
            return IN_GITIGNORE
        if is_ignored is not None:
            break
    return SECRET if _SECRETS.match_file("/".join(path.parts[-2:]) + "/" * folder) else None


class AddResult(NamedTuple):
    new: int  # number of files, like the next three
    changed: int
    unchanged: int
    removed: int
    tokens: int  # number of tokens in the new and the changed files
    skipped: Mapping[str, int]  # number of skipped files by reason


def add_files(
    store: Store, tokenizer: Tokenizer, paths: Sequence[Path], *, threads: int = 1, progress: Progress | None = None
) -> AddResult:
    """Add files and folders to a memory; `progress` is called with the bytes done and the bytes in all.

    Files with the same size and time of modification are not read again. Files that are no longer in the folder, or no
    longer text, are dropped. Nothing is written until everything has been read.
    """
    stored_times = {Path(d.name): (d.size, d.mtime) for d in store.documents() if d.kind == "file"}
    roots = [path.resolve() for path in paths]
    times: dict[Path, Times] = {}
    reasons: dict[Path, str] = {}
    for root in roots:
        try:
            root_times, root_reasons = find_files(root)
        except FileNotFoundError:
            raise MemoryFileError(f"{root}: no such file or folder") from None
        except OSError as error:
            raise MemoryFileError(f"cannot read {root}: {error.strerror or error}") from error
        times |= root_times
        reasons |= root_reasons
    # One root may be a file that is skipped in another root.
    reasons = {path: reason for path, reason in reasons.items() if path not in times}
    fresh = {path: file_times for path, file_times in times.items() if stored_times.get(path) != file_times}
    documents: dict[Path, Document] = {}
    for path, result in _tokenize_files(fresh, tokenizer, threads, progress):
        if isinstance(result, str):
            reasons[path] = result
        else:
            documents[path] = result
    for root in roots:
        if not any(path.is_relative_to(root) for path in times.keys() - reasons.keys()):
            skipped = Counter(reason for path, reason in reasons.items() if path.is_relative_to(root))
            raise MemoryFileError(f"{root}: no text files to add{list_skipped(skipped)}")
    removals = {path for path in stored_times if _is_gone(path, times, reasons, roots)}
    if documents or removals:
        # The newest files come last, because chains begin there.
        store.update(lambda before: [*_without(before, {*documents, *removals}), *documents.values()])
    n_changed = sum(path in stored_times for path in documents)
    counts = (len(documents) - n_changed, n_changed, len(times) - len(fresh), len(removals))
    return AddResult(*counts, total(documents.values()), Counter(reasons.values()))


def remove_files(store: Store, path: Path) -> int:
    """Drop the file `path`, or all files below it, from a memory, even if they no longer exist; return their number."""
    roots = Path(os.path.abspath(path)), path.resolve()
    stored_paths = [Path(d.name) for d in store.documents() if d.kind == "file"]
    removals = {stored for stored in stored_paths if any(map(stored.is_relative_to, roots))}
    if removals:
        store.update(lambda before: _without(before, removals))
    return len(removals)


def _without(documents: Sequence[Document], files: set[Path]) -> list[Document]:
    return [document for document in documents if document.kind != "file" or Path(document.name) not in files]


def _is_gone(path: Path, times: Mapping[Path, Times], reasons: Mapping[Path, str], roots: Sequence[Path]) -> bool:
    """Return True if a stored file below the roots is no longer text, is not allowed in a memory, or does not exist."""
    # A stored file that .gitignore names was added by its own name, so it stays.
    if path in reasons:
        return reasons[path] not in (UNREADABLE, IN_GITIGNORE)
    if path in times or not any(map(path.is_relative_to, roots)):
        return False
    return not any(reasons.get(folder) == UNREADABLE for folder in path.parents) and not os.path.isfile(path)


def list_skipped(counts: Mapping[str, int]) -> str:
    """Return the skipped files by reason, for a message in brackets; "" without any."""
    return f" (skipped: {', '.join(f'{n} {why}' for why, n in sorted(counts.items()))})" if counts else ""


def _tokenize_files(
    files: Mapping[Path, Times], tokenizer: Tokenizer, threads: int, progress: Progress | None
) -> Iterator[tuple[Path, Document | str]]:
    """Yield each file with its document, or with the reason why it was skipped."""
    stop = Event()
    n_bytes, done = sum(size for size, _ in files.values()), 0
    pool = ThreadPoolExecutor(threads)
    try:
        results = pool.map(lambda path: _tokenize(path, files[path], tokenizer, stop), files)
        for path, result in zip(files, results, strict=True):
            yield path, result
            done += files[path][0]
            if progress is not None:
                progress(done, n_bytes)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _tokenize(path: Path, times: Times, tokenizer: Tokenizer, stop: Event) -> Document | str:
    try:
        text = read_text(path)
    except OSError:
        return UNREADABLE
    except UnicodeError:
        return NOT_UTF8
    if text is None:
        return BINARY
    tokens, start = array("i"), 0
    while start < len(text) and not stop.is_set():
        end = start + PIECE
        line_end = text.rfind("\n", start, end) + 1 if end < len(text) else 0
        end = line_end if line_end > start else end
        tokens.extend(tokenizer.tokenize(text[start:end], add_bos=False))
        start = end
    return Document("file", str(path), np.array(tokens, np.int32), *times)
