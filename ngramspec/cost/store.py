"""`StoredTimes`: the ratios of a model's `PassTimes` on this machine, between processes.

They are stored in one small JSON file per model, build, machine and settings, whose name begins with that of the model
file. It contains no seconds: a ratio is a prior that passes replace, whatever the machine did when it was learned.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ngramspec.backend import Model
from ngramspec.cost.times import FEW, SIZES, WINDOW, PassTimes
from ngramspec.storage import FOLDERS, read_cache, write_cache

END = "-times.json"  # end of the names of files


class StoredTimes:
    """The times of the passes of one model, and their file; without a fingerprint nothing is stored."""

    def __init__(self, target: Model, folder: Path | None = None) -> None:
        folder = folder or FOLDERS.user_cache_path / "calibration"
        self.path = folder / f"{target.fingerprint}{END}" if target.fingerprint else None
        self.times = (_read(self.path) if self.path else None) or PassTimes()
        self._before = self.times.to_json()
        self._saved_pairs = self.times.pairs

    def save(self) -> None:
        """Store the ratios if passes have shown something since they were last stored; see `storage.write_cache`.

        The pairs of a short process are from one moment, in which other programs may have made batches expensive. So
        they replace what many processes have shown only in part: half of it if there are as many as in a window.
        """
        if self.path is None or self.times.pairs <= self._saved_pairs:
            return
        data = self.times.to_json()
        if known := self._before["pairs"]:
            part = WINDOW / (WINDOW + self.times.pairs - known)
            for size, ratio in self._before["ratios"].items():
                data["ratios"][size] = round(ratio**part * data["ratios"][size] ** (1.0 - part), 4)
        write_cache(self.path, json.dumps(data))
        self._saved_pairs = self.times.pairs

    def forget(self) -> None:
        self.times, self._saved_pairs = PassTimes(), 0
        self._before = self.times.to_json()
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


def _read(path: Path) -> PassTimes | None:
    try:
        data: Mapping[str, Any] = json.loads(read_cache(path) or "")
        ratios = {int(size): float(ratio) for size, ratio in data["ratios"].items()}
        first, second = map(float, data["change"])
        is_valid = 1 in ratios and all(size > 0 and 0 < ratio < math.inf for size, ratio in ratios.items())
        if is_valid and 0 <= first < math.inf and 0 <= second < math.inf:
            return PassTimes(ratios, (first, second), pairs=int(data["pairs"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    return None


def load_last_times(model: str, folder: Path | None = None) -> PassTimes | None:
    """Return the last stored times of a model, whose fingerprints begin with `model`; `None` if none are stored."""
    newest, found = -math.inf, None
    for path in (folder or FOLDERS.user_cache_path / "calibration").glob(f"{model}*{END}"):
        with suppress(OSError):
            age = path.stat().st_mtime
            if age > newest and (times := _read(path)) is not None:
                newest, found = age, times
    return found


def time_passes(
    model: Model,
    tokens: Sequence[int],
    times: PassTimes,
    clock: Callable[[], float] = time.perf_counter,
    max_seconds: float = 5.0,
) -> None:
    """Time passes over parts of a text after the cached tokens, roll each of them back, and teach `times`.

    Reports on a model that was not used yet need them.

    A pass over one token precedes each pass over more, so that load hits both. The tokens are those of a text, because
    the time of a mixture of experts depends on them. Sizes for which they or the context are too short are left out,
    and no further size is begun after `max_seconds`. The model must have a cached token.
    """
    start, end = len(model.tokens), clock() + max_seconds
    largest = min(len(tokens), model.max_batch, model.n_ctx - start)
    for _ in range(FEW):
        for size in SIZES[1:]:
            # The third pass in a row of a size does not contain the cost of a change of size.
            for n in (1, 1, 1, size, size, size) if size <= largest and clock() < end else ():
                model.checkpoint()
                began = clock()
                model.evaluate(tokens[:n])
                seconds = clock() - began
                model.rollback(start)
                times.observe(n, seconds)
