"""What is measured for `exact="auto"`, of any runner: which batch sizes agree bit for bit, and what passes cost."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from ngramspec.backend import Logits

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # batch sizes that a trial compares
PROMPT = 1024  # tokens of a usual prompt

DEPTHS = (0, PROMPT)
"""Tokens of context after which sizes are compared and passes are timed, one after the other; CPU kernels were seen to
change at 256 and 512."""

MOST = 7  # all sizes up to this one must agree, and only sizes that do are used: K-quants change their kernel at 8

REAL, COMPARED = 13, 8
"""How many real tokens stand before the compared ones, and how many are compared: the first ones of each batch. 13 is
no multiple of anything: some architectures (DeepSeek 4) treat the tokens that complete a block of the context apart."""

CHUNK = 64  # tokens of a prefill that is timed: from here on CPUs read a prompt with kernels of their own
READ = 9 * CHUNK + SIZES[-1]  # tokens of a text that are read to see how far rounding goes: past 512 cells
ROOM = DEPTHS[1] + 2 * CHUNK + SIZES[-1]  # size of a trial's context

ROUNDS = 2

COST, ROUNDING_COST = 50, 170
"""The most that `identity` and `times` take, and `rounding`, roughly, in passes over one token."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which batch sizes agree under one setting."""

    agreeing: tuple[int, ...]  # the compared sizes that agree bit for bit with single tokens, 1 among them, ascending
    padded: tuple[int, ...]  # those, from two on, that agree with the largest that drafts would use

    @property
    def whole(self) -> bool:
        """Whether single tokens agree with every size that drafts would use."""
        return set(self.agreeing) >= {n for n in SIZES if n <= MOST}

    @property
    def pads(self) -> bool:
        """Whether all sizes from two on agree with each other."""
        return set(self.padded) >= {n for n in SIZES if 2 <= n <= MOST}

    def merge(self, other: Identity) -> Identity:
        """What holds at both of two depths."""
        return Identity(
            tuple(n for n in self.agreeing if n in other.agreeing),
            tuple(n for n in self.padded if n in other.padded),
        )


Times = tuple[float, float]
"""Seconds of one way to decode, after a context of one depth: of a pass without a draft, and per token of a prompt."""


class Trial(Protocol):
    """A small context of its own under one setting, to measure in; each method raises TargetError if it fails."""

    @property
    def n_vocab(self) -> int: ...

    def start(self, depth: int, *, contents: bool = True) -> None:
        """Hold `depth` tokens and nothing else. Without `contents` only the time of later passes must be right."""

    def evaluate(self, tokens: Sequence[int], rows: int = 1) -> Logits:
        """Append tokens in one pass; logits after the first `rows` of them, or after the last for 1."""

    def keep(self) -> None:
        """Mark what is held now: every later `back` returns to it."""

    def back(self) -> None:
        """Take back what was evaluated since `keep`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def random_tokens(n_vocab: int, seed: int, count: int) -> list[int]:
    """Random tokens; kernels are chosen by shape, not by content."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, n_vocab, count)]


def _begin(trial: Trial, depth: int, *, contents: bool = True) -> None:
    """Keep `depth` tokens of context and two real ones."""
    trial.start(depth, contents=contents)
    trial.evaluate(random_tokens(trial.n_vocab, depth, 2))
    trial.keep()


def _time(trial: Trial, tokens: Sequence[int]) -> float:
    """Seconds of a pass on top of what was kept, taken back afterwards."""
    began = time.perf_counter()
    trial.evaluate(tokens, len(tokens) if len(tokens) < CHUNK else 1)
    seconds = time.perf_counter() - began
    trial.back()
    return seconds


def single(trial: Trial) -> float:
    """Seconds of a pass over one token, to tell what measuring will take. The trial then holds some real tokens."""
    _begin(trial, 0)
    _time(trial, [1])
    return _time(trial, [1])


def identity(trial: Trial, depth: int) -> Identity:
    """Compare batch sizes bit by bit, after a context of `depth` tokens and a few real ones."""
    text = random_tokens(trial.n_vocab, depth, REAL + SIZES[-1])
    trial.start(depth)
    trial.evaluate(text[:REAL])
    trial.keep()
    found = _passes(trial, text[REAL:])

    def agreeing(with_size: int) -> tuple[int, ...]:
        return tuple(n for n in SIZES if _equal(found[n], found[with_size]))

    return Identity(agreeing(1), tuple(n for n in SIZES[1:] if _equal(found[n], found[MOST])))


def rounding(trial: Trial, text: Sequence[int]) -> float:
    """The largest difference of one logit between batches and single tokens, in a text such as people write.

    It is repeated as need be; contents that no text has exaggerate.
    """
    text = [*text] * -(-READ // len(text))
    trial.start(0)
    for start in range(0, READ - SIZES[-1], CHUNK):
        trial.evaluate(text[start : start + CHUNK])
    trial.keep()
    found = _passes(trial, text[READ - SIZES[-1] : READ])
    return max(float(np.abs(rows - found[1][: len(rows)]).max()) for rows in found.values())


def _passes(trial: Trial, tail: Sequence[int]) -> dict[int, Logits]:
    """Logits after the first `COMPARED` tokens on top of what was kept, by the size of the pass."""
    singles = np.concatenate([trial.evaluate([token]) for token in tail[:COMPARED]])
    trial.back()
    found = {1: singles}
    for size in SIZES[1:]:
        found[size] = trial.evaluate(tail[:size], min(size, COMPARED))
        trial.back()
    return found


def _equal(a: Logits, b: Logits) -> bool:
    rows = min(len(a), len(b))
    return a[:rows].tobytes() == b[:rows].tobytes()


def times(trials: Mapping[str, Trial], depth: int) -> dict[str, Times]:
    """Seconds of each way to decode after a context of `depth` tokens, by setting; of "fast" also padded to two tokens.

    The settings take turns, and the fastest of some rounds counts: whatever else the machine does only adds time.
    """
    best: dict[tuple[str, int], float] = {}

    def note(name: str, size: int) -> None:
        seconds = _time(trials[name], random_tokens(trials[name].n_vocab, depth, size))
        best[name, size] = min(best.get((name, size), math.inf), seconds)

    for name, trial in trials.items():
        _begin(trial, depth, contents=False)
        note(name, CHUNK)
    for name in [*trials] * ROUNDS:
        for size in (1, 2) if name == "fast" else (1,):
            # The first pass of a new size rebuilds the graph, so each size is timed twice in a row.
            note(name, size)
            note(name, size)
    found = {name: (best[name, 1], best[name, CHUNK] / CHUNK) for name in trials}
    found["padded"] = best["fast", 2], found["fast"][1]
    return found
