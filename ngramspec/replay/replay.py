"""Replay: the decoding loop on recorded answers, as if each were the greedy output of a target.

    replay, total = Replay(make_drafter("ngram"), curve=GivenCurve({1: 1.0, 8: 2.5})), Tally()
    for recording in recordings:
        total.merge(replay.run(recording))
    total.stats.tokens_per_pass, total.speedup(curve)

`SpeculativeDecoder` itself runs, so drafter, policy and loop are those of real decoding. Only the target is a record,
whose passes take the time given by a cost curve, and the verifier compares with the record. No logits exist. One
drafter and one policy serve all recordings, in order.

The rules are those of the harness for other drafters, so that figures compare: the first token comes from the
prefill and is not counted; a pass over k drafted tokens emits the accepted ones and one more, unless the record ended;
nobody is told how long the record is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ngramspec.cost.given import GivenCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.speculation import Plan, Speculation
from ngramspec.decoding.step import Stats, Step
from ngramspec.drafting.draft import Chooser, Drafter
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.drafting.reliability import Reliability
from ngramspec.policies import make_policy
from ngramspec.policies.policy import Pass, Policy
from ngramspec.replay.recording import ENDLESS, RecordedTarget, RecordedVerifier, Recording, UnendingVocabulary


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
        """Cost of emitting the same tokens in one-token passes / cost of these passes, both by `curve`."""
        cost = sum(count * curve.ratio(size) for size, count in self.batches.items()) + self.changes * curve.switch
        return self.stats.tokens / cost if cost else 1.0


class Metered(Speculation):
    """Speculation whose own work is timed; `clock` is the CPU time of the thread."""

    begin_seconds = work_seconds = 0.0

    def __init__(self, drafter: Drafter | None, policy: Policy, clock: Callable[[], float] = time.thread_time) -> None:
        super().__init__(drafter, policy)
        self._clock = clock

    def begin(
        self,
        prompt: Sequence[int],
        *,
        guide: GrammarGuide | None = None,
        is_eog: Callable[[int], bool] | None = None,
        blind: bool = False,
    ) -> None:
        began = self._clock()
        super().begin(prompt, guide=guide, is_eog=is_eog, blind=blind)
        self.begin_seconds += self._clock() - began

    def first(self, token: int) -> None:
        began = self._clock()
        super().first(token)
        self.begin_seconds += self._clock() - began

    def plan(self, left: int, choose: Chooser | None = None, *, owed: int = 0) -> Plan:
        began = self._clock()
        plan = super().plan(left, choose, owed=owed)
        self.work_seconds += self._clock() - began
        return plan

    def learn(self, done: Pass, plan_seconds: float = 0.0) -> None:
        began = self._clock()
        super().learn(done, plan_seconds)
        self.work_seconds += self._clock() - began


def check_replayable(drafter: Drafter | None, policy: Policy) -> None:
    """Refuse what needs logits: a record has none.

    Raises:
        ValueError: the drafter or the policy reads logits.
    """
    if drafter is not None and drafter.wants_logits:
        raise ValueError(f"the drafter {drafter.name!r} needs a model's logits, and a recorded conversation has none")
    if policy.wants_logits:
        raise ValueError(f"the policy {policy.name!r} needs a model's logits, and a recorded conversation has none")


class Replay:
    """Replays recordings with one drafter and one policy, which serve all of them.

    Args:
        drafter: None replays plain decoding.
        policy: a name or a policy.
        draft_max: as in `SpeculativeDecoder`.
        curve: what a pass costs; the policy drafts by it.

    Raises:
        ValueError: what `check_replayable` and `SpeculativeDecoder` refuse.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        policy: str | Policy = "cost",
        draft_max: int | None = None,
        *,
        curve: GivenCurve,
    ) -> None:
        if isinstance(policy, str):
            policy = make_policy(policy, draft_max)
        elif draft_max is not None:
            raise ValueError("draft_max goes with a policy's name; a policy that is passed in has its own")
        check_replayable(drafter, policy)
        self._meter = Metered(drafter, policy)
        recorded = RecordedTarget(curve)
        self.decoder = SpeculativeDecoder(
            recorded,
            vocabulary=UnendingVocabulary(),
            exact="off",
            curve=curve,
            speculation=self._meter,
            clock=recorded.clock,
        )
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
