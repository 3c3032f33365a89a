"""`TimedReplay`: recorded answers, and passes that a real model runs for their time.

The record decides what is accepted, whatever the model's logits say; so acceptance is that of the recorded model, and
time that of this one. Every few drafted passes are followed by plain passes over the same tokens at the same context,
so that other work on the machine slows both alike. In the middle of each response, passes of several sizes are timed on
their own. They give a cost curve, and with it the modelled speedup to compare with the measured one.

A pass that the system interrupted says nothing about drafting: one that took more than DISTURBED times the median of
its size counts as that median, plain or drafted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from ngramspec.backend import Model
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.given import LARGEST, GivenCurve
from ngramspec.cost.measure import time_batch
from ngramspec.decoding.step import Step
from ngramspec.drafting.draft import Drafter
from ngramspec.policies.policy import Policy
from ngramspec.replay.recording import Recording
from ngramspec.replay.replay import Replay
from ngramspec.replay.tally import Tally

CHUNK = 16
"""Drafted passes between two turns of plain ones."""

DISTURBED = 3.0
"""A pass counts as disturbed if it took more than this many times the median of its size."""

TIMED_SIZES = (1, 2, 4, 8, 16)
"""Batch sizes that are timed whether passes of that size run or not."""


class TimedReplay:
    """Replays recordings on a real target.

    Args:
        target: its KV cache must roll back.
        drafter, policy, draft_max: as in `Replay`.

    Attributes:
        drafted: the counts by category, in seconds as they passed.
        passes: seconds of drafted passes by category, each with its size.
        plain: seconds of plain passes over the same tokens, by category.
    """

    def __init__(
        self, target: Model, drafter: Drafter, policy: str | Policy = "cost", draft_max: int | None = None
    ) -> None:
        self._target = target
        self._replay = Replay(drafter, policy, draft_max, target=target)
        self.drafted: dict[str, Tally] = {}
        self.passes: dict[str, list[tuple[int, float]]] = {}
        self.plain: dict[str, list[float]] = {}
        self._ratios: dict[int, list[float]] = {}
        self._switches: list[float] = []
        self._singles: list[float] = []

    def fits(self, recording: Recording) -> bool:
        """Whether the target's context holds a recording, and a draft at its end."""
        return len(recording.prompt) + len(recording.response) + LARGEST <= self._target.n_ctx

    def run(self, recording: Recording) -> None:
        """Time a recording. If this is interrupted, the recording does not count."""
        if not self.drafted:
            # Not before the first drafted pass, where the time it may take depends on the room in the context.
            self._target.prefill(recording.prompt)
            self._replay.decoder.calibration.ensure_curve(self._target, len(recording.response))
        shadow = _PlainShadow(self._target, recording)
        drafted = self._replay.run(recording, shadow.follow)
        seconds = self._time_sizes(recording, sorted({*TIMED_SIZES, *drafted.batches}))
        self.passes.setdefault(recording.category, []).extend(shadow.drafted)
        self.plain.setdefault(recording.category, []).extend(shadow.plain)
        self.drafted.setdefault(recording.category, Tally()).merge(drafted)
        self._singles.append(seconds[1][1])
        self._switches.append(median(first - steady for first, steady in seconds.values()) / seconds[1][1])
        for size, (_, steady) in seconds.items():
            self._ratios.setdefault(size, []).append(steady / seconds[1][1])

    def _time_sizes(self, recording: Recording, sizes: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Seconds of passes by size, right after a change of size and later, in the middle of the response."""
        target, text = self._target, [*recording.prompt, *recording.response]
        middle = len(recording.prompt) + len(recording.response) // 2
        target.prefill(text[:middle])
        # The first pass after a prefill pays for more than a change of size.
        time_batch(target, text[middle:][:1])
        seconds = {}
        for size in [*sizes[1:], sizes[0]]:
            # Tokens of the text itself, so that a mixture of experts uses the experts that such a text uses.
            batch = (text[middle:] * (size // (len(text) - middle) + 1))[:size]
            first, *rest = (time_batch(target, batch) for _ in range(4 if size == 1 else 3))
            seconds[size] = first, median(rest)
        return seconds

    @property
    def single(self) -> float:
        """Seconds of a pass over one token, the median over the recordings so far."""
        return median(self._singles)

    @property
    def curve(self) -> GivenCurve:
        """Medians over the recordings so far, of which there must be one."""
        points = {size: median(ratios) for size, ratios in self._ratios.items()}
        # All sizes are timed: two neighbouring ones say little about the slope up to the largest batch.
        points.setdefault(LARGEST, CostCurve(points).ratio(LARGEST))
        return GivenCurve(points, max(0.0, median(self._switches)))

    def measured(self, category: str | None = None) -> float:
        """Seconds of plain passes over seconds of drafted ones, for the same tokens of a category, or of all."""
        plain, drafted = self._seconds(category)
        return plain / drafted

    def measured_with_drafting(self) -> float:
        """As above for all, with the time of drafting and learning on the drafted side."""
        plain, drafted = self._seconds(None)
        return plain / (drafted + sum(tally.work_seconds for tally in self.drafted.values()))

    @property
    def disturbed(self) -> int:
        """How many passes, plain or drafted, count as less than they took."""
        usual = self._usual()
        drafted = [(size, seconds) for passes in self.passes.values() for size, seconds in passes]
        plain = [(1, seconds) for passes in self.plain.values() for seconds in passes]
        return sum(seconds > DISTURBED * usual[size] for size, seconds in drafted + plain)

    def _seconds(self, category: str | None) -> tuple[float, float]:
        """Seconds of plain and of drafted passes, without the disturbances."""
        usual = self._usual()

        def counted(size: int, seconds: float) -> float:
            return seconds if seconds <= DISTURBED * usual[size] else usual[size]

        names = self.plain if category is None else [category]
        plain = sum(counted(1, seconds) for name in names for seconds in self.plain[name])
        return plain, sum(counted(size, seconds) for name in names for size, seconds in self.passes[name])

    def _usual(self) -> dict[int, float]:
        """Median seconds of all passes by size."""
        by_size: dict[int, list[float]] = {1: [seconds for passes in self.plain.values() for seconds in passes]}
        for passes in self.passes.values():
            for size, seconds in passes:
                by_size.setdefault(size, []).append(seconds)
        return {size: median(seconds) for size, seconds in by_size.items()}


class _PlainShadow:
    """Runs the tokens of the last drafted passes again, one by one, before the next drafted pass."""

    def __init__(self, target: Model, recording: Recording) -> None:
        self._target = target
        self._recording = recording
        self._emitted = self._followed = 0
        self.drafted: list[tuple[int, float]] = []
        self.plain: list[float] = []

    def follow(self, step: Step) -> None:
        """Take note of a step, and catch up if it is time to."""
        self._emitted += len(step.tokens)
        if step.batch == 0:
            self._followed = self._emitted
            return
        self.drafted.append((step.batch, step.seconds))
        if len(self.drafted) % CHUNK and self._emitted < len(self._recording.response):
            return
        # The cache holds all emitted tokens but the last, as it will again.
        target, response = self._target, self._recording.response
        target.rollback(len(self._recording.prompt) + self._followed - 1)
        # Untimed passes pay for the change of size, here, and for the change back, after the loop.
        time_batch(target, response[self._followed - 1 : self._followed])
        for token in response[self._followed - 1 : self._emitted - 1]:
            began = time.perf_counter()
            target.evaluate([token])
            self.plain.append(time.perf_counter() - began)
        self._followed = self._emitted
        if self._emitted < len(response):
            time_batch(target, [response[self._emitted - 1]] * step.batch)
