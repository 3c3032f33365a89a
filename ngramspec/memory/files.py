"""Search for text files that the user wrote, without ignored files (.gitignore) and probable secrets.

This module knows nothing about tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from ngramspec.storage import is_utf16, utf8

MAX_BYTES = 8 << 20
"""Maximum size of a file; larger ones are skipped, because they are data, logs or dumps."""

BINARY, NOT_UTF8, UNREADABLE, SPECIAL = "binary", "not UTF-8 text, convert to UTF-8", "unreadable", "not a regular file"
HUGE = f"larger than {MAX_BYTES >> 20} MiB"
IN_GITIGNORE, LINK, SECRET = "in .gitignore", "symbolic link", "looks like a secret"

VERSION_CONTROL = frozenset({".git", ".hg", ".svn"})

_SECRET_NAMES = """
.env .env.* !.env.example !.env.sample !.env.template .envrc .netrc _netrc .npmrc .pypirc .pgpass .my.cnf .htpasswd
.git-credentials .dockercfg .docker/config.json .kube/config .aws/ .azure/ .gnupg/ .ssh/ .password-store/
*.pem *.key *.p8 *.p12 *.pfx *.ppk *.jks *.keystore *.kdbx *.gpg *.age id_rsa* id_dsa* id_ecdsa* id_ed25519* !id_*.pub
credentials.json secrets.json secrets.toml secrets.yaml secrets.yml *.tfstate *.tfvars service-account*.json
client_secret*.json
"""
"""Patterns, as in .gitignore, of files and folders whose names suggest passwords and keys."""

_SECRETS = GitIgnoreSpec.from_lines(_SECRET_NAMES.split())


Times = tuple[int, int]
"""Size of a file in bytes, and its time of modification in nanoseconds."""


_Rules = tuple[tuple[Path, GitIgnoreSpec], ...]
"""Rules of the .gitignore files that apply, outermost first, each with its folder."""


def find_files(path: Path) -> tuple[dict[Path, Times], dict[Path, str]]:
    """Find the files below `path`, or `path` itself, which is included even if it is ignored or may be secret.

    Links and the folders of version control are not followed. As in git, an ignored folder is ignored with all of its
    contents. Empty files are left out without a reason.

    Returns:
        Files that may contain text, in the order of their names, and skipped files with the reason. A folder that is
        skipped entirely counts as one file.

    Raises:
        OSError: `path` does not exist or cannot be read.
    """
    files: dict[Path, Times] = {}
    reasons: dict[Path, str] = {}
    if path.is_dir():
        os.scandir(path).close()
        _walk(path, _rules_above(path), files, reasons)
    else:
        _add_file(path, path.stat(), files, reasons)
    return files, reasons


def read_text(path: Path) -> str | None:
    """Return the text of a file; `None` if it is binary (contains a zero byte).

    Raises:
        OSError: The file cannot be read.
        UnicodeError: The file is not UTF-8.
    """
    raw = path.read_bytes()
    return None if b"\0" in raw and not is_utf16(raw) else utf8(raw)


def _walk(folder: Path, rules: _Rules, files: dict[Path, Times], reasons: dict[Path, str]) -> None:
    # An explicit stack is used, because trees may be deeper than Python's stack.
    stack = [(folder, rules)]
    while stack:
        folder, rules = stack.pop()
        rules = (*rules, *_rules_in(folder))
        try:
            with os.scandir(folder) as entries:
                sorted_entries = sorted(entries, key=lambda e: e.name)
        except OSError:
            reasons[folder] = UNREADABLE
            continue
        inner = []
        for entry in sorted_entries:
            path = Path(entry.path)
            try:
                folder_too = entry.is_dir(follow_symlinks=False)
                if folder_too and path.name in VERSION_CONTROL:
                    continue
                reason = LINK if entry.is_symlink() else _reason(path, rules, folder=folder_too)
                if reason:
                    reasons[path] = reason
                elif folder_too:
                    inner.append((path, rules))
                else:
                    _add_file(path, entry.stat(follow_symlinks=False), files, reasons)
            except OSError:
                reasons[path] = UNREADABLE
        stack += reversed(inner)


def _add_file(path: Path, stat: os.stat_result, files: dict[Path, Times], reasons: dict[Path, str]) -> None:
    if not os.path.isfile(path):
        reasons[path] = SPECIAL
    elif stat.st_size > MAX_BYTES:
        reasons[path] = HUGE
    elif stat.st_size:
        files[path] = stat.st_size, stat.st_mtime_ns


def _rules_above(folder: Path) -> _Rules:
    """Return the rules of the folders above `folder`, up to the root of its repository, if it is in one."""
    around = [folder, *folder.parents]
    root = next((i for i, f in enumerate(around) if (f / ".git").exists()), 0)
    exclude = around[root] / ".git" / "info" / "exclude"
    rules: list[tuple[Path, GitIgnoreSpec]] = [*_read_rules(around[root], exclude)]
    for outer in reversed(around[1 : root + 1]):
        rules += _rules_in(outer)
    return tuple(rules)


def _rules_in(folder: Path) -> _Rules:
    return _read_rules(folder, folder / ".gitignore")


def _read_rules(folder: Path, file: Path) -> _Rules:
    try:
        lines = file.read_bytes().decode("utf-8-sig", "surrogateescape").splitlines() if file.is_file() else []
    except OSError:
        return ()
    lines = [line for line in lines if _is_pattern(line)]
    return ((folder, GitIgnoreSpec.from_lines(lines)),) if lines else ()


def _is_pattern(line: str) -> bool:
    """Return True if a line is a valid pattern; like git, the callers skip other lines."""
    try:
        return bool(line.strip()) and not line.startswith("#") and len(GitIgnoreSpec.from_lines([line])) == 1
    except (ValueError, re.error):
        return False


def _reason(path: Path, rules: Sequence[tuple[Path, GitIgnoreSpec]], *, folder: bool) -> str | None:
    """Return the reason to skip `path`, by the innermost rule that matches and by its name; `None` to include it."""
    for base, spec in reversed(rules):
        is_ignored = spec.check_file(path.relative_to(base).as_posix() + "/" * folder).include
        if is_ignored:
            return IN_GITIGNORE
        if is_ignored is not None:
            break
    return SECRET if _SECRETS.match_file("/".join(path.parts[-2:]) + "/" * folder) else None
