"""Invented recordings for tests, with a fixed seed and as much repetition as real ones."""

from __future__ import annotations

import numpy as np

from ngramspec.instruments.replay.replay import Recording


def make_recordings(count: int, seed: int = 0, vocabulary: int = 300) -> list[Recording]:
    """Return recordings whose answers copy spans of the prompt and of themselves, with new tokens in between."""
    rng = np.random.default_rng(seed)
    result = []
    for i in range(count):
        text = [int(t) for t in rng.integers(0, vocabulary, rng.integers(5, 120))]
        start, length = len(text), int(rng.integers(2, 160))
        while len(text) < start + length:
            if rng.random() < 0.6:
                at, span = int(rng.integers(0, len(text))), int(rng.integers(1, 40))
                text += text[at : at + span]
            else:
                text += [int(t) for t in rng.integers(0, vocabulary, rng.integers(1, 6))]
        result.append(Recording("even" if i % 2 == 0 else "odd", str(i), text[:start], text[start : start + length]))
    return result
