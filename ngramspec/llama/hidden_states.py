"""`HiddenStates`: the target's hidden states after the last tokens of a sequence, from which a head predicts.

    rows = states.output_address(context)   # after a llama_decode of `tokens`, the first of which is at position 100
    states.copy_rows(rows, 100, tokens)
    states.count_known(text)                # number of tokens of `text` with known states, counting all older ones
    states.before(101, 104)                 # the states after the tokens at positions 100, 101 and 102

llama.cpp's buffer contains only the states of the last pass. So each sequence keeps its own states, which are copied
with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from ngramspec.llama import bindings
from ngramspec.tokens import common_prefix

MIN_STATES = 1024
"""Number of last tokens whose states are kept.

A head reads only these tokens of a prompt. This suffices, because the layers attend to earlier tokens, so a state
contains information about these too.
"""

States = NDArray[np.float32]  # hidden states, shape (tokens, width of the model)


class HiddenStates:
    """The hidden states of the last tokens of a sequence, in the order of its tokens.

    A pass returns hidden states only if they are `wanted`, and a pass over a prompt only if `of_prompts` is set too.
    The last layer is then computed for all tokens of the pass, which may change last bits.
    """

    def __init__(self, width: int, n_states: int = MIN_STATES) -> None:
        self._ext: Any = bindings.head_functions(llama)
        self._width = width
        self._n_states = n_states
        self._rows = np.zeros((2 * n_states, width), np.float32)
        self._begin: int = self._rows.ctypes.data
        self._tokens: list[int] = []
        self.first = 0  # position of the first token whose state is here
        self.wanted = self.of_prompts = True

    # ------------------------------------------------------------------ passes

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
        """Copy the states of new tokens, of which the first is at position `start`, from the address `rows`.

        Returns:
            The address of the next sequence's states.
        """
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

    # ------------------------------------------------------------------ copies

    def adopt(self, source: HiddenStates, length: int) -> None:
        """Copy the states of the first `length` tokens of another sequence."""
        self.first, self._tokens = source.first, source._tokens[: max(0, length - source.first)]
        self._rows[: len(self._tokens)] = source._rows[: len(self._tokens)]

    # ------------------------------------------------------------------ states for a head

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
