"""`Cache`: the KV cache and recurrent state of one sequence, its size, and methods that remove tokens from it.

    cache.length += 5           # a llama_decode appended five tokens
    cache.save()                # a checkpoint: `cut` can return to the state here
    cache.cut(100)              # at most the first 100 tokens are left: `cache.length` is their number

A rejected draft must be removed from the cache. Keys and values can be cut after any token. A recurrent state cannot,
because each token overwrites it. It returns to a snapshot if that is provably right. Otherwise it returns to a
checkpoint, a copy of the state made earlier, or to the beginning. The caller evaluates the missing tokens again.

Snapshots are the recurrent states after each of the last tokens (`n_rs_seq` of them, if the architecture supports it).
A pass over n tokens writes only the snapshots of these n tokens, and going back uses them up. `llama_memory_seq_rm`
accepts older ones too, and the logits are then wrong (llama-cpp-python 0.3.36).

Example: a recurrent model has 16 snapshots, a checkpoint at 96 tokens and 100 tokens in the cache.

1. A pass appends 5 tokens, so the length is 105. It wrote usable snapshots at the lengths 101 to 104.
2. `cut(102)` goes back 3 tokens to a snapshot. The length is 102, and the snapshots are used up.
3. `cut(101)` cannot use a snapshot, so it restores the checkpoint. The length is 96, and 5 tokens must be evaluated
   again. A pure KV cache would have 101 tokens now.

A sliding window is cut only if the cache still contains all that the window shows from there. With a window of 512
tokens and cells for the positions from 1480 to 1999, `cut(1995)` works: the window needs positions from 1483 on.
`cut(1900)` needs positions from 1388 on, which are gone, so it clears the cache.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec import leaves
from ngramspec.llama import devices

# These are values of enum ggml_type and bytes per element (ggml.h; a quantised block contains 32 elements).
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

MAX_CHECKPOINTS = 4  # maximum number of checkpoints of prompts; a new one replaces the oldest

WHOLE = 0  # keys and values, and the recurrent state
_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part, without keys and values
_ON_DEVICE = 2  # LLAMA_STATE_SEQ_FLAGS_ON_DEVICE; releases without it make complete copies in RAM instead

MIN_FREE = 2.0  # minimum free memory of each GPU before the first copy on it, in units of the size of the state

Checkpoints = dict[int, Any]
"""Recurrent states, as `StateCopies` returns them, by their number of tokens; the oldest first."""


class Cache:
    def __init__(
        self,
        context: Any,
        *,
        recurrent: bool,  # whether a part of the cache is a recurrent state
        window: int,  # number of tokens in the (shortest) sliding window; 0 means no sliding window
        sequence: int = 0,
        sole: bool = True,  # whether `clear` may also remove the contents of all other sequences
        pooled: bool = False,  # whether sequences can share cells
        states: leaves.HiddenStates | None = None,  # states of the last tokens for the model's own head
        on_device: bool = False,  # whether checkpoints before drafts stay on the devices; see `StateCopies`
    ) -> None:
        self._memory = llama.llama_get_memory(context)
        self.recurrent = recurrent
        self.window = window
        self.sequence = sequence
        self.states = states
        self._sole = sole
        # If sequences share a recurrent state, llama.cpp loses track of the snapshot that it must restore.
        self._shares = pooled and not recurrent
        # Cells of branches are cut together with the only sequence.
        self._cuts = -1 if self._shares and sole else sequence
        self.length = 0  # number of tokens in the cache
        # The memory keeps this many snapshots in addition to the state itself; 0 means none.
        self.snapshots = int(llama.llama_n_rs_seq(context)) if recurrent else 0
        self.usable_snapshots = 0  # maximum number of tokens that snapshots of the last pass can roll back
        # Only states without snapshots are copied before every draft. A window's cells may lie in several places.
        can_stay = recurrent and not window and not self.snapshots
        self._copies = StateCopies(context, sequence, on_device=on_device and can_stay)
        self._prompt_checkpoints: Checkpoints = {}
        self._mark: Checkpoints = {}  # latest checkpoint that was saved without `keep`

    def take_over(self, length: int) -> None:
        """Adopt `length` tokens that were evaluated by other code, and drop later tokens and all checkpoints."""
        llama.llama_memory_seq_rm(self._memory, self.sequence, length, -1)
        self._prompt_checkpoints, self._mark = {}, {}
        self.length = length
        self.usable_snapshots = 0

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, or as many of them as can be kept; `self.length` is their number."""
        if length >= self.length:
            return
        depth = self.length - length
        provable = not self.recurrent or depth <= self.usable_snapshots
        if length and provable and self._remove(length):
            self._drop_behind(length)
            self.length = length
            return
        self._go_back(length)

    def recover(self, length: int) -> None:
        """Keep at most the first `length` tokens after a failed pass, whatever it left in the cache."""
        length = min(length, self.length)
        if self.recurrent or not self._remove(length):
            self._go_back(length)
        else:
            self.length = length

    def save(self, *, keep: bool = False) -> None:
        """Save the present state, so that `cut` can return to it.

        With `keep`, it is one of the last MAX_CHECKPOINTS; otherwise the next `save` without `keep` replaces it.
        """
        if not self.recurrent or self.length == 0:
            return
        state = self._checkpoints().get(self.length)
        if not keep:
            self._mark = {self.length: self._copies.save_latest() if state is None else state}
        else:
            in_ram = None if isinstance(state, DeviceCopy) else state
            self._keep(self._prompt_checkpoints | {self.length: self._copies.save() if in_ram is None else in_ram})

    def _keep(self, checkpoints: Checkpoints) -> None:
        self._prompt_checkpoints = dict([*checkpoints.items()][-MAX_CHECKPOINTS:])

    @property
    def last_checkpoint(self) -> int:
        """Number of tokens before the last checkpoint; 0 without one."""
        return max(self._checkpoints(), default=0)

    def clear(self) -> None:
        if self._sole:
            llama.llama_memory_clear(self._memory, False)
        else:
            llama.llama_memory_seq_rm(self._memory, self.sequence, -1, -1)
        self._prompt_checkpoints, self._mark = {}, {}
        self.length = 0
        self.usable_snapshots = 0

    def _checkpoints(self) -> Checkpoints:
        return self._prompt_checkpoints | self._mark

    def _remove(self, length: int) -> bool:
        """Cut llama.cpp's memory and return True if its contents are right afterwards."""
        self.usable_snapshots = 0
        if not llama.llama_memory_seq_rm(self._memory, self._cuts, length, -1):
            return False
        if self.recurrent or not self.window or not length:
            return True
        return self._shows(length)

    def _shows(self, length: int) -> bool:
        """Return True if the cache contains all that a sliding window shows after `length` tokens."""
        # llama.cpp reuses cells outside the window for newer tokens. So tokens in the window may be gone, or no cell
        # may be left after the cut.
        first = int(llama.llama_memory_seq_pos_min(self._memory, self.sequence))
        return 0 <= first <= max(0, length - self.window)

    def _go_back(self, length: int) -> None:
        """Restore the last checkpoint of at most `length` tokens, or clear the cache."""
        self._drop_behind(length)
        last = max(self._checkpoints(), default=None)
        if last is None or not self._restore(last):
            self.clear()

    def _restore(self, length: int) -> bool:
        if not self._copies.restore(self._checkpoints()[length]):
            return False
        if not self._remove(length):
            return False
        self.length = length
        return self._ends_at(length)

    def _ends_at(self, length: int) -> bool:
        return int(llama.llama_memory_seq_pos_max(self._memory, self.sequence)) == length - 1

    def _drop_behind(self, length: int) -> None:
        self._prompt_checkpoints = {at: state for at, state in self._prompt_checkpoints.items() if at <= length}
        self._mark = {at: state for at, state in self._mark.items() if at <= length}

    def whole(self) -> tuple[Any, Checkpoints]:
        """Return the contents of the cache: bytes for `load`, and the checkpoints in RAM."""
        in_ram = {at: state for at, state in self._checkpoints().items() if not isinstance(state, DeviceCopy)}
        return self._copies.save(WHOLE), in_ram

    def load(self, state: Any, length: int, checkpoints: Checkpoints) -> bool:
        """Restore what `whole` returned for a cache of `length` tokens; the cache is empty if the result is False."""
        self.clear()
        done = self._copies.restore(state, WHOLE)
        if not done or not self._ends_at(length) or not (self.recurrent or not self.window or self._shows(length)):
            self.clear()
            return False
        self.length = length
        self._keep(checkpoints)
        return True

    def adopt(self, source: Cache, length: int) -> None:
        """Copy the first `length` tokens of another cache of this context, or fewer; `self.length` is their number."""
        self.clear()
        if self._shares:
            llama.llama_memory_seq_cp(self._memory, source.sequence, self.sequence, 0, length)
            self.length = length
            if self.window and not self._shows(length):
                self.clear()
        else:
            state, checkpoints = source.whole()
            if self.load(state, source.length, checkpoints):
                self.cut(length)
        if self.states is not None and source.states is not None:
            self.states.adopt(source.states, self.length)


@dataclass(slots=True)
class DeviceCopy:
    cells: Any  # llama.cpp's description of the state, without its contents
    reference: Any  # the same state in RAM; `None` after a restore was proven right


class StateCopies:
    """Copies of the state of one sequence, in RAM or on the devices that compute it.

    A recurrent state takes 50 to 200 MB in common models. On a GPU, a copy in RAM crosses the bus twice, tensor by
    tensor. llama.cpp can copy the state within the memory of each device instead, but it keeps only one such copy of a
    sequence. The copy takes memory that llama.cpp does not reserve, and it ends the process if the allocation fails, so
    a device must have twice as much memory free.

    The return value of llama.cpp does not prove that a state was restored. So the first copy is made in RAM too, and
    the state after the first restore must have the same bytes. Otherwise all later copies are made in RAM.
    """

    def __init__(self, context: Any, sequence: int, *, on_device: bool) -> None:
        self._context, self._sequence = context, sequence
        self._on_device = on_device
        self._is_proven = False  # whether a restored state had the right bytes

    def save(self, flags: int = _PARTIAL) -> Any:
        """Return a copy in RAM, a ctypes array of bytes; it is empty if llama.cpp could not make it."""
        size = llama.llama_state_seq_get_size_ext(self._context, self._sequence, flags)
        buffer = (ctypes.c_uint8 * size)()
        n_written = llama.llama_state_seq_get_data_ext(self._context, buffer, size, self._sequence, flags)
        return (ctypes.c_uint8 * n_written).from_buffer(buffer)

    def save_latest(self) -> Any:
        """Return a copy of the recurrent state, which invalidates the `DeviceCopy` that was returned before."""
        if not self._on_device:
            return self.save()
        reference = None if self._is_proven else self.save()
        if reference is not None and devices.min_free_bytes() < MIN_FREE * len(reference):
            self._on_device = False
            return reference
        cells = self.save(_PARTIAL | _ON_DEVICE)
        if not len(cells):
            self._on_device = False
            return self.save() if reference is None else reference
        return DeviceCopy(cells, reference)

    def restore(self, copy: Any, flags: int = _PARTIAL) -> bool:
        """Restore a copy and return True if the sequence has that state again."""
        if not isinstance(copy, DeviceCopy):
            return self._write(copy, flags)
        done = self._write(copy.cells, _PARTIAL | _ON_DEVICE)
        if done and copy.reference is not None:
            done = bytes(self.save()) == bytes(copy.reference)
        if done:
            self._is_proven, copy.reference = True, None
            return True
        self._on_device = False
        return copy.reference is not None and self._write(copy.reference, _PARTIAL)

    def _write(self, state: Any, flags: int) -> bool:
        return bool(llama.llama_state_seq_set_data_ext(self._context, state, len(state), self._sequence, flags))


def is_recurrent(model: Any) -> bool:
    """Return True if some layers of a model have a recurrent state, which cannot be cut like a KV cache."""
    return bool(llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model))
