"""Files of a guesser's weights: initial weights in the package, and statistics about tokens for each vocabulary.

Weights and rates are reset to those of the package for every text. This gives a higher speedup than the weights at the
end of the previous text (held out, 1.212 against 1.208 on the curve cpu-1.5b-q4_0). Files are npz with float32 arrays
and the number of their layout. A file with another layout, or a damaged one, is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ngramspec.storage import FOLDERS, atomic_write

LAYOUT = 1  # number of the layout, raised when an index gets another meaning: another state, weight set or fact
# Initial weights of every text, and initial acceptance of the target's predictions; see `answers.py`.
START = Path(__file__).with_name("start.npz")  # output of `tools/train_start.py`
ANSWERS = Path(__file__).with_name("answers.npz")  # output of `tools/train_answers.py`

Arrays = Mapping[str, NDArray[np.float32]]


def file_of(vocabulary: bytes) -> Path:
    """Return the user's file for a target's `vocabulary_hash`."""
    return FOLDERS.user_cache_path / "judge" / f"{vocabulary.hex()}.npz"


def read(path: Path) -> Arrays:
    """Return the contents of a file; empty if it is missing, damaged or has another layout."""
    try:
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        is_valid = int(arrays.pop("layout")) == LAYOUT and all(np.isfinite(a).all() for a in arrays.values())
    except Exception:  # numpy's reader may raise any error, including those of its tokenizer
        return {}
    return arrays if is_valid else {}


def save(path: Path, weights: Mapping[str, memoryview]) -> None:
    """Write a file completely or not at all; do nothing if the folder cannot be created or written."""
    with suppress(OSError):  # an answer waits for this: to compress 1.6 MB takes 40 ms, to write them 2 ms
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.asarray(array, np.float32) for name, array in weights.items()}
        with atomic_write(path) as file:
            np.savez(file, allow_pickle=False, layout=np.int32(LAYOUT), **arrays)


def load_into(weights: Mapping[str, memoryview], arrays: Arrays) -> None:
    """Copy the arrays of a file into a guesser's arrays; do nothing if one is missing or has another shape."""
    if weights.keys() == arrays.keys() and all(array.shape == weights[name].shape for name, array in arrays.items()):
        for name, array in arrays.items():
            np.asarray(weights[name])[:] = array


read_packaged = cache(read)  # for START and ANSWERS, which do not change


def files() -> list[Path]:
    """Return the user's files."""
    return sorted((FOLDERS.user_cache_path / "judge").glob("*.npz"))
