"""`Slots`: which sequence a request works in, and how it comes to hold what is known of its prompt.

That is what it holds already, what another sequence holds, or what `PromptCache` kept in RAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ngramspec.errors import TargetError
from ngramspec.shared_model import SequenceModel
from ngramspec.tokens import common_prefix

WORTH = 32
"""Fewest tokens for which a state is saved or restored: evaluating them takes about as long."""

COPIED = 16
"""Fewest tokens that are copied from another sequence: on 2 cores SmolLM2 reads so many in 50 ms, and copies them in 1
to 30, by what the other sequence holds. Chats often share a system prompt that is no longer."""


class PromptCache:
    """States of texts, the least recently used first: these go when there are more than `room` bytes of them.

    A text that another one begins with is not kept twice.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._states: dict[tuple[int, ...], bytes] = {}

    @property
    def size(self) -> int:
        return sum(map(len, self._states.values()))

    def put(self, tokens: Sequence[int], state: bytes) -> None:
        """Keep a state, unless it is larger than all the room there is."""
        for known in [known for known in self._states if common_prefix(known, tokens) == len(known)]:
            del self._states[known]
        if len(state) <= self.room:
            self._states[tuple(tokens)] = state
        while self.size > self.room:
            del self._states[next(iter(self._states))]

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether a text that begins with these tokens is kept."""
        return any(common_prefix(known, tokens) == len(tokens) for known in self._states)

    def best(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The text with the most tokens in common with a prompt from its start, and how many those are."""
        common = ((common_prefix(known, prompt), known) for known in self._states)
        most, best = max(common, key=lambda found: found[0], default=(0, ()))
        return best, most

    def take(self, tokens: tuple[int, ...]) -> bytes:
        """The state of a text, which is not kept any longer."""
        return self._states.pop(tokens)


class Slots:
    """The sequences of a model, and the texts that left them.

    Args:
        room: most bytes of the states of texts that left their sequence.
        apart: whether sequences whose numbers do not follow each other are evaluated one after the other.
    """

    def __init__(self, sequences: Sequence[SequenceModel], room: int = 0, *, apart: bool = False) -> None:
        self._sequences = list(sequences)
        self._apart = apart
        self._free = list(sequences)  # the least recently used first
        self._cache = PromptCache(room)

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self, prompt: Sequence[int], preferred: int | None = None) -> SequenceModel:
        """A free sequence, that numbered `preferred` if it is free, made to hold what is known of a prompt's start."""
        sequence = self._choose(prompt, preferred)
        self._fill(sequence, prompt)
        self._free.remove(sequence)
        return sequence

    def _fill(self, sequence: SequenceModel, prompt: Sequence[int]) -> None:
        """Make a sequence hold what is known of a prompt, wherever that is."""
        here = common_prefix(sequence.tokens, prompt)
        self._leave(sequence, here)
        others = ((common_prefix(other.tokens, prompt), other) for other in self._sequences if other is not sequence)
        # Of several the one that holds least: all that it holds may be copied.
        there, other = max(others, key=lambda x: (x[0], -len(x[1].tokens)), default=(0, sequence))
        tokens, saved = self._cache.best(prompt)
        if saved > there and saved >= here + WORTH:
            state = self._cache.take(tokens)
            with suppress(TargetError):
                sequence.restore(tokens, state)
                self._cache.put(tokens, state)  # it was of use: it is the last to go
        elif there >= here + COPIED:
            sequence.adopt(other, there)

    def give_back(self, sequence: SequenceModel) -> None:
        """A request left a sequence, which goes on holding its text."""
        self._free.append(sequence)

    def _choose(self, prompt: Sequence[int], preferred: int | None) -> SequenceModel:
        for sequence in self._free:
            if sequence.number == preferred:
                return sequence
        # One whose text goes on: most of what it holds is the prompt's beginning.
        common = {sequence.number: common_prefix(sequence.tokens, prompt) for sequence in self._free}
        going_on = [sequence for sequence in self._free if 2 * common[sequence.number] > len(sequence.tokens)]
        if going_on:
            return max(going_on, key=lambda sequence: common[sequence.number])
        return min(self._free, key=lambda sequence: (self._gaps(sequence), len(sequence.tokens) > 0))

    def _gaps(self, sequence: SequenceModel) -> int:
        """How many idle sequences would lie between those at work and this one, where each makes passes dearer."""
        free = {other.number for other in self._free}
        busy = [other.number for other in self._sequences if other.number not in free or other is sequence]
        return max(busy) - min(busy) + 1 - len(busy) if self._apart else 0

    def _leave(self, sequence: SequenceModel, common: int) -> None:
        """Save what a sequence holds, if its next text goes on from far before the end of it."""
        tokens = tuple(sequence.tokens)
        if len(tokens) - common >= WORTH and self._cache.room and not self._cache.holds(tokens):
            with suppress(TargetError):
                self._cache.put(tokens, sequence.saved())
