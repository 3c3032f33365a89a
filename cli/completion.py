"""What the shell completes: names of models; typer knows commands and options. `--install-completion` sets it up."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from ngramspec.models.find import names

_BEFORE = "_NGRAMSPEC_BEFORE_COLON"


def join_at_colons(env: MutableMapping[str, str]) -> None:
    """Undo how bash takes words apart: `hf:owner` comes as three, and only the last of them is to be completed.

    The words before the last colon are left out, so that they do not count as arguments, and kept for `models`.
    """
    try:
        words, at = shlex.split(env["COMP_WORDS"]), int(env["COMP_CWORD"])
    except (KeyError, ValueError):  # a quote that is still open
        return
    typed, begins = words[at : at + 1] or [""], at
    while begins > 1 and (typed[0] == ":" or words[begins - 1] == ":"):
        begins -= 1
        typed.insert(0, words[begins])
    if len(typed) == 1:
        return
    last = "" if typed[-1] == ":" else typed.pop()
    env[_BEFORE] = "".join(typed)
    env["COMP_WORDS"], env["COMP_CWORD"] = shlex.join([*words[:begins], last]), str(begins)


def models(incomplete: str) -> list[str]:
    """Names of models on this disk, and .gguf files, that begin so. Where there are none, the shell offers files."""
    before = os.environ.get(_BEFORE, "")
    found = [name.removeprefix(before) for name, _ in names() if name.startswith(before + incomplete)]
    return found if before else [*found, *_files(incomplete)]


def _files(incomplete: str) -> Iterator[str]:
    """The .gguf files whose path begins so and, if there are any, the folders that more may be in."""
    folder, name = os.path.split(incomplete)
    try:
        beside = sorted(Path(os.path.expanduser(folder) or ".").iterdir())
    except (OSError, ValueError):
        return
    fitting = [path for path in beside if path.name.startswith(name) and (name or not path.name.startswith("."))]
    files = [path.name for path in fitting if path.suffix == ".gguf" and path.is_file()]
    folders = [f"{path.name}/" for path in fitting if path.is_dir()] if files else []
    yield from (os.path.join(folder, one) for one in files + folders)
