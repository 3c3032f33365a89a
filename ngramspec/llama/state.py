"""`Cache`: the KV cache and recurrent state of one sequence, and the ways to take tokens out of them again.

    cache.decoded(5)            # a llama_decode appended five tokens
    cache.save()                # a checkpoint: the state here can be gone back to
    cache.cut(100)              # at most the first 100 tokens are left: `cache.length` says how many

The keys and values of attention can be cut anywhere. A recurrent state cannot: it goes back to a snapshot where that
is provably right (see `ngramspec.llama.snapshots`), else to a checkpoint, a copy of the state made earlier, else to the
beginning. A sliding window is cut only if the cache still holds all that the window shows from there. Only what is
provably right is kept, whatever llama.cpp answers: whoever cuts has to evaluate the missing tokens again.

llama.cpp is handed in by `ngramspec.llama.context`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ngramspec.llama.snapshots import Snapshots

KEPT = 4
"""Checkpoints of prompts that are kept; the oldest goes first."""

_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part, without keys and values


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The recurrent state after the first `length` tokens."""

    length: int
    state: Any  # a ctypes array of bytes


class Cache:
    """The KV cache and recurrent state of a context's sequence 0.

    Args:
        api: the llama_cpp module.
        context: llama.cpp's handle.
        recurrent: whether a part of it is a recurrent state.
        window: tokens that a sliding window shows, the shortest if there are several; 0: none slides.

    Attributes:
        length: tokens that it holds.
        snapshots: what of them the last pass lets it take back.
    """

    def __init__(self, api: Any, context: Any, *, recurrent: bool, window: int) -> None:
        self._api = api
        self._context = context
        self._memory = api.llama_get_memory(context)
        self._recurrent = recurrent
        self._window = window
        self.length = 0
        self.snapshots = Snapshots(int(api.llama_n_rs_seq(context)) if recurrent else 0)
        self._kept: list[Checkpoint] = []
        self._mark: Checkpoint | None = None

    def decoded(self, n: int) -> None:
        """A pass appended n tokens."""
        self.length += n
        self.snapshots.decoded(n)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, or as many of them as can be kept: `self.length` tells."""
        if length >= self.length:
            return
        depth = self.length - length
        provable = not self._recurrent or self.snapshots.takes_back(depth)
        if length and provable and self._remove(length):
            self._drop_behind(length)
            self.length = length
            return
        self._go_back(length)

    def recover(self, length: int) -> None:
        """A pass failed on its way: whatever it left behind, keep no more than the first `length` tokens."""
        length = min(length, self.length)
        if self._recurrent or not self._remove(length):
            self._go_back(length)
        else:
            self.length = length

    def save(self, *, keep: bool = False) -> None:
        """Make it possible to go back to the present state; does nothing if the cache can be cut anywhere.

        Args:
            keep: keep it for later requests, among the last KEPT of these; else it lasts until the next `save`.
        """
        if not self._recurrent or self.length == 0:
            return
        found = next((c for c in self._checkpoints() if c.length == self.length), None)
        checkpoint = found or Checkpoint(self.length, self._state())
        if not keep:
            self._mark = checkpoint
        elif checkpoint not in self._kept:
            self._kept = [*self._kept, checkpoint][-KEPT:]

    @property
    def saved(self) -> int:
        """Tokens before the last checkpoint; 0 without one."""
        return max((c.length for c in self._checkpoints()), default=0)

    def clear(self) -> None:
        """Hold nothing."""
        self._api.llama_memory_clear(self._memory, False)
        self._kept.clear()
        self._mark = None
        self.length = 0
        self.snapshots.used_up()

    def _checkpoints(self) -> list[Checkpoint]:
        return self._kept if self._mark is None else [*self._kept, self._mark]

    def _remove(self, length: int) -> bool:
        """Cut llama.cpp's memory; whether it is right then."""
        self.snapshots.used_up()
        if not self._api.llama_memory_seq_rm(self._memory, 0, length, -1):
            return False
        if self._recurrent or not self._window or not length:
            return True
        # Cells outside a sliding window are reused for newer tokens: what it would show after the cut may be gone.
        return int(self._api.llama_memory_seq_pos_min(self._memory, 0)) <= max(0, length - self._window)

    def _go_back(self, length: int) -> None:
        """Restore the last checkpoint that is not behind `length`, or forget everything."""
        self._drop_behind(length)
        last = max(self._checkpoints(), key=lambda c: c.length, default=None)
        if last is None or not self._restore(last):
            self.clear()

    def _restore(self, checkpoint: Checkpoint) -> bool:
        api, state = self._api, checkpoint.state
        if not api.llama_state_seq_set_data_ext(self._context, state, len(state), 0, _PARTIAL):
            return False
        if not self._remove(checkpoint.length):
            return False
        self.length = checkpoint.length
        return int(api.llama_memory_seq_pos_max(self._memory, 0)) == self.length - 1

    def _drop_behind(self, length: int) -> None:
        """Forget checkpoints of tokens that are no longer there."""
        self._kept = [c for c in self._kept if c.length <= length]
        if self._mark is not None and self._mark.length > length:
            self._mark = None

    def _state(self) -> Any:
        size = self._api.llama_state_seq_get_size_ext(self._context, 0, _PARTIAL)
        buffer = (ctypes.c_uint8 * size)()
        written = self._api.llama_state_seq_get_data_ext(self._context, buffer, size, 0, _PARTIAL)
        return (ctypes.c_uint8 * written).from_buffer(buffer)
