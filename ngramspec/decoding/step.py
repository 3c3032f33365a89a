"""The speculative step: one pass of the target over the last token of each text, and a draft of the next ones.

1. Draft: the drafter of a text proposes a chain of tokens, with an estimate p_i of the chance that the target keeps the
   i-th, if it keeps all before it.
2. Choose: k tokens of the chain are expected to yield

       E[tokens(k)] = 1 + p_1 + p_1 p_2 + ... + p_1 p_2 ... p_k        (Leviathan et al. 2023, section 3.1)

   in the time T(1 + k) of a pass over 1 + k tokens. The policy picks k, and a size of batch, padded if it is larger.
3. Evaluate: one pass gives the logits after the last token, and after each of the draft.
4. Verify: the text grows by the drafted tokens that the target keeps, and by one of its own, so that it is the text
   of plain decoding (Stern et al. 2018; `ngramspec.acceptance.rules`).
5. Roll back: the cache is cut behind what was kept. Where it cannot be cut (a recurrent state), it goes back to the
   checkpoint made before the pass; the tokens since then are owed: the next pass evaluates them again before its own.
6. Learn: drafter, policy and cost curve are told what came of it, and what it took.

`SpeculativeDecoder` makes steps of one text, `ngramspec.batching` of several that share a pass. `ngramspec.dropin` uses
`send` and `learn`; llama-cpp-python's own loop verifies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ngramspec.backend import Conditions, Logits
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import RestoreCost
from ngramspec.decoding.drafts import Batch, Plan, Text, no_draft
from ngramspec.decoding.generation import Generation
from ngramspec.drafting.draft_model.passes import draft_together
from ngramspec.exactness.decision import ExactnessMode
from ngramspec.policies.policy import Policy, smallest
from ngramspec.steps import Step


class Sent(NamedTuple):
    """A pass that was made."""

    plans: Sequence[Plan]  # what it evaluated of each text
    rows: Sequence[Logits]  # the logits of each text
    owed: int  # tokens that were evaluated again
    planning: float  # seconds from the first drafter asked to the pass
    seconds: float  # of the pass
    is_quiet: bool  # whether no other program slowed it down


class Speculation:
    """Makes the passes of one model: decides on every draft, and learns from every pass.

    Attributes:
        curve: cost of a pass by batch size; None while nobody measured.
        sizes: batch sizes that may be used, ascending.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.perf_counter) -> None:
        self.policy = policy  # decides how many tokens to draft
        self.exactness = ExactnessMode()  # which sizes of batch move no logit, and how far others do
        self._clock = clock
        self._explained: Mapping[str, float] = {}
        self._conditions: Conditions | None = None  # under which `curve` holds
        self._curves: dict[tuple[int, int] | None, CostCurve] = {}  # by numbers of threads
        self.prepare(None, (1,))

    def prepare(
        self,
        curve: CostCurve | None,
        sizes: Sequence[int],
        restore: RestoreCost | None = None,
        *,
        is_provisional: bool = False,
    ) -> None:
        """Set what holds from here on.

        Args:
            curve, sizes: see `Speculation`.
            restore: what taking a draft back costs; None: nothing.
            is_provisional: True if other programs ran while the curve was measured.
        """
        self._is_provisional = is_provisional
        if curve is None or self._curves.get(curve.threads) is not curve:
            self._curves = {} if curve is None else {curve.threads: curve}
        self.sizes, self._restore = sizes, restore
        self._conditions = None
        self._use(curve)

    def _use(self, curve: CostCurve | None) -> None:
        self.curve, sizes = curve, self.sizes
        self._plain = [no_draft(curve.padded(sizes)[1][0] if curve else smallest(1, sizes))]

    def _follow(self, conditions: Conditions) -> bool:
        """Use the curve for these conditions. Return True if they are as they were at the last pass."""
        before, self._conditions = self._conditions, conditions
        if conditions == before or self.curve is None or not self.curve.measured:
            return True
        threads = conditions.threads, conditions.threads_batch
        if self.curve.threads not in (None, threads):
            if threads not in self._curves:
                self._curves[threads] = self.curve.copy(threads)
            self._use(self._curves[threads])
        if before is not None and before.period != conditions.period:
            self.curve.restart()
        return before is None

    def begin(self) -> None:
        self._explained = {}
        self.policy.begin()

    def step(self, texts: Sequence[Generation], batch: Batch | None = None) -> list[Step | None]:
        """Make a pass; the step that came of it for each text, or None where an error ended the text before.

        Args:
            texts: none of which has ended.
            batch: their sequences, which share the pass; None: the only text has a model of its own.

        Raises:
            TargetError: the pass failed, or a draft model's; the texts are as before.
        """
        sent = self.send(texts, batch)
        alone, exactness, back = len(texts) == 1, self.exactness, 0.0
        size = sum(plan.size for plan in sent.plans)
        steps: list[Step | None] = []
        for text, plan, rows in zip(texts, sent.plans, sent.rows, strict=True):
            bound = 0.0 if alone and size in exactness.agreeing else exactness.bound
            step = text.take(plan, rows, bound)
            if step is not None:
                step.batch = size + sent.owed if alone else plan.size
                step.seconds = sent.seconds * (plan.size / size)
                step.is_quiet = sent.is_quiet
            steps.append(step)
            if len(text.sequence.tokens) > text.settled:
                began = self._clock()
                text.sequence.rollback(text.settled)
                back += self._clock() - began
        if alone:
            if steps[0] is not None:
                self.learn(texts[0], steps[0], sent.planning + back)
        elif batch is not None and texts[0].drafts.drafter is not None:
            self._learn_together(texts, steps, sent, sent.planning + back, batch)
        return steps

    # ------------------------------------------------------------------ what to send

    def send(self, texts: Sequence[Text], batch: Batch | None = None) -> Sent:
        clock = self._clock
        began = clock()
        is_steady = self._follow(texts[0].sequence.conditions)
        plans = self.plan(texts, batch)
        owed = 0
        for text, plan in zip(texts, plans, strict=True):
            sequence = text.sequence
            debt = sequence.owed
            owed += debt
            # So that the draft can be taken back. Where tokens are owed, there is a checkpoint before them already.
            if plan.sent.tokens and sequence.replays and not debt:
                sequence.checkpoint()
        asked = clock()
        tokens = [plan.batch(text.last) for text, plan in zip(texts, plans, strict=True)]
        rows = batch.evaluate(tokens) if batch is not None else [self.evaluate(texts[0], tokens[0])]
        seconds = clock() - asked
        return Sent(plans, rows, owed, asked - began, seconds, is_steady and texts[0].sequence.conditions.is_quiet)

    def evaluate(self, text: Text, tokens: Sequence[int]) -> Logits:
        """The pass over a text that is alone."""
        return text.sequence.evaluate(tokens)

    def plan(self, texts: Sequence[Text], batch: Batch | None = None) -> list[Plan]:
        """What the next pass evaluates of each text."""
        n = len(texts)
        plain = self._plain if n == 1 else [_ONE_TOKEN] * n
        if texts[0].drafts.drafter is None:
            return plain
        policy, curve, sizes = self.policy.shared(n), self.curve, self.sizes
        self._explained = policy.explain()
        room, owed = sizes[-1] - n, 0
        if n == 1:
            owed = texts[0].sequence.owed
            room = min(room, texts[0].sequence.max_batch - 1) - owed
        most = 0 if batch is not None and batch.drafts_alone and n > 1 else min(policy.limit(), room)
        limits = [min(most, text.left - 1) for text in texts]
        if max(limits) < 1:
            for text in texts:
                text.drafts.proposal = None
            return plain
        price = policy.price(curve, sizes)
        proposals = draft_together(
            [text.drafts.proposing(limit, price, text.chooser()) for text, limit in zip(texts, limits, strict=True)],
            price,
        )
        if batch is not None and n > 1:
            assert curve is not None
            chosen = policy.plan_together(proposals, curve, sizes, batch.batches)
            return [
                text.drafts.plan(proposal.head(length), size, (size,))
                for text, proposal, (length, size) in zip(texts, proposals, chosen, strict=True)
            ]
        restore = self._restore
        if restore is not None and owed:  # there is a checkpoint already
            restore = restore._replace(save=0.0, recompute=owed)
        length, size = policy.plan(proposals[0], curve, sizes, restore)
        if not length:
            return [no_draft(size)]
        return [texts[0].drafts.plan(proposals[0].head(length), size, sizes)]

    # ------------------------------------------------------------------ what came of it

    def learn(self, text: Text, step: Step, overhead: float = 0.0) -> None:
        """Learn from a pass over one text, and fill in its record. `overhead`: seconds spent on the draft."""
        drafts, curve = text.drafts, self.curve
        if curve is not None:
            step.plain_seconds = curve.seconds(self._plain[0].size)
            step.expected_seconds = self._expected(curve, [step.batch])
        if drafts.drafter is not None:
            step.policy_details = self._explained
            if curve is not None:
                step.interruption_seconds = step.seconds - self._undisturbed(
                    curve, step.batch, step.seconds, step.is_quiet
                )
            reading = drafts.settle(step)
            if drafts.proposal is not None:
                step.draft_seconds = overhead - reading
            self.policy.record(step)
        if curve is not None and step.batch <= self.sizes[-1]:
            curve.observe(step.batch, step.seconds, step.is_quiet)

    def _expected(self, curve: CostCurve, batches: Sequence[int]) -> float:
        """Return the seconds that a pass of these batches takes by the curve; 0 if the curve is provisional."""
        if self._is_provisional:
            return 0.0
        change = curve.switch if batches[0] != curve.last else 0.0
        return sum(map(curve.seconds, batches)) + change

    @staticmethod
    def _undisturbed(curve: CostCurve, size: int, seconds: float, is_quiet: bool) -> float:
        """Return the seconds of a pass that the draft is charged for: what other programs added is left out."""
        undisturbed = curve.undisturbed(size, seconds)
        return undisturbed if is_quiet else min(undisturbed, curve.seconds(size))

    def _learn_together(
        self, texts: Sequence[Text], steps: Sequence[Step | None], sent: Sent, overhead: float, batch: Batch
    ) -> None:
        """Learn from a pass over several texts what passes cost, and whether drafting pays for so many."""
        n, curve = len(texts), self.curve
        assert curve is not None
        if all(text.drafts.proposal is None for text in texts):
            overhead = 0.0
        done = []
        for text, step in zip(texts, steps, strict=True):
            if step is not None:
                overhead -= text.drafts.settle(step)
                done.append(step)
        plain_seconds = curve.level * batch.plain_cost(curve) / n
        batches = batch.batches([plan.size for plan in sent.plans])
        expected = self._expected(curve, batches)
        for step in done:
            step.plain_seconds, step.draft_seconds = plain_seconds, overhead / n
            step.expected_seconds = expected * step.seconds / sent.seconds if sent.seconds else 0.0
        whole = batches[0] + sent.owed if len(batches) == 1 else 0
        self.policy.shared(n).record(
            Step(
                tuple(token for step in done for token in step.tokens),
                drafted=tuple(token for step in done for token in step.drafted),
                accepted=sum(step.accepted for step in done),
                # As many drafters were asked: it was not in vain if each had one right.
                correct_guesses=sum(step.correct_guesses for step in done) // n,
                batch=sum(batches) + sent.owed,
                seconds=sent.seconds,
                interruption_seconds=sent.seconds - self._undisturbed(curve, whole, sent.seconds, sent.is_quiet)
                if whole
                else 0.0,
                is_quiet=sent.is_quiet,
                draft_seconds=overhead,
                plain_seconds=plain_seconds,
            )
        )
        if 0 < whole <= self.sizes[-1]:
            curve.observe(whole, sent.seconds, sent.is_quiet)


_ONE_TOKEN = no_draft(1)
