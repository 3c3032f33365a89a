"""`HiddenStates`: what a target's layers made of the last tokens of a text, for a head that guesses from that.

    rows = states.handed_out(context)       # after a llama_decode of `tokens`, the first of which is number 100
    states.took(rows, 100, tokens)
    states.known(text)                      # how many tokens of `text` have their states here, older ones aside
    states.before(101, 104)                 # the states after the tokens in front of numbers 101, 102 and 103

llama.cpp's buffer holds those of the last pass alone. A sequence has its own, which go with its text, and are copied
with it.
"""

from __future__ import annotations

import ctypes
import functools
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

States = NDArray[np.float32]  # hidden states, shape (tokens, width of the model)


class HiddenStates:
    """The hidden states of the last tokens of a sequence, each of `width` numbers, in order of the text.

    At least the last `kept` are. Passes may be asked for theirs where they are `wanted`, and those over prompts where
    `of_prompts` says so: the last layer is then computed for all of their tokens, which may move last bits.
    """

    def __init__(self, width: int, kept: int = KEPT) -> None:
        self._ext: Any = bindings.head_functions(llama)
        self._width = width
        self._kept = kept
        self._rows = np.zeros((2 * kept, width), np.float32)
        self._begin: int = self._rows.ctypes.data
        self._tokens: list[int] = []
        self.first = 0  # number in the text of the first token whose state is here
        self.wanted = self.of_prompts = True

    # ------------------------------------------------------------------ passes

    def due_in_prompt(self, left: int) -> bool:
        """Whether a pass over a prompt may hand them out, with so many tokens of it yet to come."""
        return self.of_prompts and left < self._kept

    def ask(self, context: Any, wanted: bool) -> None:
        """Have the next passes of a context give their states, or not."""
        self._ext.llama_set_embeddings_nextn(context, wanted, False)

    def forget(self) -> None:
        self._tokens.clear()
        self.first = 0

    def missed(self, start: int) -> None:
        """Drop the states of a text from token number `start` on: a pass over those gave none."""
        del self._tokens[max(0, start - self.first) :]

    def handed_out(self, context: Any) -> int:
        """Where the states are that the last pass of a context handed out, in order of its tokens."""
        return ctypes.addressof(self._ext.llama_get_embeddings_nextn(context).contents)

    def took(self, rows: int, start: int, tokens: Sequence[int]) -> int:
        """Take the states at `rows`, of tokens from number `start` on; returns where those of the next sequence are."""
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
        # Every pass of the target comes here: numpy's views of what a pointer points to take longer than the copy.
        state = self._rows.itemsize * self._width
        ctypes.memmove(self._begin + held * state, rows + skipped * state, (size - skipped) * state)
        self._tokens += tokens[skipped:]
        return rows + size * state

    # ------------------------------------------------------------------ copies

    def adopt(self, other: HiddenStates, length: int) -> None:
        """Hold what another text's are of its first `length` tokens."""
        self.first, self._tokens = other.first, other._tokens[: max(0, length - other.first)]
        self._rows[: len(self._tokens)] = other._rows[: len(self._tokens)]

    # ------------------------------------------------------------------ what a head reads

    def known(self, text: Sequence[int]) -> int:
        """How many tokens of a text have states here, those before `first` included; 0: none."""
        same = common_prefix(self._tokens, text[self.first : self.first + len(self._tokens)])
        return self.first + same if same else 0

    def before(self, start: int, end: int) -> States:
        """The states after the tokens in front of number `start` to `end`; 0 where they are not here."""
        found = np.zeros((end - start, self._width), np.float32)
        low, high = max(start - 1, self.first), min(end - 1, self.first + len(self._tokens))
        if low < high:
            found[low - start + 1 : high - start + 1] = self._rows[low - self.first : high - self.first]
        return found


def rows_at(pointer: Any, rows: int, width: int, owner: object = None) -> States:
    """Return a view of a llama.cpp array, valid until the next pass, that keeps `owner` alive."""
    buffer = _bytes(4 * rows * width).from_address(ctypes.addressof(pointer.contents))
    buffer.owner = owner
    found: States = np.ndarray((rows, width), np.float32, buffer)
    return found


@functools.cache
def _bytes(size: int) -> Any:
    """The type of so many bytes: making it takes longer than all else that is done to logits here."""
    return ctypes.c_char * size
