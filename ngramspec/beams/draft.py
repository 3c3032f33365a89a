"""Drafts of beam search: `BeamDrafter` guesses what may follow a text, `BeamPlan` which guesses a pass evaluates.

A guess is several tokens with their probabilities, from one of two sources; the one with the longer context counts:

    rows    the likeliest tokens that the target gave the last time after the same 1 to 3 tokens, with their
            probabilities (as in Token Recycling, Luo et al. 2024, arXiv 2408.08696): beams differ in a token and then
            go on alike.
    copies  what followed the longest suffix of the beam that was seen in the prompt, or in what all beams agree on.

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
from dataclasses import dataclass

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.baselines.suffix import SuffixAutomaton
from ngramspec.drafting.chances import FadingRate
from ngramspec.drafting.draft import TokenPrice
from ngramspec.tokens import Likely, Node

ORDERS = 3  # most tokens of context that a row is remembered by
AHEAD = 2  # a copy's context must be this much longer than a row's to be preferred: a row says more
LONGEST = 8  # contexts are told apart by their length up to here
FADE = 0.98  # factor by which earlier counts fade at each new count
SUREST = 0.99


@dataclass(slots=True)
class Place:
    """Where a node stands in the drafter's text, and the copy proposed after it."""

    state: int  # of the automaton, for the longest suffix that was seen
    match: int  # its length
    copy: int = -1  # the token proposed; -1: none
    trust: FadingRate | None = None  # the probability that the target gives such copies


class BeamDrafter:
    """Guesses continuations of the nodes of a tree. One instance serves many searches, one at a time."""

    def begin(self, prompt: Sequence[int], root: Node) -> None:
        """Start a search; `root` stands for the prompt."""
        self._prompt_end = tuple(prompt[-ORDERS:])
        self._text = SuffixAutomaton()
        self._text.extend(prompt)
        root.notes = self._at(self._text.longest_suffix()[0])
        self._rows: dict[tuple[int, ...], Likely] = {}
        self._trust: defaultdict[tuple[int, int], FadingRate] = defaultdict(lambda: FadingRate(1.0, 2.0, fade=FADE))

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens that all beams agree on."""
        self._text.extend(tokens)

    def see(self, node: Node, likely: Likely) -> None:
        """Learn what the target says after `node`."""
        tail = self._tail(node)
        for order in range(len(tail)):
            self._rows[tail[order:]] = likely
        place: Place | None = node.notes
        if place is not None and place.trust is not None:
            place.trust.add(sum(math.exp(logprob) for token, logprob in likely if token == place.copy))

    def guess(self, node: Node) -> tuple[Likely, int]:
        """What may follow `node`, and how many tokens of context that rests on, at most LONGEST; 0: not known."""
        tail = self._tail(node)
        contexts = (tail[start:] for start in range(len(tail)))
        known = next((context for context in contexts if context in self._rows), ())
        order, row = len(known), self._rows.get(known)
        place = self._place(node)
        if place.match < order + AHEAD:
            return row or (), order
        return self._copy(place, order, row), min(place.match, LONGEST)

    def _copy(self, place: Place, order: int, row: Likely | None) -> Likely:
        """Give the copy the probability that copies are trusted with; the row, or other copies, share the rest."""
        text, state = self._text, place.state
        place.copy = token = text.likeliest(state)
        place.trust = self._trust[min(place.match, LONGEST), order]
        trust = min(place.trust.value, SUREST)
        others = row or [(t, math.log(n / text.total[state])) for t, n in text.weights(state).items()]
        instead = sum(math.exp(logprob) for other, logprob in others if other == token)
        likely = [(token, math.log(trust))]
        if instead < 1.0:
            shift = math.log((1.0 - trust) / (1.0 - instead))
            likely += [(other, logprob + shift) for other, logprob in others if other != token]
        return sorted(likely, key=lambda guess: -guess[1])

    def _tail(self, node: Node) -> tuple[int, ...]:
        """The last ORDERS tokens up to a node, oldest first."""
        tail: list[int] = []
        at = node
        while at.parent is not None and len(tail) < ORDERS:
            tail.insert(0, at.token)
            at = at.parent
        return (*self._prompt_end, *tail)[-ORDERS:]

    def _place(self, node: Node) -> Place:
        """Where a node stands, from where the node before it stands."""
        text = self._text
        place: Place | None = node.notes
        if place is None:
            assert node.parent is not None
            before = self._place(node.parent)
            state, match = before.state, before.match
            while node.token not in text.goals[state] and state > 0:
                state = text.link[state]
                match = text.length[state]
            goal = text.goals[state].get(node.token)
            place = node.notes = self._at(0) if goal is None else self._at(goal, match + 1)
            return place
        # The text may have grown: a state is split where its shorter contexts were seen elsewhere.
        found = self._at(place.state, place.match)
        place.state, place.match = found.state, found.match
        return place

    def _at(self, state: int, match: int | None = None) -> Place:
        """The place of the longest suffix of a state's contexts, at most `match` long, that anything followed."""
        text = self._text
        if state < 0:
            return Place(0, 0)
        match = text.length[state] if match is None else match
        while state > 0 and (match <= text.length[text.link[state]] or text.total[state] == 0):
            state = text.link[state]
            match = min(match, text.length[state])
        return Place(state, match)


# --------------------------------------------------------------------------- which guesses a pass evaluates

DECAY = 0.95  # factor by which earlier gains and costs fade at each pass
SIZES = range(1, 65)
IN_VAIN = 0.01  # share of the time that may be spent on plans that lead to no draft
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
        clock: Callable[[], float],
    ) -> None:
        self._drafter, self._curve, self._is_eog, self._clock = drafter, curve, is_eog, clock
        self._width, self._farthest = width, farthest
        self._partly = PARTLY * (1.0 - 1.0 / width)
        self._covered: dict[tuple[int, int], FadingRate] = {}  # by shortest context and number of guesses
        self._layers: list[Layer] = []
        self._scale = 1.0  # of the curve's seconds
        self._per_token = 0.0  # seconds of other work than the pass, per token in it
        self._spent = self._in_vain = 0.0
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
        began = self._clock()
        idle = self._curve is not None and self._in_vain > IN_VAIN * self._spent
        self._layers = [] if idle else self._draft(live, min(steps, self._farthest), room, leaves)
        sent = self._layers[: self._best(sum(node.likely is None for _, node in live))]
        new = [node for _, unknown, _ in sent for node in unknown]
        known = [node for nodes, _, _ in self._layers for node in nodes if node.likely is not None]
        # Forget nodes that were imagined but are not sent, and those sent earlier that are no longer hoped for.
        kept = {*new, *known}
        for node in [node for _, node in live] + new + known:
            node.children = {token: child for token, child in node.children.items() if child in kept}
        if not new and not idle:
            self._in_vain += self._clock() - began
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
            if price is not None and not price.pays(chance, size - room - 1):
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

    def _price(self) -> TokenPrice | None:
        """Seconds that one more token costs a pass: a step ahead must be reached often enough to be worth it."""
        curve = self._curve
        if curve is None:
            return None
        slopes = [slope * curve.level * self._scale + self._per_token for slope in curve.slopes(SIZES)]
        return TokenPrice(self._rate(curve), slopes)

    def learn(self, size: int, seconds: float, besides: float, taken: Sequence[Sequence[Node]]) -> None:
        """Learn how the last planned pass went: `size` tokens in `seconds`, and `besides` for all other work; and the
        live texts of each step `taken` since."""
        for (drafted, _, covered), nodes in zip(self._layers, taken, strict=False):
            chosen = {(node.parent, node.token) for node in drafted}
            hit = all((node.parent, node.token) in chosen for node in nodes)
            covered.add(hit)
            if not hit:
                break
        self._spent += seconds + besides
        self._steps = DECAY * self._steps + len(taken)
        self._seconds = DECAY * self._seconds + seconds + besides
        self._per_token += 0.1 * (besides / size - self._per_token)
        if self._curve is not None:
            # The curve itself is not refreshed: without passes of one token nothing anchors it.
            self._scale += 0.1 * (min(seconds / self._curve.seconds(size), 3.0 * self._scale) - self._scale)
            self._curve.last = size
