"""A reference for NextN layers that evaluates texts token by token in new contexts of llama.cpp, without rollbacks.

It shares no code with `ngramspec.llama.head`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from llama_cpp import llama_cpp_ext as ext
from numpy.typing import NDArray

Rows = NDArray[np.float32]


class HeadReference:
    """Model with a NextN layer that opens new contexts for every call."""

    def __init__(self, path: Path) -> None:
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mtp = True
        params.use_extra_bufts = False
        self._model = llama.llama_model_load_from_file(str(path).encode(), params)
        self._n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._width = llama.llama_model_n_embd(self._model)

    def rows(self, text: Sequence[int], own: int = 0) -> Rows:
        """Return the logits after each token; the last `own` tokens use the layer's own output, not hidden states."""
        states = self._states(text[: len(text) - own])
        context = self._open(llama.LLAMA_CONTEXT_TYPE_MTP, masked=True)
        rows = []
        before = np.zeros(self._width, np.float32)
        for position, token in enumerate(text):
            batch, ids = llama.llama_batch_init(1, self._width, 1), (llama.llama_token * 1)(token)
            batch.token = ctypes.cast(ids, type(batch.token))
            self._fill(batch, position)
            ctypes.memmove(batch.embd, before.ctypes.data, before.nbytes)
            assert llama.llama_decode(context, batch) == 0
            rows.append(_copy(llama.llama_get_logits_ith(context, 0), self._n_vocab))
            before = _copy(ext.llama_get_embeddings_nextn_ith(context, 0), self._width)
            if position < len(states):
                before = states[position]
            batch.token = type(batch.token)()
            llama.llama_batch_free(batch)
        llama.llama_free(context)
        return np.array(rows)

    def _states(self, text: Sequence[int]) -> list[Rows]:
        """Return the model's hidden states after all tokens except the last, which the target has not evaluated yet."""
        context = self._open(llama.LLAMA_CONTEXT_TYPE_DEFAULT, masked=False)
        states = []
        for position, token in enumerate(text[:-1]):
            batch = llama.llama_batch_init(1, 0, 1)
            batch.token[0] = token
            self._fill(batch, position)
            assert llama.llama_decode(context, batch) == 0
            states.append(_copy(ext.llama_get_embeddings_nextn(context), self._width))
            llama.llama_batch_free(batch)
        llama.llama_free(context)
        return states

    def _fill(self, batch: Any, position: int) -> None:
        batch.n_tokens, batch.pos[0], batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, position, 1, 0, 1

    def _open(self, kind: int, *, masked: bool) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 512, 64, 64, 1
        params.n_threads = params.n_threads_batch = 1
        params.ctx_type = kind
        context = llama.llama_init_from_model(self._model, params)
        ext.llama_set_embeddings_nextn(context, True, masked)
        return context

    def close(self) -> None:
        """Free the model."""
        llama.llama_model_free(self._model)


def _copy(pointer: Any, size: int) -> Rows:
    return np.ctypeslib.as_array(pointer, (size,)).copy()
