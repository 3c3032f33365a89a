"""`Writing`: one pass for the texts that are being written, with one budget for all their drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ngramspec.backend import Lane, Logits, SharedModel
from ngramspec.batching.formation import Formation
from ngramspec.batching.job import Job
from ngramspec.cost.calibration import Calibration
from ngramspec.decoding.generation import Generation
from ngramspec.decoding.speculation import Plan
from ngramspec.decoding.step import Step
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.drafting.in_step import made_together
from ngramspec.errors import NGramSpecError, TargetError
from ngramspec.exactness.auto import Footing
from ngramspec.policies.policy import Debt, Pass
from ngramspec.policies.together import DraftBudget

Ended = list[tuple[Job, NGramSpecError | ValueError | None]]
"""Jobs whose text ended, and the error that ended it, where one did."""


class Writing:
    """Makes passes over the texts of jobs.

    Args:
        model: whose lanes the jobs work in.
        calibration: what was measured of it, with a curve.
        footing: which batch sizes may be used.
        drafts: whether anything is drafted.
        draft_max: most tokens in a draft.
        clock: tells the seconds that passes and drafting take.

    Attributes:
        passes: how many there were.
        busy: the sum of texts in each.
    """

    def __init__(
        self,
        model: SharedModel,
        calibration: Calibration,
        footing: Footing,
        *,
        drafts: bool,
        draft_max: int,
        clock: Callable[[], float],
    ) -> None:
        assert calibration.curve is not None
        self._model = model
        self._curve = calibration.curve
        self._replay = calibration.replay
        self._footing = footing
        self._drafts = drafts
        self._clock = clock
        self._budget = DraftBudget(draft_max)
        self._sizes: Sequence[int] = footing.sizes or range(1, model.max_rows + 1)
        self._together = self._most_together()
        self._formation: Formation | None = None  # of the last pass
        self._turn = 0
        self.passes = self.busy = 0

    def _most_together(self) -> int:
        """How many texts may share a pass: as many as there is an allowed size for, and for every smaller number."""
        most = 1
        while most + 1 in self._sizes and 1 in self._sizes:
            most += 1
        return most

    def begin(self) -> None:
        """A text begins."""
        self._budget.begin()

    def step(self, jobs: Sequence[Job]) -> tuple[list[tuple[Job, Step]], Ended]:
        """One pass over the texts whose turn it is: the steps that came of it, and the jobs that ended with it."""
        if len(jobs) > self._together:
            at = self._turn % len(jobs)
            jobs = [*jobs[at:], *jobs[:at]][: self._together]
            self._turn += self._together
        began = self._clock()
        lanes = [_lane(job) for job in jobs]
        formation = self._formation
        if formation is None or formation.lanes != lanes:
            formation = self._formation = Formation(self._model, lanes, self._curve, self._sizes[-1])
        try:
            plans, asked = self._plans(jobs, formation)
            owed = sum([lane.owed for lane in lanes])
            for lane, plan in zip(lanes, plans, strict=True):
                _secure(lane, plan)
            batches = [_text(job).batch(plan) for job, plan in zip(jobs, plans, strict=True)]
            planned = self._clock()
            rows = formation.evaluate(batches)
        except TargetError as error:
            if len(jobs) == 1:
                return [], [(jobs[0], error)]
            # Each alone: only those end that cannot be helped.
            apart = [self.step([job]) for job in jobs]
            return [step for steps, _ in apart for step in steps], [end for _, ends in apart for end in ends]
        seconds = self._clock() - planned
        steps, ended = self._take(jobs, plans, rows, seconds)
        overhead = self._clock() - began - seconds if asked else 0.0
        for job, step in steps:
            overhead -= job.proposer.read_seconds
            job.proposer.settle(step)
        self._learn([step for _, step in steps], plans, formation, owed, seconds, overhead)
        self.passes += 1
        self.busy += len(jobs)
        return steps, ended

    # ------------------------------------------------------------------ what to send

    def _plans(self, jobs: Sequence[Job], formation: Formation) -> tuple[list[Plan], bool]:
        """What to send of each text, and whether any drafter was asked."""
        n = len(jobs)
        if not self._drafts and self._footing.sizes is None:
            return [_ONE_TOKEN] * n, False
        room = self._sizes[-1] - n
        if n == 1:
            room = min(room, _lane(jobs[0]).max_batch - 1) - _lane(jobs[0]).owed
        most = self._budget.limit(n) if self._drafts and (n == 1 or not self._model.drafts_alone) else 0
        limits = [min(most, room, _text(job).left - 1) for job in jobs]
        price = self._budget.price(n, self._curve, self._sizes)
        drafts = made_together(
            [
                job.proposer.proposing(limit, price, _text(job).chooser())
                for job, limit in zip(jobs, limits, strict=True)
            ],
            price,
        )
        debt = None
        if self._replay is not None and n == 1:
            owed = _lane(jobs[0]).owed
            debt = Debt(owed, 0.0 if owed else self._replay.save, self._replay.restore)
        chosen = self._budget.plan(drafts, self._curve, self._sizes, formation.batches, debt)
        plans = [
            job.proposer.trimmed(draft.head(length), size, self._sizes if n == 1 else (size,))
            for job, draft, (length, size) in zip(jobs, drafts, chosen, strict=True)
        ]
        return plans, max(limits) > 0

    # ------------------------------------------------------------------ what came of it

    def _take(
        self, jobs: Sequence[Job], plans: Sequence[Plan], rows: Sequence[Logits], seconds: float
    ) -> tuple[list[tuple[Job, Step]], Ended]:
        total = sum(plan.size for plan in plans)
        steps: list[tuple[Job, Step]] = []
        ended: Ended = []
        for job, plan, own in zip(jobs, plans, rows, strict=True):
            text, lane = _text(job), _lane(job)
            harmless = len(jobs) == 1 and plan.size in self._footing.harmless
            try:
                step = text.take(
                    plan,
                    own,
                    job.proposer,
                    batch=plan.size,
                    seconds=seconds * plan.size / total,
                    bound=0.0 if harmless else self._footing.bound,
                )
            except (NGramSpecError, ValueError) as error:
                ended.append((job, error))
                continue
            lane.rollback(text.settled)
            steps.append((job, step))
            if text.stop is not None or text.error is not None:
                ended.append((job, text.error))
        return steps, ended

    def _learn(
        self,
        steps: Sequence[Step],
        plans: Sequence[Plan],
        formation: Formation,
        owed: int,
        seconds: float,
        overhead: float,
    ) -> None:
        """Learn from a pass what passes cost, and whether drafting pays."""
        n, curve = len(plans), self._curve
        if not self._drafts:
            if n == 1 and not owed:
                curve.observe(plans[0].size, seconds)
            return
        batches = formation.batches([plan.size for plan in plans])
        whole = batches[0] + owed if len(batches) == 1 else 0
        plain_seconds = curve.level * formation.plain_cost(curve) / n
        done = Pass(
            tuple(token for step in steps for token in step.tokens),
            drafted=tuple(token for step in steps for token in step.drafted),
            accepted=sum(step.accepted for step in steps),
            # As many drafters were asked: it was not in vain if each had one right.
            guessed=sum(step.guessed for step in steps) // n,
            batch=sum(batches) + owed,
            seconds=seconds,
            disturbed=seconds - curve.undisturbed(whole, seconds) if whole else 0.0,
            draft_seconds=overhead,
            plain_seconds=plain_seconds,
        )
        for step in steps:
            step.plain_seconds = plain_seconds
            step.draft_seconds = overhead / n
        self._budget.record(n, done)
        if 0 < whole <= self._sizes[-1]:
            curve.observe(whole, seconds)


_ONE_TOKEN = Plan(NO_DRAFT, NO_DRAFT, 1, ends=False)


def _secure(lane: Lane, plan: Plan) -> None:
    """Make sure that what is sent can be taken back."""
    # Where tokens are owed, there is a checkpoint already: the state before them.
    if lane.replays and plan.sent.tokens and not lane.owed:
        lane.checkpoint()


def _text(job: Job) -> Generation:
    """The text that a job writes."""
    assert job.generation is not None
    return job.generation


def _lane(job: Job) -> Lane:
    """Where it works."""
    assert job.lane is not None
    return job.lane
