"""Whether what a memory went through leaves a trace: the same tokens, read into a cleared cache, give the same logits.

The reference takes nothing back, so a memory that returns to a wrong state is caught even if it does so every time.
Refused drafts make a memory go back (see `ngramspec.selfcheck.rollback`), and so do three other things, which are
tested here: a prompt that shares its beginning with what the cache holds; the measurement of what passes cost, in a new
process and in later ones; and the probe of batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from ngramspec.backend import Logits, Model
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.kernels import POSITIONS, SIZES, probe
from ngramspec.cost.measure import MEASURE_ORDER

Kind = Literal["reuse", "probe", "calibration"]
Affordable = Callable[[int, int], bool]
"""Is there time to read this many prompt tokens (first argument) and make this many passes (second)?"""

DEPTHS = (12, 300)
"""Lengths of a prompt: short, and long enough for exact mode to keep chunks and recurrent memory checkpoints of it."""

AFTER = 12
"""Tokens that a test reads after the prompt, not counting those that measurements add."""

MARGIN = 4.0
"""A difference counts as rounding if it is at most this many times the largest one between ways to read the tokens."""

_RETIMED = (2, 5)  # which of the sizes that are measured
_PROBE_PASSES = 2 * sum(-(-POSITIONS // size) for size in SIZES)


@dataclass(frozen=True, slots=True)
class StateTest:
    """What logits were after something that must leave no trace, and without it.

    Attributes:
        kind: what went back.
        what: the same in words.
        depth: tokens of the prompt.
        difference: largest difference of a logit; inf where one is nan.
        bound: the largest difference that batch sizes explain; 0 where the bits must be the same.
        identical: whether the bits are the same; for a probe, whether it found the same classes of sizes.
    """

    kind: Kind
    what: str
    depth: int
    difference: float
    bound: float
    identical: bool

    @property
    def held(self) -> bool:
        return self.identical or self.difference <= self.bound


class _History(NamedTuple):
    """Passes after a prompt, as (tokens, how many of them are kept), and the prompt that comes next.

    A pass (0, -n) evaluates nothing and takes back n more tokens.
    """

    what: str
    passes: tuple[tuple[int, int], ...]
    kept: float  # share of the old prompt that the new one begins with
    new: int  # its own tokens at the end
    answered: bool = False  # whether the tokens kept of the passes stand between the two parts

    @property
    def refuses(self) -> bool:
        return any(size != kept for size, kept in self.passes)


_HISTORIES = (
    _History("the same prompt after three tokens", ((1, 1), (1, 1), (1, 1)), 1.0, 0),
    _History("a longer prompt after a token", ((1, 1),), 1.0, 3),
    _History("another end after a refused draft", ((5, 2), (1, 1)), 0.8, 4),
    _History("the same prompt after drafts", ((5, 5), (5, 1), (1, 1), (4, 2)), 1.0, 0),
    _History("another end of an answer that was cut", ((5, 4), (0, -2)), 1.0, 2, answered=True),
    _History("a shorter prompt after two tokens", ((1, 1), (1, 1)), 0.6, 0),
)


def state_tests(
    target: Model, text: Sequence[int], kind: Kind, affordable: Affordable, *, exact: bool
) -> Iterator[StateTest]:
    """The tests of a kind, those of a short prompt first, while there is time; the first one is made in any case.

    Args:
        target: its cache is empty afterwards.
        text: tokens to read, more than AFTER.
        kind: what goes back.
        affordable: asked before each test.
        exact: prompts are read as in exact mode, and bits must be the same.
    """
    room = min(len(text), target.n_ctx) - AFTER
    first = True
    for depth in sorted({min(depth, room) for depth in DEPTHS}):
        # Where there is rounding, measuring it takes three more readings.
        readings, passes = (2, 12) if exact else (5, 24)
        if kind == "probe":
            if depth == min(DEPTHS[0], room) and affordable((len(SIZES) + 1) * depth, 2 * _PROBE_PASSES):
                yield _probe(target, depth)
            continue
        tests = (
            [partial(_reuse, history=history) for history in _HISTORIES if target.can_rollback or not history.refuses]
            if kind == "reuse"
            else [partial(_calibration, later=later) for later in (None, *_RETIMED)]
        )
        for test in tests:
            if not first and not affordable(readings * depth, passes):
                break
            first = False
            yield test(target, list(text[:depth]), list(text[depth : depth + AFTER]), exact=exact)
    target.clear()


def _reuse(target: Model, prompt: list[int], behind: list[int], *, history: _History, exact: bool) -> StateTest:
    """A prompt that shares its beginning with what the cache holds."""
    new = [(token + 1) % target.n_vocab for token in behind[: history.new]]
    answer = behind[: sum(kept for _, kept in history.passes)] if history.answered else []
    then = [*prompt[: max(1, int(history.kept * len(prompt)))], *answer, *new]
    target.clear()
    target.prefill(prompt, aligned=exact)
    done = 0
    for size, kept in history.passes:
        if size:
            target.evaluate(behind[done : done + size])
        done += kept
        target.rollback(len(prompt) + done)
    got = _read(target, then, behind, exact=exact)
    target.clear()
    want = _read(target, then, behind, exact=exact)
    bound = 0.0 if exact or _same(got, want) else _rounding(target, then, behind, want)
    return _test("reuse", history.what, len(prompt), got, want, bound)


def _calibration(target: Model, prompt: list[int], behind: list[int], *, later: int | None, exact: bool) -> StateTest:
    """Measure what passes cost after a prompt and two tokens: as a new process does, or a later one in its turn."""
    rows = []
    for measuring in (True, False):
        target.clear()
        target.prefill(prompt, aligned=exact)
        for token in behind[:2]:
            target.evaluate([token])
        if measuring:
            Calibration(curve=None if later is None else CostCurve({1: 1e-3}), uses=later or 0).ensure_curve(target)
        rows.append(_evaluate(target, behind[2:]))
    got, want = rows
    bound = 0.0 if exact or _same(got, want) else _rounding(target, [*prompt, *behind[:2]], behind[2:], want)
    what = "measuring all sizes" if later is None else f"timing {MEASURE_ORDER[later]} tokens again"
    return _test("calibration", what, len(prompt), got, want, bound)


def _probe(target: Model, depth: int) -> StateTest:
    """Compare the probe of batch sizes with each size evaluated in a freshly cleared cache."""
    found = probe(target, (depth,))
    rng = np.random.default_rng(0)
    text = [int(token) for token in rng.integers(0, target.n_vocab, depth + max(SIZES) + POSITIONS)]
    rows: dict[int, Logits] = {}
    for size in SIZES:
        target.clear()
        target.prefill(text[:depth])
        starts = range(depth, depth + POSITIONS, size)
        rows[size] = np.concatenate([target.evaluate(text[i : i + size]).copy() for i in starts])[:POSITIONS]
    target.clear()
    classes: dict[bytes, list[int]] = {}
    for size in SIZES:
        classes.setdefault(rows[size].tobytes(), []).append(size)
    largest = max(float(np.abs(each - rows[SIZES[0]]).max()) for each in rows.values())
    identical = sorted(map(sorted, classes.values())) == sorted(map(sorted, found.classes))
    identical = identical and found.max_difference == largest
    return StateTest("probe", "sizes of batches", depth, abs(found.max_difference - largest), 0.0, identical)


def _read(target: Model, prompt: Sequence[int], behind: Sequence[int], *, exact: bool) -> Logits:
    """The logits after a prompt, and after a few tokens more."""
    row = target.prefill(prompt, aligned=exact).copy()
    return np.concatenate([row[np.newaxis], _evaluate(target, behind)])


def _evaluate(target: Model, tokens: Sequence[int]) -> Logits:
    """The logits of two single tokens and of a batch of four behind them."""
    parts = (tokens[:1], tokens[1:2], tokens[2:6])
    return np.concatenate([target.evaluate(part).copy() for part in parts])


def _rounding(target: Model, prompt: Sequence[int], behind: Sequence[int], want: Logits) -> float:
    """How far logits move when tokens are read in batches of other sizes; measured without taking anything back."""
    largest = 0.0
    for cut in sorted({len(prompt) * 3 // 5, len(prompt) - 3, len(prompt) - 1}):
        target.clear()
        if cut > 0:
            target.prefill(prompt[:cut])
        rows = [target.prefill(prompt).copy()[np.newaxis], target.evaluate(behind[:6]).copy()]
        largest = max(largest, float(np.abs(np.concatenate(rows)[-len(want) :] - want).max()))
    return MARGIN * largest


def _same(got: Logits, want: Logits) -> bool:
    return got.tobytes() == want.tobytes()


def _test(kind: Kind, what: str, depth: int, got: Logits, want: Logits, bound: float) -> StateTest:
    if _same(got, want):
        return StateTest(kind, what, depth, 0.0, bound, True)
    changed = got != want
    gaps = np.abs(got[changed] - want[changed])
    return StateTest(kind, what, depth, float(np.nan_to_num(gaps, nan=np.inf).max(initial=0.0)), bound, False)
