"""`Speculation`: the drafting side of a pass. What to send, in a batch of which size, and what to learn from it.

It joins drafter, policy and cost curve, and knows neither target nor text. The decoding loop asks it on every pass
(`ngramspec.decoder`), and so does whoever drives passes of their own:

    speculation.begin(prompt)
    speculation.first(token)                                    # the prefill's
    while ...:
        draft, size = speculation.plan(left)
        ...                                                     # a pass over size tokens emits `tokens`
        speculation.see(last, draft, rows)                      # its logits, for drafters that read them
        speculation.learn(tokens, draft, size, seconds)
"""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.cost import CostCurve
from ngramspec.draft import NO_DRAFT, Choose, Draft, Drafter, ReadsLogits
from ngramspec.policy import Pass, Policy, smallest
from ngramspec.protocol import Logits


class Speculation:
    """Decides on every draft, and learns from every pass. One instance serves many requests, in order.

    Args:
        drafter: guesses the tokens; None for plain decoding.
        policy: decides how many of them to send.

    Attributes:
        drafter, policy: as above.
        curve: cost of a pass by batch size; None while nobody measured.
        sizes: batch sizes that may be used, ascending.
        plain: size of a batch without a draft.
        proposal: all that the drafter proposed for the pass planned last, sent or not; None if it was not asked.
    """

    def __init__(self, drafter: Drafter | None, policy: Policy) -> None:
        self.drafter = drafter
        self.policy = policy
        self.proposal: Draft | None = None
        self._reader: ReadsLogits | None = None
        self.prepare(None, (1,))

    def prepare(self, curve: CostCurve | None, sizes: Sequence[int]) -> None:
        """Take the cost curve and the batch sizes that hold from here on."""
        self.curve = curve
        self.sizes = sizes
        self.plain = curve.padded(sizes)[1][0] if curve else smallest(1, sizes)

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request."""
        self.proposal = None
        # Asked here, since it takes longer than all else that a pass costs who reads nothing.
        self._reader = self.drafter if isinstance(self.drafter, ReadsLogits) else None
        if self.drafter is not None:
            self.drafter.begin(prompt)

    def first(self, token: int) -> None:
        """The prefill's token: no pass of its own, and nothing was drafted for it."""
        if self.drafter is not None:
            self.drafter.accept((token,))

    def plan(self, left: int, choose: Choose | None = None, *, blind: bool = False) -> tuple[Draft, int]:
        """The draft for the next pass, and the size of its batch: one more than the draft, or padded further.

        Args:
            left: most tokens the pass may emit.
            choose, blind: as in `Drafter.propose`.
        """
        self.proposal = None
        if self.drafter is None:
            return NO_DRAFT, self.plain
        limit = min(self.policy.limit(), left - 1, self.sizes[-1] - 1)
        if limit <= 0:
            return NO_DRAFT, self.plain
        outlook = self.policy.outlook(self.curve, self.sizes)
        self.proposal = draft = self.drafter.propose(limit, choose, blind=blind, outlook=outlook)
        length, size = self.policy.plan(draft, self.curve, self.sizes)
        return (draft.head(length) if length else NO_DRAFT), size

    def see(self, last: int, draft: Draft, rows: Logits) -> None:
        """Show the logits of a pass to a drafter that reads them.

        Args:
            last, draft: what was evaluated, but for padding behind it.
            rows: at least one for each, of shape (n, n_vocab).
        """
        if self._reader is not None:
            self._reader.see((last, *draft.tokens), rows[: 1 + len(draft)])

    def learn(self, tokens: Sequence[int], draft: Draft, size: int, seconds: float, plan_seconds: float = 0.0) -> Pass:
        """Learn from a pass.

        Args:
            tokens: what it emitted.
            draft, size: as planned.
            seconds: of the target.
            plan_seconds: that `plan` took; counted only if the drafter was asked.

        Returns:
            the pass as the policy was told of it.
        """
        curve = self.curve
        guessed = self.drafter.accept(tokens) if self.drafter is not None else 0
        draft_seconds = plan_seconds if self.proposal is not None else 0.0
        plain_seconds = curve.seconds(self.plain) if curve else 0.0
        done = Pass(len(tokens), len(draft), guessed, seconds, draft_seconds, plain_seconds)
        if self.drafter is not None:
            self.policy.record(done)
        if curve is not None:
            curve.observe(size, seconds)
        return done
