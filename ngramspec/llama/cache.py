"""`Cache`: the KV cache and recurrent state of one sequence, its size, and the ways to take tokens out of it again.

    cache.decoded(5)            # a llama_decode appended five tokens
    cache.save()                # a checkpoint: the state here can be gone back to
    cache.cut(100)              # at most the first 100 tokens are left: `cache.length` says how many

Keys and values can be cut anywhere. A recurrent state goes back to a snapshot where that is provably right, else to a
checkpoint, a copy of the state made earlier, else to the beginning. A sliding window is cut only if the cache still
holds all that the window shows from there. Whoever cuts evaluates the missing tokens again.

Snapshots are what a recurrent state was after each of the last tokens (`n_rs_seq` of them, where the architecture
supports it). A pass over n tokens writes those of its own tokens alone, and going back uses them up.
`llama_memory_seq_rm` accepts older ones too, and the logits are then wrong (llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import llama_cpp.llama_cpp as llama

from ngramspec.llama.hidden_states import HiddenStates

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]

# enum ggml_type and bytes per element (ggml.h; a quantised block holds 32 elements).
CACHE_TYPES: dict[str, tuple[int, float]] = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 34 / 32),
    "q5_1": (7, 24 / 32),
    "q5_0": (6, 22 / 32),
    "q4_1": (3, 20 / 32),
    "q4_0": (2, 18 / 32),
}

UNQUANTISED: tuple[CacheType, ...] = ("f32", "f16", "bf16")
"""Element types that are not quantised: llama.cpp has a V cache of others with flash attention only."""

KEPT = 4  # checkpoints of prompts that are kept; the oldest goes first

_WHOLE = 0
_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part, without keys and values


Checkpoints = dict[int, Any]
"""Recurrent states, each a ctypes array of bytes, by how many tokens they are of; the oldest first."""


class Cache:
    """The KV cache and recurrent state of a sequence.

    Args:
        recurrent: whether a part of it is a recurrent state.
        window: tokens that a sliding window shows, the shortest if there are several; 0: none slides.
        sequence: its number.
        sole: whether what any other sequence holds may be lost in `clear`.
        pooled: whether sequences can share cells.
        states: the hidden states of its last tokens, which go with them; None: nobody needs these.
    """

    def __init__(
        self,
        context: Any,
        *,
        recurrent: bool,
        window: int,
        sequence: int = 0,
        sole: bool = True,
        pooled: bool = False,
        states: HiddenStates | None = None,
    ) -> None:
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self.recurrent = recurrent
        self.window = window
        self.sequence = sequence
        self.states = states
        self._sole = sole
        # A recurrent state that sequences share forgets which snapshot it is to go back to.
        self._shares = pooled and not recurrent
        # Cut the cells of branches of the only sequence together with it.
        self._cuts = -1 if self._shares and sole else sequence
        self.length = 0  # tokens that it holds
        # how many of them the memory keeps beside the state itself; 0: none
        self.snapshots = int(llama.llama_n_rs_seq(context)) if recurrent else 0
        self._back = 0  # by how many tokens a snapshot of the last pass goes back
        self._kept: Checkpoints = {}
        self._mark: Checkpoints = {}  # the last that is not kept

    def decoded(self, n: int, *, alone: bool = True) -> None:
        """A pass appended n tokens, `alone` if it fed no other; 0: it fed others, and may have moved the state."""
        self.length += n
        # llama.cpp splits a pass over several as it likes, and only the last part of it writes snapshots.
        self._back = min(self.snapshots, n - 1) if alone else 0

    def disturbed(self) -> None:
        """A pass that fed other sequences failed on its way, while it was moving this one's state perhaps."""
        if self.recurrent and self.length:
            self._go_back(self.length)

    def take_over(self, length: int) -> None:
        """Hold `length` tokens that somebody else evaluated, and nothing behind them; no checkpoint is left."""
        llama.llama_memory_seq_rm(self._memory, self.sequence, length, -1)
        self._kept, self._mark = {}, {}
        self.length = length
        self._back = 0

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, or as many of them as can be kept: `self.length` tells."""
        if length >= self.length:
            return
        depth = self.length - length
        provable = not self.recurrent or depth <= self._back
        if length and provable and self._remove(length):
            self._drop_behind(length)
            self.length = length
            return
        self._go_back(length)

    def recover(self, length: int) -> None:
        """A pass failed on its way: whatever it left behind, keep no more than the first `length` tokens."""
        length = min(length, self.length)
        if self.recurrent or not self._remove(length):
            self._go_back(length)
        else:
            self.length = length

    def save(self, *, keep: bool = False) -> None:
        """Let `cut` go back to the present state until the next `save`, or longer: `keep` it among the last KEPT."""
        if not self.recurrent or self.length == 0:
            return
        state = self._checkpoints().get(self.length)
        checkpoint = {self.length: self._state() if state is None else state}
        if not keep:
            self._mark = checkpoint
        else:
            self._keep(self._kept | checkpoint)

    def _keep(self, checkpoints: Checkpoints) -> None:
        self._kept = dict([*checkpoints.items()][-KEPT:])

    @property
    def saved(self) -> int:
        """Tokens before the last checkpoint; 0 without one."""
        return max(self._checkpoints(), default=0)

    def clear(self) -> None:
        if self._sole:
            llama.llama_memory_clear(self._memory, False)
        else:
            llama.llama_memory_seq_rm(self._memory, self.sequence, -1, -1)
        self._kept, self._mark = {}, {}
        self.length = 0
        self._back = 0

    def _checkpoints(self) -> Checkpoints:
        return self._kept | self._mark

    def _remove(self, length: int) -> bool:
        """Cut llama.cpp's memory; whether it is right then."""
        self._back = 0
        if not llama.llama_memory_seq_rm(self._memory, self._cuts, length, -1):
            return False
        if self.recurrent or not self.window or not length:
            return True
        return self._shows(length)

    def _shows(self, length: int) -> bool:
        """Whether all that a sliding window shows after `length` tokens is there."""
        # Cells outside the window are reused for newer tokens: what it would show may be gone, or all that is left cut.
        first = int(llama.llama_memory_seq_pos_min(self._memory, self.sequence))
        return 0 <= first <= max(0, length - self.window)

    def _go_back(self, length: int) -> None:
        """Restore the last checkpoint that is not behind `length`, or forget everything."""
        self._drop_behind(length)
        last = max(self._checkpoints(), default=None)
        if last is None or not self._restore(last):
            self.clear()

    def _restore(self, length: int) -> bool:
        state = self._checkpoints()[length]
        if not llama.llama_state_seq_set_data_ext(self._context, state, len(state), self.sequence, _PARTIAL):
            return False
        if not self._remove(length):
            return False
        self.length = length
        return self._ends_at(length)

    def _ends_at(self, length: int) -> bool:
        return int(llama.llama_memory_seq_pos_max(self._memory, self.sequence)) == length - 1

    def _drop_behind(self, length: int) -> None:
        """Forget checkpoints of tokens that are no longer there."""
        self._kept = {at: state for at, state in self._kept.items() if at <= length}
        self._mark = {at: state for at, state in self._mark.items() if at <= length}

    def _state(self, flags: int = _PARTIAL) -> Any:
        size = llama.llama_state_seq_get_size_ext(self._context, self.sequence, flags)
        buffer = (ctypes.c_uint8 * size)()
        written = llama.llama_state_seq_get_data_ext(self._context, buffer, size, self.sequence, flags)
        return (ctypes.c_uint8 * written).from_buffer(buffer)

    # ------------------------------------------------------------------ copies

    def whole(self) -> tuple[Any, Checkpoints]:
        """All that it holds: (bytes for `load`, the checkpoints)."""
        return self._state(_WHOLE), self._checkpoints()

    def load(self, state: Any, length: int, checkpoints: Checkpoints) -> bool:
        """Hold what `whole` of a cache of `length` tokens gave; False, and nothing is held, if that cannot be."""
        self.clear()
        done = llama.llama_state_seq_set_data_ext(self._context, state, len(state), self.sequence, _WHOLE)
        if not done or not self._ends_at(length) or not (self.recurrent or not self.window or self._shows(length)):
            self.clear()
            return False
        self.length = length
        self._keep(checkpoints)
        return True

    def adopt(self, other: Cache, length: int) -> None:
        """Hold the first `length` tokens of another cache of this context, or fewer: `self.length` tells."""
        self.clear()
        if self._shares:
            llama.llama_memory_seq_cp(self._memory, other.sequence, self.sequence, 0, length)
            self.length = length
            if self.window and not self._shows(length):
                self.clear()
        else:
            state, checkpoints = other.whole()
            if self.load(state, other.length, checkpoints):
                self.cut(length)
        if self.states is not None and other.states is not None:
            self.states.adopt(other.states, self.length)


def is_recurrent(model: Any) -> bool:
    """Whether a model has a state that cannot be cut as a KV cache can, if only in some of its layers."""
    return bool(llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model))


# --------------------------------------------------------------------------- size


def bytes_per_token(types: tuple[str, str], layers: int, heads: int, widths: tuple[int, int]) -> float:
    """Bytes of a token in the KV cache, at most; `types` and `widths` are those of keys and values in a KV head."""
    return layers * heads * sum(width * CACHE_TYPES[kind][1] for kind, width in zip(types, widths, strict=True))
