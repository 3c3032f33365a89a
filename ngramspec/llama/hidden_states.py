"""`HiddenStates`: what a target's layers made of its last tokens, for a head that guesses from that.

    states.took(context, 100, tokens)       # after a llama_decode of `tokens`, the first of which is number 100
    states.known(text, 90)                  # how many tokens of `text` have their states here, older ones aside
    states.before(101, 104)                 # the states after the tokens in front of numbers 101, 102 and 103

llama.cpp's buffer holds those of the last pass alone.
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

KEPT = 1024
"""States that are kept, of the last tokens. A head reads no more of a prompt than that: it guesses what comes next,
and a state, by all that its layers attended to, tells of the tokens before it too."""

States = NDArray[np.float32]
"""Hidden states, shape (tokens, width of the model)."""


class HiddenStates:
    """The hidden states of the last tokens that a context evaluated, in order of the text.

    Args:
        width: numbers in a state.
        kept: fewest states that are kept of a longer text; twice as many have room.

    Attributes:
        first: number in the text of the first token whose state is here.
        wanted: whether passes are to hand out their states.
    """

    def __init__(self, width: int, kept: int = KEPT) -> None:
        self._ext: Any = bindings.head_functions(llama)
        self._width = width
        self._kept = kept
        self._rows = np.zeros((2 * kept, width), np.float32)
        self._begin: int = self._rows.ctypes.data
        self._tokens: list[int] = []
        self._same = 0  # tokens that are what they were when `known` was asked last
        self.first = 0
        self.wanted = True

    def ask(self, context: Any, wanted: bool) -> None:
        """Have the next passes of a context give their states, or not."""
        self._ext.llama_set_embeddings_nextn(context, wanted, False)

    def forget(self) -> None:
        """Hold nothing: a pass failed."""
        self._tokens.clear()
        self.first = self._same = 0

    def missed(self, start: int) -> None:
        """Drop the states of a text from token number `start` on: a pass over those gave none."""
        self._same = min(self._same, start)
        del self._tokens[max(0, start - self.first) :]

    def took(self, context: Any, start: int, tokens: Sequence[int]) -> None:
        """Take the states of the pass that a context has just made over tokens of one text, from number `start` on."""
        self.missed(start)
        if start != self.first + len(self._tokens):
            self._tokens.clear()
        size = len(tokens)
        skipped = max(0, size - self._kept)
        if skipped or len(self._tokens) + size > len(self._rows):
            left = 0 if skipped else min(len(self._tokens), self._kept)
            self._rows[:left] = self._rows[len(self._tokens) - left : len(self._tokens)].copy()
            self._tokens = self._tokens[len(self._tokens) - left :]
        held = len(self._tokens)
        self.first = start + skipped - held
        found = ctypes.addressof(self._ext.llama_get_embeddings_nextn(context).contents)
        # Every pass of the target comes here: numpy's views of what a pointer points to take longer than the copy.
        state = self._rows.itemsize * self._width
        ctypes.memmove(self._begin + held * state, found + skipped * state, (size - skipped) * state)
        self._tokens += tokens[skipped:]

    def known(self, text: Sequence[int], sure: int = 0) -> int:
        """How many tokens of a text have states here, those before `first` included; 0: none.

        Args:
            text: of which token number `first` and those behind it are looked at.
            sure: so many were found the last time, and are in the text still: they are not compared again.
        """
        start = max(self.first, min(sure, self._same))
        end = self._same = self.first + len(self._tokens)
        same = start + common_prefix(self._tokens[start - self.first :], text[start:end])
        return same if same > self.first else 0

    def before(self, start: int, end: int) -> States:
        """What a head is given beside the tokens number `start` to `end`: the states after those in front of them.

        They are 0 where they are not here, and before the first token of a text.
        """
        found = np.zeros((end - start, self._width), np.float32)
        low, high = max(start - 1, self.first), min(end - 1, self.first + len(self._tokens))
        if low < high:
            found[low - start + 1 : high - start + 1] = self._rows[low - self.first : high - self.first]
        return found


def rows_at(pointer: Any, rows: int, width: int) -> States:
    """What a pointer of llama.cpp's points to; a view, valid until the next pass."""
    buffer: Any = (ctypes.c_char * (4 * rows * width)).from_address(ctypes.addressof(pointer.contents))
    found: States = np.ndarray((rows, width), np.float32, buffer)
    return found
