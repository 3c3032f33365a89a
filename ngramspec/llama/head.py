"""`Head`: the layer of a model that guesses the token after the next one (NextN, also called MTP), as a model.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains one: from the model's hidden state after token i and the embedding of
token i + 1 a layer of its own, with the model's output matrix, guesses token i + 2. A second guess takes the layer's
own output in place of a hidden state that nobody computed yet. So its cost is that of one layer and the output matrix
per token, and it is a `Model` like any other: `evaluate` appends tokens and gives the logits after them.

llama.cpp runs it in a context of a kind of its own. Its KV cache holds one layer, of which tokens can be cut off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

from ngramspec.backend import Logits, Progress
from ngramspec.errors import ModelError, TargetError
from ngramspec.llama import bindings
from ngramspec.llama.hidden_states import HiddenStates, States, rows_at
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.models.check import has_gguf_magic, parts_of
from ngramspec.models.gguf import read_header
from ngramspec.tokens import common_prefix

ARCHITECTURES = frozenset({"deepseek2", "deepseek32", "glm4moe", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"})
"""Values of general.architecture whose heads are tested here. llama.cpp has graphs for more, and ends the process in
some of them where a tensor is not as it expects."""


def head_missing(path: Path) -> str:
    """Why the head of a model cannot be run with this build of llama.cpp, in a few words; "" if it can."""
    if bindings.head_functions(llama) is None:
        return "this build of llama-cpp-python cannot run NextN layers"
    if not has_gguf_magic(path):
        return ""  # the loader says what it is
    headers = [read_header(part) for part in parts_of(path) if has_gguf_magic(part)]
    count = sum(header.heads for header in headers)
    architecture = headers[0].metadata.get("general.architecture")
    if not count:
        return "its file holds no NextN layer"
    if architecture not in ARCHITECTURES:
        return f"NextN layers of {architecture} are not supported"
    if count > 1:
        return f"it has {count} NextN layers, and only models with one are supported"
    return ""


class Head:
    """The head of a loaded model, in a context of its own.

    The target's hidden states go with the tokens that the target has evaluated. Tokens behind those are evaluated with
    the head's own output, one by one, and once more when their states are there: `owed` counts them. Where older
    states are missing, the cache begins behind them.

    Args:
        model: llama.cpp's handle.
        params: of the context.
        states: the target's.
        n_ctx: most tokens that may stay in the cache.

    Attributes:
        tokens, n_vocab, n_ctx, max_batch, can_rollback, replays, exact_rollback, fingerprint: see
            `ngramspec.backend.Model`.

    Raises:
        ModelError: llama.cpp makes no such context, for lack of memory.
    """

    max_batch = MAX_EVALUATE
    can_rollback, replays, exact_rollback, fingerprint = True, False, True, ""

    def __init__(self, model: Any, params: Any, states: HiddenStates, *, n_ctx: int) -> None:
        params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
        params.n_seq_max, params.n_rs_seq = 1, 0
        self._states = states
        self._ctx = llama.llama_init_from_model(model, params)
        if not self._ctx:
            raise ModelError(
                "there is no memory for the context of the model's NextN layer; try a smaller -c/--ctx-size"
            )
        self._ext: Any = bindings.head_functions(llama)
        self._ext.llama_set_embeddings_nextn(self._ctx, True, True)
        self._memory = llama.llama_get_memory(self._ctx)
        self.n_vocab: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self.n_ctx = n_ctx
        self.tokens: list[int] = []
        self._first = 0  # number of the first token that the cache holds
        self._true = 0  # number of the first token that is to be evaluated again
        self._known = 0  # tokens of which the target's states were there when that was asked last
        self._own: list[States] = []  # the head's output after its last tokens, as far as it is known
        self._width: int = llama.llama_model_n_embd_out(model)
        self._n_batch: int = params.n_batch
        self._batch = llama.llama_batch_init(self._n_batch, self._width, 1)
        self._ids = (llama.llama_token * self._n_batch)()
        # llama.cpp allocates embeddings or token ids; a head takes both.
        self._batch.token = ctypes.cast(self._ids, type(self._batch.token))
        for i in range(self._n_batch):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = 0

    # ------------------------------------------------------------------ the calls of a model

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        """See `ngramspec.backend.Model`; what is not known of the target's states is left out, but the last token."""
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"prefill needs 1 to {self.n_ctx} tokens, got {len(tokens)}")
        self.rollback(0 if aligned else min(common_prefix(self.tokens, tokens), len(tokens) - 1))
        row: Logits = self._append(tokens[len(self.tokens) :], 1)[0]
        if progress is not None:
            progress(len(tokens), len(tokens))
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        """See `ngramspec.backend.Model`; tokens without a hidden state of the target's take a pass each."""
        if not 0 < len(tokens) <= MAX_EVALUATE:
            raise ValueError(f"evaluate takes 1 to {MAX_EVALUATE} tokens, got {len(tokens)}")
        if len(self.tokens) + len(tokens) > self.n_ctx + MAX_EVALUATE:
            raise ValueError(f"{len(self.tokens) + len(tokens)} tokens do not fit in a context of {self.n_ctx}")
        return self._append(tokens, len(tokens))

    def rollback(self, length: int) -> None:
        """See `ngramspec.backend.Model`."""
        back = len(self.tokens) - length
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot roll back to {length}: the cache holds {len(self.tokens)} tokens")
        if back:
            del self.tokens[length:], self._own[max(0, len(self._own) - back) :]
            self._first, self._true = min(self._first, length), min(self._true, length)
            self._known = min(self._known, length)
            self._cut(length)

    def clear(self) -> None:
        """Forget everything in the cache."""
        self._check_open()
        self._empty(0)
        self.tokens.clear()
        self._known = 0

    @property
    def owed(self) -> int:
        """How many tokens are evaluated again as soon as the target's states for them are there."""
        return len(self.tokens) - max(self._true, self._first)

    def checkpoint(self) -> None:
        """Nothing: the cache can be cut anywhere."""

    def close(self) -> None:
        """Free the context; nothing can be evaluated afterwards."""
        if self._ctx:
            self._batch.token = type(self._batch.token)()
            llama.llama_batch_free(self._batch)
            llama.llama_free(self._ctx)
            self._ctx = None

    # ------------------------------------------------------------------ evaluating

    def _check_open(self) -> None:
        if not self._ctx:
            raise ValueError("the context is closed")

    def _append(self, tokens: Sequence[int], rows: int) -> Logits:
        """Append tokens; the logits after the last `rows` of them."""
        self._check_open()
        start = len(self.tokens)
        self.tokens += tokens
        try:
            return self._evaluate(start, rows)
        except BaseException:
            self.clear()
            raise

    def _evaluate(self, start: int, rows: int) -> Logits:
        """Evaluate the tokens from number `start` on, and what is owed; the logits after the last `rows` of them."""
        end, states = len(self.tokens), self._states
        read = end - rows  # the first whose logits are wanted
        known = self._known = states.known(self.tokens, self._known)
        # Tokens from this one on follow states that are yet to come. Where all that is known is newer, none will come.
        told = end if end <= states.first else min(end, known + 1) if known else 0
        seen = np.empty((0, self.n_vocab), np.float32)
        if max(told, start) < read:
            # What the head would make of so many by itself is of no use.
            self._empty(read)
            told = read
        elif told > self._true:
            first = states.first + 1 if states.first else 0
            if first <= self._true:
                first = self._true
                self._cut(first)
            else:
                first = min(first, read)
                self._empty(first)
            self._own.clear()
            self._true = told
            silent = min(read, told - 1)
            while first < silent:
                step = min(self._n_batch, silent - first)
                self._decode(first, states.before(first, first + step), speaks=False)
                first += step
            seen = self._decode(first, states.before(first, told))
            if told == end:
                return seen
        else:
            told = start
        found = np.empty((rows, self.n_vocab), np.float32)
        if told > read:
            found[: told - read] = seen
        for at in range(told, end):
            row = self._decode(at, self._own[-1] if self._own else np.zeros((1, self._width), np.float32))
            if at >= read:
                found[at - read] = row[0]
        return found

    def _empty(self, first: int) -> None:
        """Let the cache hold nothing, and begin at token number `first`."""
        llama.llama_memory_clear(self._memory, False)
        self._own.clear()
        self._true, self._first = 0, first

    def _cut(self, length: int) -> None:
        """Let the cache hold the first `length` tokens at most."""
        self._check_open()
        if not llama.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise TargetError("llama.cpp could not take tokens back from a head's cache")

    def _decode(self, first: int, states: States, *, speaks: bool = True) -> Logits:
        """One pass over tokens from number `first` on, one for each state.

        Args:
            first, states: as above.
            speaks: whether there are logits after all of the tokens, or after none. Where only some are asked for, most
                of llama.cpp's graphs hand out the layer's output after other tokens (llama-cpp-python 0.3.36).
        """
        size = len(states)
        batch = self._batch
        batch.n_tokens = size
        self._ids[:size] = self.tokens[first : first + size]
        for i in range(size):
            batch.pos[i], batch.logits[i] = first + i, speaks
        ctypes.memmove(batch.embd, states.ctypes.data, states.nbytes)
        status = llama.llama_decode(self._ctx, batch)
        if status != 0:
            raise TargetError(f"llama_decode returned {status} for {size} tokens of a head at position {first}")
        if not speaks:
            return np.empty((0, self.n_vocab), np.float32)
        own = self._ext.llama_get_embeddings_nextn_ith(self._ctx, size - 1)
        self._own.append(rows_at(own, 1, self._width).copy())
        return rows_at(llama.llama_get_logits_ith(self._ctx, 0), size, self.n_vocab)
