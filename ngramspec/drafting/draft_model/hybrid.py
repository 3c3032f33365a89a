"""`HybridDrafter`: one chain of guesses by n-grams and a draft model; probabilities and costs choose between them.

Guesses of n-grams are nearly free, those of a model take time. So a draft is made in these steps:

1. N-grams guess as far as a guess may pay.
2. If the expected gain of the model exceeds its time, it reads these guesses in one pass, as far as that pays.
3. The pass shows the model's own guess at each of these positions, and at the next one. If both agree, the guess
   becomes more certain. If they differ, the more likely guess is used. If it is the model's, the rest of the chain is
   dropped.
4. N-grams continue after it, and the model may be called again. So each of them continues the other's chain.

The expected gain is computed over all possible results of the model. For each result, it is the value of the best
chain, including the cost of the target's decode call. The first token of a draft may cost more than the next ten. A
likely guess is then worthless unless others follow it.

Example in units of T(1), the time of a one-token decode call, with a throughput of 1 token per T(1). A draft of 1, 2
or 3 tokens costs 1.0, 1.1 or 1.2 in addition to a plain decode call. A pass of the model takes 0.3. N-grams have one
guess, with a probability of 0.9:

    the guess alone                       0.9 - 1.0 = -0.1, so it would not be sent
    with two more guesses of 0.9          0.9 + 0.81 + 0.729 - 1.2 = 1.24
    minus two passes of the model         1.24 - 0.6 = 0.64, so the model is called

A model that checks cheaper guesses before the target is known as staged speculation (Spector and Re 2023, arXiv
2308.04623). Here the costs decide at which positions the model is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from ngramspec.backend import Logits
from ngramspec.drafting.draft import Chooser, Draft, MarginalCost
from ngramspec.drafting.draft_model.agreement import (
    ALONE,
    CONSENSUS,
    LEVELS,
    MODEL,
    NGRAMS,
    AgreementModel,
    Observation,
)
from ngramspec.drafting.draft_model.draft_model import DraftModel
from ngramspec.drafting.draft_model.passes import Drafting, PassRequest, StepwiseDrafter
from ngramspec.drafting.mixture.drafter import FREE, HOPELESS, LONGEST, MixtureDrafter, TextIndexSet
from ngramspec.sampling.settings import Sampling

FARTHEST = 10  # maximum number of guesses that the model reads at once, and of further calls that are considered


class Guess(NamedTuple):
    """A position of the chain."""

    token: int  # chosen guess
    p: float  # probability of the n-grams' guess; 0 if they have none
    chance: float  # probability of the chosen guess
    q: Mapping[int, float]  # distribution that the chosen guess was drawn from; empty in greedy decoding


class ChainValue(NamedTuple):
    """Expected gain of a chain of guesses, in tokens, including the cost of the target's decode call.

    >>> price = MarginalCost(1.0, [0.4, 0.1, 0.1], costs=lambda: [0.0, 1.0, 1.1, 1.2])
    >>> one = ChainValue().then(0.9, price)
    >>> one.most, round(one.along([0.9, 0.9], price), 3)
    (0.0, 1.239)
    """

    tokens: float = 0.0  # expected number of accepted tokens
    reach: float = 1.0  # probability that all tokens are accepted
    most: float = 0.0  # gain of the best prefix of the chain, after the cost of its tokens is subtracted
    length: int = 0  # number of guesses in the chain

    def then(self, chance: float, price: MarginalCost) -> ChainValue:
        reach = self.reach * chance
        tokens, length = self.tokens + reach, self.length + 1
        return ChainValue(tokens, reach, max(self.most, tokens - price.rate * price.costs[length]), length)

    def along(self, chances: Sequence[float], price: MarginalCost) -> float:
        """Return the gain of the best prefix of the chain with these further guesses."""
        tokens, reach, most, worth, costs = self.tokens, self.reach, self.most, price.rate, price.costs
        for length, chance in enumerate(chances, self.length + 1):
            reach *= chance
            tokens += reach
            most = max(most, tokens - worth * costs[length])
        return most


class HybridDrafter(StepwiseDrafter, MixtureDrafter):
    """Drafts with n-grams, and with a model if that is expected to pay.

    With `fixed_length` (see `Drafter.propose`) one of the two makes the whole draft: the one with the higher expected
    gain before any token is drawn.

    Args:
        model: Draft model.
        memory: Texts to look up; see `MixtureDrafter`.
        state_path: File for the statistics about tokens; see `MixtureDrafter`.
    """

    name = "hybrid"

    def __init__(
        self, model: DraftModel, memory: TextIndexSet | bool | None = None, state_path: Path | None = None
    ) -> None:
        super().__init__(memory, state_path)
        self.model = model
        self.opinion = AgreementModel()  # statistics on the agreement of the two
        self._forget()

    @property
    def prefill_seconds(self) -> float:  # type: ignore[override]
        return self.model.prefill_seconds

    def set_sampling(self, sampling: Sampling) -> None:
        super().set_sampling(sampling)
        self.model.set_sampling(sampling)

    def fresh_copy(self) -> HybridDrafter:
        return HybridDrafter(self.model.fresh_copy(), self._memory)

    def clone_for_sequence(self) -> Self:
        other = super().clone_for_sequence()
        other.model, other.opinion = self.model.clone_for_sequence(), self.opinion.clone_for_sequence()
        other._forget()
        return other

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.model.begin(prompt)
        self.opinion.begin()
        self._forget()

    def _forget(self) -> None:
        self._chain: list[Guess] = []
        self._asked_about: list[tuple[int, Observation]] = []
        self._by_model = False

    def accept(self, tokens: Sequence[int]) -> int:
        by_model, proposed = self._by_model, self.model.accept(tokens)
        hits = super().accept(tokens)
        for at, answered in self._asked_about:
            if at <= hits and at < len(tokens):
                self.opinion.learn(answered, tokens[at])
        for at, guess in enumerate(self._chain[: min(hits + 1, len(tokens))]):
            if guess.q and self.guesser.acceptance_probs[at] > 0:
                self._drawn_calibrator.learn(self.guesser.acceptance_probs[at], at < hits)
        self._forget()
        return proposed if by_model else hits

    # ------------------------------------------------------------------ draft

    def _drafting_blindly(self, limit: int, choose: Chooser, price: MarginalCost) -> Drafting:
        self.guesser.guess(limit, HOPELESS, price)
        gain, reach = 0.0, 1.0
        for at, p in enumerate(self.guesser.chain()[2]):
            reach *= self._undrawn_calibrator.estimate(p)
            gain += max(0.0, reach - price.rate * price.slopes[at])
        if self.model.estimate_gain(limit, price) > gain:
            draft = yield from self.model.propose_stepwise(limit, choose, fixed_length=True, price=price)
            if draft.tokens:
                self._by_model = True
                return draft
        return MixtureDrafter.propose(self, limit, choose, fixed_length=True, price=price)

    def propose_stepwise(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Drafting:
        self._forget()
        self._calibration = None
        price = price or FREE
        limit = min(limit, LONGEST, len(price.slopes) - 1)
        self.model.open(price)
        self._request_rows(price)
        if choose is not None and fixed_length:
            return (yield from self._drafting_blindly(limit, choose, price))
        if self._answer is not None and self._answer.continuation(1)[0]:
            return MixtureDrafter.propose(self, limit, choose, fixed_length=fixed_length, price=price)
        self.guesser.pending = 0
        settled, reach, read = 0, 1.0, 0
        while True:
            length = self._guess(settled, limit, choose, price, reach)
            along, gain = self._worth_asking(settled, limit, price, read)
            if along is None:
                break
            answered = yield from self._ask(settled, along, read, choose, reach, gain)
            if answered is None:
                break
            settled, reach, read = answered
            if settled >= limit or reach < HOPELESS or not price.worth_extending(reach, settled):
                length = settled
                break
        chain = self._chain[:length]
        q = () if choose is None else tuple(guess.q for guess in chain)
        chances = tuple(guess.chance for guess in chain)
        return Draft(tuple(guess.token for guess in chain), q, (), (), chances, self.name)

    def _guess(self, settled: int, limit: int, choose: Chooser | None, price: MarginalCost, reach: float) -> int:
        """Continue the chain with n-grams after `settled` guesses, to one guess more than pays.

        Returns:
            Length of the chain without that last guess.
        """
        guesser = self.guesser
        chain = self._chain = self._chain[:settled]
        if guesser.pending != settled:
            self._set_prefix([guess.token for guess in chain])
        length = settled
        goes_on = True
        while len(chain) < limit:
            at = len(chain)
            best = guesser.score_position(at)
            if best < 0:
                break
            q: Mapping[int, float] = {}
            if choose is not None:
                q = guesser.distribution(at)
                best = list(q).index(choose(at, q))
            guesser.take_candidate(at, best)
            p = (
                guesser.acceptance_probs[at]
                if choose is None
                else self._drawn_calibrator.estimate(guesser.acceptance_probs[at])
            )
            chain.append(Guess(guesser.guesses[at], p, p, q))
            if not goes_on:
                break
            length = len(chain)
            reach *= p
            goes_on = reach >= HOPELESS and price.worth_extending(reach, length)
        return length

    def _worth_asking(self, settled: int, limit: int, price: MarginalCost, read: int) -> tuple[int | None, float]:
        """Decide if the model should be called, and how many guesses it should read.

        Args:
            settled: Number of guesses that are final.
            limit: Maximum length of the draft.
            price: Cost of one more token.
            read: Number of guesses that the model has read.

        Returns:
            Number of guesses after the settled ones that the model should read before its own guess, and the expected
            gain before its time is subtracted. `None` means that the model should not be called.
        """
        ps = [guess.p for guess in self._chain[settled:]]
        value = ChainValue()
        for guess in self._chain[:settled]:
            value = value.then(guess.chance, price)
        further = self._further(price, limit)
        best = bare = value.along(ps, price) + price.rate * self.model.catch_up_cost(price)
        along, gain = None, 0.0
        ended, agreed = 0.0, 1.0
        for i in range(min(len(ps), limit - settled - 1, FARTHEST) + 1):
            prospects = self.opinion.prospects(ps[i] if i < len(ps) else 0.0)
            for share, chance in prospects.disagreements:
                ended += agreed * (1.0 - prospects.agreement.value) * share * further(value.then(chance, price))
            agreed *= prospects.agreement.value
            expected = ended
            if agreed:
                value = value.then(prospects.consensus.value, price)
                expected += agreed * max(value.along(ps[i + 1 :], price), further(value))
            paid = expected - price.rate * self.model.pass_cost(settled + i - read, price)
            if paid > best:
                best, along, gain = paid, i, expected - bare
        return along, gain

    def _further(self, price: MarginalCost, limit: int) -> Callable[[ChainValue], float]:
        """Return a function for the value of a chain after which the model may be called while its guesses are good."""
        prospects = self.opinion.prospects()
        agrees = prospects.agreement.value
        outcomes = [((1.0 - agrees) * share, chance) for share, chance in prospects.disagreements]
        outcomes.append((agrees, prospects.consensus.value))
        ways = []
        for least in LEVELS:
            good = [(share, chance) for share, chance in outcomes if chance > least]
            often = sum(share for share, _ in good)
            if often:
                ways.append((often, sum(share * chance for share, chance in good) / often))
        asking = price.rate * self.model.extra_pass_cost(price)

        def further(value: ChainValue) -> float:
            best = value.most
            for often, chance in ways:
                goes_on, ended, at = 1.0, 0.0, value
                for _ in range(min(limit - value.length, FARTHEST)):
                    ended += goes_on * ((1.0 - often) * at.most - asking)
                    goes_on *= often
                    at = at.then(chance, price)
                    best = max(best, ended + goes_on * at.most)
            return best

        return further

    def _ask(
        self, settled: int, along: int, read: int, choose: Chooser | None, reach: float, gain: float
    ) -> Generator[PassRequest, Logits | None, tuple[int, float, int] | None]:
        """Let the model read `along` guesses, and settle these and the next one.

        Returns:
            Number of settled guesses, the probability that all are right, and the number of guesses that the model has
            read; `None` if the request was declined.
        """
        chain, opinion = self._chain, self.opinion
        end = settled + along
        rows = yield from self.model.read_chain([guess.token for guess in chain[read:end]], read, gain)
        if rows is None:
            return None
        for at in range(settled, end + 1):
            answered = self.model.guess(rows[at - end - 1], at, choose)
            if answered is None:
                return at, reach, at
            answer, m, q = answered
            ours = chain[at] if at < len(chain) else Guess(-1, 0.0, 0.0, {})
            if answer == ours.token:
                better = ours._replace(chance=opinion.estimate(CONSENSUS, ours.p, m))
            else:
                case = MODEL if ours.token >= 0 else ALONE
                better = Guess(answer, ours.p, opinion.estimate(case, ours.p, m), q)
                if ours.token >= 0 and (stands := opinion.estimate(NGRAMS, ours.p, m)) > better.chance:
                    better = ours._replace(chance=stands)
            self._asked_about.append((at, (ours.p, m, ours.token, answer, better.token)))
            reach *= better.chance
            if at < len(chain):
                chain[at] = better
            else:
                chain.append(better)
            if better.token != ours.token:
                del chain[at + 1 :]
                self._set_prefix([guess.token for guess in chain])
                return at + 1, reach, at
        return end + 1, reach, end
