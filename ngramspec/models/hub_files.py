"""Which of a Hugging Face repository's files a name asks for. Pure functions on lists of paths."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from ngramspec.errors import ModelError
from ngramspec.models.check import SPLIT_NAME

PREFERRED = ("Q4_K_M", "Q8_0")
"""The quantisations that are looked for where none is named, as in llama.cpp's `common/download.cpp`."""

_COMPANIONS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""What is in the names of files beside a model, there: images and audio, statistics, and heads that draft."""

_QUANT = re.compile(
    r"(?<![A-Za-z0-9])"
    r"(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|FP?16|FP?32)"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_LISTED = 12


def choose(listed: Iterable[str], wanted: str | None) -> list[str]:
    """The files to load, in the order of their parts.

    Args:
        listed: paths of all files of the repository.
        wanted: a file name that ends in .gguf (its folder may be left out); a quantisation such as
            Q4_K_M, in any case; None for `PREFERRED`, else any. Of several, llama.cpp's choice: the first.

    Returns:
        one path, or those of all parts of a split model.

    Raises:
        ModelError: no model matches, more than one has that file name, or parts are missing. The message
            does not name the repository.

    Example:
        choose(["m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf"], None) -> ["m-Q4_K_M.gguf"]
    """
    models = _group_parts(file for file in listed if is_model(file))
    if not models:
        raise ModelError("there is no GGUF model in this repository")
    if wanted is not None and wanted.lower().endswith(".gguf"):
        found = _by_file_name(models, wanted)
        if len(found) > 1:
            raise ModelError(f"{wanted} is the name of several files; name one of them: {_listing(found)}")
    elif wanted is not None:
        found = _by_quant(models, wanted)
    else:
        found = next(filter(None, (_by_quant(models, quant) for quant in PREFERRED)), list(models))
    if not found:
        raise ModelError(_not_found(models, wanted))
    files = models[found[0]]
    split = SPLIT_NAME.match(found[0])
    if split is not None and len(files) != int(split["parts"]):
        parts = int(split["parts"])
        raise ModelError(f"only {len(files)} of the {parts} parts of {found[0]} are there")
    return files


def stem(file: str) -> str:
    """The name of a .gguf file without its folder, its ending and the number of its part."""
    name = PurePosixPath(file).name
    split = SPLIT_NAME.match(name)
    return split["stem"] if split else name[: -len(".gguf")]


def is_model(file: str) -> bool:
    """Whether a file is a model by its name, and not one that lies beside it, as of vision."""
    name = PurePosixPath(file).name.lower()
    return name.endswith(".gguf") and not any(word in name for word in _COMPANIONS)


def _group_parts(files: Iterable[str]) -> dict[str, list[str]]:
    """Models by the path of their first file, each with the paths of all its files in order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        split = SPLIT_NAME.match(file)
        first = f"{split['stem']}-00001-of-{split['parts']}.gguf" if split else file
        models.setdefault(first, []).append(file)
    return models


def _by_file_name(models: Mapping[str, Sequence[str]], wanted: str) -> list[str]:
    """The models one of whose files has this path; without any, this name in some folder."""
    exact = [first for first, files in models.items() if wanted in files]
    return exact or [
        first for first, files in models.items() if any(PurePosixPath(file).name == wanted for file in files)
    ]


def _by_quant(models: Iterable[str], wanted: str) -> list[str]:
    """The models with `wanted` as a word in their path; without any, those in which one ends with it.

    Q2_K_XL finds UD-Q2_K_XL, and Q4_K never Q4_K_M. F16 finds BF16, as in llama.cpp, but only where there is no F16.
    """
    names, end = list(models), rf"{re.escape(wanted)}(?![A-Za-z0-9_])"
    words = (re.compile(pattern, re.IGNORECASE) for pattern in (rf"(?<![A-Za-z0-9]){end}", end))
    return next(filter(None, ([name for name in names if word.search(name)] for word in words)), [])


def _quant(model: str) -> str | None:
    """The quantisation in a file name, as written there: the last word that looks like one."""
    words: list[str] = _QUANT.findall(stem(model))
    return words[-1] if words else None


def _not_found(models: Mapping[str, Sequence[str]], wanted: str | None) -> str:
    if wanted is not None and wanted.lower().endswith(".gguf"):
        close = difflib.get_close_matches(wanted, models, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {_listing(models)}"
        return f"there is no model file {wanted} in this repository; {hint}"
    quants = _listing(sorted({_quant(model) or model for model in models}))
    return f"there is no {wanted} in this repository; it has {quants}"


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
