"""`FadingRate`: how often something lately came true."""

from __future__ import annotations


class FadingRate:
    """Hits over tries, where each new outcome makes all before it count a little less.

    Args:
        hits, tries: imagined outcomes to begin with.
        fade: weight of what was counted before, at each new outcome; 1: nothing fades.
    """

    __slots__ = ("_fade", "_hits", "_tries")

    def __init__(self, hits: float = 0.0, tries: float = 0.0, *, fade: float) -> None:
        self._hits = hits
        self._tries = tries
        self._fade = fade

    def add(self, hit: float) -> None:
        """Count an outcome: a bool, or a share of a hit."""
        self._hits = self._hits * self._fade + hit
        self._tries = self._tries * self._fade + 1.0

    @property
    def value(self) -> float:
        """The rate. Raises ZeroDivisionError where nothing was counted, nor imagined."""
        return self._hits / self._tries

    def towards(self, rate: float, strength: float) -> float:
        """The rate, shrunk: as if `strength` more outcomes had been counted, of which `rate` were hits."""
        return (self._hits + strength * rate) / (self._tries + strength)
