"""`HybridDrafter`: one chain of guesses by n-grams, which are nearly free, and by a draft model, which takes time.

    n-grams guess                 A 0.90, B 0.60
    the model reads A and B       it guesses A with 0.95, then C with 0.80
    both guess A                  the probability of A rises to 0.97
    they differ after A           C is more likely than B, so it replaces B with 0.70, and the rest is dropped
    n-grams continue after A C    D 0.90, so the chain is A C D with the probabilities 0.97, 0.70 and 0.90

`plan_call` decides before each call whether it pays, and how many guesses the model reads: staged speculation (Spector
and Re 2023, arXiv 2308.04623). Invariant between calls: `_chain` begins with `n_final` guesses that stay. The guesser
of the base class has exactly the tokens of `_chain`. From the first call on, the model's cache begins with the text and
`n_read` tokens of the chain. So a replaced guess ends the chain (`start_chain`), and the next call reads from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from ngramspec.drafting.draft import Ask, Chooser, Draft, MarginalCost
from ngramspec.drafting.draft_model.agreement import (
    ALONE,
    CONSENSUS,
    MODEL,
    NGRAMS,
    AgreementModel,
    Observation,
    plan_call,
)
from ngramspec.drafting.draft_model.model import ModelDrafter, ModelGuess
from ngramspec.drafting.mixture.drafter import FREE, HOPELESS, LONGEST, MixtureDrafter, TextIndexSet
from ngramspec.sampling.settings import Sampling


class Guess(NamedTuple):
    """A position of the chain."""

    token: int  # chosen guess
    p: float  # probability of the n-grams' guess; 0 if they have none
    chance: float  # probability of the chosen guess
    q: Mapping[int, float]  # distribution that the chosen guess was drawn from; empty in greedy decoding


NO_GUESS = Guess(-1, 0.0, 0.0, {})


class HybridDrafter(MixtureDrafter):
    """Drafts with n-grams, and with a model if that is expected to pay.

    With `fixed_length` (see `Ask`) one of the two makes the whole draft: the one with the higher expected
    gain before any token is drawn. The arguments after `model` are those of `MixtureDrafter`.
    """

    name = "hybrid"
    is_slow = True

    def __init__(
        self, model: ModelDrafter, memory: TextIndexSet | bool | None = None, state_path: Path | None = None
    ) -> None:
        super().__init__(memory, state_path)
        self.model = model
        self.agreement = AgreementModel()  # statistics on the agreement of the two
        self._forget()

    @property
    def prefill_seconds(self) -> float:  # type: ignore[override]
        return self.model.prefill_seconds

    def set_sampling(self, sampling: Sampling) -> None:
        super().set_sampling(sampling)
        self.model.set_sampling(sampling)

    def fresh_copy(self) -> Self:
        return type(self)(self.model.fresh_copy(), self._memory)

    def clone_for_sequence(self) -> Self:
        clone = super().clone_for_sequence()
        clone.model, clone.agreement = self.model.clone_for_sequence(), self.agreement.clone_for_sequence()
        clone._forget()
        return clone

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.model.begin(prompt)
        self.agreement.begin()
        self._forget()

    def _forget(self) -> None:
        self._chain: list[Guess] = []
        self._observations: list[tuple[int, Observation]] = []
        self._by_model = False

    def accept(self, tokens: Sequence[int]) -> int:
        by_model, model_hits = self._by_model, self.model.accept(tokens)
        hits = super().accept(tokens)
        for at, observation in self._observations:
            if at <= hits and at < len(tokens):
                self.agreement.learn(observation, tokens[at])
        for at, guess in enumerate(self._chain[: min(hits + 1, len(tokens))]):
            if guess.q and self.guesser.acceptance_probs[at] > 0:
                self._drawn_calibrator.learn(self.guesser.acceptance_probs[at], at < hits)
        self._forget()
        return model_hits if by_model else hits

    # ------------------------------------------------------------------ draft

    def propose(self, ask: Ask) -> Draft:
        self._forget()
        self._read_tokens()
        self._calibration = None
        choose, price = ask.choose, ask.price or FREE
        limit = min(ask.limit, LONGEST, len(price.slopes) - 1)
        self.model.open(price)
        self._request_rows(price)
        if choose is not None and ask.fixed_length:
            gain, reach = 0.0, 1.0
            self.guesser.guess(limit, HOPELESS, price)
            for at, p in enumerate(self.guesser.chain()[2]):
                reach *= self._undrawn_calibrator.estimate(p)
                gain += max(0.0, reach - price.rate * price.slopes[at])
            if self.model.estimate_gain(limit, price) > gain:
                draft = self.model.propose(Ask(limit, choose, fixed_length=True, price=price))
                if draft.tokens:
                    self._by_model = True
                    return draft
            return super().propose(ask)
        if self._answer is not None and self._answer.continuation(1)[0]:
            return super().propose(ask)
        self.guesser.pending = 0
        length = self._extend_chain(limit, choose, price)
        chain = self._chain[:length]
        q = () if choose is None else tuple(guess.q for guess in chain)
        chances = tuple(guess.chance for guess in chain)
        return Draft(tuple(guess.token for guess in chain), q, (), (), chances, self.name)

    def _extend_chain(self, limit: int, choose: Chooser | None, price: MarginalCost) -> int:
        """Extend the chain by n-grams and model in turn; return the length of the part that is sent."""
        n_final, reach, n_read = 0, 1.0, 0
        while True:
            length = self._guess(n_final, limit, choose, price, reach)
            final = [guess.chance for guess in self._chain[:n_final]]
            ps = [guess.p for guess in self._chain[n_final:]]
            n_guesses = plan_call(self.model, self.agreement, final, ps, limit, price, n_read)
            if n_guesses is None:
                return length
            n_final, reach, n_read = self._call_model(n_final, n_final + n_guesses, n_read, choose, reach)
            if n_final >= limit or reach < HOPELESS or not price.worth_extending(reach, n_final):
                return n_final

    def _guess(self, n_final: int, limit: int, choose: Chooser | None, price: MarginalCost, reach: float) -> int:
        """Continue the chain with n-grams to one guess more than pays; return its length without that guess."""
        guesser = self.guesser
        chain = self._chain = self._chain[:n_final]
        if guesser.pending != n_final:
            guesser.start_chain([guess.token for guess in chain])
        length = n_final
        continues = True
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
            p = guesser.acceptance_probs[at]
            if choose is not None:
                p = self._drawn_calibrator.estimate(p)
            chain.append(Guess(guesser.guesses[at], p, p, q))
            if not continues:
                break
            length = len(chain)
            reach *= p
            continues = reach >= HOPELESS and price.worth_extending(reach, length)
        return length

    def _call_model(
        self, n_final: int, end: int, n_read: int, choose: Chooser | None, reach: float
    ) -> tuple[int, float, int]:
        """Let the model read the guesses up to `end`, and decide on these and on the next one.

        Return the number of final guesses, the probability that all are right, and the number of guesses that the model
        has read.
        """
        chain = self._chain
        rows = self.model.read_chain([guess.token for guess in chain[n_read:end]], n_read)
        for at in range(n_final, end + 1):
            model_guess = self.model.guess(rows[at - end - 1], at, choose)
            if model_guess is None:
                return at, reach, at
            ours = chain[at] if at < len(chain) else NO_GUESS
            better = self._choose_guess(at, ours, model_guess)
            reach *= better.chance
            if at < len(chain):
                chain[at] = better
            else:
                chain.append(better)
            if better.token != ours.token:
                del chain[at + 1 :]
                self.guesser.start_chain([guess.token for guess in chain])
                return at + 1, reach, at
        return end + 1, reach, end

    def _choose_guess(self, at: int, ours: Guess, model_guess: ModelGuess) -> Guess:
        """Return the more likely guess of n-grams and model at a position, with its probability."""
        token, m, q = model_guess
        estimate = self.agreement.estimate
        if token == ours.token:
            better = ours._replace(chance=estimate(CONSENSUS, ours.p, m))
        else:
            case = MODEL if ours.token >= 0 else ALONE
            better = Guess(token, ours.p, estimate(case, ours.p, m), q)
            if ours.token >= 0 and (chance := estimate(NGRAMS, ours.p, m)) > better.chance:
                better = ours._replace(chance=chance)
        self._observations.append((at, (ours.p, m, ours.token, token, better.token)))
        return better
