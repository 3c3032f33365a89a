"""Replay: the decoding loop on recorded answers, as if each were the greedy output of a target.

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
from typing import Any

import numpy as np

from ngramspec.acceptance.rules import Row, Rows, Verdict
from ngramspec.backend import Logits, ModelBase, Progress
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.given import LARGEST
from ngramspec.decoding.branches import BranchingLoop
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.drafts import DraftedText, Drafts, Plan
from ngramspec.decoding.loop import Pass
from ngramspec.decoding.text import Text
from ngramspec.drafting.chances import Reliability
from ngramspec.drafting.draft import Chooser, Draft, Drafter
from ngramspec.instruments.reports.report import Piece
from ngramspec.policies.policy import Policy
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats, Step
from ngramspec.tokens import common_prefix

ENDLESS = 1 << 30
"""Room for an answer: the loop must not know where the record ends."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded answer as token ids."""

    # category, id: whose it is.
    category: str
    id: str
    prompt: Sequence[int]  # all that the model saw before it answered
    response: Sequence[int]  # what it answered, end of turn included; at least 2 tokens


class RecordedTarget(ModelBase):
    """A model without weights: it counts tokens, and its clock runs by a cost curve, in units of T(1).

    No token ends anything, nor says anything unless `says` tells what.
    """

    n_ctx = ENDLESS
    n_vocab = 0
    max_batch = LARGEST
    leaves = 8  # as a model on a GPU has

    def __init__(self, curve: CostCurve, says: Piece | None = None) -> None:
        self.tokens: list[int] = []
        self._says = says
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

    def ask(self, tokens: Sequence[int], branches: Sequence[object]) -> Logits:
        rows = self.evaluate([*tokens, *[0] * len(branches)])
        del self.tokens[len(self.tokens) - len(branches) :]
        return rows

    def rollback(self, length: int) -> None:
        del self.tokens[length:]

    def clear(self) -> None:
        self.tokens.clear()

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        raise NotImplementedError("a record is tokens already")

    def piece(self, token: int) -> bytes:
        return b"" if self._says is None else self._says(token)

    def is_eog(self, token: int) -> bool:
        return False

    def sampler(self, sampling: Sampling) -> Sampler:
        raise NotImplementedError("a record is verified by RecordedVerifier")


class RecordedVerifier:
    """Keeps a draft while it equals the recorded answer, and gives the record's next token after it."""

    fixed_length = False

    def __init__(self, recording: Recording) -> None:
        self._start, self._response = len(recording.prompt), tuple(recording.response)

    def choose(self, position: int) -> Chooser | None:
        return None

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        offset = position - self._start
        truth = self._response[offset : offset + 1 + len(draft)]
        right = common_prefix(draft.tokens, truth)
        return Verdict(truth[: right + 1], right)

    def recorded(self, position: int) -> int | None:
        offset = position - self._start
        return self._response[offset] if offset < len(self._response) else None


@dataclass(slots=True)
class ReplayCounts:
    """The counts of some recordings."""

    transcripts: int = 0  # how many
    prompt_tokens: int = 0  # of their prompts
    # The counters of all their steps; its seconds are the target's (modelled ones: in units of T(1)).
    stats: Stats = field(default_factory=Stats)
    batches: Counter[int] = field(default_factory=Counter)  # target passes by batch size, padding included
    changes: int = 0  # passes of another size than the one before
    begin_seconds: float = 0.0  # CPU time of the prefills, where no target takes any: the drafter's to read the prompts
    work_seconds: float = 0.0  # CPU time of drafting and learning, drafter and policy
    reliability: Reliability = field(default_factory=Reliability)  # of the acceptance that the drafter predicted

    def merge(self, other: ReplayCounts) -> None:
        """Add another's counts to these."""
        self.stats.merge(other.stats)
        self.reliability.merge(other.reliability)
        for name in ("transcripts", "prompt_tokens", "batches", "changes", "begin_seconds", "work_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def speedup(self, curve: CostCurve) -> float:
        """Cost of emitting the same tokens in one-token passes / cost of these passes, both by `curve`."""
        cost = sum(count * curve.ratio(size) for size, count in self.batches.items()) + self.changes * curve.switch
        return self.stats.tokens / cost if cost else 1.0


class MeteredDrafts(Drafts):
    """Drafts that take the CPU time in which the drafter learns: `work_seconds`, of this thread."""

    work_seconds = 0.0

    def accept(self, step: Step) -> float:
        began = time.thread_time()
        seconds = super().accept(step)
        self.work_seconds += time.thread_time() - began
        return seconds


class MeteredLoop(BranchingLoop):
    """A decoding loop that takes the CPU time of drafting and planning: `work_seconds`, of this thread.

    Branches are answered by the recording.
    """

    work_seconds = 0.0

    def plan(self, text: DraftedText, owed: int) -> Plan:
        began = time.thread_time()
        plan = super().plan(text, owed)
        self.work_seconds += time.thread_time() - began
        return plan

    def report(self, current: Pass) -> Sequence[Step | None]:
        began = time.thread_time()
        steps = super().report(current)
        self.work_seconds += time.thread_time() - began
        return steps

    def answer(self, text: Text, row: Row, position: int) -> int | None:
        return text.verifier.recorded(position) if isinstance(text.verifier, RecordedVerifier) else None


class Replay:
    """Replays recordings with one drafter (None: plain decoding) and one policy, which drafts by the curve.

    Where `piece` says what tokens stand for, steps have their text.

    Raises:
        ValueError: the drafter or the policy reads logits, which a record lacks, or `SpeculativeDecoder` refuses them.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        policy: str | Policy = "cost",
        draft_max: int | None = None,
        *,
        curve: CostCurve,
        piece: Piece | None = None,
    ) -> None:
        self.curve, recorded = curve, RecordedTarget(curve, piece)
        options: dict[str, Any] = {"exact": "off", "curve": curve, "clock": recorded.clock}
        self.decoder = SpeculativeDecoder(recorded, drafter=drafter, policy=policy, draft_max=draft_max, **options)
        for kind, part in (("drafter", drafter), ("policy", self.decoder.policy)):
            if part is not None and part.wants_logits:
                raise ValueError(
                    f"the {kind} {part.name!r} needs a model's logits, and a recorded conversation has none"
                )
        self.decoder.loop = self._meter = MeteredLoop(self.decoder.policy, recorded.clock)
        self.decoder.drafts = self._drafts = MeteredDrafts(drafter, self.decoder.policy)
        self._last = 1

    def run(self, recording: Recording, watch: Callable[[Step], None] | None = None) -> ReplayCounts:
        """Replay one recording, and count; `watch` is told of every step before the next pass."""
        tally = ReplayCounts(1, len(recording.prompt))
        self._meter.work_seconds = self._drafts.work_seconds = 0.0
        emitted, end = 0, len(recording.response)
        steps = self.decoder.generate(recording.prompt, max_tokens=ENDLESS, acceptance=RecordedVerifier(recording))
        began = time.thread_time()
        for step in steps:
            proposal = self.decoder.drafts.proposal
            if not step.batch:
                tally.begin_seconds = time.thread_time() - began
            else:
                if proposal is not None:
                    tally.reliability.add(proposal, recording.response[emitted : emitted + len(proposal)])
                tally.batches[step.batch] += 1
                tally.changes += step.batch != self._last
                self._last = step.batch
            tally.stats.add(step)
            if watch is not None:
                watch(step)
            emitted += len(step.tokens)
            if emitted == end:
                steps.close()
        tally.work_seconds = self._meter.work_seconds + self._drafts.work_seconds
        return tally
