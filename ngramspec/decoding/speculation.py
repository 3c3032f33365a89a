"""`Speculation`: the drafting side of a pass: what to send, in how large a batch, and what to learn from the outcome.

It joins drafter, policy, grammar and cost curve, and knows neither target nor text. `Proposer` is the part of it that
belongs to one text: where several texts share a pass, each has one, and one policy decides for all. The decoding loop
asks it on every pass (`ngramspec.decoding.decoder`); code that drives its own passes uses it in the same way:

    speculation.begin(prompt)
    speculation.first(token)                                    # the prefill's
    while ...:
        plan = speculation.plan(left)
        ...                                                     # a pass over plan.size tokens: `done` is its record
        speculation.see(last, plan.sent, rows, done.accepted)   # its logits, for drafters and policies that want them
        speculation.learn(done)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ngramspec.backend import Logits
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import Replay
from ngramspec.drafting.chances import Record
from ngramspec.drafting.draft import NO_DRAFT, Chooser, Draft, Drafter, Drafting, Question
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.drafting.in_step import made_alone
from ngramspec.drafting.price import TokenPrice
from ngramspec.drafting.refused_rows import CHEAP
from ngramspec.policies.policy import Debt, Pass, Policy, smallest


class Plan(NamedTuple):
    """What a pass is to evaluate.

    Attributes:
        sent: the draft in its batch; nothing in it is past the end of the text.
        judged: what the verifier judges: `sent`, followed by the forbidden token if a grammar cut a draft that was
            drawn blindly. That token is refused without being sent; its q says how to draw the one in its place.
        size: of the batch: one token more than the draft, or padded further.
        ends: whether the draft's last token ends the text.
        questions: evaluated beside the draft, in the same batch.
    """

    sent: Draft
    judged: Draft
    size: int
    ends: bool
    questions: Sequence[Question] = ()


NO_PLAN = Plan(NO_DRAFT, NO_DRAFT, 0, ends=False)
"""The plan of the prefill's token, which takes no pass of its own."""


class Proposer:
    """The drafts of one text at a time: what its drafter proposes, what is sent of that, and what is learnt from it.

    Args:
        drafter: guesses the tokens; None for plain decoding.

    Attributes:
        drafter: as above.
        proposal: all that the drafter proposed for the pass planned last, sent or not, with estimates; None if it was
            not asked.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.proposal: Draft | None = None
        self._record = Record()
        self._guide: GrammarGuide | None = None
        self._is_eog: Callable[[int], bool] | None = None
        self._blind = False

    @property
    def read_seconds(self) -> float:
        """Seconds of the last proposal that went into reading the text; see `Drafter`."""
        return 0.0 if self.drafter is None or self.proposal is None else self.drafter.read_seconds

    def begin(
        self,
        prompt: Sequence[int],
        *,
        guide: GrammarGuide | None = None,
        is_eog: Callable[[int], bool] | None = None,
        blind: bool = False,
    ) -> None:
        """Start a request.

        Args:
            prompt: its context so far.
            guide: what its grammar knows of the next tokens; None: any may follow.
            is_eog: whether a token ends the text; None: none does.
            blind: as in `Drafter.propose`.
        """
        self._guide, self._is_eog, self._blind = guide, is_eog, blind
        self.proposal = None
        self._record.begin()
        if self.drafter is not None:
            self.drafter.begin(prompt)

    def first(self, token: int) -> None:
        """Tell the drafter of the prefill's token, for which nothing was drafted."""
        if self.drafter is not None:
            self.drafter.accept((token,))

    def proposing(self, limit: int, price: TokenPrice | None, choose: Chooser | None = None) -> Drafting:
        """What may follow, with estimates, as the grammar allows it; nothing where `limit` is below 1.

        It is a generator, like `Drafter.drafting`, so that several texts can be drafted for in step.

        Args:
            limit: most tokens.
            price, choose: as in `Drafter.propose`.
        """
        self.proposal = None
        if self.drafter is None or limit < 1:
            return NO_DRAFT
        draft = yield from self.drafter.drafting(limit, choose, blind=self._blind, price=price)
        self.proposal = draft = self._record.estimated(draft, limit, blind=self._blind)
        return draft if self._guide is None else self._guide.shape(draft, limit, blind=self._blind)

    def trimmed(self, draft: Draft, size: int, sizes: Sequence[int]) -> Plan:
        """The plan to send a draft in a batch of `size` or less, cut after the token that ends the text.

        A draft that was drawn blindly is also cut before the first token that the grammar forbids.

        Args:
            draft: what to send.
            size: of the batch.
            sizes: batch sizes that may be used, ascending.
        """
        end = None
        if self._is_eog is not None:
            end = next((i for i, token in enumerate(draft.tokens, 1) if self._is_eog(token)), None)
        legal = judged = len(draft) if end is None else end
        if self._guide is not None and self._blind:
            legal = self._guide.legal(draft.head(judged))
            judged = min(judged, legal + 1)
        size = size if legal == len(draft) else smallest(1 + legal, sizes)
        return Plan(draft.head(legal), draft.head(judged), size, ends=legal == end)

    def see(self, last: int, draft: Draft, rows: Logits, accepted: int = 0) -> None:
        """Show the logits of a pass to whoever wants them.

        Args:
            last, draft: the tokens that were evaluated, without the padding behind them.
            rows: at least one for each of those tokens, of shape (n, n_vocab).
            accepted: how many tokens of the draft were accepted; `rows[accepted]` decided the last token emitted.
        """
        if self.drafter is not None and self.drafter.wants_logits:
            self.drafter.see((last, *draft.tokens), rows[: 1 + len(draft)], accepted)

    def hear(self, answers: Sequence[int]) -> None:
        """Tell the drafter what the target said behind the tokens that `settle` is told of next."""
        if self.drafter is not None:
            self.drafter.hear(answers)

    def settle(self, done: Pass) -> None:
        """Learn what came of the proposal, and tell the record of the pass how much of it was right."""
        self._record.settle(done.tokens)
        if self._guide is not None:
            self._guide.learn(len(done.drafted), done.accepted, done.tokens)
        if self.drafter is not None:
            done.guessed = self.drafter.accept(done.tokens)


class Speculation(Proposer):
    """Decides on every draft, and learns from every pass. One instance serves many requests, in order.

    Args:
        drafter: guesses the tokens; None for plain decoding.
        policy: decides how many of them to send.

    Attributes:
        drafter, policy: as above.
        curve: cost of a pass by batch size; None while nobody measured.
        sizes: batch sizes that may be used, ascending.
        replay: seconds to save a state and to go back to it, where taking a draft back means evaluating tokens
            again; None: taking back costs nothing.
        plain: size of a batch without a draft.
    """

    def __init__(self, drafter: Drafter | None, policy: Policy) -> None:
        super().__init__(drafter)
        self.policy = policy
        self._explained: Mapping[str, float] = {}
        self.prepare(None, (1,))

    def prepare(
        self, curve: CostCurve | None, sizes: Sequence[int], replay: Replay | None = None, leaves: int = 0
    ) -> None:
        """Set what holds from here on: the cost curve, the batch sizes, and what taking back costs (None: nothing).

        Args:
            leaves: most branches of questions beside a draft.
        """
        self.curve = curve
        self.sizes = sizes
        self.replay = replay
        self.leaves = leaves
        self.plain = curve.padded(sizes)[1][0] if curve else smallest(1, sizes)

    def begin(
        self,
        prompt: Sequence[int],
        *,
        guide: GrammarGuide | None = None,
        is_eog: Callable[[int], bool] | None = None,
        blind: bool = False,
    ) -> None:
        super().begin(prompt, guide=guide, is_eog=is_eog, blind=blind)
        self._explained = {}
        self.policy.begin()

    def plan(self, left: int, choose: Chooser | None = None, *, owed: int = 0) -> Plan:
        """Plan the next pass.

        Args:
            left: most tokens it may emit.
            choose: as in `Drafter.propose`.
            owed: tokens that the target evaluates again before those of the pass.
        """
        self.proposal = None
        plain = Plan(NO_DRAFT, NO_DRAFT, self.plain, ends=False)
        if self.drafter is None:
            return plain
        self._explained = self.policy.explain()
        limit = min(self.policy.limit(), left - 1, self.sizes[-1] - 1 - owed)
        if limit <= 0:
            return plain
        price = self.policy.price(self.curve, self.sizes)
        draft = made_alone(self.proposing(limit, price, choose))
        debt = None
        if self.replay is not None:
            debt = Debt(owed, 0.0 if owed else self.replay.save, self.replay.restore)
        length, size = self.policy.plan(draft, self.curve, self.sizes, debt)
        if not length:
            return Plan(NO_DRAFT, NO_DRAFT, size, ends=False)
        plan = self.trimmed(draft.head(length), size, self.sizes)
        if price is None or not self.leaves or price.slopes[0] > CHEAP or not plan.sent or self._guide is not None:
            return plan
        return self._asking(plan, self.drafter, price)

    def _asking(self, plan: Plan, drafter: Drafter, price: TokenPrice) -> Plan:
        """The plan with the questions that are worth asking beside it."""
        sent = len(plan.sent)
        # Behind the text's end nobody asks.
        found = drafter.questions(sent - plan.ends, self.sizes[-1] - 1 - sent, self.leaves, price)
        count, size = self.policy.ask(found, sent, plan.size, self.curve, self.sizes)
        return plan._replace(size=size, questions=found[:count])

    def see(self, last: int, draft: Draft, rows: Logits, accepted: int = 0) -> None:
        if self.drafter is None:
            return
        if self.drafter.wants_logits:
            super().see(last, draft, rows, accepted)
        if self.policy.wants_logits:
            self.policy.see(rows[accepted])

    def learn(self, done: Pass, plan_seconds: float = 0.0) -> None:
        """Learn from a pass, and fill in what its record lacks.

        Args:
            done: its record, which gives the tokens emitted, the draft, the batch size and the time.
            plan_seconds: seconds spent on `plan` and on being able to take a draft back; counted only if the drafter
                was asked.
        """
        curve = self.curve
        done.explained = self._explained
        if curve is not None:
            done.plain_seconds = curve.seconds(self.plain)
            done.disturbed = done.seconds - curve.undisturbed(done.batch, done.seconds)
        if self.proposal is not None:
            done.draft_seconds = plan_seconds - self.read_seconds
        self.settle(done)
        if self.drafter is not None:
            self.policy.record(done)
        if curve is not None and done.batch <= self.sizes[-1]:
            curve.observe(done.batch, done.seconds)
