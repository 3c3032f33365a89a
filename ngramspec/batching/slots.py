"""`Slots`: assigns a sequence to each request and fills it with known tokens; `PromptCache`: states of texts in RAM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ngramspec.backend import SequenceModel
from ngramspec.data import TargetError
from ngramspec.tokens import common_prefix

WORTH = 32  # minimum number of tokens of a state that is saved or restored: evaluating them takes about as long
MIN_COPY = 16  # minimum number of tokens that are copied from another sequence: chats often share a short system prompt


class PromptCache:
    """Saved states of texts. The least recently used ones are deleted if there are more than `room` bytes of them.

    A text that is the beginning of another one is not stored separately.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._states: dict[tuple[int, ...], bytes] = {}

    @property
    def size(self) -> int:
        return sum(map(len, self._states.values()))

    def put(self, tokens: Sequence[int], state: bytes) -> None:
        """Store a state, unless it is larger than `room`."""
        for text in [text for text in self._states if common_prefix(text, tokens) == len(text)]:
            del self._states[text]
        if len(state) <= self.room:
            self._states[tuple(tokens)] = state
        while self.size > self.room:
            del self._states[next(iter(self._states))]

    def holds(self, tokens: Sequence[int]) -> bool:
        """Return True if a text that begins with these tokens is stored."""
        return any(common_prefix(text, tokens) == len(tokens) for text in self._states)

    def best(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Return the text with the longest common prefix with a prompt, and the length of that prefix."""
        common = ((common_prefix(tokens, prompt), tokens) for tokens in self._states)
        length, text = max(common, key=lambda item: item[0], default=(0, ()))
        return text, length

    def take(self, tokens: tuple[int, ...]) -> bytes:
        return self._states.pop(tokens)


class Slots:
    """The sequences of a model, and the saved texts that were in them, at most `room` bytes.

    `needs_neighbours`: sequences whose numbers are not consecutive are evaluated one after the other. `scales` are
    those of the LoRA adapters for requests that do not set their own.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceModel],
        room: int = 0,
        *,
        needs_neighbours: bool = False,
        scales: tuple[float, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self.read_seconds = 0.0  # seconds that evaluating a token of a prompt takes; 0 if that is not known
        self._save_seconds = 0.0  # of the last save, per token
        self._sequences = list(sequences)
        self._scales = scales
        self._scales_of = {sequence.number: scales for sequence in sequences}  # with which its tokens were evaluated
        self._needs_neighbours = needs_neighbours
        self.free = list(sequences)  # sequences without a request, the least recently used first
        self._cache = PromptCache(room)

    def take(
        self, prompt: Sequence[int], preferred_number: int | None = None, scales: tuple[float, ...] | None = None
    ) -> SequenceModel:
        """Return a free sequence, filled with the longest known beginning of a prompt.

        This beginning is its own tokens, those of another sequence, or a state in the `PromptCache`; tokens that were
        evaluated with other `scales` of the LoRA adapters are not used. The sequence with `preferred_number` is used if
        it is free.
        """
        scales = self._scales if scales is None else scales
        sequence = self._choose(prompt, preferred_number, scales)
        n_own = self._common(sequence, prompt, scales)
        self._leave(sequence, n_own)
        self.normalise(sequence, scales)
        matches = (
            (self._common(source, prompt, scales), source) for source in self._sequences if source is not sequence
        )
        # If several match, the shortest one is copied, because a copy may include all of its tokens.
        n_other, source = max(matches, key=lambda x: (x[0], -len(x[1].tokens)), default=(0, sequence))
        tokens, n_saved = self._cache.best(prompt) if scales == self._scales else ((), 0)
        if n_saved > n_other and n_saved >= n_own + WORTH:
            state = self._cache.take(tokens)
            with suppress(TargetError):
                sequence.restore(tokens, state)
                self._cache.put(tokens, state)  # It was useful, so it becomes the last to be deleted.
        elif n_other >= n_own + MIN_COPY:
            sequence.adopt(source, n_other)
        self.free.remove(sequence)
        return sequence

    def give_back(self, sequence: SequenceModel) -> None:
        """Free a sequence, which keeps its tokens."""
        self.free.append(sequence)

    def set_scales(self, scales: tuple[float, ...]) -> None:
        """Set the scales of requests that do not set their own. Only states of these are kept in RAM."""
        if scales != self._scales:
            self._scales, self._cache = scales, PromptCache(self._cache.room)

    def normalise(self, sequence: SequenceModel, scales: tuple[float, ...] | None = None) -> SequenceModel:
        """Clear a sequence if its tokens were evaluated with other scales; `None` means the default ones."""
        scales = self._scales if scales is None else scales
        if self._scales_of[sequence.number] != scales:
            sequence.clear()
            self._scales_of[sequence.number] = scales
        return sequence

    def _common(self, sequence: SequenceModel, prompt: Sequence[int], scales: tuple[float, ...]) -> int:
        """Return the length of the common prefix of a sequence and a prompt, if it was evaluated with these scales."""
        return common_prefix(sequence.tokens, prompt) if self._scales_of[sequence.number] == scales else 0

    def _choose(self, prompt: Sequence[int], preferred_number: int | None, scales: tuple[float, ...]) -> SequenceModel:
        for sequence in self.free:
            if sequence.number == preferred_number:
                return sequence
        # A sequence that the prompt continues: more than half of its tokens are the beginning of the prompt.
        common = {sequence.number: self._common(sequence, prompt, scales) for sequence in self.free}
        going_on = [sequence for sequence in self.free if 2 * common[sequence.number] > len(sequence.tokens)]
        if going_on:
            return max(going_on, key=lambda sequence: common[sequence.number])
        return min(self.free, key=lambda sequence: (self._gaps(sequence), len(sequence.tokens) > 0))

    def _gaps(self, sequence: SequenceModel) -> int:
        """Return how many idle sequences would be between the busy ones and this one, which makes passes slower."""
        free = {slot.number for slot in self.free}
        busy = [slot.number for slot in self._sequences if slot.number not in free or slot is sequence]
        return max(busy) - min(busy) + 1 - len(busy) if self._needs_neighbours else 0

    def _leave(self, sequence: SequenceModel, common: int) -> None:
        """Save the tokens of a sequence, if its next text continues from far before their end."""
        tokens = tuple(sequence.tokens)
        if self._scales_of[sequence.number] != self._scales or not self._cache.room:
            return
        if len(tokens) - common < WORTH or self._cache.holds(tokens):
            return
        if 0 < self.read_seconds < self._save_seconds:
            # Evaluating them again takes less time; on a GPU, a save copies the tokens of interleaved texts one by one.
            self._save_seconds *= 0.95  # so that a save is tried again now and then
            return
        began = self._clock()
        with suppress(TargetError):
            self._cache.put(tokens, sequence.save_state())
        self._save_seconds = (self._clock() - began) / len(tokens)
