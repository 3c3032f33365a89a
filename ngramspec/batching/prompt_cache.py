"""`PromptCache`: in RAM, what lanes held before other texts took their place, so that a text goes on without a prefill.

The oldest unused go first when the space is used up. A text that another one begins with is not kept twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ngramspec.tokens import common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The state of a lane that held `tokens`."""

    tokens: tuple[int, ...]
    state: bytes


class PromptCache:
    """States of texts, the least recently used first.

    Args:
        room: most bytes of all states.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._kept: list[Kept] = []

    @property
    def size(self) -> int:
        """Bytes of all states."""
        return sum(len(kept.state) for kept in self._kept)

    def put(self, tokens: Sequence[int], state: bytes) -> None:
        """Keep a state, unless it is larger than all the room there is."""
        new = Kept(tuple(tokens), state)
        self._kept = [kept for kept in self._kept if common_prefix(kept.tokens, new.tokens) < len(kept.tokens)]
        if len(state) <= self.room:
            self._kept.append(new)
        while self.size > self.room:
            del self._kept[0]

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether a text that begins with these tokens is kept."""
        return any(common_prefix(kept.tokens, tokens) == len(tokens) for kept in self._kept)

    def best(self, prompt: Sequence[int]) -> tuple[Kept | None, int]:
        """The state with the most tokens in common with a prompt from its start, and how many those are."""
        best, most = None, 0
        for kept in self._kept:
            common = common_prefix(kept.tokens, prompt)
            if common > most:
                best, most = kept, common
        return best, most

    def used(self, kept: Kept) -> None:
        """A state was of use: it is the last to go."""
        self._kept.remove(kept)
        self._kept.append(kept)

    def drop(self, kept: Kept) -> None:
        """Forget a state that turned out to be of no use."""
        self._kept.remove(kept)
