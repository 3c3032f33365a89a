"""`Pace`: how long a draft model takes for a token, and for a longer text, measured as it works."""

from __future__ import annotations

from collections import deque
from statistics import median_low

RECENT = 15
"""Passes that the pace is the median of: one that the system interrupted, or the first, which sets things up, is not
seen in it."""

FEW = 8
"""Tokens in the largest pass of those that are timed apart: kernels for a few tokens may take longer for each of them
than those for many do."""


class Pace:
    """Seconds of a pass over one token, and of each token more, as medians of the latest passes.

    >>> pace = Pace()
    >>> for seconds in (0.9, 0.02, 0.02):
    ...     pace.saw(1, seconds)
    >>> pace.saw(11, 0.07)
    >>> pace.token, round(pace.reading(101), 3)
    (0.02, 0.52)
    >>> pace.saw(4, 0.08)
    >>> round(pace.reading(3), 3)
    0.06
    """

    def __init__(self) -> None:
        self._ones: deque[float] = deque(maxlen=RECENT)
        self._few: deque[float] = deque(maxlen=RECENT)
        self._more: deque[float] = deque(maxlen=RECENT)

    def saw(self, tokens: int, seconds: float) -> None:
        """Learn from a pass."""
        if tokens == 1:
            self._ones.append(seconds)
        elif tokens > 1:
            times = self._few if tokens <= FEW else self._more
            times.append(max(0.0, (seconds - self.token) / (tokens - 1)))

    @property
    def token(self) -> float:
        """Seconds of a pass over one token; 0 while none was timed."""
        return median_low(self._ones) if self._ones else 0.0

    def reading(self, tokens: int) -> float:
        """Seconds that it takes to read so many tokens, at least one; no longer than one by one."""
        one = self.token
        times = (self._few if tokens <= FEW else self._more) or self._more or self._few
        each = min(one, median_low(times)) if times else one
        return one + each * (tokens - 1)

    def share(self, tokens: int, texts: int) -> float:
        """Seconds of a pass over so many tokens of each of several texts, divided among these."""
        return self.reading(tokens * texts) / texts
