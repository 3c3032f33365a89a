"""`HeadPasses`: one `llama_decode` of the NextN layer over tokens of one text or of several.

llama.cpp runs the layer (see `ngramspec.llama.head`) in a context of a kind of its own, whose KV cache holds that layer
alone. Each text has a sequence in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as llama
import numpy as np

from ngramspec.backend import Logits
from ngramspec.errors import ModelError, TargetError
from ngramspec.llama import bindings
from ngramspec.llama.adapters import Adapter, open_context
from ngramspec.llama.hidden_states import States, rows_at


class HeadFeed(NamedTuple):
    """What a pass appends to one sequence."""

    sequence: int  # its number
    first: int  # number of the first token in its text
    tokens: Sequence[int]  # at least one
    states: States  # that go with them, one for each
    # whether there are logits after all of them, or after none. Where only some are asked for, most of llama.cpp's
    # graphs hand out the layer's output after other tokens (llama-cpp-python 0.3.36).
    speaks: bool


HeadRows = tuple[Logits, States]
"""What came of a feed: the logits after its tokens, and the layer's output after the last of them, a row; where it does
not speak, none of either."""


class HeadPasses:
    """The passes of a model's NextN layer, in a context of its own.

    Args:
        model: llama.cpp's handle.
        params: of the context, for as many sequences as there are texts.
        adapters: the model's.

    Raises:
        ModelError: llama.cpp makes no such context, for lack of memory.
    """

    def __init__(self, model: Any, params: Any, adapters: Sequence[Adapter]) -> None:
        params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
        params.n_rs_seq = 0
        self._ctx = open_context(model, params, adapters)
        if not self._ctx:
            raise ModelError(
                "there is no memory for the context of the model's NextN layer; try a smaller -c/--ctx-size"
            )
        self._ext: Any = bindings.head_functions(llama)
        self._ext.llama_set_embeddings_nextn(self._ctx, True, True)
        self._memory = llama.llama_get_memory(self._ctx)
        self.n_vocab: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))  # length of a row of logits
        self.n_batch: int = params.n_batch  # most tokens of a pass
        self.width: int = llama.llama_model_n_embd_out(model)  # numbers in a hidden state
        self._batch = llama.llama_batch_init(self.n_batch, self.width, 1)
        self._ids = (llama.llama_token * self.n_batch)()
        # llama.cpp allocates embeddings or token ids; a head takes both.
        self._batch.token = ctypes.cast(self._ids, type(self._batch.token))
        for i in range(self.n_batch):
            self._batch.n_seq_id[i] = 1

    def decode(self, feeds: Sequence[HeadFeed]) -> list[HeadRows]:
        """One pass; what came of each feed. Its logits are views, valid until the next pass.

        Args:
            feeds: all of them speak, or none does; at most `n_batch` tokens, and MAX_EVALUATE rows, in all.

        Raises:
            TargetError: llama.cpp could not.
        """
        self.check()
        batch, ends = self._batch, []
        end = 0
        for sequence, first, tokens, states, speaks in feeds:
            start, end = end, end + len(tokens)
            self._ids[start:end] = tokens
            for i in range(start, end):
                batch.pos[i], batch.logits[i], batch.seq_id[i][0] = first + i - start, speaks, sequence
            row = ctypes.addressof(batch.embd.contents) + start * self.width * states.itemsize
            ctypes.memmove(row, states.ctypes.data, states.nbytes)
            ends.append(end)
        batch.n_tokens = end
        status = llama.llama_decode(self._ctx, batch)
        if status != 0:
            at = ", ".join(f"{len(feed.tokens)} tokens at position {feed.first}" for feed in feeds)
            raise TargetError(f"llama_decode returned {status} for {at} of a head")
        if not feeds[0].speaks:
            none = np.empty((0, self.n_vocab), np.float32)
            return [(none, np.empty((0, self.width), np.float32))] * len(feeds)
        logits = rows_at(llama.llama_get_logits_ith(self._ctx, 0), end, self.n_vocab)
        found = []
        for feed, end in zip(feeds, ends, strict=True):
            own = rows_at(self._ext.llama_get_embeddings_nextn_ith(self._ctx, end - 1), 1, self.width)
            found.append((logits[end - len(feed.tokens) : end], own.copy()))
        return found

    def cut(self, sequence: int, length: int) -> None:
        """Let the cache of a sequence hold the first `length` tokens of its text at most."""
        self.check()
        if not llama.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise TargetError("llama.cpp could not take tokens back from a head's cache")

    def check(self) -> None:
        if not self._ctx:
            raise ValueError("the context is closed")

    def close(self) -> None:
        if self._ctx:
            self._batch.token = type(self._batch.token)()
            llama.llama_batch_free(self._batch)
            llama.llama_free(self._ctx)
            self._ctx = None
