"""Drafts of beam search: `BeamDrafter` guesses what may follow a text, `BeamPlan` which guesses a pass evaluates.

A guess is several tokens with their probabilities, from one of two sources; the one with the longer context counts:

    rows    the most likely tokens that the target gave the last time after the same 1 to 3 tokens, with their
            probabilities (as in Token Recycling, Luo et al. 2024, arXiv 2408.08696): beams differ in a token and then
            continue alike.
    copies  what followed the same 1 to 8 tokens, the most that were seen, in the prompt or in what all beams agree on.

The draft is itself a beam search (Leviathan et al. 2023, appendix A.4): each step takes the best `width` results, by
the target's rows where they are known and by guesses elsewhere. It is evaluated to the length k that maximises

    1 + c_1 + c_1 c_2 + ... + c_1 ... c_k - rate * T(n + n_1 + ... + n_k)

with c_i the chance that step i of the draft holds all that the search then chooses, n the rows that the pass must
compute in any case, n_i those that step i adds, T the seconds of a pass by its size, and rate the recent steps per
second, but no less than plain beam search makes. About PARTLY of the rows of a step that misses need not be computed
later, and their share of T is not counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.chances import FadingRate
from ngramspec.drafting.draft import MarginalCost
from ngramspec.tokens import Likely, Node

ORDERS = 3  # most tokens of context that a row is remembered by
LONGEST = 8  # and a copy
AHEAD = 2  # a copy's context must be this much longer than a row's to be preferred: a row says more
CLEARLY = 2  # another copy is preferred to the most recent one if it was seen at least this many times as often
FADE = 0.98  # factor by which earlier counts fade at each new count
SUREST = 0.99

Context = tuple[int, ...]


class BeamDrafter:
    """Guesses continuations of the nodes of a tree. One instance serves many searches, one at a time.

    A node's `notes` are the copy proposed after it, and the probability that the target gives such copies.
    """

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a search."""
        self._end: Context = ()  # of the prompt and all that was committed
        self._prompt_end = tuple(prompt[-LONGEST:])
        # How often each token was seen after a context, the most recent one last.
        self._copies: defaultdict[Context, dict[int, int]] = defaultdict(dict)
        self._rows: dict[Context, Likely] = {}
        self._trust: defaultdict[tuple[int, int], FadingRate] = defaultdict(lambda: FadingRate(1.0, 2.0, fade=FADE))
        self.commit(prompt)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens that all beams agree on."""
        for token in tokens:
            for start in range(len(self._end)):
                seen = self._copies[self._end[start:]]
                seen[token] = seen.pop(token, 0) + 1
            self._end = (*self._end, token)[-LONGEST:]

    def see(self, node: Node, likely: Likely) -> None:
        """Learn what the target says after `node`."""
        tail = self._tail(node)[-ORDERS:]
        for start in range(len(tail)):
            self._rows[tail[start:]] = likely
        if node.notes is not None:
            copy, trust = node.notes
            trust.add(sum(math.exp(logprob) for token, logprob in likely if token == copy))

    def guess(self, node: Node) -> tuple[Likely, int]:
        """Return likely successors of `node` and the length of their context, at most LONGEST; 0: unknown."""
        tail = self._tail(node)
        contexts = [tail[start:] for start in range(len(tail))]
        known = next((context for context in contexts[-ORDERS:] if context in self._rows), ())
        seen = next((context for context in contexts if context in self._copies), ())
        row = self._rows.get(known)
        if len(seen) < len(known) + AHEAD:
            return row or (), len(known)
        counts = self._copies[seen]
        *_, latest = counts
        often = max(counts, key=counts.__getitem__)
        copy = often if counts[often] >= CLEARLY * counts[latest] else latest
        trust = self._trust[len(seen), len(known)]
        node.notes = copy, trust
        all_of_them = sum(counts.values())
        others = row or [(token, math.log(n / all_of_them)) for token, n in counts.items()]
        return _with_copy(copy, min(trust.value, SUREST), others), len(seen)

    def _tail(self, node: Node) -> Context:
        """The last LONGEST tokens up to a node, oldest first."""
        tail: list[int] = []
        at = node
        while at.parent is not None and len(tail) < LONGEST:
            tail.append(at.token)
            at = at.parent
        return (*self._prompt_end, *reversed(tail))[-LONGEST:]


def _with_copy(copy: int, trust: float, others: Likely) -> Likely:
    """A copy with the probability that copies are trusted with; the other guesses share the rest."""
    instead = sum(math.exp(logprob) for other, logprob in others if other == copy)
    likely = [(copy, math.log(trust))]
    if instead < 1.0:
        shift = math.log((1.0 - trust) / (1.0 - instead))
        likely += [(other, logprob + shift) for other, logprob in others if other != copy]
    return sorted(likely, key=lambda guess: -guess[1])


# --------------------------------------------------------------------------- which guesses a pass evaluates

DECAY = 0.95  # factor by which earlier gains and costs fade at each pass
SIZES = range(1, 65)
MANY = 4  # steps with more guesses than this are counted as having so many

PARTLY = 0.5
"""Share of a step's rows that the search chooses though it does not choose all; measured 0.3 to 0.5 for 2 to 8 beams.
A single beam chooses one or none."""

COVERED = (0.15, 0.4, 0.7, 0.9, 0.6, 0.65, 0.65, 0.7, 0.9)
"""Chance that a step with one guess holds all that the search chooses, by the guess's context, on the demo model
(rounded): 1 to 3 are mostly rows, more are copies. It counts as WEIGHT steps."""

EACH, WEIGHT = 0.84, 4.0
"""EACH: by how much each further guess lowers that chance, as the choice is right only if they all were good enough."""


Layer = tuple[list[Node], list[Node], FadingRate]
"""One step of a draft: the nodes that it chooses, those of them whose rows are not known, and how often such steps held
all that the search chose."""


class BeamPlan:
    """Drafts for one search.

    Args:
        curve: cost of a pass by its size; None: all cost the same.
        width: how many texts each step takes.
        farthest: most steps ahead.
    """

    def __init__(
        self,
        drafter: BeamDrafter,
        curve: CostCurve | None,
        width: int,
        farthest: int,
        is_eog: Callable[[int], bool],
    ) -> None:
        self._drafter, self._curve, self._is_eog = drafter, curve, is_eog
        self._width, self._farthest = width, farthest
        self._partly = PARTLY * (1.0 - 1.0 / width)
        self._covered: dict[tuple[int, int], FadingRate] = {}  # by shortest context and number of guesses
        self._layers: list[Layer] = []
        self._scale = 1.0  # of the curve's seconds
        self._per_token = 0.0  # seconds of other work than the pass, per token in it
        self._steps = self._seconds = 0.0  # of the last passes, fading

    def plan(
        self, live: Sequence[tuple[float, Node]], steps: int, room: int, leaves: int
    ) -> tuple[list[Node], list[Node]]:
        """(nodes to be evaluated ahead, nodes known already that may be needed), both without the live ones.

        Args:
            live: score and last token of each text of the next step; some of their rows are missing.
            steps, room: most steps ahead that can be of use, and most nodes to be evaluated ahead.
            leaves: most leaves of what is kept and evaluated, the live texts among them.
        """
        self._layers = self._draft(live, min(steps, self._farthest), room, leaves)
        sent = self._layers[: self._best(sum(node.likely is None for _, node in live))]
        new = [node for _, unknown, _ in sent for node in unknown]
        known = [node for nodes, _, _ in self._layers for node in nodes if node.likely is not None]
        # Forget nodes that were imagined but are not sent, and those sent earlier that are no longer hoped for.
        kept = {*new, *known}
        for node in [node for _, node in live] + new + known:
            node.children = {token: child for token, child in node.children.items() if child in kept}
        return new, known

    def _draft(self, live: Sequence[tuple[float, Node]], steps: int, room: int, leaves: int) -> list[Layer]:
        layers: list[Layer] = []
        front, chance, tips = live, 1.0, len(live)
        size = room + sum(node.likely is None for _, node in live)
        price = self._price()
        for _ in range(steps):
            results: list[tuple[float, Node, int]] = []
            contexts: list[int] = []
            for score, node in front:
                likely = node.likely
                if likely is None:
                    likely, context = self._drafter.guess(node)
                    contexts.append(context)
                results += [(score + logprob, node, token) for token, logprob in likely]
            results.sort(key=lambda result: -result[0])
            chosen = [result for result in results[: self._width] if not self._is_eog(result[2])]
            tips += len(chosen) - len({node for _, node, _ in chosen})
            if not chosen or tips > leaves:
                break
            front = [(score, node.child(token)) for score, node, token in chosen]
            nodes = [node for _, node in front]
            unknown = [node for node in nodes if node.likely is None]
            covered = self._coverage(contexts)
            room -= len(unknown)
            chance *= covered.value
            if room < 0:
                break
            layers.append((nodes, unknown, covered))
            if price is not None and not price.worth_extending(chance, size - room - 1):
                break
        return layers

    def _coverage(self, contexts: Sequence[int]) -> FadingRate:
        """How often a step held all that the search chose, by the contexts' lengths that its guesses rested on."""
        if not contexts:  # a step without guesses is sure
            return FadingRate(1.0, 1.0, fade=1.0)
        key = min(contexts), min(len(contexts), MANY)
        if key not in self._covered:
            first = COVERED[key[0]] * EACH ** (key[1] - 1)
            self._covered[key] = FadingRate(WEIGHT * first, WEIGHT, fade=FADE)
        return self._covered[key]

    def _best(self, size: int) -> int:
        """How many of the layers are worth their time, if a pass without them evaluates `size` tokens."""
        if self._curve is None:
            return len(self._layers)
        rate = self._rate(self._curve)
        before = spent = self._cost(self._curve, size)
        best, best_value = 0, 1.0 - rate * spent
        expected = chance = 1.0
        for k, (_, unknown, covered) in enumerate(self._layers, 1):
            size += len(unknown)
            after = self._cost(self._curve, size)
            spent += (after - before) * (1.0 - chance * (1.0 - covered.value) * self._partly)
            before = after
            chance *= covered.value
            expected += chance
            value = expected - rate * spent
            if value > best_value:
                best, best_value = k, value
        return best

    def _rate(self, curve: CostCurve) -> float:
        """Recent steps per second, but no less than plain beam search makes."""
        plain = 1.0 / self._cost(curve, self._width)
        return max(plain, self._steps / self._seconds) if self._seconds else plain

    def _cost(self, curve: CostCurve, size: int) -> float:
        """Seconds of a pass and of the other work that goes with it."""
        switch = curve.switch if size != curve.last else 0.0
        return self._scale * (curve.seconds(size) + switch) + self._per_token * size

    def _price(self) -> MarginalCost | None:
        """Seconds that one more token costs a pass: a step ahead must be reached often enough to be worth it."""
        curve = self._curve
        if curve is None:
            return None
        slopes = [slope * curve.level * self._scale + self._per_token for slope in curve.slopes(SIZES)]
        return MarginalCost(self._rate(curve), slopes)

    def learn(self, size: int, seconds: float, besides: float, taken: Sequence[Sequence[Node]]) -> None:
        """Learn how the last planned pass went: `size` tokens in `seconds`, and `besides` for all other work; and the
        live texts of each step `taken` since."""
        for (drafted, _, covered), nodes in zip(self._layers, taken, strict=False):
            chosen = {(node.parent, node.token) for node in drafted}
            hit = all((node.parent, node.token) in chosen for node in nodes)
            covered.add(hit)
            if not hit:
                break
        self._steps = DECAY * self._steps + len(taken)
        self._seconds = DECAY * self._seconds + seconds + besides
        self._per_token += 0.1 * (besides / size - self._per_token)
        if self._curve is not None:
            # The curve itself is not refreshed: without passes of one token nothing anchors it.
            self._scale += 0.1 * (min(seconds / self._curve.seconds(size), 3.0 * self._scale) - self._scale)
            self._curve.last = size
