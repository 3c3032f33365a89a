"""`SettingsTimer`: times settings on a loaded model, each in a small context of its own.

Numbers of threads are changed in place, and contexts stay open; where the weights have to be loaded otherwise, they are
loaded a second time beside the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil

from ngramspec.backend import Logits
from ngramspec.errors import TargetError
from ngramspec.exactness.trial import random_tokens
from ngramspec.llama.target import Target
from ngramspec.llama.trial_context import TrialContext
from ngramspec.machine_settings import LONG_READING, READING, Measure, Settings

SLOW = 0.1  # a pass of so many seconds is timed once; below, the better of two after one that warms up

REPEATS = 2

COMPARED = 600
"""Tokens of the text on which it is tried whether settings give the same bits: more than the usual micro-batch."""

SPARE = 2**30  # bytes of RAM that loading the weights again must leave free


_Open = tuple[TrialContext, int]  # a context in use, and the tokens of its micro-batches


class SettingsTimer:
    """A model on which settings are timed; `seconds` is the timer of `ngramspec.instruments.tuning.search.Tuning`.

    Args:
        target: a loaded model, which is neither read nor changed.
        load: loads the same model once more, with the `mmap` and `repack` of the settings, and a small context.
        depth: tokens of what is called a long context.
    """

    def __init__(self, target: Target, load: Callable[[Settings], Target], depth: int) -> None:
        self._target, self._load, self._depth = target, load, depth
        self._loaded: dict[tuple[bool, bool], Target] = {(target.present.mmap, target.present.repack): target}
        self._open: dict[tuple[object, ...], _Open] = {}

    def seconds(self, settings: Settings, measure: Measure) -> float:
        """Take one time, after the passes that warm it up.

        Raises:
            TargetError, ModelError: these settings cannot be had on this machine.
        """
        bench = self._context(settings, deep=measure.deep)
        tokens = random_tokens(self._target.n_vocab, measure.size, measure.size)
        if measure.reads:
            return self._pass(bench, tokens, reads=True) / measure.size
        first = self._pass(bench, tokens)
        return first if first > SLOW else min(self._pass(bench, tokens) for _ in range(REPEATS))

    def _pass(self, bench: _Open, tokens: Sequence[int], *, reads: bool = False) -> float:
        trial, _ = bench
        began = time.perf_counter()
        if reads:
            self._read(bench, tokens)
        else:
            # Asked for two rows, it computes those of all tokens, as a pass with a draft does.
            trial.evaluate(tokens, min(2, len(tokens)))
        seconds = time.perf_counter() - began
        trial.back()
        return seconds

    def _read(self, bench: _Open, tokens: Sequence[int]) -> None:
        trial, micro = bench
        for start in range(0, len(tokens), micro):
            trial.evaluate(tokens[start : start + micro])

    def alike(self, one: Settings, other: Settings) -> bool:
        """Whether both gave the same bits: after a short random text, for single tokens and for a batch."""
        return len({self._bits(settings) for settings in (one, other)}) == 1

    def _bits(self, settings: Settings) -> bytes:
        bench = trial, _ = self._context(settings, deep=False)
        text = random_tokens(self._target.n_vocab, 2, COMPARED)
        self._read(bench, text[:-6])
        rows: list[Logits] = [trial.evaluate([token]) for token in text[-6:-4]]
        rows.append(trial.evaluate(text[-4:], 4))
        trial.back()
        return np.concatenate(rows).tobytes()

    def _context(self, settings: Settings, *, deep: bool) -> _Open:
        weights = settings.mmap, settings.repack
        key = (*weights, settings.flash_attn, settings.micro_batch, settings.cache_types, deep)
        if key not in self._open:
            held = self._depth if deep else 0
            model = self._weights(settings)
            room = READING.size if deep else LONG_READING.size
            trial, micro = model.trial_of(settings, held + room + 2 * READING.size)
            self._open[key] = trial, micro
            trial.use_threads(settings.threads, settings.threads_batch)
            trial.start(held, contents=False)
            trial.evaluate(random_tokens(self._target.n_vocab, 1, 8))
            trial.keep()
        bench = self._open[key]
        bench[0].use_threads(settings.threads, settings.threads_batch)
        return bench

    def _weights(self, settings: Settings) -> Target:
        key = settings.mmap, settings.repack
        if key not in self._loaded:
            if psutil.virtual_memory().available < self._target.size_bytes + SPARE:
                raise TargetError("there is no memory for the weights a second time")
            self._loaded[key] = self._load(settings)
        return self._loaded[key]

    def close(self) -> None:
        for trial, _ in self._open.values():
            trial.close()
        self._open.clear()
        for model in self._loaded.values():
            if model is not self._target:
                model.close()
        self._loaded.clear()
