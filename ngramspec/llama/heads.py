"""`Heads`: a head for each text of a target, in one context, and the passes over them.

    heads = Heads(model, params, [states, other], n_ctx=4096, pooled=False, adapters=())
    heads.sequences[1].prefill(text)            # a text alone
    heads.evaluate_together([Part(heads.sequences[0], [5], 1), Part(heads.sequences[1], [7], 1)])

llama.cpp runs the layer (see `ngramspec.llama.head`) in a context of a kind of its own, whose KV cache holds that layer
alone. Each text has a sequence in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, cast

import llama_cpp.llama_cpp as llama
import numpy as np

from ngramspec.backend import Logits
from ngramspec.errors import ModelError, TargetError
from ngramspec.llama import bindings
from ngramspec.llama.adapters import Adapter, open_context
from ngramspec.llama.head import Head, HeadFeed, HeadRows
from ngramspec.llama.hidden_states import HiddenStates, rows_at
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.shared_model import Part, SequenceModel


class Heads:
    """The heads of a loaded model's texts, in one context: a `SharedModel` as far as a draft model has to be one.

    Texts are evaluated and taken back, not copied: a head reads a text anew by the target's hidden states, which are.

    Args:
        model: llama.cpp's handle.
        params: of the context, for as many sequences as there are texts.
        states: the target's, for each of its texts.
        n_ctx: most tokens of a text that may stay in the cache.
        pooled: whether the context's sequences share one pool of cells, so that a pass over several is one batch.
        adapters: the model's.

    Raises:
        ModelError: llama.cpp makes no such context, for lack of memory.
    """

    max_rows = MAX_EVALUATE
    drafts_alone = False

    def __init__(
        self,
        model: Any,
        params: Any,
        states: Sequence[HiddenStates],
        *,
        n_ctx: int,
        pooled: bool,
        adapters: Sequence[Adapter],
    ) -> None:
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
        self.n_ctx, self.max_tokens, self._pooled = n_ctx, int(params.n_batch), pooled
        self._width: int = llama.llama_model_n_embd_out(model)  # numbers in a hidden state
        self._batch = llama.llama_batch_init(self.max_tokens, self._width, 1)
        self._ids = (llama.llama_token * self.max_tokens)()
        # llama.cpp allocates embeddings or token ids; a head takes both.
        self._batch.token = ctypes.cast(self._ids, type(self._batch.token))
        for i in range(self.max_tokens):
            self._batch.n_seq_id[i] = 1
        self.sequences = [Head(self, own, number) for number, own in enumerate(states)]

    def evaluate_together(self, parts: Sequence[Part]) -> list[Logits]:
        """What a head owes may take passes before."""
        return self.evaluate([(cast(Head, sequence), tokens, rows) for sequence, tokens, rows in parts])

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel]) -> Sequence[int]:
        """With caches of their own texts go one after the other."""
        return [sum(lengths)] if self._pooled else list(lengths)

    def evaluate(self, parts: Sequence[tuple[Head, Sequence[int], int]]) -> list[Logits]:
        """Append tokens to heads of one model, in as few passes as can be.

        Args:
            parts: a head, its tokens, and for how many of the last of them logits are wanted.

        Returns:
            The logits of each; those of a single head may be views, valid until the next pass.

        Raises:
            TargetError: llama.cpp could not evaluate them; the heads are then empty.
        """
        found: list[Logits] = [np.empty((0, 0), np.float32)] * len(parts)
        try:
            runs = [head.appending(tokens, rows) for head, tokens, rows in parts]
            feeds: dict[int, HeadFeed] = {}

            def go_on(text: int, answer: HeadRows | None) -> None:
                try:
                    feeds[text] = runs[text].send(answer)  # type: ignore[arg-type]  # None starts a generator
                except StopIteration as done:
                    found[text] = done.value

            for text in range(len(parts)):
                go_on(text, None)
            while feeds:
                group = self._next(feeds)
                answers = self.decode([feeds.pop(text) for text in group])
                for text, (logits, own) in zip(group, answers, strict=True):
                    go_on(text, (logits if len(parts) == 1 else logits.copy(), own))
        except BaseException:
            for head, _, _ in parts:
                head.clear()
            raise
        return found

    def _next(self, feeds: Mapping[int, HeadFeed]) -> list[int]:
        """The texts of the next pass: of those that do not speak, if there are any, as many as it has room for."""
        speaks = all(feed.speaks for feed in feeds.values())
        room = min(self.max_tokens, MAX_EVALUATE) if speaks else self.max_tokens
        group: list[int] = []
        for text, feed in feeds.items():
            if feed.speaks == speaks and (not group or len(feed.tokens) <= room):
                group.append(text)
                room -= len(feed.tokens)
        return group

    def decode(self, feeds: Sequence[HeadFeed]) -> list[HeadRows]:
        """One pass; what came of each feed. Its logits are views, valid until the next pass.

        Args:
            feeds: all of them speak, or none does; at most `max_tokens` tokens, and MAX_EVALUATE rows, in all.

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
            row = ctypes.addressof(batch.embd.contents) + start * self._width * states.itemsize
            ctypes.memmove(row, states.ctypes.data, states.nbytes)
            ends.append(end)
        batch.n_tokens = end
        status = llama.llama_decode(self._ctx, batch)
        if status != 0:
            at = ", ".join(f"{len(feed.tokens)} tokens at position {feed.first}" for feed in feeds)
            raise TargetError(f"llama_decode returned {status} for {at} of a head")
        if not feeds[0].speaks:
            none = np.empty((0, self.n_vocab), np.float32)
            return [(none, np.empty((0, self._width), np.float32))] * len(feeds)
        logits = rows_at(llama.llama_get_logits_ith(self._ctx, 0), end, self.n_vocab)
        found = []
        for feed, end in zip(feeds, ends, strict=True):
            own = rows_at(self._ext.llama_get_embeddings_nextn_ith(self._ctx, end - 1), 1, self._width)
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
