"""Whether what a memory went through leaves a trace: the same tokens, read into a cleared cache, give the same logits.

Nothing is taken back in what is compared with, so a memory that goes back to a wrong state is seen even where it does
so every time. Three things go back besides the refusal of drafts (see `ngramspec.selfcheck.rollback`): a prompt that
shares its beginning with what the cache holds, the measurement of what passes cost, in a new process and in later ones,
and the probe of batch sizes.
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
"""Whether there is time to read so many tokens of prompts, and for so many passes."""

DEPTHS = (12, 300)
"""Tokens of a prompt: a few, and so many that exact mode keeps chunks of it and a recurrent memory checkpoints."""

AFTER = 12
"""Tokens behind a prompt that a test takes, besides those that measurements add."""

MARGIN = 4.0
"""A difference counts as rounding up to so many times the largest one between ways to read the tokens."""

_RETIMED = (2, 5)  # which of the sizes that are measured
_PROBE_PASSES = 2 * sum(-(-POSITIONS // size) for size in SIZES)


@dataclass(frozen=True, slots=True)
class StateTest:
    """What logits were after something that must leave no trace, and without it.

    Attributes:
        kind: what went back.
        what: it, in words.
        depth: tokens of the prompt.
        difference: largest difference of a logit; inf where one is nan.
        bound: up to which batch sizes explain that; 0 where the bits must be the same.
        identical: whether they are; of a probe, whether it found the same classes of sizes.
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

    Where no tokens are evaluated, as many as are "kept", less than 0, are taken back once more.
    """

    what: str
    passes: tuple[tuple[int, int], ...]
    kept: float  # share of the old prompt that the new one begins with
    new: int  # tokens that it has behind that
    answered: bool = False  # whether what was kept of the passes stands between them

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
    """The tests of a kind, those of a short prompt first, as far as there is time; the first one takes what it takes.

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
        # Rounding is measured by three readings more, where there is any.
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
    """Measuring on top of a prompt and two tokens: as a new process does, or a later one whose turn it is to time."""
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
    """The probe of batch sizes, against each size in a cache that was cleared before."""
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
    """How far off logits may be because tokens were read in batches of other sizes: measured, nothing taken back."""
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
