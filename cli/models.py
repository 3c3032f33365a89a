"""`ngramspec models`, which lists the models on this machine, and completion of their names in the shell."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

from ngramspec.data import ModelError
from ngramspec.models.check import parts_of
from ngramspec.models.find import check_model, list_models

from .console import MAX_COLUMNS, note


def models() -> None:
    """List the models on this machine, by the names that every command accepts.

    The list contains the models in the Hugging Face cache, which llama.cpp shares, those of Ollama and LM Studio,
    SmolLM2 if it is installed, with its Q4_0 copy if that is used, and other GGUF files that have run, by their paths.

    T(4)/T(1) is the time of a decode call over four tokens on this machine relative to one token, for models that have
    run with drafts. The closer it is to 1, the more drafts pay; at 4, they never do. It comes from that many pairs of
    calls, under the load and with the threads of those runs; ngramspec info --remeasure times it again.
    """
    # These imports take too long for completion, which uses this module too.
    from ngramspec.cost.store import load_last_times
    from ngramspec.llama.devices import quantisation
    from ngramspec.llama.weights import model_key

    from .show import print_report

    entries = list(list_models())
    if not entries:
        note("no models found on this machine; pass the path of a .gguf file")
    rows = [("name", "size", "quantisation", "architecture", "T(4)/T(1)", "pairs")]
    for name, path in entries:
        try:
            metadata = check_model(name, path).metadata
            size = sum(part.stat().st_size for part in parts_of(path))
        except (ModelError, OSError) as error:
            note(f"{name} cannot be used: {error}")
            continue
        kind, architecture = metadata.get("general.file_type"), str(metadata.get("general.architecture", ""))
        quant = quantisation(kind) if isinstance(kind, int) else None
        times = load_last_times(model_key(path))
        evidence = ("", "") if times is None else (f"{times.ratio(4):.2f}", str(times.pairs))
        rows.append((name, f"{size / 2**20:,.0f} MiB", quant or "?", architecture, *evidence))
    if len(rows) > 1:
        print_report(list(_format(rows)))


def _format(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table of at most 100 columns; the figures of a long name are on the next line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][1:]
    room = MAX_COLUMNS - sum(widths) - 2 * len(widths)
    width = max(len(name) for name, *_ in rows if len(name) <= room)
    for name, *figures in rows:
        if len(name) > width:
            yield name
        cells = [f"{figure:{side}{n}}" for figure, side, n in zip(figures, "><<>>", widths, strict=True)]
        yield "  ".join([f"{'' if len(name) > width else name:<{width}}", *cells]).rstrip()


_BEFORE = "_NGRAMSPEC_BEFORE_COLON"


def join_at_colons(env: MutableMapping[str, str]) -> None:
    """Undo bash's splitting of words at colons: bash splits `hf:owner` into three words and completes only the last."""
    try:
        words, at = shlex.split(env["COMP_WORDS"]), int(env["COMP_CWORD"])
    except (KeyError, ValueError):  # missing variables or an open quote
        return
    parts, start = words[at : at + 1] or [""], at
    while start > 1 and (parts[0] == ":" or words[start - 1] == ":"):
        start -= 1
        parts.insert(0, words[start])
    if len(parts) == 1:
        return
    last = "" if parts[-1] == ":" else parts.pop()
    # These words are stored for `complete_model`, and do not count as arguments.
    env[_BEFORE] = "".join(parts)
    env["COMP_WORDS"], env["COMP_CWORD"] = shlex.join([*words[:start], last]), str(start)


def complete_model(incomplete: str) -> list[str]:
    """Return the names of models and .gguf files that start with a text; for an empty list the shell offers files."""
    before = os.environ.get(_BEFORE, "")
    matches = [name.removeprefix(before) for name, _ in list_models() if name.startswith(before + incomplete)]
    return matches if before else [*matches, *_files(incomplete)]


def _files(incomplete: str) -> Iterator[str]:
    """Yield the .gguf files whose path starts with a text and, if there are any, the folders that may contain more."""
    folder, name = os.path.split(incomplete)
    try:
        siblings = sorted(Path(os.path.expanduser(folder) or ".").iterdir())
    except (OSError, ValueError):
        return
    matches = [path for path in siblings if path.name.startswith(name) and (name or not path.name.startswith("."))]
    files = [path.name for path in matches if path.suffix == ".gguf" and path.is_file()]
    folders = [f"{path.name}/" for path in matches if path.is_dir()] if files else []
    yield from (os.path.join(folder, file_name) for file_name in files + folders)
