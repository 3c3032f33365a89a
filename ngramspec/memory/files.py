"""Which files of a folder hold text that the user wrote: all but what .gitignore names, and what is probably secret.

Knows nothing about tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from ngramspec.storage import utf8

MAX_BYTES = 8 << 20
"""Files larger than this are skipped: they are data, logs, dumps."""

BINARY, NOT_UTF8, UNREADABLE, SPECIAL = "binary", "not UTF-8", "unreadable", "not a regular file"
HUGE = f"larger than {MAX_BYTES >> 20} MiB"
IGNORED, LINK, SECRET = "in .gitignore", "symbolic link", "looks like a secret"

VERSION_CONTROL = frozenset({".git", ".hg", ".svn"})

_SECRET_NAMES = """
.env .env.* !.env.example !.env.sample !.env.template .envrc .netrc _netrc .npmrc .pypirc .pgpass .my.cnf .htpasswd
.git-credentials .dockercfg .docker/config.json .kube/config .aws/ .azure/ .gnupg/ .ssh/ .password-store/
*.pem *.key *.p8 *.p12 *.pfx *.ppk *.jks *.keystore *.kdbx *.gpg *.age id_rsa* id_dsa* id_ecdsa* id_ed25519* !id_*.pub
credentials.json secrets.json secrets.toml secrets.yaml secrets.yml *.tfstate *.tfvars service-account*.json
client_secret*.json
"""
"""Files and folders that hold passwords and keys, going by their names, as a .gitignore would name them."""

_SECRETS = GitIgnoreSpec.from_lines(_SECRET_NAMES.split())


Times = tuple[int, int]
"""Of a file: bytes, and time of modification in nanoseconds."""


_Rules = tuple[tuple[Path, GitIgnoreSpec], ...]
"""The .gitignore files that apply, outermost first, each with the folder it stands in."""


def find_files(path: Path) -> tuple[dict[Path, Times], dict[Path, str]]:
    """The files below `path`, or `path` itself, which neither .gitignore nor its name can forbid.

    Neither links nor the folders of version control are followed. An ignored folder is ignored with all that is
    in it, as git does it; empty files count as none.

    Returns:
        The files that may hold text, in the order of their names, and those that were left out, with the reason; a
        folder of which nothing is taken counts as one.

    Raises:
        OSError: `path` does not exist or cannot be read.
    """
    files: dict[Path, Times] = {}
    skipped: dict[Path, str] = {}
    if path.is_dir():
        os.scandir(path).close()
        _walk(path, _rules_above(path), files, skipped)
    else:
        _take(path, path.stat(), files, skipped)
    return files, skipped


def read_text(path: Path) -> str | None:
    """The text of a file, or None if it is no UTF-8 text after all (binary: it has a zero byte).

    Raises:
        OSError: the file cannot be read.
        UnicodeError: it is not UTF-8.
    """
    raw = path.read_bytes()
    return None if b"\0" in raw else utf8(raw, marked=True)


def _walk(folder: Path, rules: _Rules, files: dict[Path, Times], skipped: dict[Path, str]) -> None:
    # A stack of its own: trees may be deeper than Python's.
    stack = [(folder, rules)]
    while stack:
        folder, rules = stack.pop()
        rules = (*rules, *_rules_in(folder))
        try:
            with os.scandir(folder) as entries:
                ordered = sorted(entries, key=lambda e: e.name)
        except OSError:
            skipped[folder] = UNREADABLE
            continue
        inner = []
        for entry in ordered:
            path = Path(entry.path)
            try:
                folder_too = entry.is_dir(follow_symlinks=False)
                if folder_too and path.name in VERSION_CONTROL:
                    continue
                reason = LINK if entry.is_symlink() else _reason(path, rules, folder=folder_too)
                if reason:
                    skipped[path] = reason
                elif folder_too:
                    inner.append((path, rules))
                else:
                    _take(path, entry.stat(follow_symlinks=False), files, skipped)
            except OSError:
                skipped[path] = UNREADABLE
        stack += reversed(inner)


def _take(path: Path, stat: os.stat_result, files: dict[Path, Times], skipped: dict[Path, str]) -> None:
    if not os.path.isfile(path):
        skipped[path] = SPECIAL
    elif stat.st_size > MAX_BYTES:
        skipped[path] = HUGE
    elif stat.st_size:
        files[path] = stat.st_size, stat.st_mtime_ns


def _rules_above(folder: Path) -> _Rules:
    """The rules of the folders around `folder`, up to the root of its repository, if it is in one."""
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
        lines = file.read_bytes().decode("utf-8", "surrogateescape").splitlines() if file.is_file() else []
    except OSError:
        return ()
    lines = [line for line in lines if _is_pattern(line)]
    return ((folder, GitIgnoreSpec.from_lines(lines)),) if lines else ()


def _is_pattern(line: str) -> bool:
    """Whether a line means anything; like git, one that does not is passed over."""
    try:
        return bool(line.strip()) and not line.startswith("#") and len(GitIgnoreSpec.from_lines([line])) == 1
    except (ValueError, re.error):
        return False


def _reason(path: Path, rules: Sequence[tuple[Path, GitIgnoreSpec]], *, folder: bool) -> str | None:
    """Why `path` is left out, by the innermost rule that speaks of it, and by its name; None if it is not."""
    for base, spec in reversed(rules):
        said = spec.check_file(path.relative_to(base).as_posix() + "/" * folder).include
        if said:
            return IGNORED
        if said is not None:
            break
    return SECRET if _SECRETS.match_file("/".join(path.parts[-2:]) + "/" * folder) else None
