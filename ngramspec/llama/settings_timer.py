"""`SettingsTimer`: times settings of a loaded model, each in a separate small context.

Numbers of threads are changed in place, and contexts stay open. If a setting requires loading the weights in another
way, they are loaded a second time, and the first ones stay loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import psutil

from ngramspec.data import TargetError
from ngramspec.llama.target import Target
from ngramspec.llama.trial_context import TrialContext
from ngramspec.machine import LONG_READING, READING, Measure, Settings

SLOW = 0.1  # duration in seconds above which a pass is timed once; a faster one is repeated after a warm-up

REPEATS = 2  # number of timed passes after the warm-up, of which the fastest counts

SPARE = 2**30  # bytes of RAM that must stay free when the weights are loaded again


class SettingsTimer:
    """A model on which settings are timed; `seconds` is the timer of `ngramspec.instruments.tuning.search.Tuning`.

    Args:
        target: Loaded model, whose cache is neither read nor changed.
        load: Loads the same model again with the `mmap` and `repack` of the settings and a small context.
        depth: Number of tokens in a long context.
    """

    def __init__(self, target: Target, load: Callable[[Settings], Target], depth: int) -> None:
        self._target, self._load, self._depth = target, load, depth
        self._models: dict[tuple[bool, bool], Target] = {
            (target.weights.present.mmap, target.weights.present.repack): target
        }
        self._open: dict[tuple[object, ...], TrialContext] = {}

    def seconds(self, settings: Settings, measure: Measure) -> float:
        """Measure one time after a warm-up.

        Raises:
            TargetError, ModelError: The machine does not support these settings.
        """
        trial = self._context(settings, deep=measure.deep)
        first = trial.seconds(measure.size)
        if measure.is_prefill:
            return first / measure.size
        return first if first > SLOW else min(trial.seconds(measure.size) for _ in range(REPEATS))

    def _context(self, settings: Settings, *, deep: bool) -> TrialContext:
        """Return the context of these settings with their threads; a deep one contains `depth` tokens."""
        key = (replace(settings, threads=1, threads_batch=1), deep)
        trial = self._open.get(key)
        if trial is not None:
            trial.use_threads(settings.threads, settings.threads_batch)
            return trial
        depth, room = (self._depth, READING.size) if deep else (0, LONG_READING.size)
        trial = self._open[key] = self._weights(settings).trials.open(settings, depth + room + 2 * READING.size)
        trial.use_threads(settings.threads, settings.threads_batch)
        trial.begin(depth)
        return trial

    def _weights(self, settings: Settings) -> Target:
        key = settings.mmap, settings.repack
        if key not in self._models:
            if psutil.virtual_memory().available < self._target.weights.size_bytes + SPARE:
                raise TargetError("not enough memory to load the weights a second time")
            self._models[key] = self._load(settings)
        return self._models[key]

    def close(self) -> None:
        for trial in self._open.values():
            trial.close()
        self._open.clear()
        for model in self._models.values():
            if model is not self._target:
                model.close()
        self._models.clear()
