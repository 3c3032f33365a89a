# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`BranchingLoop`: a decoding loop that also evaluates side branches of a draft, which are never accepted.

A branch is another continuation that is likely, such as ` lazy` after `the quick` if the draft is `the quick brown
fox`. If the target rejects ` brown` and emits ` lazy`, the row of the branch already shows which token the target emits
after it. The next draft begins with that token (`MixtureDrafter.known_prefix`), which is nearly certain.

This gains 1.5 to 2.5 % if a drafted token is nearly free, as on some GPUs, and nothing otherwise; see `choose_loop`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import cython

from ngramspec.acceptance.rules import Row
from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.backend import Logits, Model
from ngramspec.cost.times import PassTimes
from ngramspec.data import GrammarError
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import DraftedText, Plan, Text
from ngramspec.drafting.acceptance_estimator import DecayingRate
from ngramspec.drafting.draft import Drafter, MarginalCost
from ngramspec.drafting.mixture.drafter import CHEAP, HOPELESS, MixtureDrafter
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.policies.policy import Policy
from ngramspec.sampling.distribution import BadLogits, gumbel_pick

CANDIDATES = cython.declare(cython.int, 10)
POSITIONS = cython.declare(cython.int, 64)
NOBODY = cython.declare(cython.int, -1)

ANSWER_TOKENS = 0.8
"""Value in tokens of a token that is known a pass ahead: its draft does not exist yet, and the text may end before."""


class SideBranch(NamedTuple):
    """A continuation that is not in the draft."""

    fork: int  # number of draft tokens before the branch
    path: tuple[int, ...]  # tokens after these, instead of the draft's
    probability: float  # probability that the text continues so


def choose_loop(
    loop: DecodingLoop, target: Model, drafter: Drafter | None, times: PassTimes | None, sizes: Sequence[int]
) -> DecodingLoop:
    """Return a loop with branches if they can be evaluated, and their cost does not rule out a gain."""
    # A draft model's guesses have no other candidates.
    if not isinstance(drafter, MixtureDrafter) or drafter.is_slow or times is None or not target.leaves:
        return loop
    return BranchingLoop(loop.policy, loop.clock) if times.slopes(sizes)[0] <= CHEAP else loop


class BranchingLoop(DecodingLoop):
    """A decoding loop for one text that evaluates branches if they pay."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(policy, clock)
        # How often the target says the same in the next pass: nearly always, except for rounding and for tokens that
        # were drawn again.
        self._trust = DecayingRate(50.0, 50.5, fade=0.99)
        self._finder: BranchFinder | None = None
        self.branches: Sequence[SideBranch] = ()
        self._rows: Iterable[Row] = ()  # their logits

    def plan(self, text: DraftedText, owed: int) -> Plan:
        plan = super().plan(text, owed)
        self.branches = ()
        times, drafter, leaves = self.times, text.drafts.drafter, text.sequence.leaves
        if not leaves or times is None or not plan.draft.tokens or text.drafts.is_slow:
            return plan
        price, proposal = self.policy.price(times, self.sizes), text.drafts.proposal
        if price is None or not price.seconds or price.slopes[0] > CHEAP or not isinstance(drafter, MixtureDrafter):
            return plan
        assert proposal is not None
        if self._finder is None:
            self._finder = BranchFinder(drafter.guesser)
        n_sent, largest = len(plan.draft), self.sizes[len(self.sizes) - 1]
        # No branch begins after the end of the text.
        candidates = self._finder.find(
            proposal.acceptance_probs, n_sent - plan.ends, largest - 1 - n_sent, leaves, price
        )
        count, size = choose_branches(candidates, n_sent, plan.size, price, times, self.sizes)
        self.branches = candidates[:count]
        return plan._replace(size=size)

    def ask(self, text: DraftedText, tokens: Sequence[int]) -> Logits:
        # They take the place of padding.
        count = len(tokens) - len(self.branches)
        branches = [(branch.fork, branch.path) for branch in self.branches]
        rows: Logits = cast(Any, text.sequence).ask(tokens[:count], branches)
        self._rows = rows[count:]
        return rows[:count]

    def commit(self, current: Pass) -> None:
        (text,) = current.texts
        drafter = text.drafts.drafter
        answers = drafter.known_prefix if isinstance(drafter, MixtureDrafter) else ()
        super().commit(current)
        (step,) = current.steps
        if not isinstance(drafter, MixtureDrafter) or step is None:
            return
        self.judge(answers, step.tokens)
        if self.branches and step.stop is None:
            drafter.known_prefix = self._answers(cast(Text, text), len(step.tokens))
            drafter.prefix_probability = self._trust.value

    def judge(self, answers: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn how often answers of the target come true; `tokens` came after them."""
        for answer, token in zip(answers, tokens, strict=False):
            self._trust.add(answer == token)
            if answer != token:
                break

    def _answers(self, text: Text, n_emitted: int) -> list[int]:
        """Return the target's predictions after the text, from the branches of the last pass."""
        rows = {
            branch.path: row
            for branch, row in zip(self.branches, self._rows, strict=True)
            if branch.fork == n_emitted - 1
        }
        path: tuple[int, ...] = (text.last,)
        answers: list[int] = []
        while path in rows:
            token = self.answer(text, rows[path], text.settled + 1 + len(answers))
            if token is None:
                break
            answers.append(token)
            path = (*path, token)
        return answers

    def answer(self, text: Text, row: Row, position: int) -> int | None:
        """Return the token that the target would probably emit, given its logits, or `None` if it is unknown.

        The token depends on the emitted tokens and on the last draft, not on a random number that verifies the next
        draft. So it counts as picked by a rule in the sense of `Rejection`, with q = 1.
        """
        verifier = text.verifier
        if not isinstance(verifier, RuleVerifier):
            return None
        sampling = verifier.sampler.sampling
        if sampling.samples_internally or sampling.xtc_probability > 0:
            return None  # these samplers draw random numbers, and another draw would change the text
        try:
            p = verifier.sampler.distribution(row)
        except (BadLogits, GrammarError):
            return None
        if verifier.rule in ("coupled", "match"):
            return gumbel_pick(sampling.seed, position, p)
        return int(p.ids[p.probs.argmax()])


def choose_branches(
    branches: Sequence[SideBranch],
    length: int,
    size: int,
    price: MarginalCost,
    times: PassTimes,
    sizes: Sequence[int],
) -> tuple[int, int]:
    """Return how many of the branches pay, beginning with the first, and the batch size with them.

    The target's answer after a branch is a token of the next pass, where it takes a row. So it is worth
    ANSWER_TOKENS * (1 - lambda * slope) tokens of this pass. The most likely branch is the first; without branches,
    `length` draft tokens are sent in a batch of `size`.
    """
    costs, now = times.optimal_batches(sizes), times.ratio(size)
    plain, plain_cost = costs[1]
    max_cost = max(now, plain_cost + price.loss_budget)
    share = ANSWER_TOKENS * max(0.0, 1.0 - price.rate * price.slopes[length])
    best, best_size, best_value, gain = 0, size, 0.0, 0.0
    for k, branch in enumerate(branches[: sizes[len(sizes) - 1] - 1 - length], 1):
        gain += share * branch.probability
        wider, cost = (size, now) if 1 + length + k <= size else costs[1 + length + k]
        if cost > max_cost:
            continue
        change = times.change if wider != size and size in (plain, times.last) else 0.0
        value = gain - price.rate * (cost - now + change)
        if value > best_value:
            best, best_size, best_value = k, wider, value
    return best, best_size


class BranchFinder:
    """Finds the most likely tokens that are not in a draft.

    A row is worth its *reach*, the probability that the text contains its token and all tokens before it. So the rows
    with the largest reaches are chosen, best first. With known reaches, this is the optimum that Sequoia finds by
    dynamic programming from averages (Chen et al. 2024, arXiv 2402.12374, section 3.1).

    Nodes have numbers: a node of the draft has the number of guesses before it, and side nodes have the numbers after
    these. The candidates that may follow a node are in the cells of that number of the guesser, which made the draft.
    """

    def __init__(self, guesser: Guesser) -> None:
        self._guesser = guesser
        # For each node: where it leaves the draft, and the tokens after that.
        self._fork = array("i", bytes(4 * POSITIONS))
        self._path: list[tuple[int, ...]] = [()] * POSITIONS
        self._goes_on = array("i", bytes(4 * POSITIONS))
        self._reach = array("d", bytes(8 * POSITIONS))
        # For each candidate: the probability that it is right; below 0 once it has a row.
        self._probability = array("d", bytes(8 * POSITIONS * CANDIDATES))
        # For each node: the most likely candidate without a row, and the reach that its row would have.
        self._best_candidate = array("i", bytes(4 * POSITIONS))
        self._best_reach = array("d", bytes(8 * POSITIONS))

    def find(
        self,
        chances: Sequence[float],
        n_sent: cython.int,
        limit: cython.int,
        leaves: cython.int,
        price: MarginalCost,
    ) -> list[SideBranch]:
        """Return branches, the most likely first, each after those that begin its path.

        `chances` are the probabilities of the draft tokens, each if those before it are right. No branch begins after
        the `n_sent` tokens that are sent. There are at most `limit` rows and `leaves` paths; each row may pay.
        """
        guesser: Guesser = self._guesser
        reach: cython.double = 1.0
        branches: list[SideBranch] = []
        start: cython.int = guesser.pending
        if n_sent == start and n_sent < POSITIONS - 1:
            self._best_reach[start] = 0.0
            if guesser.score_position(start) < 0:
                guesser.counts.n_candidates[start] = 0
            start += 1
        for node in range(min(n_sent + 1, start)):
            self._fork[node] = node
            self._path[node] = ()
            self._reach[node] = reach
            if node < guesser.pending:
                self._rate(node, chances[node], guesser.guesses[node] if node < n_sent else -1)
                reach *= chances[node]
            elif guesser.counts.n_candidates[node] > 0:
                self._rate(node, guesser.correction.p[node], -1)
        # A token that is known a pass ahead takes a row there.
        share: cython.double = max(0.0, 1.0 - price.rate * price.slopes[n_sent])
        limit = min(limit, POSITIONS - start, cython.cast(cython.int, len(price.slopes)) - 1 - n_sent)
        for n in range(start, start + limit):
            best = NOBODY
            reach = 0.0
            for node in range(n):
                if n_sent < node < start or (leaves == 0 and (node < start or self._goes_on[node])):
                    continue
                if self._best_reach[node] > reach:
                    reach = self._best_reach[node]
                    best = node
            if best == NOBODY or reach < HOPELESS or not price.worth_extending(share * reach, n_sent + n - start):
                break
            # The first row after a side node continues its path; any other begins a new one.
            if best < start or self._goes_on[best]:
                leaves -= 1
            else:
                self._goes_on[best] = 1
            cell = best * CANDIDATES + self._best_candidate[best]
            self._fork[n] = self._fork[best]
            self._path[n] = (*self._path[best], guesser.counts.tokens[cell])
            self._goes_on[n] = 0
            self._reach[n] = reach
            self._probability[cell] = -1.0
            self._next(best)
            branches.append(SideBranch(self._fork[n], self._path[n], reach))
            self._look(n)
        return branches

    def _look(self, node: cython.int) -> None:
        """Rate the candidates after a side node."""
        guesser: Guesser = self._guesser
        t = guesser.history.tokens
        path = self._path[node]
        fork: cython.int = self._fork[node]
        depth: cython.int = fork + cython.cast(cython.int, len(path))
        self._best_reach[node] = 0.0
        for i in range(depth):
            t[guesser.history.size + i] = guesser.guesses[i] if i < fork else path[i - fork]
        if guesser.score_branch_position(node, depth, fork) >= 0:
            self._rate(node, guesser.correction.p[node], -1)

    def _rate(self, node: cython.int, chance: cython.double, draft_token: cython.int) -> None:
        """Set the probability of each candidate after a node; their sum is at most 1.

        `chance` is that of the next draft token, or at the end of the draft (-1) of the most likely candidate.
        """
        guesser: Guesser = self._guesser
        cell: cython.int = node * CANDIDATES
        first: cython.int = -1
        rest: cython.double = 0.0
        for c in range(guesser.counts.n_candidates[node]):
            if draft_token < 0:
                if first < 0 or guesser.mixer.p[cell + c] > guesser.mixer.p[cell + first]:
                    first = c
            elif guesser.counts.tokens[cell + c] == draft_token:
                first = c
        for c in range(guesser.counts.n_candidates[node]):
            if c != first:
                rest += guesser.mixer.p[cell + c]
        scale: cython.double = (1.0 - chance) / rest if rest > 1.0 - chance else 1.0
        for c in range(guesser.counts.n_candidates[node]):
            if c != first:
                self._probability[cell + c] = scale * guesser.mixer.p[cell + c]
            else:
                # Tokens of the draft are not branches.
                self._probability[cell + c] = chance if draft_token < 0 else -1.0
        self._next(node)

    def _next(self, node: cython.int) -> None:
        """Find the most likely candidate after a node that has no row."""
        chance: cython.double = 0.0
        for c in range(self._guesser.counts.n_candidates[node]):
            if self._probability[node * CANDIDATES + c] > chance:
                chance = self._probability[node * CANDIDATES + c]
                self._best_candidate[node] = c
        self._best_reach[node] = self._reach[node] * chance
