"""Replay: the decoding loop on recorded answers, as if each were the greedy output of a target.

`SpeculativeDecoder` itself runs; only the target is a record, whose passes take the time given by a cost curve. As in
the harness for other drafters, the first token comes from the prefill and is not counted, a pass over k draft tokens
emits the accepted ones and one more, and neither drafter nor policy knows the length of the record.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ngramspec.acceptance.rules import Row, Rows, Verdict
from ngramspec.backend import Logits, ModelBase, Progress
from ngramspec.cost.times import LARGEST, PassTimes
from ngramspec.decoding.branches import BranchingLoop
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.loop import Pass
from ngramspec.decoding.text import DraftedText, Drafts, Plan, Text
from ngramspec.drafting.draft import Chooser, Draft, Drafter
from ngramspec.instruments.reports.report import Piece
from ngramspec.policies.policy import Policy
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats, Step
from ngramspec.tokens import common_prefix

Result = TypeVar("Result")

ENDLESS = 1 << 30
"""Context size of the target and limit of an answer: the loop must not know where the record ends."""
BINS = 10  # number of bins in the reliability table


@dataclass(frozen=True, slots=True)
class Recording:
    category: str  # category of the conversation
    id: str  # id of the conversation
    prompt: Sequence[int]  # all tokens before the answer
    response: Sequence[int]  # tokens of the answer, including the end of turn; at least 2


class RecordedTarget(ModelBase):
    """A model without weights that ends no generation; its clock follows a cost curve, in units of T(1)."""

    n_ctx = ENDLESS
    n_vocab = 0
    max_batch = LARGEST
    leaves = 8  # same number as for a model on a GPU

    def __init__(self, curve: PassTimes, piece: Piece | None = None) -> None:
        self.tokens: list[int] = []
        self._piece = piece
        self.seconds = 0.0
        self._curve = curve
        self._last = 1
        # The rows have no columns, because a verifier that knows the answer reads no logits.
        self._rows = np.empty((LARGEST, 0), np.float32)

    def clock(self) -> float:
        return self.seconds

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        self.tokens = list(tokens)
        row: Logits = self._rows[0]
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        size = len(tokens)
        self.seconds += self._curve.ratio(size)
        if size != self._last:
            self.seconds += self._curve.change
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
        return b"" if self._piece is None else self._piece(token)

    def display_piece(self, token: int) -> bytes:
        return self.piece(token)

    def is_eog(self, token: int) -> bool:
        return False

    def sampler(self, sampling: Sampling) -> Sampler:
        raise NotImplementedError("a record is verified by RecordedVerifier")


class RecordedVerifier:
    """A verifier that accepts draft tokens while they equal the recorded answer, and adds its next token."""

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

    def token_at(self, position: int) -> int | None:
        offset = position - self._start
        return self._response[offset] if offset < len(self._response) else None


@dataclass(slots=True)
class ReplayCounts:
    """Counts over several recordings."""

    transcripts: int = 0  # number of recordings
    prompt_tokens: int = 0  # number of tokens in their prompts
    # Counters of all steps; the seconds are simulated times of the target, in units of T(1).
    stats: Stats = field(default_factory=Stats)
    batches: Counter[int] = field(default_factory=Counter)  # target passes by batch size, including padding
    changes: int = 0  # passes whose size differs from that of the previous one
    begin_seconds: float = 0.0  # CPU time of the prefills, in which only the drafter works: it reads the prompts
    work_seconds: float = 0.0  # CPU time of drafting and learning, of drafter and policy
    # Draft positions by bins of the predicted acceptance, shape (3, BINS): their number, the sum of the predictions,
    # and the number of right guesses. Positions after the first wrong one of a draft do not count.
    reliability: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, BINS)))

    def merge(self, other: ReplayCounts) -> None:
        self.stats.merge(other.stats)
        for name in set(self.__dataclass_fields__) - {"stats"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add_proposal(self, proposal: Draft, truth: Sequence[int]) -> None:
        """Count the positions of a proposal, sent or not, given the tokens that were emitted."""
        for guess, p, token in zip(proposal.tokens, proposal.acceptance_probs, truth, strict=False):
            self.reliability[:, min(BINS - 1, int(p * BINS))] += 1, p, guess == token
            if guess != token:
                return

    def speedup(self, curve: PassTimes) -> float:
        """Return the cost of the same tokens in one-token passes / the cost of these passes, both by `curve`."""
        cost = sum(count * curve.ratio(size) for size, count in self.batches.items()) + self.changes * curve.change
        return self.stats.tokens / cost if cost else 1.0


class TimedLoop(BranchingLoop):
    """A loop whose branches a recording answers; `work_seconds` is this thread's CPU time for drafting and learning."""

    work_seconds = 0.0

    def _timed(self, method: Callable[..., Result], *arguments: object) -> Result:
        start = time.thread_time()
        result = method(*arguments)
        self.work_seconds += time.thread_time() - start
        return result

    def plan(self, text: DraftedText, owed: int) -> Plan:
        return self._timed(super().plan, text, owed)

    def accept(self, current: Pass, drafts: Drafts, step: Step) -> None:
        self._timed(super().accept, current, drafts, step)

    def report(self, current: Pass) -> Sequence[Step | None]:
        return self._timed(super().report, current)

    def answer(self, text: Text, row: Row, position: int) -> int | None:
        return text.verifier.token_at(position) if isinstance(text.verifier, RecordedVerifier) else None


class Replay:
    """A replay with one drafter (`None` means plain decoding) and one policy, which drafts by the given curve."""

    def __init__(
        self,
        drafter: Drafter | None,
        policy: str | Policy = "cost",
        draft_max: int | None = None,
        *,
        curve: PassTimes,
        piece: Piece | None = None,
    ) -> None:
        self.curve, target = curve, RecordedTarget(curve, piece)
        options: dict[str, Any] = {"exact": "off", "times": curve, "clock": target.clock}
        self.decoder = SpeculativeDecoder(target, drafter=drafter, policy=policy, draft_max=draft_max, **options)
        for kind, part in (("drafter", drafter), ("policy", self.decoder.policy)):
            if part is not None and part.wants_logits:
                raise ValueError(
                    f"the {kind} {part.name!r} needs a model's logits, and a recorded conversation has none"
                )
        self.decoder.loop = self._timed_loop = TimedLoop(self.decoder.policy, target.clock)
        self._last = 1

    def run(self, recording: Recording, watch: Callable[[Step], None] | None = None) -> ReplayCounts:
        """Replay one recording and return its counts; `watch` is called with each step before the next pass."""
        tally = ReplayCounts(1, len(recording.prompt))
        self._timed_loop.work_seconds = 0.0
        n_emitted, end = 0, len(recording.response)
        steps = self.decoder.generate(recording.prompt, max_tokens=ENDLESS, acceptance=RecordedVerifier(recording))
        start = time.thread_time()
        for step in steps:
            proposal = self.decoder.drafts.proposal
            if not step.batch:
                tally.begin_seconds = time.thread_time() - start
            else:
                if proposal is not None:
                    tally.add_proposal(proposal, recording.response[n_emitted : n_emitted + len(proposal)])
                tally.batches[step.batch] += 1
                tally.changes += step.batch != self._last
                self._last = step.batch
            tally.stats.add(step)
            if watch is not None:
                watch(step)
            n_emitted += len(step.tokens)
            if n_emitted == end:
                steps.close()
        tally.work_seconds = self._timed_loop.work_seconds
        return tally
