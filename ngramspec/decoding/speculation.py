"""`Speculation`: the drafting side of a pass. What to send, in a batch of which size, and what to learn from it.

It joins drafter, policy and cost curve, and knows neither target nor text. The decoding loop asks it on every pass
(`ngramspec.decoding.decoder`), and so does whoever drives passes of their own:

    speculation.begin(prompt)
    speculation.first(token)                                    # the prefill's
    while ...:
        draft, size = speculation.plan(left)
        ...                                                     # a pass over size tokens emits `tokens`
        speculation.see(last, draft, rows, accepted)            # its logits, for drafters and policies that read them
        speculation.learn(tokens, draft, size, seconds)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ngramspec.backend import Logits
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import Replay
from ngramspec.drafting.chances import Record
from ngramspec.drafting.draft import NO_DRAFT, Choose, Draft, Drafter, ReadsLogits
from ngramspec.policies.policy import Debt, Gauge, Pass, Policy, ReadsRow, smallest

Shape = Callable[[Draft, int], Draft]
"""(what the drafter proposed, most tokens) -> what to draft."""


class Speculation:
    """Decides on every draft, and learns from every pass. One instance serves many requests, in order.

    Args:
        drafter: guesses the tokens; None for plain decoding.
        policy: decides how many of them to send.

    Attributes:
        drafter, policy: as above.
        curve: cost of a pass by batch size; None while nobody measured.
        sizes: batch sizes that may be used, ascending.
        replay: what it takes to take a draft back where tokens are then evaluated again; None: nothing.
        plain: size of a batch without a draft.
        proposal: all that the drafter proposed for the pass planned last, sent or not, with estimates; None if it was
            not asked.
        gauge: what a policy that reads logits made of them when that pass was planned; None for any other policy.
    """

    def __init__(self, drafter: Drafter | None, policy: Policy) -> None:
        self.drafter = drafter
        self.policy = policy
        self.proposal: Draft | None = None
        self.gauge: Gauge | None = None
        self._record = Record()
        self._reader: ReadsLogits | None = None
        self._gauging: ReadsRow | None = None
        self.prepare(None, (1,))

    def prepare(self, curve: CostCurve | None, sizes: Sequence[int], replay: Replay | None = None) -> None:
        """Take what holds from here on: the cost curve, the batch sizes, and what taking back costs, if anything."""
        self.curve = curve
        self.sizes = sizes
        self.replay = replay
        self.plain = curve.padded(sizes)[1][0] if curve else smallest(1, sizes)

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request."""
        self.proposal = self.gauge = None
        self.policy.begin()
        self._record.begin()
        # Asked here, since it takes longer than all else that a pass costs who reads nothing.
        self._reader = self.drafter if isinstance(self.drafter, ReadsLogits) else None
        self._gauging = self.policy if self.drafter is not None and isinstance(self.policy, ReadsRow) else None
        if self.drafter is not None:
            self.drafter.begin(prompt)

    def first(self, token: int) -> None:
        """The prefill's token: no pass of its own, and nothing was drafted for it."""
        if self.drafter is not None:
            self.drafter.accept((token,))

    def plan(
        self,
        left: int,
        choose: Choose | None = None,
        *,
        blind: bool = False,
        shape: Shape | None = None,
        owed: int = 0,
    ) -> tuple[Draft, int]:
        """The draft for the next pass, and the size of its batch: one more than the draft, or padded further.

        Args:
            left: most tokens the pass may emit.
            choose, blind: as in `Drafter.propose`.
            shape: changes what the drafter proposed before the policy looks at it.
            owed: tokens that the target evaluates again before those of the pass.
        """
        self.proposal = None
        if self.drafter is None:
            return NO_DRAFT, self.plain
        if self._gauging is not None:
            self.gauge = self._gauging.gauge
        limit = min(self.policy.limit(), left - 1, self.sizes[-1] - 1 - owed)
        if limit <= 0:
            return NO_DRAFT, self.plain
        price = self.policy.price(self.curve, self.sizes)
        draft = self.drafter.propose(limit, choose, blind=blind, price=price)
        self.proposal = draft = self._record.estimated(draft, limit, blind=blind)
        if shape is not None:
            draft = shape(draft, limit)
        debt = None
        if self.replay is not None:
            debt = Debt(owed, 0.0 if owed else self.replay.save, self.replay.restore)
        length, size = self.policy.plan(draft, self.curve, self.sizes, debt)
        return (draft.head(length) if length else NO_DRAFT), size

    def see(self, last: int, draft: Draft, rows: Logits, accepted: int = 0) -> None:
        """Show the logits of a pass to a drafter or a policy that reads them.

        Args:
            last, draft: what was evaluated, but for padding behind it.
            rows: at least one for each, of shape (n, n_vocab).
            accepted: how many tokens of the draft were: that row decided the last token.
        """
        if self._reader is not None:
            self._reader.see((last, *draft.tokens), rows[: 1 + len(draft)])
        if self._gauging is not None:
            self._gauging.see(rows[accepted])

    def learn(self, tokens: Sequence[int], draft: Draft, size: int, seconds: float, plan_seconds: float = 0.0) -> Pass:
        """Learn from a pass.

        Args:
            tokens: what it emitted.
            draft: as planned.
            size: tokens that the target evaluated.
            seconds: of the target.
            plan_seconds: that `plan` took, and what lets a draft be taken back; counted if the drafter was asked.

        Returns:
            the pass as the policy was told of it.
        """
        curve = self.curve
        self._record.settle(tokens)
        guessed = self.drafter.accept(tokens) if self.drafter is not None else 0
        draft_seconds = plan_seconds if self.proposal is not None else 0.0
        plain_seconds = curve.seconds(self.plain) if curve else 0.0
        # An interruption would be booked to whatever was drafted just then.
        booked = curve.undisturbed(size, seconds) if curve else seconds
        done = Pass(len(tokens), len(draft), guessed, booked, draft_seconds, plain_seconds)
        if self.drafter is not None:
            self.policy.record(done)
        if curve is not None and size <= self.sizes[-1]:
            curve.observe(size, seconds)
        return done
