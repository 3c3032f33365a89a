"""`StateCopies`: copies of the state of one sequence, in RAM or on the devices that compute it.

    copies = StateCopies(context, sequence, on_device=True)
    checkpoint = copies.save_latest()           # replaces the checkpoint before it
    copies.restore(checkpoint)                  # True if the sequence has that state again

A recurrent state takes 50 to 200 MB in common models. On a GPU, a copy in RAM crosses the bus twice, tensor by tensor.
llama.cpp can copy the state within the memory of each device instead (`LLAMA_STATE_SEQ_FLAGS_ON_DEVICE`), but it keeps
only one such copy of a sequence. The copy takes memory that llama.cpp does not reserve, and it ends the process if the
allocation fails, so a device must have twice as much memory free.

The return value of llama.cpp does not prove that a state was restored. So the first copy is made in RAM too, and the
state after the first restore must have the same bytes. Otherwise all later copies are made in RAM.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.llama import devices

WHOLE = 0  # keys and values, and the recurrent state
_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part, without keys and values
_ON_DEVICE = 2  # LLAMA_STATE_SEQ_FLAGS_ON_DEVICE; releases without it make complete copies in RAM instead

MIN_FREE = 2.0  # minimum free memory of each GPU before the first copy on it, in units of the size of the state


@dataclass(slots=True)
class DeviceCopy:
    """The latest state of a sequence, copied on the devices."""

    cells: Any  # llama.cpp's description of the state, without its contents
    reference: Any  # the same state in RAM; `None` after a restore was proven right


class StateCopies:
    """Copies and restores the state of a sequence; with `on_device`, `save_latest` leaves the copy on the devices."""

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
