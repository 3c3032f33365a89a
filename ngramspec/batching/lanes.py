"""`Lanes`: which lane a request works in, and how it comes to hold what is known of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.backend import Lane
from ngramspec.batching.prompt_cache import PromptCache
from ngramspec.errors import TargetError
from ngramspec.tokens import common_prefix

WORTH = 32
"""Fewest tokens for which a state is saved, copied or restored: evaluating them takes about as long."""


class Lanes:
    """The lanes of a model, and the texts that left them.

    Args:
        lanes: all of them.
        cache: where texts go that leave a lane.
        apart: whether lanes whose numbers do not follow each other are evaluated one after the other.
    """

    def __init__(self, lanes: Sequence[Lane], cache: PromptCache, *, apart: bool = False) -> None:
        self._lanes = list(lanes)
        self._apart = apart
        self._free = list(lanes)  # the least recently used first
        self._cache = cache

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self, prompt: Sequence[int], preferred: int | None = None) -> Lane:
        """A free lane that holds the longest known beginning of a prompt.

        Args:
            prompt: token ids.
            preferred: number of the lane to take if it is free.
        """
        lane = self._choose(prompt, preferred)
        self._fill(lane, prompt)
        self._free.remove(lane)
        return lane

    def _fill(self, lane: Lane, prompt: Sequence[int]) -> None:
        """Make a lane hold what is known of a prompt, wherever that is."""
        here = common_prefix(lane.tokens, prompt)
        self._leave(lane, here)
        others = ((common_prefix(other.tokens, prompt), other) for other in self._lanes if other is not lane)
        there, other = max(others, key=lambda x: x[0], default=(0, lane))
        kept, saved = self._cache.best(prompt)
        if max(there, saved) < here + WORTH:
            return
        if kept is not None and saved > there:
            try:
                lane.restore(kept.tokens, kept.state)
            except TargetError:
                self._cache.drop(kept)
            else:
                self._cache.used(kept)
        else:
            lane.adopt(other, there)

    def give_back(self, lane: Lane) -> None:
        """A request left a lane, which goes on holding its text."""
        self._free.append(lane)

    def _choose(self, prompt: Sequence[int], preferred: int | None) -> Lane:
        for lane in self._free:
            if lane.number == preferred:
                return lane
        # One whose text goes on: most of what it holds is the prompt's beginning.
        common = {lane.number: common_prefix(lane.tokens, prompt) for lane in self._free}
        going_on = [lane for lane in self._free if 2 * common[lane.number] > len(lane.tokens)]
        if going_on:
            return max(going_on, key=lambda lane: common[lane.number])
        return min(self._free, key=lambda lane: (self._distance(lane), len(lane.tokens) > 0))

    def _distance(self, lane: Lane) -> int:
        """How many numbers lie between a lane and the next one at work, where that matters."""
        free = {other.number for other in self._free}
        busy = [other.number for other in self._lanes if other.number not in free]
        return min((abs(lane.number - number) for number in busy), default=0) if self._apart else 0

    def _leave(self, lane: Lane, common: int) -> None:
        """Save what a lane holds, if its next text goes on from far before the end of it."""
        if len(lane.tokens) - common < WORTH or self._cache.room == 0 or self._cache.holds(lane.tokens):
            return
        try:
            tokens = tuple(lane.tokens)
            self._cache.put(tokens, lane.saved())
        except TargetError:
            return
