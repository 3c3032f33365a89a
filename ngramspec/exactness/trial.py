"""`Trial`: a small context of a target under one of its settings, and what is measured in it for `exact="auto"`.

A trial must not cost the user seconds, and the kernels that tell batch sizes apart depend on the length of the
context. So the context is made long without evaluating most of it: in a second context llama.cpp's passes are stopped
at their first operation, which gives their cells positions and no contents (zeros), and the cells are copied. Attention
takes the same time over zeros, by the same kernels. Zeros can be summed in any order, though, and so some tokens of
every stretch are real, and all of the last ones before those that are compared.

llama.cpp is handed in by `ngramspec.llama.target`.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ngramspec.backend import Logits
from ngramspec.errors import TargetError
from ngramspec.exactness.choice import DEPTHS, MOST, SIZES, Identity, Times

STRETCH, OF_STRETCH = 128, 4
"""In a long context so many tokens of each stretch are real; kernels split it into stretches no shorter than that."""

REAL, COMPARED = 13, 8
"""Real tokens before those that are compared, and how many of these: the first ones of each batch. No multiple of
anything, since some architectures (DeepSeek 4) treat the tokens that complete a block of the context apart."""

CHUNK = 64
"""Tokens of a prefill that is timed: from here on CPUs read a prompt with kernels of their own."""

READ = 9 * CHUNK + SIZES[-1]
"""Tokens of a user's text that are read to see how far rounding goes: past 512 cells."""

ROOM = DEPTHS[1] + 2 * CHUNK + SIZES[-1]
"""Size of a trial's context."""

ROUNDS = 2

IDENTITY_COST, TIMES_COST, ROUNDING_COST = 50, 50, 170
"""The most that `identity`, `times` and `rounding` take, roughly, in passes over one token."""


class Trial:
    """A context of its own, whatever the target holds.

    Args:
        api: llama.cpp's functions.
        model: its handle.
        params: of a context of `ROOM` tokens, in micro-batches of at least `SIZES[-1]`.
        n_vocab: size of the vocabulary.
        recurrent: whether the memory cannot simply drop its last tokens.

    Raises:
        TargetError: there is no memory for it, here and below: llama.cpp failed.
    """

    def __init__(self, api: Any, model: Any, params: Any, n_vocab: int, *, recurrent: bool = False) -> None:
        self._api, self._model, self._params = api, model, params
        self._n_vocab = n_vocab
        self._recurrent = recurrent
        self._length = 0
        self._kept: tuple[int, Any] = (0, None)
        self._ctx = self._open(params)

    def _open(self, params: Any) -> Any:
        ctx = self._api.llama_init_from_model(self._model, params)
        if not ctx:
            raise TargetError("there is no memory for a second context to measure in")
        return ctx

    # ------------------------------------------------------------------ what it holds

    def start(self, depth: int, real: int = OF_STRETCH) -> None:
        """Hold `depth` tokens and nothing else, with contents so many of each stretch."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._ctx), False)
        self._length = 0
        if depth:
            self._load(self._hollow(depth, real))
            self._length = depth

    def _hollow(self, depth: int, count: int) -> Any:
        stopping = False

        @self._api.ggml_backend_sched_eval_callback  # type: ignore[untyped-decorator]
        def stop(_tensor: Any, asked: bool, _data: Any) -> bool:
            # Who asks to see a tensor and then says no ends the pass.
            return stopping and asked

        params = type(self._params).from_buffer_copy(self._params)
        params.cb_eval = stop
        ctx = self._open(params)
        text = self.text(1, depth)
        try:
            for start in range(0, depth, STRETCH):
                # A recurrent state that nothing was written to says nothing about one in use.
                real = start + (STRETCH if self._recurrent else count)
                stopping = False
                if real > start:
                    self._decode(ctx, text[start:real], start, 1)
                stopping = True
                if not self._recurrent:
                    self._decode(ctx, text[real : start + STRETCH], real, 1)
            return self._save(ctx)
        finally:
            self._api.llama_free(ctx)

    def _save(self, ctx: Any) -> Any:
        size = self._api.llama_state_seq_get_size(ctx, 0)
        state = (ctypes.c_uint8 * size)()
        if self._api.llama_state_seq_get_data(ctx, state, size, 0) != size:
            raise TargetError("llama.cpp did not give the state of a context")
        return state

    def _load(self, state: Any) -> None:
        if not self._api.llama_state_seq_set_data(self._ctx, state, len(state), 0):
            raise TargetError("llama.cpp did not take the state of a context")

    def keep(self) -> None:
        """Come back to what is held now with every `back`."""
        self._kept = self._length, self._save(self._ctx) if self._recurrent else None

    def back(self) -> None:
        self._length, state = self._kept
        memory = self._api.llama_get_memory(self._ctx)
        if state is not None:
            self._api.llama_memory_clear(memory, False)
            self._load(state)
        elif not self._api.llama_memory_seq_rm(memory, 0, self._length, -1):
            raise TargetError("llama.cpp did not take tokens back")

    def evaluate(self, tokens: Sequence[int], rows: int = 1) -> Logits:
        """Append tokens in one pass; logits after the first `rows` of them, or after the last for 1.

        As in decoding, a pass that could hold a draft computes the logits after all of its tokens.
        """
        asked = len(tokens) if rows > 1 else 1
        self._decode(self._ctx, tokens, self._length, asked)
        self._length += len(tokens)
        count = min(rows, len(tokens))
        found = np.empty((count, self._n_vocab), np.float32)
        for i in range(count):
            # A pass of a prefill asks for its last token's only.
            row = self._api.llama_get_logits_ith(self._ctx, i if rows > 1 else len(tokens) - 1)
            if not row:
                raise TargetError("llama.cpp returned no logits")
            found[i] = np.ctypeslib.as_array(row, (self._n_vocab,))
        return found

    def _decode(self, ctx: Any, tokens: Sequence[int], start: int, rows: int) -> None:
        n = len(tokens)
        batch = self._api.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, start + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = i < rows if rows > 1 else i == n - 1
            if self._api.llama_decode(ctx, batch) != 0:
                raise TargetError(f"llama_decode failed for {n} tokens at position {start}")
        finally:
            self._api.llama_batch_free(batch)

    def close(self) -> None:
        if self._ctx:
            self._api.llama_free(self._ctx)
            self._ctx = None

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what is measured

    def text(self, depth: int, count: int) -> list[int]:
        """Random tokens; kernels are chosen by shape, not by content."""
        return [int(t) for t in np.random.default_rng(depth).integers(0, self._n_vocab, count)]

    def time(self, tokens: Sequence[int]) -> float:
        """Seconds of a pass on top of what was kept, taken back afterwards."""
        began = time.perf_counter()
        self.evaluate(tokens, len(tokens) if len(tokens) < CHUNK else 1)
        seconds = time.perf_counter() - began
        self.back()
        return seconds


def single(trial: Trial) -> float:
    """Seconds of a pass over one token, to tell what measuring will take. The trial then holds some real tokens."""
    trial.start(0)
    trial.evaluate(trial.text(0, 2))
    trial.keep()
    trial.time([1])
    return trial.time([1])


def identity(trial: Trial, depth: int) -> Identity:
    """Compare batch sizes bit by bit, after a context of `depth` tokens and a few real ones."""
    text = trial.text(depth, REAL + SIZES[-1])
    trial.start(depth)
    trial.evaluate(text[:REAL])
    trial.keep()
    found = _passes(trial, text[REAL:])

    def agreeing(with_size: int) -> tuple[int, ...]:
        return tuple(n for n in SIZES if _equal(found[n], found[with_size]))

    return Identity(agreeing(1), tuple(n for n in SIZES[1:] if _equal(found[n], found[MOST])))


def rounding(trial: Trial, text: Sequence[int]) -> float:
    """The largest difference of one logit between batches and single tokens.

    Args:
        text: a user's, which is repeated as need be: contents that no text has exaggerate.
    """
    text = [*text] * -(-READ // len(text))
    trial.start(0)
    for start in range(0, READ - SIZES[-1], CHUNK):
        trial.evaluate(text[start : start + CHUNK])
    trial.keep()
    found = _passes(trial, text[READ - SIZES[-1] : READ])
    return max(float(np.abs(rows - found[1][: len(rows)]).max()) for rows in found.values())


def _passes(trial: Trial, tail: Sequence[int]) -> dict[int, Logits]:
    """Logits after the first `COMPARED` tokens on top of what was kept, by the size of the pass."""
    singles = np.concatenate([trial.evaluate([token]) for token in tail[:COMPARED]])
    trial.back()
    found = {1: singles}
    for size in SIZES[1:]:
        found[size] = trial.evaluate(tail[:size], min(size, COMPARED))
        trial.back()
    return found


def _equal(a: Logits, b: Logits) -> bool:
    rows = min(len(a), len(b))
    return a[:rows].tobytes() == b[:rows].tobytes()


def times(trials: Mapping[str, Trial], depth: int) -> dict[str, Times]:
    """Seconds of each way to decode after a context of `depth` tokens, by setting; of "fast" also padded to two tokens.

    The settings take turns, and the fastest of some rounds counts: whatever else the machine does only adds time.
    """
    best: dict[tuple[str, int], float] = {}

    def note(name: str, size: int) -> None:
        seconds = trials[name].time(trials[name].text(depth, size))
        best[name, size] = min(best.get((name, size), math.inf), seconds)

    for name, trial in trials.items():
        trial.start(depth, 0)
        trial.evaluate(trial.text(depth, 2))
        trial.keep()
        note(name, CHUNK)
    for name in [*trials] * ROUNDS:
        for size in (1, 2) if name == "fast" else (1,):
            # A change of size rebuilds the graph, which a run of passes does once.
            note(name, size)
            note(name, size)
    found = {name: Times(best[name, 1], best[name, CHUNK] / CHUNK) for name in trials}
    found["padded"] = found["fast"]._replace(single=best["fast", 2])
    return found
