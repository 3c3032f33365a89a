"""`CacheSequence`: one sequence of a context; `append` extends several in one pass.

    sequence.prefill(prompt)            # the four calls of a `Model`, on this sequence alone
    append(passes, [(sequence, tokens, rows), (other, tokens, rows)])

The cache may lack the last of a sequence's `tokens`. These are owed:
the next pass evaluates them before its own tokens.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Generator, Sequence
from typing import Any

from ngramspec.backend import Logits, Progress, SequenceModel
from ngramspec.data import TargetError
from ngramspec.llama.cache import Cache
from ngramspec.llama.passes import MAX_EVALUATE, Passes, UsedAtOnceError
from ngramspec.tokens import common_prefix

TAIL = 8
"""Distance in tokens between a prompt's checkpoint and its end, which templates often change in later requests."""

APART = 64  # minimum number of tokens between two checkpoints of prompts: evaluating them again takes about one pass

_PIECE = struct.Struct("<QQ")
"""Header of each saved piece: the number of tokens that were aligned or in the checkpoint, and the size in bytes."""


class CacheSequence:
    """A sequence in the cache of a context, which implements `ngramspec.backend.SequenceModel`."""

    leaves: int = 0

    def __init__(self, passes: Passes, cache: Cache, *, n_ctx: int) -> None:
        self._passes = passes
        self.cache = cache
        self.tokens: list[int] = []  # tokens of the sequence, including those that it owes
        self.number = cache.sequence
        self.n_vocab = passes.n_vocab
        self.n_ctx = n_ctx
        self._n_aligned = 0
        self.fetch = passes.fetch
        n_snapshots = cache.snapshots
        self.replays = cache.recurrent and n_snapshots == 0
        # A checkpoint also contains the cells of a sliding window, which may have another order after it is restored.
        # Tokens that are evaluated again go through passes of other sizes. Both may change last bits.
        self.exact_rollback = not cache.recurrent or (n_snapshots > 0 and not cache.window)
        self.max_batch = min(MAX_EVALUATE, n_snapshots + 1) if n_snapshots else MAX_EVALUATE
        self.can_rollback = True
        self.returns_early = passes.returns_early
        self.fingerprint = ""

    def goes_back(self) -> bool:
        """Return True if tokens that are evaluated after the present ones (at least one) can be rolled back."""
        if not self.replays:
            return True
        self.checkpoint()
        self.evaluate([0])
        self.rollback(len(self.tokens) - 1)
        return not self.owed

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        report = progress or (lambda done, total: None)
        reader = self.reading(tokens, aligned=aligned)
        next(reader)
        try:
            while True:
                report(next(reader), len(tokens))
        except StopIteration as end:
            report(len(tokens), len(tokens))
            row: Logits = end.value
            return row

    def reading(
        self, tokens: Sequence[int], *, aligned: bool = False, max_chunk: Callable[[], int] | None = None
    ) -> Generator[int, None, Logits]:
        total, n_batch = len(tokens), self._passes.n_batch
        if not 0 < total <= self.n_ctx:
            raise ValueError(f"prefill needs 1 to {self.n_ctx} tokens, got {total}")
        keep = min(common_prefix(self.tokens, tokens), total - 1)
        if aligned:
            keep = min(keep, self._n_aligned) // n_batch * n_batch
        self.rollback(keep)
        if aligned and self.cache.length % n_batch:
            self.clear()
        was_aligned = self._n_aligned
        done = self.cache.length
        del self.tokens[done:]
        # The recurrent state after `stop` tokens is kept for later prompts; 0 means that none is kept. In exact mode
        # the chunks of a prompt must not depend on what the cache already contains.
        stop = (total - 1) // n_batch * n_batch if aligned else total - TAIL
        stop = stop if self.cache.recurrent and stop - self.cache.last_checkpoint >= APART else 0
        hidden_states = self.cache.states
        while done < total:
            yield done
            size = n_batch if aligned or max_chunk is None else max(1, min(n_batch, max_chunk()))
            end = stop if done < stop < done + size else min(total, done + size)
            states = not aligned and hidden_states is not None and hidden_states.due_in_prompt(total - end)
            # Only the logits after the last token are read.
            append(self._passes, [(self, tokens[done:end], int(end == total))], states=states)
            if max_chunk is not None:
                # The caller times the chunk. On a GPU, the pass after it would otherwise pay for it.
                self._passes.wait()
            done = end
            if done == stop:
                self.cache.save(keep=True)
        self._n_aligned = total // n_batch * n_batch if aligned else min(keep, was_aligned)
        row: Logits = self.fetch()[0]
        return row

    def submit(self, tokens: Sequence[int]) -> None:
        n = len(tokens)
        if not 0 < n <= MAX_EVALUATE:
            raise ValueError(f"a pass takes 1 to {MAX_EVALUATE} tokens, got {n}")
        own_tokens, cache, passes = self.tokens, self.cache, self._passes
        length = len(own_tokens)
        if cache.length != length or n > passes.n_batch or length + n > self.n_ctx + MAX_EVALUATE:
            append(passes, ((self, tokens, n),))
            return
        own_tokens.extend(tokens)
        try:
            passes.decode(((cache, tokens, n),))
        except BaseException:
            del own_tokens[length:]
            raise

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        self.submit(tokens)
        return self.fetch()

    def rollback(self, length: int) -> None:
        self._passes.check()
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot roll back to {length}: the cache holds {len(self.tokens)} tokens")
        self._n_aligned = min(self._n_aligned, length)
        del self.tokens[length:]
        self.cache.cut(length)

    def clear(self) -> None:
        self._passes.check()
        self.cache.clear()
        self.tokens.clear()
        self._n_aligned = 0

    @property
    def owed(self) -> int:
        """Number of tokens that the next call must evaluate again before its own."""
        return len(self.tokens) - self.cache.length

    def checkpoint(self) -> None:
        self.settle()
        self.cache.save()

    def settle(self) -> None:
        self._passes.check()
        while self.owed:
            self.pay()

    def pay(self) -> int:
        """Evaluate as many owed tokens as fit in one pass, and return their number."""
        start = self.cache.length
        tokens = self.tokens[start : start + self._passes.n_batch]
        self._passes.decode([(self.cache, tokens, 0)])
        return len(tokens)

    def adopt(self, source: SequenceModel, length: int) -> None:
        """Copy the first `length` tokens of another sequence of the same context, or fewer, as `Cache.cut` permits."""
        self._passes.check()
        if not isinstance(source, CacheSequence) or source._passes is not self._passes or source is self:
            raise ValueError("a prefix can only be copied from another sequence of the same context")
        if not 0 <= length <= len(source.tokens):
            raise ValueError(f"cannot copy {length} tokens: the other sequence has {len(source.tokens)}")
        self.clear()
        if n_tokens := min(length, source.cache.length):
            self.cache.adopt(source.cache, n_tokens)
            self.tokens[:] = source.tokens[: self.cache.length]
            self._n_aligned = min(source._n_aligned, len(self.tokens))

    def save_state(self) -> bytes:
        """Return the state of the sequence, including checkpoints; owed tokens are evaluated first."""
        self.settle()
        if not self.tokens:
            return b""
        state, checkpoints = self.cache.whole()
        if not len(state):
            raise TargetError("llama.cpp could not save the state of a sequence")
        pieces: list[Any] = []
        for number, piece in ((self._n_aligned, state), *checkpoints.items()):
            pieces += (_PIECE.pack(number, len(piece)), piece)
        return b"".join(pieces)

    def restore(self, tokens: Sequence[int], state: bytes) -> None:
        """Restore what `save_state` returned when a sequence contained `tokens`; after a TargetError it is empty."""
        self.clear()
        if self.cache.states is not None:
            self.cache.states.forget()
        if len(tokens) > self.n_ctx + MAX_EVALUATE:
            raise TargetError(f"it has {len(tokens)} tokens, more than the context size of a sequence")
        if any(not 0 <= token < self.n_vocab for token in tokens):
            raise TargetError("it has a token that is not in the vocabulary")
        at, pieces = 0, list[tuple[int, Any]]()
        while at < len(state):
            if at + _PIECE.size > len(state):
                raise TargetError("it is cut off")
            number, size = _PIECE.unpack_from(state, at)
            at += _PIECE.size
            if size > len(state) - at or not 0 <= number <= len(tokens):
                raise TargetError("its parts do not fit together")
            pieces.append((number, (ctypes.c_uint8 * size).from_buffer_copy(state, at)))
            at += size
        if not pieces:
            if tokens:
                raise TargetError("it has no state")
            return
        (n_aligned, whole), *checkpoints = pieces
        if not self.cache.load(whole, len(tokens), dict(checkpoints)):
            raise TargetError("llama.cpp could not restore the state of a sequence")
        self.tokens[:] = tokens
        self._n_aligned = n_aligned


Piece = tuple[CacheSequence, Sequence[int], int]
"""Tokens that a pass appends to a sequence, and the number of the last ones that need logits."""


def append(passes: Passes, pieces: Sequence[Piece], *, states: bool = True) -> None:
    """Append to several sequences in one pass, at most n_batch tokens and MAX_EVALUATE rows; see `Passes.decode`.

    Owed tokens that do not fit in the pass are evaluated in passes before it. After an error, the sequences are as
    before, although they may owe tokens.
    """
    before = []
    n_tokens = 0
    for sequence, tokens, _ in pieces:
        length = len(sequence.tokens)
        if length + len(tokens) > sequence.n_ctx + MAX_EVALUATE:
            raise ValueError(f"{length + len(tokens)} tokens do not fit in a context of {sequence.n_ctx}")
        before.append(length)
        n_tokens += length - sequence.cache.length + len(tokens)
    try:
        while n_tokens > passes.n_batch:
            n_tokens -= max((sequence for sequence, _, _ in pieces), key=lambda sequence: sequence.owed).pay()
        feeds = []
        for sequence, tokens, rows in pieces:
            owed = sequence.tokens[sequence.cache.length :]
            feeds.append((sequence.cache, [*owed, *tokens] if owed else tokens, rows))
        passes.decode(feeds, states=states)
        for sequence, tokens, _ in pieces:
            sequence.tokens.extend(tokens)
    except UsedAtOnceError:
        raise  # another thread is changing the sequences, so leave them alone
    except BaseException:
        for (sequence, _, _), length in zip(pieces, before, strict=True):
            del sequence.tokens[length:]
            if sequence.cache.length > length:
                sequence.cache.recover(length)
        raise
