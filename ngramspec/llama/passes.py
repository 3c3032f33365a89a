"""`Passes`: one `llama_decode` over tokens of one sequence or of several, and the logits after them.

After a failed pass, the caches of the context contain only what is provably right.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from ngramspec import leaves
from ngramspec.backend import Logits
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.data import TargetError
from ngramspec.llama.cache import Cache
from ngramspec.model_settings import MAX_DRAFT

MAX_EVALUATE = MAX_DRAFT + 1  # maximum number of logits rows in a pass, for which the buffer is reserved


class UsedAtOnceError(RuntimeError):
    def __init__(self) -> None:
        super().__init__("this model is used from two threads at once; use a lock, or load one model per thread")


Feed = tuple[Cache, Sequence[int], int]
"""Input of a pass for one sequence: its cache, at least one token, and the number of the last ones that need logits."""

StateFeed = tuple["leaves.HiddenStates", int, Sequence[int]]
"""Hidden states of a sequence, and the start and the tokens of what the pass appends to it."""


class Passes:
    """The passes of an open context; `close` frees the context, and `release` does not."""

    max_rows = MAX_EVALUATE

    def __init__(
        self,
        context: Any,
        caches: Sequence[Cache],  # of all sequences that will be fed, by number
        owner: object,  # owner of the model; rows of logits keep it alive
        *,
        n_batch: int,  # maximum number of tokens in a pass
        n_seq: int = 1,  # maximum number of sequences that a token of a pass belongs to
        governor: ThreadGovernor | None = None,  # `None` leaves the number of threads of the context unchanged
        returns_early: bool = False,  # whether `llama_decode` returns before the work is done, as on a GPU
    ) -> None:
        self._context = context
        self.memory = llama.llama_get_memory(context)
        self._caches = caches
        # The owner refers to the passes, and a reference cycle would keep models in memory after their last use.
        self._owner = weakref.ref(owner)
        self.n_batch = n_batch
        self._threads = 0  # number of threads that was set last
        self.governor, self.returns_early = governor, returns_early
        vocab = llama.llama_model_get_vocab(llama.llama_get_model(context))
        self.n_vocab: int = llama.llama_vocab_n_tokens(vocab)  # length of a row of logits
        self.busy = False  # whether a pass is running
        self._rows = 0  # number of rows that the last pass requested
        self._asks = False  # whether the context is set to return hidden states
        self._branches = llama.llama_batch_init(MAX_EVALUATE, 0, n_seq)
        batch = self._batch = llama.llama_batch_init(n_batch, 0, 1)
        # These are ctypes arrays, because assigning a few tokens to numpy arrays takes three times as long.
        self._tokens = _array(batch.token, n_batch)
        self._positions = _array(batch.pos, n_batch)
        self._output_flags = _array(batch.logits, n_batch)
        # These are the tokens, rows and sequence of the last pass, if it was over one sequence.
        self._last_shape: tuple[int, int, int] | None = None
        self._sequences = [0] * n_batch  # sequence of each token in the batch, from the pass before
        for i in range(n_batch):
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0

    def check(self) -> None:
        """Raise ValueError if the context was closed, UsedAtOnceError if another thread runs a pass."""
        if not self._context:
            raise ValueError("the context is closed")
        if self.busy:
            raise UsedAtOnceError

    def decode(self, feeds: Sequence[Feed], *, states: bool = True) -> None:
        """Append at most `n_batch` tokens to one or more sequences, each with one feed.

        With `states`, hidden states may be requested. The last layer is then computed for all tokens, not only for
        those whose logits are requested, which may change last bits.

        After a TargetError, or a ValueError for a token that is not in the vocabulary, the caches contain what they did
        before, or less. A UsedAtOnceError does not disturb the pass of the other thread.
        """
        end = n_rows = 0
        is_alone = len(feeds) == 1
        starts: list[int] = []
        state_feeds: list[StateFeed] | None = None
        # There is no lock, because Ctrl-C after its `acquire` would leave it locked. No function is called from here to
        # the `try`, so nothing can interrupt these lines.
        if self.busy or not self._context:
            self.check()
        self.busy = True
        try:
            state_feeds = None if feeds[0][0].states is None else self._request_states(feeds, states)
            for cache, tokens, rows in feeds:
                size, length = len(tokens), cache.length
                start, end = end, end + size
                starts.append(length)
                n_rows += rows
                self._tokens[start:end] = tokens
                self._positions[start:end] = range(length, length + size)
                # A pass usually has the shape of the one before, and these fields are already right.
                shape = size, rows, cache.sequence
                if not is_alone or shape != self._last_shape:
                    self._output_flags[start:end] = [0] * (size - rows) + [1] * rows
                    if len(self._caches) > 1:
                        self._assign(start, end, cache.sequence)
                    self._last_shape = shape if is_alone else None
            self._batch.n_tokens, self._rows = end, n_rows
            status = self._run(self._batch)
            if status != 0:
                self._raise_error(status, feeds)
            for cache, tokens, _ in feeds:
                cache.length += len(tokens)
            if self._caches[0].snapshots:
                # A pass may move the states of other sequences. llama.cpp may split a pass over several sequences
                # anywhere, and only its last part writes snapshots.
                for cache in self._caches:
                    cache.usable_snapshots = 0
                feeds[0][0].usable_snapshots = min(feeds[0][0].snapshots, end - 1) if is_alone else 0
            if state_feeds is not None:
                self._take_states(state_feeds)
        except BaseException:
            self._recover(feeds, starts)
            for state, _, _ in state_feeds or ():
                state.forget()
            raise
        finally:
            self.busy = False

    def _run(self, batch: Any) -> int:
        """Call `llama_decode` with as many threads as the governor chooses, and return its status."""
        governor = self.governor
        if governor is None:
            return int(llama.llama_decode(self._context, batch))
        size: int = batch.n_tokens
        threads = governor.begin_call(size)
        if threads != self._threads:
            llama.llama_set_n_threads(self._context, threads, threads)
            self._threads = threads
        began = time.perf_counter()
        status: int = llama.llama_decode(self._context, batch)
        governor.end_call(size, threads, 0.0 if self.returns_early else time.perf_counter() - began)
        return status

    def set_threads(self, size: int) -> None:
        """Set the number of threads for a call over `size` tokens that the owner of the context makes."""
        if self.governor is not None:
            self._threads = self.governor.begin_call(size)
            llama.llama_set_n_threads(self._context, self._threads, self._threads)

    def _recover(self, feeds: Sequence[Feed], starts: Sequence[int]) -> None:
        """Remove what a failed pass may have left in the caches, whose lengths were `starts` as far as it got."""
        lengths = {cache.sequence: start for (cache, _, _), start in zip(feeds, starts, strict=False)}
        for cache in self._caches:
            # A pass may also move the recurrent states of other sequences.
            if cache.recurrent or cache.sequence in lengths:
                cache.recover(lengths.get(cache.sequence, cache.length))

    def branch(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> Logits:
        """Evaluate at most MAX_EVALUATE rows (token, position, sequences), and return the logits after each.

        After a TargetError, the caller must remove what the pass left in the memory.
        """
        if self.busy or not self._context:  # no lock, as in `decode`
            self.check()
        self.busy = True
        try:
            batch = self._branches
            batch.n_tokens = self._rows = len(rows)
            for i, (token, position, sequences) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, 1
                batch.n_seq_id[i] = len(sequences)
                for j, sequence in enumerate(sequences):
                    batch.seq_id[i][j] = sequence
            status = self._run(batch)
        finally:
            self.busy = False
        if status != 0:
            raise TargetError(f"llama_decode returned {status} for {len(rows)} tokens of several sequences")
        return self.fetch()

    def length(self, sequence: int) -> int:
        return int(llama.llama_memory_seq_pos_max(self.memory, sequence)) + 1

    def share(self, source: int, sequence: int, end: int) -> None:
        """Let a sequence share the cells of another one, from its own end up to `end`."""
        if (length := self.length(sequence)) < end:
            llama.llama_memory_seq_cp(self.memory, source, sequence, length, end)

    def cut(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens in a sequence; -1 means all sequences."""
        if not llama.llama_memory_seq_rm(self.memory, sequence, length, -1):
            raise TargetError(f"llama.cpp did not cut sequence {sequence} to {length} tokens")

    def _request_states(self, feeds: Sequence[Feed], may_ask: bool) -> list[StateFeed]:
        """Request hidden states from the next pass, if that is allowed and a head needs them."""
        state_feeds = [(cache.states, cache.length, tokens) for cache, tokens, _ in feeds if cache.states is not None]
        asks = may_ask and any(states.wanted for states, _, _ in state_feeds)
        if asks != self._asks:
            state_feeds[0][0].ask(self._context, asks)
            self._asks = asks
        return state_feeds

    def _take_states(self, state_feeds: Sequence[StateFeed]) -> None:
        rows = state_feeds[0][0].output_address(self._context) if self._asks else 0
        for states, start, tokens in state_feeds:
            if self._asks:
                rows = states.copy_rows(rows, start, tokens)
            else:
                states.drop_from(start)

    def _raise_error(self, status: int, feeds: Sequence[Feed]) -> NoReturn:
        """Raise an error with the reason why llama.cpp rejected a pass, as far as it can be determined."""
        for token in self._tokens[: self._batch.n_tokens]:
            if not 0 <= token < self.n_vocab:
                raise ValueError(f"token {token} is not in the vocabulary of {self.n_vocab} tokens")
        at = ", ".join(f"{len(tokens)} tokens at position {cache.length}" for cache, tokens, _ in feeds)
        raise TargetError(f"llama_decode returned {status} for {at}")

    def _assign(self, start: int, end: int, sequence: int) -> None:
        """Assign tokens of the batch to a sequence, unless the pass before left them assigned to it."""
        for i in range(start, end):
            if self._sequences[i] != sequence:
                self._sequences[i] = self._batch.seq_id[i][0] = sequence

    def fetch(self) -> Logits:
        """Return a view of the logits that the last pass requested, in the order of its feeds."""
        rows = self._rows
        if not rows:
            return np.empty((0, self.n_vocab), np.float32)
        first = llama.llama_get_logits_ith(self._context, -rows)
        if not first:
            raise TargetError("llama.cpp returned no logits")
        return rows_at(first, rows, self.n_vocab, self._owner())

    def wait(self) -> None:
        """Wait until the last pass is done, if `decode` returns earlier."""
        if self.returns_early:
            llama.llama_synchronize(self._context)

    def close(self) -> None:
        """Free the context; sequences in it raise ValueError from then on."""
        context = self._context
        self.release()
        if context:
            llama.llama_free(context)

    def release(self) -> None:
        """Stop using the context, but leave it open for its creator."""
        if self._context:
            llama.llama_batch_free(self._batch)
            llama.llama_batch_free(self._branches)
            self._context = None


def _array(pointer: Any, size: int) -> Any:
    """Return the memory that a pointer points to as a ctypes array."""
    return ctypes.cast(pointer, ctypes.POINTER(pointer._type_ * size)).contents


def rows_at(pointer: Any, rows: int, width: int, owner: object = None) -> NDArray[np.float32]:
    """Return a view of a llama.cpp array, valid until the next pass, that keeps `owner` alive."""
    buffer = _bytes(4 * rows * width).from_address(ctypes.addressof(pointer.contents))
    buffer.owner = owner
    view: NDArray[np.float32] = np.ndarray((rows, width), np.float32, buffer)
    return view


@functools.cache
def _bytes(size: int) -> Any:
    """Return the ctypes type of `size` bytes; creating it takes longer than all other steps of `rows_at`."""
    return ctypes.c_char * size


def split(lengths: Mapping[int, int], max_size: int, *, neighbours: bool = False, tail: int = 0) -> list[int]:
    """Return the sizes of the batches into which llama.cpp splits a pass over sequences with these numbers.

    Every batch contains equally many tokens of each of its sequences (`llama_batch_allocr::split_equal`). It starts
    with the first sequence that has tokens left and adds the others, until one of them has no more tokens. `neighbours`
    have consecutive numbers, because their cells are separate. The last `tail` tokens of a sequence are never split.
    This follows the source of llama-cpp-python 0.3.36; `tests/llama/test_shared.py` compares it with llama.cpp's log.
    """
    remaining = dict(sorted(lengths.items()))
    sizes = []
    while remaining:
        group: list[int] = []
        for sequence in remaining:
            if not neighbours or not group or sequence == group[-1] + 1:
                group.append(sequence)
        each = min(max_size // len(group), *(remaining[sequence] for sequence in group))
        if tail:
            splits_tail = [0 < remaining[sequence] - each < tail for sequence in group]
            fitting = splits_tail.index(True) if True in splits_tail else len(group)
            if not fitting:
                # The first sequence gets a batch alone: up to its end, or so far that its tail is not split.
                first = remaining[group[0]]
                each = first if first <= max_size else min(each, first - tail)
            group = group[: fitting or 1]
        sizes.append(each * len(group))
        for sequence in group:
            remaining[sequence] -= each
        remaining = {sequence: rest for sequence, rest in remaining.items() if rest}
    return sizes
