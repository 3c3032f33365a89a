"""Replay: the decoding loop on recorded answers, as if each were the greedy output of a target.

    replay, total = Replay(make_drafter("ngram"), curve=GivenCurve({1: 1.0, 8: 2.5})), Tally()
    for recording in recordings:
        total.merge(replay.run(recording))
    total.stats.tokens_per_pass, total.speedup(curve)

It is `SpeculativeDecoder` itself that runs: drafter, policy and loop are those of real decoding. Only the target is
a record, whose passes take the time that a cost curve says, and the verifier compares with the record. No logits
exist. One drafter and one policy serve all recordings, in order.

The rules are those of the harness for other drafters, so that figures compare: the first token comes from the
prefill and is not counted; a pass over k drafted tokens emits the accepted ones and one more, unless the record ended;
nobody is told how long the record is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ngramspec.acceptance.rules import Rows, Verdict
from ngramspec.backend import Logits, Progress, TargetProtocol
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.given import LARGEST, GivenCurve
from ngramspec.cost.kernels import ProbeReport
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.speculation import Shape, Speculation
from ngramspec.decoding.step import Stats, Step
from ngramspec.drafting.draft import Choose, Draft, Drafter, ReadsLogits
from ngramspec.llama.samplers import SamplerChain
from ngramspec.policies.cost_aware import Pass, Policy, ReadsRow, make_policy
from ngramspec.sampling.settings import Sampling

BINS = 10
"""Of the reliability table."""

ENDLESS = 1 << 30
"""Room for an answer: the loop must not know where the record ends."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded answer as token ids.

    Attributes:
        category, id: whose it is.
        prompt: all that the model saw before it answered.
        response: what it answered, end of turn included; at least 2 tokens.
    """

    category: str
    id: str
    prompt: Sequence[int]
    response: Sequence[int]


# --------------------------------------------------------------------------- the record as target and as verifier


class RecordedTarget:
    """A target without a model: it counts tokens, and its clock runs by a cost curve.

    Attributes:
        seconds: modelled time so far, in units of T(1).
    """

    n_ctx = ENDLESS
    n_vocab = 0
    max_batch = LARGEST
    can_rollback = True
    replays = False
    owed = 0
    fingerprint = "recorded"

    def __init__(self, curve: GivenCurve) -> None:
        self.tokens: list[int] = []
        self.seconds = 0.0
        self._curve = curve
        self._last = 1
        # Rows without columns: what a verifier that knows the answer needs to see of logits.
        self._rows = np.empty((LARGEST, 0), np.float32)

    def clock(self) -> float:
        """Modelled time."""
        return self.seconds

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        self.tokens = list(tokens)
        row: Logits = self._rows[0]
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        size = len(tokens)
        self.seconds += self._curve.ratio(size)
        if size != self._last:
            self.seconds += self._curve.switch
            self._last = size
        self.tokens += tokens
        return self._rows[:size]

    def rollback(self, length: int) -> None:
        del self.tokens[length:]

    def checkpoint(self) -> None:
        pass

    def clear(self) -> None:
        self.tokens.clear()

    def sampler(self, sampling: Sampling) -> SamplerChain:
        raise NotImplementedError("a record is verified by RecordedVerifier")

    def probe(self) -> ProbeReport:
        raise NotImplementedError("a record has no kernels to probe")

    def is_eog(self, token: int) -> bool:
        # The record ends where it ends; `Replay` sees to that.
        return False

    def piece(self, token: int) -> bytes:
        return b""


class RecordedVerifier:
    """Keeps a draft while it equals the record, and gives the record's next token after it.

    Args:
        recording: what the target is taken to answer.
    """

    blind = False

    def __init__(self, recording: Recording) -> None:
        self._start = len(recording.prompt)
        self._response = tuple(recording.response)

    def choose(self, position: int) -> Choose | None:
        return None

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        offset = position - self._start
        truth = self._response[offset : offset + 1 + len(draft)]
        right = 0
        for guess, token in zip(draft.tokens, truth, strict=False):
            if guess != token:
                break
            right += 1
        return Verdict(truth[: right + 1], whole=right == len(truth))


# --------------------------------------------------------------------------- what is counted


@dataclass(slots=True)
class Reliability:
    """Predicted against observed acceptance of every proposed position whose outcome is known.

    That is every position of every proposal, sent or not, up to and with the first that was wrong.

    Attributes:
        seen, predicted, right: per bin of BINS, how many, the sum of their predictions, and how many were right.
    """

    seen: list[int] = field(default_factory=lambda: [0] * BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * BINS)
    right: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, proposal: Draft, truth: Sequence[int]) -> None:
        """Count a proposal; `truth` is what really followed."""
        for guess, p, token in zip(proposal.tokens, proposal.acceptance, truth, strict=False):
            number = min(BINS - 1, int(p * BINS))
            self.seen[number] += 1
            self.predicted[number] += p
            if guess != token:
                return
            self.right[number] += 1

    def merge(self, other: Reliability) -> None:
        """Add another's counts to these."""
        for i in range(BINS):
            self.seen[i] += other.seen[i]
            self.predicted[i] += other.predicted[i]
            self.right[i] += other.right[i]

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error: the mean of |predicted - observed| over bins, weighted by their counts.

        (Naeini, Cooper, Hauskrecht 2015, "Obtaining well calibrated probabilities using Bayesian binning".)
        None if nothing was proposed.
        """
        total = sum(self.seen)
        if not total:
            return None
        return sum(abs(p - r) for p, r in zip(self.predicted, self.right, strict=True)) / total


@dataclass(slots=True)
class Tally:
    """The counts of some recordings.

    Attributes:
        transcripts: how many.
        prompt_tokens: of their prompts.
        stats: the counters of all their steps; its seconds are the target's (modelled ones: in units of T(1)).
        batches: target passes by batch size, padding included.
        changes: passes of another size than the one before.
        begin_seconds: CPU time that the drafter took to read the prompts.
        work_seconds: CPU time of drafting and learning, drafter and policy.
        reliability: of the acceptance that the drafter predicted.
    """

    transcripts: int = 0
    prompt_tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    batches: Counter[int] = field(default_factory=Counter)
    changes: int = 0
    begin_seconds: float = 0.0
    work_seconds: float = 0.0
    reliability: Reliability = field(default_factory=Reliability)

    def merge(self, other: Tally) -> None:
        """Add another's counts to these."""
        self.transcripts += other.transcripts
        self.prompt_tokens += other.prompt_tokens
        self.stats.merge(other.stats)
        self.batches += other.batches
        self.changes += other.changes
        self.begin_seconds += other.begin_seconds
        self.work_seconds += other.work_seconds
        self.reliability.merge(other.reliability)

    def speedup(self, curve: GivenCurve) -> float:
        """Passes of one token for the same tokens, over these passes, all at the costs of `curve`."""
        cost = sum(count * curve.ratio(size) for size, count in self.batches.items()) + self.changes * curve.switch
        return self.stats.tokens / cost if cost else 1.0


# --------------------------------------------------------------------------- the replay


class Metered(Speculation):
    """Speculation whose own work is timed; `clock` is the CPU time of the thread."""

    begin_seconds = work_seconds = 0.0

    def __init__(self, drafter: Drafter | None, policy: Policy, clock: Callable[[], float] = time.thread_time) -> None:
        super().__init__(drafter, policy)
        self._clock = clock

    def begin(self, prompt: Sequence[int]) -> None:
        began = self._clock()
        super().begin(prompt)
        self.begin_seconds += self._clock() - began

    def first(self, token: int) -> None:
        began = self._clock()
        super().first(token)
        self.begin_seconds += self._clock() - began

    def plan(
        self,
        left: int,
        choose: Choose | None = None,
        *,
        blind: bool = False,
        shape: Shape | None = None,
        owed: int = 0,
    ) -> tuple[Draft, int]:
        began = self._clock()
        planned = super().plan(left, choose, blind=blind, shape=shape, owed=owed)
        self.work_seconds += self._clock() - began
        return planned

    def learn(self, tokens: Sequence[int], draft: Draft, size: int, seconds: float, plan_seconds: float = 0.0) -> Pass:
        began = self._clock()
        done = super().learn(tokens, draft, size, seconds, plan_seconds)
        self.work_seconds += self._clock() - began
        return done


def check_replayable(drafter: Drafter | None, policy: Policy) -> None:
    """Refuse what a record cannot feed, a timed replay included: its logits are not the record's.

    Raises:
        ValueError: the drafter or the policy reads logits.
    """
    if isinstance(drafter, ReadsLogits):
        raise ValueError(f"the drafter {drafter.name!r} needs a model's logits, and a recorded conversation has none")
    if isinstance(policy, ReadsRow):
        raise ValueError(f"the policy {policy.name!r} needs a model's logits, and a recorded conversation has none")


class Replay:
    """Replays recordings with one drafter and one policy, which serve all of them.

    Args:
        drafter: None replays plain decoding.
        policy: a name or a policy.
        draft_max: as in `SpeculativeDecoder`.
        curve: what a pass costs; the policy drafts by it.
        target: what really runs the passes, if anything does; its logits are ignored, and the policy drafts by
            what is measured of it.

    Raises:
        ValueError: curve and target are given, or neither; what `check_replayable` and `SpeculativeDecoder` refuse.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        policy: str | Policy = "cost",
        draft_max: int | None = None,
        *,
        curve: GivenCurve | None = None,
        target: TargetProtocol | None = None,
    ) -> None:
        if isinstance(policy, str):
            policy, draft_max = make_policy(policy, draft_max), None
        check_replayable(drafter, policy)
        clock = None
        if curve is not None and target is None:
            target = recorded = RecordedTarget(curve)
            clock = recorded.clock
        elif target is None or curve is not None:
            raise ValueError("a replay runs either by a curve or on a target")
        self.decoder = SpeculativeDecoder(
            target, drafter=drafter, policy=policy, draft_max=draft_max, curve=curve, clock=clock
        )
        if curve is None:
            # What is measured of the target belongs to this replay, not to earlier ones, nor to real decoding.
            self.decoder.calibration = Calibration()
        self._meter = self.decoder.speculation = Metered(self.decoder.drafter, self.decoder.policy)
        self._last = 1

    def run(self, recording: Recording, watch: Callable[[Step], None] | None = None) -> Tally:
        """Replay one recording, and count; `watch` is told of every step before the next pass."""
        tally, meter = Tally(1, len(recording.prompt)), self._meter
        meter.begin_seconds = meter.work_seconds = 0.0
        emitted, end = 0, len(recording.response)
        steps = self.decoder.generate(recording.prompt, max_tokens=ENDLESS, verify=RecordedVerifier(recording))
        for step in steps:
            if step.batch:
                if meter.proposal is not None:
                    following = recording.response[emitted : emitted + len(meter.proposal)]
                    tally.reliability.add(meter.proposal, following)
                tally.batches[step.batch] += 1
                tally.changes += step.batch != self._last
                self._last = step.batch
            tally.stats.add(step)
            if watch is not None:
                watch(step)
            emitted += len(step.tokens)
            if emitted == end:
                steps.close()
        assert emitted == end, "the loop stopped before the record did"
        tally.begin_seconds, tally.work_seconds = meter.begin_seconds, meter.work_seconds
        return tally
