"""`Head`: the layer of a model that predicts the token after the next one (NextN, also called MTP), as a model.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains such a layer. Its inputs are the model's hidden state after token i
and the embedding of token i + 1. With the model's output matrix it predicts token i + 2. A second prediction uses the
layer's own output in place of a hidden state that the model has not computed yet. So a token costs one layer and the
output matrix. A head is a `Model` like any other: `evaluate` appends tokens and returns the logits after them.

llama.cpp runs the layer in a context of a special type, whose KV cache contains only that layer. Each of the target's
sequences has a sequence in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from ngramspec.backend import Logits, ModelBase, Part, Progress, SequenceModel
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.data import ModelError, TargetError
from ngramspec.llama import bindings
from ngramspec.llama.passes import MAX_EVALUATE, rows_at
from ngramspec.llama.weights import Adapter, Weights, set_adapters
from ngramspec.models.check import read_headers
from ngramspec.tokens import common_prefix

States = NDArray[np.float32]  # hidden states, shape (tokens, width of the model)

ARCHITECTURES = frozenset({"deepseek2", "deepseek32", "glm4moe", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"})
"""Values of general.architecture whose heads are tested. llama.cpp has graphs for more, and some of them end the
process if a tensor has an unexpected shape."""


def head_missing(path: Path) -> str:
    """Return why the head of a model cannot be run with this build of llama.cpp, in a few words; "" if it can."""
    if bindings.head_functions() is None:
        return "this build of llama-cpp-python does not support NextN layers"
    if not (headers := read_headers(path)):
        return ""  # the loader reports the error
    # Each NextN layer has this tensor once.
    count = sum(name.endswith(".nextn.eh_proj.weight") for header in headers for name in header.shapes)
    architecture = headers[0].metadata.get("general.architecture")
    if not count:
        return "its file contains no NextN layer"
    if architecture not in ARCHITECTURES:
        return f"NextN layers of {architecture} are not supported"
    if count > 1:
        return f"it has {count} NextN layers, and only models with one are supported"
    return ""


class HeadFeed(NamedTuple):
    sequence: int  # number of the sequence
    first: int  # position of the first token in the sequence
    tokens: Sequence[int]  # tokens to append, at least one
    states: States  # one hidden state for each token
    # The pass returns logits after all tokens of a feed that speaks, and otherwise after none. If only some are
    # requested, most of llama.cpp's graphs return the layer's output after other tokens (llama-cpp-python 0.3.36).
    speaks: bool


HeadRows = tuple[Logits, States]
"""Result of a feed that speaks: the logits after its tokens, and one row with the layer's output after the last one."""


class Head(ModelBase):
    """The head of a loaded model for one sequence, in the context that all heads share.

    Tokens that the target has evaluated are evaluated with the target's hidden states. Later tokens are evaluated one
    by one with the head's own output, and again when the target's states for them are available: `owed` counts them. If
    older states are missing, the cache begins after them.
    """

    max_batch = MAX_EVALUATE

    def __init__(self, heads: Heads, states: HiddenStates, number: int) -> None:
        self._heads, self._states = heads, states
        self.number = number
        self.n_vocab, self.n_ctx = heads.n_vocab, heads.n_ctx
        self.tokens: list[int] = []
        self._first = 0  # position of the first token in the cache
        self._true = 0  # position of the first token that must be evaluated again
        self._own: list[States] = []  # outputs of the head after its last tokens, as far as they are known

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        """Prefill without the tokens whose target states are unknown, except the last token."""
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"prefill needs 1 to {self.n_ctx} tokens, got {len(tokens)}")
        self.rollback(0 if aligned else min(common_prefix(self.tokens, tokens), len(tokens) - 1))
        row: Logits = self._together(tokens[len(self.tokens) :], 1)[0]
        if progress is not None:
            progress(len(tokens), len(tokens))
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        """Append tokens; each token without a hidden state of the target takes a separate pass."""
        if not 0 < len(tokens) <= MAX_EVALUATE:
            raise ValueError(f"evaluate takes 1 to {MAX_EVALUATE} tokens, got {len(tokens)}")
        if len(self.tokens) + len(tokens) > self.n_ctx + MAX_EVALUATE:
            raise ValueError(f"{len(self.tokens) + len(tokens)} tokens do not fit in a context of {self.n_ctx}")
        return self._together(tokens, len(tokens))

    def _together(self, tokens: Sequence[int], rows: int) -> Logits:
        return self._heads.evaluate_together([Part(cast(SequenceModel, self), tokens, rows)])[0]

    def rollback(self, length: int) -> None:
        back = len(self.tokens) - length
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot roll back to {length}: the cache holds {len(self.tokens)} tokens")
        if back:
            del self.tokens[length:], self._own[max(0, len(self._own) - back) :]
            self._first, self._true = min(self._first, length), min(self._true, length)
            self._heads.cut(self.number, length)

    def clear(self) -> None:
        self._empty(0)
        self.tokens.clear()

    @property
    def owed(self) -> int:  # type: ignore[override]
        """Number of tokens that are evaluated again as soon as the target's states for them are available."""
        return len(self.tokens) - max(self._true, self._first)

    def appending(self, tokens: Sequence[int], rows: int) -> Generator[HeadFeed, HeadRows, Logits]:
        """Append tokens, yield the input of each pass for its result, and return the logits after the last `rows`."""
        self._heads.check()
        start = len(self.tokens)
        self.tokens += tokens
        end, states = len(self.tokens), self._states
        first_row = end - rows  # position of the first token whose logits are requested
        n_known = states.count_known(self.tokens)
        # Tokens from this position on follow states that are not available yet. If all known states are newer, the
        # missing ones will never be available.
        states_end = end if end <= states.first else min(end, n_known + 1) if n_known else 0
        known_logits = np.empty((0, self.n_vocab), np.float32)
        if max(states_end, start) < first_row:
            # The head's own output is useless for that many tokens.
            self._empty(first_row)
            states_end = first_row
        elif states_end > self._true:
            first = states.first + 1 if states.first else 0
            if first <= self._true:
                first = self._true
                self._heads.cut(self.number, first)
            else:
                first = min(first, first_row)
                self._empty(first)
            self._own.clear()
            self._true = states_end
            silent = min(first_row, states_end - 1)
            while first < silent:
                step = min(self._heads.max_tokens, silent - first)
                yield self._feed(first, states.before(first, first + step), speaks=False)
                first += step
            known_logits, own = yield self._feed(first, states.before(first, states_end))
            self._own.append(own)
            if states_end == end:
                return known_logits
        else:
            states_end = start
        logits = np.empty((rows, self.n_vocab), np.float32)
        if states_end > first_row:
            logits[: states_end - first_row] = known_logits
        for at in range(states_end, end):
            row, own = yield self._feed(at, self._own[-1] if self._own else states.before(0, 1))
            self._own.append(own)
            if at >= first_row:
                logits[at - first_row] = row[0]
        return logits

    def _empty(self, first: int) -> None:
        """Empty the cache and let it begin at position `first`."""
        self._heads.cut(self.number, 0)
        self._own.clear()
        self._true, self._first = 0, first

    def _feed(self, first: int, states: States, *, speaks: bool = True) -> HeadFeed:
        """Return the input of a pass over the tokens from position `first` on, one for each state."""
        return HeadFeed(self.number, first, self.tokens[first : first + len(states)], states, speaks)


class HiddenStates:
    """The target's hidden states after the last tokens of a sequence, in the order of its tokens.

    llama.cpp's buffer contains only the states of the last pass. So each sequence keeps its own, at least the last
    `n_states`, which also contain information about earlier tokens. A pass returns hidden states only if they are
    `wanted`, and a pass over a prompt only if `of_prompts` is set too: it may change last bits.
    """

    def __init__(self, width: int, n_states: int = 1024) -> None:
        self._ext: Any = bindings.head_functions()
        self._width = width
        self._n_states = n_states
        self._rows = np.zeros((2 * n_states, width), np.float32)
        self._begin: int = self._rows.ctypes.data
        self._tokens: list[int] = []
        self.first = 0  # position of the first token whose state is here
        self.wanted = self.of_prompts = True

    def due_in_prompt(self, n_remaining: int) -> bool:
        """Return True if a pass over a prompt may return states, with `n_remaining` tokens of the prompt after it."""
        return self.of_prompts and n_remaining < self._n_states

    def ask(self, context: Any, wanted: bool) -> None:
        """Set whether the next passes of a context return their states."""
        self._ext.llama_set_embeddings_nextn(context, wanted, False)

    def forget(self) -> None:
        self._tokens.clear()
        self.first = 0

    def drop_from(self, start: int) -> None:
        """Drop the states from position `start` on, because a pass over these tokens returned none."""
        del self._tokens[max(0, start - self.first) :]

    def output_address(self, context: Any) -> int:
        """Return the address of the states that the last pass of a context returned, in the order of its tokens."""
        return ctypes.addressof(self._ext.llama_get_embeddings_nextn(context).contents)

    def copy_rows(self, rows: int, start: int, tokens: Sequence[int]) -> int:
        """Copy the states of new tokens from the address `rows`, and return that of the next sequence's states."""
        self.drop_from(start)
        if start != self.first + len(self._tokens):
            self._tokens.clear()
        size = len(tokens)
        n_skipped = max(0, size - self._n_states)
        if n_skipped or len(self._tokens) + size > len(self._rows):
            n_retained = 0 if n_skipped else min(len(self._tokens), self._n_states)
            self._rows[:n_retained] = self._rows[len(self._tokens) - n_retained : len(self._tokens)].copy()
            self._tokens = self._tokens[len(self._tokens) - n_retained :]
        n_old = len(self._tokens)
        self.first = start + n_skipped - n_old
        # Every pass of the target runs this code, and creating a numpy view of a pointer takes longer than the copy.
        state = self._rows.itemsize * self._width
        ctypes.memmove(self._begin + n_old * state, rows + n_skipped * state, (size - n_skipped) * state)
        self._tokens += tokens[n_skipped:]
        return rows + size * state

    def adopt(self, source: HiddenStates, length: int) -> None:
        self.first, self._tokens = source.first, source._tokens[: max(0, length - source.first)]
        self._rows[: len(self._tokens)] = source._rows[: len(self._tokens)]

    def count_known(self, text: Sequence[int]) -> int:
        """Return the number of tokens of a text with known states, including those before `first`; 0 means none."""
        same = common_prefix(self._tokens, text[self.first : self.first + len(self._tokens)])
        return self.first + same if same else 0

    def before(self, start: int, end: int) -> States:
        """Return the states after the tokens at positions from `start` - 1 to `end` - 2; unknown states are 0."""
        states = np.zeros((end - start, self._width), np.float32)
        low, high = max(start - 1, self.first), min(end - 1, self.first + len(self._tokens))
        if low < high:
            states[low - start + 1 : high - start + 1] = self._rows[low - self.first : high - self.first]
        return states


class Heads:
    """The heads of a target's sequences in one context, with the part of `SharedModel` that draft models need.

    A head does not copy tokens of another one, but evaluates them again from the target's hidden states, which are
    copied. If `pooled`, the sequences share one pool of cells, so a pass over several is one batch.
    """

    max_rows = MAX_EVALUATE
    drafts_alone = False

    def __init__(
        self,
        weights: Weights,
        params: Any,
        states: Sequence[HiddenStates],
        *,
        n_ctx: int,
        pooled: bool,
        governor: ThreadGovernor | None = None,
    ) -> None:
        params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
        params.n_rs_seq = 0
        self._ctx = weights.open_context(params)
        if not self._ctx:
            raise ModelError(
                "not enough memory for the context of the model's NextN layer; try a smaller -c/--ctx-size"
            )
        self._governor = governor
        self._ext: Any = bindings.head_functions()
        self._ext.llama_set_embeddings_nextn(self._ctx, True, True)
        self._memory = llama.llama_get_memory(self._ctx)
        self.n_vocab = weights.vocabulary.n_vocab
        self.n_ctx, self.max_tokens, self._pooled = n_ctx, int(params.n_batch), pooled
        self._width = bindings.width_out(weights.handle)  # width of a hidden state
        self._batch = llama.llama_batch_init(self.max_tokens, self._width, 1)
        self._ids = (llama.llama_token * self.max_tokens)()
        # llama.cpp allocates either embeddings or token ids, but a head needs both.
        self._batch.token = ctypes.cast(self._ids, type(self._batch.token))
        for i in range(self.max_tokens):
            self._batch.n_seq_id[i] = 1
        self.sequences = [Head(self, own, number) for number, own in enumerate(states)]

    def evaluate_together(self, parts: Sequence[Part]) -> list[Logits]:
        """Append tokens to heads in as few passes as possible; after an error, the heads are empty."""
        heads = [cast(Head, part.sequence) for part in parts]
        results: list[Logits] = [np.empty((0, 0), np.float32)] * len(parts)
        try:
            runs = [head.appending(tokens, rows) for head, (_, tokens, rows) in zip(heads, parts, strict=True)]
            feeds: dict[int, HeadFeed] = {}

            def go_on(text: int, answer: HeadRows | None) -> None:
                try:
                    feeds[text] = runs[text].send(answer)  # type: ignore[arg-type]  # None starts a generator
                except StopIteration as done:
                    results[text] = done.value

            for text in range(len(parts)):
                go_on(text, None)
            while feeds:
                group = self._next(feeds)
                answers = self.decode([feeds.pop(text) for text in group])
                for text, (logits, own) in zip(group, answers, strict=True):
                    go_on(text, (logits if len(parts) == 1 else logits.copy(), own))
        except BaseException:
            for head in heads:
                head.clear()
            raise
        return results

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel]) -> Sequence[int]:
        """Return the sizes of batches; sequences with separate caches are evaluated one after the other."""
        return [sum(lengths)] if self._pooled else list(lengths)

    def _next(self, feeds: Mapping[int, HeadFeed]) -> list[int]:
        """Return the keys of the feeds of the next pass: as many as fit, and first those that do not speak."""
        speaks = all(feed.speaks for feed in feeds.values())
        room = min(self.max_tokens, MAX_EVALUATE) if speaks else self.max_tokens
        group: list[int] = []
        for text, feed in feeds.items():
            if feed.speaks == speaks and (not group or len(feed.tokens) <= room):
                group.append(text)
                room -= len(feed.tokens)
        return group

    def decode(self, feeds: Sequence[HeadFeed]) -> list[HeadRows]:
        """Evaluate feeds, of which all speak or none, in one pass; the resulting logits are valid until the next."""
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
        if self._governor is not None:
            threads = self._governor.begin_call(end)
            llama.llama_set_n_threads(self._ctx, threads, threads)
        status = llama.llama_decode(self._ctx, batch)
        if status != 0:
            at = ", ".join(f"{len(feed.tokens)} tokens at position {feed.first}" for feed in feeds)
            raise TargetError(f"llama_decode returned {status} for {at} of a head")
        if not feeds[0].speaks:
            none = np.empty((0, self.n_vocab), np.float32)
            return [(none, np.empty((0, self._width), np.float32))] * len(feeds)
        logits = rows_at(llama.llama_get_logits_ith(self._ctx, 0), end, self.n_vocab)
        results = []
        for feed, end in zip(feeds, ends, strict=True):
            own = rows_at(self._ext.llama_get_embeddings_nextn_ith(self._ctx, end - 1), 1, self._width)
            results.append((logits[end - len(feed.tokens) : end], own.copy()))
        return results

    def cut(self, sequence: int, length: int) -> None:
        self.check()
        if not llama.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise TargetError("llama.cpp could not roll back the cache of the NextN layer")

    def check(self) -> None:
        if not self._ctx:
            raise ValueError("the context is closed")

    def set_adapters(self, adapters: Sequence[Adapter]) -> None:
        set_adapters(self._ctx, adapters)

    def close(self) -> None:
        if self._ctx:
            self._batch.token = type(self._batch.token)()
            llama.llama_batch_free(self._batch)
            llama.llama_free(self._ctx)
            self._ctx = None
