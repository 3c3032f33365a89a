"""`Head`: the layer of a model that guesses the token after the next one (NextN, also called MTP), as a model.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains one: from the model's hidden state after token i and the embedding of
token i + 1 a layer of its own, with the model's output matrix, guesses token i + 2. A second guess takes the layer's
own output in place of a hidden state that nobody computed yet. So its cost is that of one layer and the output matrix
per token, and it is a `Model` like any other: `evaluate` appends tokens and gives the logits after them.

llama.cpp runs the layer in a context of a kind of its own, whose KV cache holds that layer alone. Each text has a
sequence in it:

    heads = Heads(model, params, [states, other], n_ctx=4096, pooled=False, adapters=())
    heads.sequences[1].prefill(text)            # a text alone
    heads.evaluate_together([Part(heads.sequences[0], [5], 1), Part(heads.sequences[1], [7], 1)])
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import llama_cpp.llama_cpp as llama
import numpy as np

from ngramspec.backend import EvaluatesAtOnce, Logits, Progress
from ngramspec.cpu.thread_governor import Conditions, ThreadGovernor
from ngramspec.errors import ModelError, TargetError
from ngramspec.llama import bindings
from ngramspec.llama.hidden_states import HiddenStates, States, rows_at
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.threads import GovernedContext
from ngramspec.llama.weights import Adapter, open_context, set_adapters
from ngramspec.shared_model import Part, SequenceModel
from ngramspec.tokens import common_prefix


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
"""What came of a feed that speaks: the logits after its tokens, and the layer's output after the last one, a row."""


class Head(EvaluatesAtOnce):
    """The head of a loaded model, for one text, in a sequence of the context that all heads share.

    The target's hidden states go with the tokens that the target has evaluated. Tokens behind those are evaluated with
    the head's own output, one by one, and once more when their states are there: `owed` counts them. Where older
    states are missing, the cache begins behind them.
    """

    max_batch = MAX_EVALUATE
    can_rollback, replays, exact_rollback, fingerprint = True, False, True, ""

    def __init__(self, heads: Heads, states: HiddenStates, number: int) -> None:
        self._heads, self._states = heads, states
        self.number = number
        self.n_vocab, self.n_ctx = heads.n_vocab, heads.n_ctx
        self.tokens: list[int] = []
        self._first = 0  # number of the first token that the cache holds
        self._true = 0  # number of the first token that is to be evaluated again
        self._own: list[States] = []  # the head's output after its last tokens, as far as it is known

    # ------------------------------------------------------------------ as of `ngramspec.backend.Model`

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        """What is not known of the target's states is left out, but the last token."""
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"prefill needs 1 to {self.n_ctx} tokens, got {len(tokens)}")
        self.rollback(0 if aligned else min(common_prefix(self.tokens, tokens), len(tokens) - 1))
        row: Logits = self._together(tokens[len(self.tokens) :], 1)[0]
        if progress is not None:
            progress(len(tokens), len(tokens))
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        """Tokens without a hidden state of the target's take a pass each."""
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
        self._heads.check()
        self._empty(0)
        self.tokens.clear()

    @property
    def owed(self) -> int:
        """How many tokens are evaluated again as soon as the target's states for them are there."""
        return len(self.tokens) - max(self._true, self._first)

    @property
    def conditions(self) -> Conditions:
        """Conditions that the time of a pass currently depends on."""
        return self._heads.conditions

    def checkpoint(self) -> None:
        """Nothing: the cache can be cut anywhere."""

    # ------------------------------------------------------------------ evaluating

    def appending(self, tokens: Sequence[int], rows: int) -> Generator[HeadFeed, HeadRows, Logits]:
        """Append tokens, and evaluate them and what is owed pass by pass; the logits after the last `rows` of them."""
        self._heads.check()
        start = len(self.tokens)
        self.tokens += tokens
        end, states = len(self.tokens), self._states
        read = end - rows  # the first whose logits are wanted
        known = states.known(self.tokens)
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
                self._heads.cut(self.number, first)
            else:
                first = min(first, read)
                self._empty(first)
            self._own.clear()
            self._true = told
            silent = min(read, told - 1)
            while first < silent:
                step = min(self._heads.max_tokens, silent - first)
                yield self._feed(first, states.before(first, first + step), speaks=False)
                first += step
            seen, own = yield self._feed(first, states.before(first, told))
            self._own.append(own)
            if told == end:
                return seen
        else:
            told = start
        found = np.empty((rows, self.n_vocab), np.float32)
        if told > read:
            found[: told - read] = seen
        for at in range(told, end):
            row, own = yield self._feed(at, self._own[-1] if self._own else states.before(0, 1))
            self._own.append(own)
            if at >= read:
                found[at - read] = row[0]
        return found

    def _empty(self, first: int) -> None:
        """Let the cache hold nothing, and begin at token number `first`."""
        self._heads.cut(self.number, 0)
        self._own.clear()
        self._true, self._first = 0, first

    def _feed(self, first: int, states: States, *, speaks: bool = True) -> HeadFeed:
        """A pass over tokens from number `first` on, one for each state."""
        return HeadFeed(self.number, first, self.tokens[first : first + len(states)], states, speaks)


class Heads:
    """The heads of a loaded model's texts, in one context: a `SharedModel` as far as a draft model has to be one.

    Texts are not copied: a head reads one anew by the target's hidden states, which are.

    Args:
        params: of the context, for as many sequences as there are texts.
        states: the target's, for each of its texts.
        n_ctx: most tokens of a text that may stay in the cache.
        pooled: whether the context's sequences share one pool of cells, so that a pass over several is one batch.
        governor: Chooses the number of threads.

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
        governor: ThreadGovernor | None = None,
    ) -> None:
        params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
        params.n_rs_seq = 0
        self._ctx = open_context(model, params, adapters)
        if not self._ctx:
            raise ModelError(
                "not enough memory for the context of the model's NextN layer; try a smaller -c/--ctx-size"
            )
        self._governor, self._calls = governor, GovernedContext(self._ctx, governor)
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
        """Append tokens to heads, in as few passes as can be; what a head owes may take passes before.

        Returns:
            The logits of each; those of a single head may be views, valid until the next pass.

        Raises:
            TargetError: llama.cpp could not evaluate them; the heads are then empty.
        """
        heads = [cast(Head, part.sequence) for part in parts]
        found: list[Logits] = [np.empty((0, 0), np.float32)] * len(parts)
        try:
            runs = [head.appending(tokens, rows) for head, (_, tokens, rows) in zip(heads, parts, strict=True)]
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
            for head in heads:
                head.clear()
            raise
        return found

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel]) -> Sequence[int]:
        """With caches of their own texts go one after the other."""
        return [sum(lengths)] if self._pooled else list(lengths)

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

        All feeds speak, or none does; they have at most `max_tokens` tokens, and MAX_EVALUATE rows, in all.
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
        status = self._calls.decode(batch)
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
            raise TargetError("llama.cpp could not roll back the cache of the NextN layer")

    @property
    def conditions(self) -> Conditions:
        """Conditions that the time of a pass currently depends on."""
        return Conditions() if self._governor is None else self._governor.conditions

    def check(self) -> None:
        if not self._ctx:
            raise ValueError("the context is closed")

    def set_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Apply adapters to the following passes."""
        set_adapters(self._ctx, adapters)

    def close(self) -> None:
        if self._ctx:
            self._batch.token = type(self._batch.token)()
            llama.llama_batch_free(self._batch)
            llama.llama_free(self._ctx)
            self._ctx = None
