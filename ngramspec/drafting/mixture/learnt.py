"""What a judge has learnt, from one process to the next: what all start from, and a file per vocabulary of the user's.

    take_up(guesser.shared(), shipped(START))      what recorded conversations taught: it comes with the package
    take_up(guesser.about_tokens(), read(path))    what the user's own texts taught about tokens
    keep(path, guesser.about_tokens())

Weights and rates are taken up again for every text, which is better than what the last one left behind (held out, 1.212
against 1.208 on the curve cpu-1.5b-q4_0). Files are npz with float32 in them and the number of their layout; one of
another layout, or damaged, counts as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ngramspec.storage import cache_folder, replacing

LAYOUT = 1
"""Changes whenever the same numbers would mean something else: another state, weight set or fact behind an index."""

# Initial weights of every text, and initial acceptance of the target's predictions; see `answers.py`.
START = Path(__file__).with_name("start.npz")  # made by `tools/train_judge.py`
ANSWERS = Path(__file__).with_name("answers.npz")  # made by `tools/train_answers.py`

Arrays = Mapping[str, NDArray[np.float32]]


def folder() -> Path:
    """Where the user's files are."""
    return cache_folder("judge")


def file_of(vocabulary: bytes) -> Path:
    """The user's file for a vocabulary, which its `vocabulary_hash` names."""
    return folder() / f"{vocabulary.hex()}.npz"


def read(path: Path) -> Arrays:
    """Return the contents of a file; empty if it is missing, damaged or has another layout."""
    try:
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        known = int(arrays.pop("layout")) == LAYOUT and all(np.isfinite(a).all() for a in arrays.values())
    except Exception:  # numpy's reader raises what it stumbles over, its tokenizer's errors included
        return {}
    return arrays if known else {}


def keep(path: Path, learnt: Mapping[str, memoryview]) -> None:
    """Write a file whole or not at all; where the folder cannot be made or written, do nothing."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.asarray(array, np.float32) for name, array in learnt.items()}
        with replacing(path) as file:
            np.savez_compressed(file, allow_pickle=False, layout=np.int32(LAYOUT), **arrays)


def take_up(learnt: Mapping[str, memoryview], arrays: Arrays) -> None:
    """Write what was read into a judge's arrays, or nothing if one is missing or of another shape."""
    if learnt.keys() == arrays.keys() and all(array.shape == learnt[name].shape for name, array in arrays.items()):
        for name, array in arrays.items():
            np.asarray(learnt[name])[:] = array


@cache
def shipped(path: Path) -> Arrays:
    """Return the contents of a file of the package: START or ANSWERS."""
    return read(path)


def files() -> list[Path]:
    """The user's files."""
    return sorted(folder().glob("*.npz"))
