"""`BeamPlan`: the drafts of a beam search, which are themselves a beam search (Leviathan et al. 2023, appendix A.4).

Each round takes the best `width` results, by the target's rows if they are known and by guesses otherwise. A guess is
several tokens with their probabilities, from the source with the longer context:

    rows    the most likely tokens of the target's last row after the same 1 to 3 tokens, with their probabilities (as
            in Token Recycling, Luo et al. 2024, arXiv 2408.08696), because beams often differ in only one token
    copies  tokens that followed the longest known context of 1 to 8 tokens, in the prompt or in the common start of
            all beams

The draft is evaluated to the length k that maximises

    1 + c_1 + c_1 c_2 + ... + c_1 ... c_k - rate * T(n + n_1 + ... + n_k)

Here c_i is the probability that round i of the draft contains all nodes that the search then chooses. n is the number
of rows that the pass must compute without a draft, and n_i the number that round i adds. T is the cost of a pass by its
size. rate is the recent number of rounds per plain pass, but at least that of plain beam search. If a round misses,
about PARTIAL_SHARE of its rows need not be computed later, and their share of T is not counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, reduce

from ngramspec.cost.times import PassTimes
from ngramspec.drafting.acceptance_estimator import DecayingRate
from ngramspec.drafting.draft import MarginalCost
from ngramspec.tokens import Node, TopLogprobs, common_ancestor

ORDERS = 3  # maximum number of context tokens of a row
LONGEST = 8  # maximum number of context tokens of a copy
AHEAD = 2  # minimum number of tokens by which a copy's context must exceed a row's, which contains more information
COPY_MARGIN = 2  # minimum ratio of occurrences for which the most frequent copy is preferred to the most recent one
FADE = 0.98  # factor by which earlier counts fade at each new count
DECAY = 0.95  # factor by which earlier gains and costs fade at each pass
SIZES = range(1, 65)

PARTIAL_SHARE = 0.5
"""Share of a round's rows that the search chooses if it does not choose all; measured 0.3 to 0.5 for 2 to 8 beams. A
single beam chooses one row or no row."""

COVERAGE = (0.15, 0.4, 0.7, 0.9, 0.6, 0.65, 0.65, 0.7, 0.9)
"""Probability that a round with one guess contains all nodes that the search chooses, by the length of the guess's
context, measured on the demo model (rounded). Contexts of 1 to 3 tokens are mostly rows, longer ones are copies."""

PER_GUESS, MANY = 0.84, 4
"""Factor of that probability for each further guess, because all guesses of a round must be good enough, and the number
of guesses from which on they are not counted."""

WEIGHT = 4.0  # weight of these probabilities in rounds

Context = tuple[int, ...]

Layer = tuple[list[Node], list[Node], DecayingRate]
"""One round of a draft: the nodes that it chooses, those of them without known rows, and the rate of such rounds that
contained all nodes that the search chose."""


class BeamPlan:
    """The drafts of one search: up to `depth` rounds, each of `width` texts.

    The `notes` of a node are the copy proposed after it, and the probability that the target gives such copies.
    """

    def __init__(
        self, prompt: Sequence[int], root: Node, times: PassTimes, width: int, depth: int, is_eog: Callable[[int], bool]
    ) -> None:
        self._is_eog = is_eog
        self._trunk = root  # last node that all texts have in common
        self._times = times.for_plain(width)
        self._width, self._depth = width, depth
        self._partial_share = PARTIAL_SHARE * (1.0 - 1.0 / width)
        # Rates of rounds that contained all nodes that the search chose, by shortest context and number of guesses.
        self._coverage = cache(
            lambda shortest, n: DecayingRate(WEIGHT * (COVERAGE[shortest] * PER_GUESS ** (n - 1)), WEIGHT, fade=FADE)
        )
        self._layers: list[Layer] = []
        self._per_token = 0.0  # cost of the work outside the pass, per token of the pass
        self._rounds = self._units = 0.0  # fading sums over the last passes: rounds, and cost
        self._end: Context = ()  # last tokens of the prompt and of all committed tokens
        self._prompt_end = tuple(prompt[-LONGEST:])
        # Number of occurrences of each token after a context, the most recent token last.
        self._copies: defaultdict[Context, dict[int, int]] = defaultdict(dict)
        self._rows: dict[Context, TopLogprobs] = {}
        self._trust: defaultdict[tuple[int, int], DecayingRate] = defaultdict(lambda: DecayingRate(1.0, 2.0, fade=FADE))
        self._commit(prompt)

    # ------------------------------------------------------------------ guesses

    def _commit(self, tokens: Sequence[int]) -> None:
        """Add the next tokens that all beams have in common."""
        for token in tokens:
            for start in range(len(self._end)):
                counts = self._copies[self._end[start:]]
                counts[token] = counts.pop(token, 0) + 1
            self._end = (*self._end, token)[-LONGEST:]

    def observe_row(self, node: Node, likely: TopLogprobs) -> None:
        """Learn the target's most likely tokens after a node."""
        tail = self._tail(node)[-ORDERS:]
        for start in range(len(tail)):
            self._rows[tail[start:]] = likely
        if node.notes is not None:
            copy, trust = node.notes
            trust.add(sum(math.exp(logprob) for token, logprob in likely if token == copy))

    def _guess(self, node: Node) -> tuple[TopLogprobs, int]:
        """Return likely tokens after a node and the length of their context, at most LONGEST; 0 means no guess."""
        tail = self._tail(node)
        contexts = [tail[start:] for start in range(len(tail))]
        row_context = next((context for context in contexts[-ORDERS:] if context in self._rows), ())
        copy_context = next((context for context in contexts if context in self._copies), ())
        row = self._rows.get(row_context)
        if len(copy_context) < len(row_context) + AHEAD:
            return row or (), len(row_context)
        counts = self._copies[copy_context]
        *_, latest = counts
        most_frequent = max(counts, key=counts.__getitem__)
        copy = most_frequent if counts[most_frequent] >= COPY_MARGIN * counts[latest] else latest
        rate = self._trust[len(copy_context), len(row_context)]
        node.notes = copy, rate
        total = sum(counts.values())
        alternatives = row or [(token, math.log(n / total)) for token, n in counts.items()]
        # The copy has the probability `trust`, and the other tokens share the rest.
        trust = min(rate.value, 0.99)
        copy_probability = sum(math.exp(logprob) for token, logprob in alternatives if token == copy)
        likely = [(copy, math.log(trust))]
        if copy_probability < 1.0:
            shift = math.log((1.0 - trust) / (1.0 - copy_probability))
            likely += [(token, logprob + shift) for token, logprob in alternatives if token != copy]
        return sorted(likely, key=lambda guess: -guess[1]), len(copy_context)

    def _tail(self, node: Node) -> Context:
        """Return the last LONGEST tokens up to a node, oldest first."""
        tail: list[int] = []
        while node.parent is not None and len(tail) < LONGEST:
            tail.append(node.token)
            node = node.parent
        return (*self._prompt_end, *reversed(tail))[-LONGEST:]

    # ------------------------------------------------------------------ the guesses of a pass

    def plan(
        self, live: Sequence[tuple[float, Node]], rounds: int, room: int, leaves: int
    ) -> tuple[list[Node], list[Node]]:
        """Return the nodes to evaluate ahead, and the known nodes that may be needed, both without the live ones.

        `live` are the score and the last node of each text of the next round; some of their rows are missing. `room` is
        the maximum number of nodes to evaluate ahead, and `leaves` that of leaves among all kept and evaluated nodes,
        including the live texts.
        """
        common = reduce(common_ancestor, [node for _, node in live])
        if common is not self._trunk:
            self._commit(common.path()[self._trunk.length - common.length :])
            self._trunk = common
        n_missing = sum(node.likely is None for _, node in live)
        self._layers = self._draft(live, min(rounds, self._depth), room, room + n_missing, leaves)
        layers = self._layers[: self._count_best_layers(n_missing)]
        new = [node for _, unknown, _ in layers for node in unknown]
        known_nodes = [node for nodes, _, _ in self._layers for node in nodes if node.likely is not None]
        # Forget nodes that were drafted but are not sent, and nodes that were sent earlier but are no longer needed.
        needed_nodes = {*new, *known_nodes}
        for node in [node for _, node in live] + new + known_nodes:
            node.children = {token: child for token, child in node.children.items() if child in needed_nodes}
        return new, known_nodes

    def _draft(self, live: Sequence[tuple[float, Node]], rounds: int, room: int, size: int, leaves: int) -> list[Layer]:
        layers: list[Layer] = []
        front, chance, tips = live, 1.0, len(live)
        # A further round must be likely enough to justify one more token in the pass.
        price = MarginalCost(self._rate(), [slope + self._per_token for slope in self._times.slopes(SIZES)])
        for _ in range(rounds):
            results: list[tuple[float, Node, int]] = []
            contexts: list[int] = []
            for score, node in front:
                likely = node.likely
                if likely is None:
                    likely, context = self._guess(node)
                    contexts.append(context)
                results += [(score + logprob, node, token) for token, logprob in likely]
            results.sort(key=lambda result: -result[0])
            best_results = [result for result in results[: self._width] if not self._is_eog(result[2])]
            tips += len(best_results) - len({node for _, node, _ in best_results})
            if not best_results or tips > leaves:
                break
            front = [(score, node.child(token)) for score, node, token in best_results]
            nodes = [node for _, node in front]
            unknown = [node for node in nodes if node.likely is None]
            coverage = DecayingRate(1.0, 1.0, fade=1.0)  # a round without guesses is certain
            if contexts:
                coverage = self._coverage(min(contexts), min(len(contexts), MANY))
            room -= len(unknown)
            chance *= coverage.value
            if room < 0:
                break
            layers.append((nodes, unknown, coverage))
            if not price.worth_extending(chance, size - room - 1):
                break
        return layers

    def _count_best_layers(self, size: int) -> int:
        """Return the number of layers that are worth their time, if a pass without them evaluates `size` tokens."""
        rate = self._rate()
        before = cost = self._cost(size)
        best, best_value = 0, 1.0 - rate * cost
        expected_steps = chance = 1.0
        for k, (_, unknown, coverage) in enumerate(self._layers, 1):
            size += len(unknown)
            after = self._cost(size)
            cost += (after - before) * (1.0 - chance * (1.0 - coverage.value) * self._partial_share)
            before = after
            chance *= coverage.value
            expected_steps += chance
            value = expected_steps - rate * cost
            if value > best_value:
                best, best_value = k, value
        return best

    def _rate(self) -> float:
        """Return the recent number of rounds per plain pass, but at least that of plain beam search."""
        plain = 1.0 / self._cost(self._width)
        return max(plain, self._rounds / self._units) if self._units else plain

    def _cost(self, size: int) -> float:
        """Return the cost of a pass and of the work outside it, in plain passes."""
        return self._times.ratio(size) + self._times.change_now(size) + self._per_token * size

    def learn(self, size: int, seconds: float, other_seconds: float, rounds: Sequence[Sequence[Node]]) -> None:
        """Learn the result of the last planned pass, of `size` tokens.

        `rounds` are the last nodes of the live texts after each round since the pass.
        """
        for (nodes_drafted, _, coverage), nodes in zip(self._layers, rounds, strict=False):
            keys = {(node.parent, node.token) for node in nodes_drafted}
            hit = all((node.parent, node.token) in keys for node in nodes)
            coverage.add(hit)
            if not hit:
                break
        self._rounds = DECAY * self._rounds + len(rounds)
        cost, other_cost = self._times.observe(size, seconds).cost, other_seconds / self._times.level
        self._units = DECAY * self._units + cost + other_cost
        self._per_token += 0.1 * (other_cost / size - self._per_token)
