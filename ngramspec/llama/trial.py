"""`Trial`: a small context of a loaded model under one of its settings, to measure in for `exact="auto"`.

A trial must not cost the user seconds, and whether kernels tell batch sizes apart depends on the length of the
context. So the context is made long without evaluating most of it: in a second context llama.cpp's passes are stopped
at their first operation, which gives their cells positions and no contents (zeros), and the cells are copied. Attention
takes the same time over zeros, by the same kernels. Zeros can be summed in any order, though, and so some tokens of
every stretch are real, and the caller evaluates the last ones before those that it compares.

llama.cpp is handed in by `ngramspec.llama.context`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ngramspec.backend import Logits
from ngramspec.errors import TargetError
from ngramspec.exactness.trial import random_tokens

STRETCH, OF_STRETCH = 128, 4
"""In a long context so many tokens of each stretch are real; kernels split it into stretches no shorter than that."""


class Trial:
    """See `ngramspec.exactness.trial.Trial`.

    Args:
        api: llama.cpp's functions.
        model: its handle.
        params: of the context, in micro-batches of at least 16 tokens; a batch holds STRETCH tokens in any case.
        n_vocab: size of the vocabulary.
        recurrent: whether there is a recurrent state, which cannot simply drop its last tokens.

    Raises:
        TargetError: the machine lacks the memory for it; here and in the methods: llama.cpp failed.
    """

    def __init__(self, api: Any, model: Any, params: Any, n_vocab: int, *, recurrent: bool = False) -> None:
        self._api, self._model, self._params = api, model, params
        params.n_batch = max(params.n_batch, STRETCH)
        self.n_vocab = n_vocab
        self._recurrent = recurrent
        self._length = 0
        self._kept: tuple[int, Any] = (0, None)
        self._ctx = self._open(params)

    def _open(self, params: Any) -> Any:
        ctx = self._api.llama_init_from_model(self._model, params)
        if not ctx:
            raise TargetError("there is no memory for a second context to measure in")
        return ctx

    def use_threads(self, single: int, batch: int) -> None:
        """Take so many CPU threads from now on: for passes over one token, and for larger ones."""
        self._api.llama_set_n_threads(self._ctx, single, batch)

    # ------------------------------------------------------------------ what it holds

    def start(self, depth: int, *, contents: bool = True) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._ctx), False)
        self._length = 0
        if depth:
            self._load(self._hollow(depth, OF_STRETCH if contents else 0))
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
        text = random_tokens(self.n_vocab, 1, depth)
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
        # As in decoding, a pass that could hold a draft computes the logits after all of its tokens.
        asked = len(tokens) if rows > 1 else 1
        self._decode(self._ctx, tokens, self._length, asked)
        self._length += len(tokens)
        count = min(rows, len(tokens))
        found = np.empty((count, self.n_vocab), np.float32)
        for i in range(count):
            # A pass of a prefill asks for its last token's only.
            row = self._api.llama_get_logits_ith(self._ctx, i if rows > 1 else len(tokens) - 1)
            if not row:
                raise TargetError("llama.cpp returned no logits")
            found[i] = np.ctypeslib.as_array(row, (self.n_vocab,))
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
