"""`Embedder`: embeddings of inputs, computed from the outputs of a loaded model's last layer.

llama.cpp's own pooling stores logits after every token, and limits an input to one micro-batch with mean pooling. So
this module pools the rows itself, and rejects models whose tokens attend to later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Literal, get_args

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from ngramspec.data import ModelError, TargetError
from ngramspec.llama import bindings
from ngramspec.llama.cache import Cache
from ngramspec.llama.passes import MAX_EVALUATE, Passes, rows_at
from ngramspec.llama.sequence import CacheSequence, append
from ngramspec.llama.target import Target

Pooling = Literal["none", "mean", "cls", "last"]
"""Pooling of token embeddings: their mean, the first ("cls") or the last one; "none" keeps one for each token."""

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)  # poolings by their numbers in GGUF files


class Embedder:
    """The embeddings of inputs of at most `n_ctx` tokens, in a separate context of a target, which closes it too.

    `pooling=None` means that of the file, or "none" if it specifies none.
    """

    def __init__(self, target: Target, pooling: Pooling | None, n_ctx: int) -> None:
        weights = target.weights
        params = weights.context_params(target.settings, n_ctx + MAX_EVALUATE)
        if weights.read_metadata(f"{weights.architecture}.attention.causal") == "false":
            raise ModelError(
                f"{weights.path} uses bidirectional attention; embeddings of such models are not supported"
            )
        if pooling is None:
            number = int(weights.read_metadata(f"{weights.architecture}.pooling_type") or 0)
            if number >= len(POOLINGS):
                raise ModelError(f"{weights.path} is a ranking model; use --pooling mean to compute embeddings with it")
            pooling = POOLINGS[number]
        params.pooling_type = llama.LLAMA_POOLING_TYPE_NONE
        self._context = context = weights.open_context(params)
        if not context:
            raise ModelError(f"{weights.path}: not enough memory for the embeddings context of {n_ctx} tokens")
        self.pooling, self.n_ctx = pooling, n_ctx
        self.width = bindings.width_out(weights.handle)  # dimension of an embedding
        self._n_batch = int(params.n_batch)
        self.n_tokens = self.n_passes = 0  # number of tokens and passes evaluated so far
        cache = Cache(context, recurrent=weights.is_recurrent, window=0)
        self._passes = Passes(context, [cache], self, n_batch=self._n_batch, governor=target.governor)
        self._sequence = CacheSequence(self._passes, cache, n_ctx=n_ctx)
        target.users = (*target.users, self._passes.close)

    def reading(
        self, tokens: Sequence[int], max_chunk: Callable[[], int]
    ) -> Generator[None, None, NDArray[np.float32]]:
        """Compute the embeddings of an input, and yield before each pass, of at most `max_chunk()` tokens.

        Only one input may be in progress at a time. The result is not normalised; its shape is (1, width), or (tokens,
        width) with pooling "none".
        """
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"a text to embed has 1 to {self.n_ctx} tokens, not {len(tokens)}")
        # Only the rows from `first` to `end` are needed, and later tokens are not evaluated.
        first = len(tokens) - 1 if self.pooling == "last" else 0
        end = 1 if self.pooling == "cls" else len(tokens)
        self._sequence.clear()
        done, rows, total = 0, list[NDArray[np.float32]](), np.zeros(self.width)
        while done < end:
            yield
            is_needed = done >= first
            limit, stop = (MAX_EVALUATE, end) if is_needed else (self._n_batch, first)
            size = max(1, min(max_chunk(), limit, stop - done))
            llama.llama_set_embeddings(self._context, is_needed)
            append(self._passes, [(self._sequence, tokens[done : done + size], size if is_needed else 0)])
            done += size
            self.n_tokens += size
            self.n_passes += 1
            if not is_needed:
                continue
            pointer = llama.llama_get_embeddings(self._context)
            if not pointer:
                raise TargetError("llama.cpp returned no embeddings")
            embeddings = rows_at(pointer, size, self.width)
            if self.pooling == "none":
                rows.append(embeddings.copy())
            else:
                total += embeddings.sum(axis=0, dtype=np.float64)
        if self.pooling == "none":
            return np.concatenate(rows)
        return (total / (end - first)).astype(np.float32)[np.newaxis]
