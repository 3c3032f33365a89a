"""`BeamPlan`: which tokens a pass of beam search evaluates ahead of the search, and how many steps ahead.

The draft is itself a beam search (Leviathan et al. 2023, appendix A.4): from the live texts on, each step takes the
best `width` results, by the target's rows where they are known and by guesses elsewhere. The draft that is evaluated
has the length k that maximises

    1 + c_1 + c_1 c_2 + ... + c_1 ... c_k - worth * T(n + n_1 + ... + n_k)

with c_i the chance that step i of the draft holds all that the search then chooses, n the rows that the pass must
compute in any case, n_i those that step i adds, T the seconds of a pass by its size, and worth the recent steps per
second, but no less than plain beam search makes: the same trade-off as in `ngramspec.policies.cost_aware`. A step that
misses is not all lost: about PARTLY of its rows need not be computed later, and their share of T is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ngramspec.backend import Node
from ngramspec.beams.draft import FADE, BeamDrafter
from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.fading import FadingRate
from ngramspec.drafting.price import TokenPrice

DECAY = 0.95
"""Factor by which earlier gains and costs fade at each pass."""

PARTLY = 0.5
"""Share of a step's rows that the search chooses though it does not choose all; measured 0.3 to 0.5 for 2 to 8 beams.
A single beam chooses one or none."""

SIZES = range(1, 65)

IN_VAIN = 0.01
"""Share of the time that may be spent on plans that lead to no draft."""

Scored = tuple[float, Node]


class Coverage:
    """How often a drafted step held all that the search chose, by what it rested on.

    A running mean for each (shortest context among its guesses, how many guesses there were, at most MANY): the
    choice is right only if they all were good enough.
    """

    MANY = 4
    FIRST = (0.15, 0.4, 0.7, 0.9, 0.6, 0.65, 0.65, 0.7, 0.9)
    """With one guess, by its context, on the demo model (rounded): 1 to 3 are mostly rows, more are copies."""

    EACH = 0.84
    """Factor by which each further guess lowers that rate."""

    WEIGHT = 4.0
    """How many steps these figures count as; they soon fade."""

    def __init__(self) -> None:
        self._rates: dict[tuple[int, int], FadingRate] = {}

    def rate(self, context: int, guesses: int) -> float:
        """The share of such steps that held all that was chosen, 0 to 1; 1 for a step that rests on no guess."""
        return self._rate(context, guesses).value if guesses else 1.0

    def learn(self, context: int, guesses: int, hit: bool) -> None:
        """Count one step."""
        if guesses:
            self._rate(context, guesses).add(hit)

    def _rate(self, context: int, guesses: int) -> FadingRate:
        key = context, min(guesses, self.MANY)
        if key not in self._rates:
            first = self.FIRST[context] * self.EACH ** (key[1] - 1)
            self._rates[key] = FadingRate(self.WEIGHT * first, self.WEIGHT, fade=FADE)
        return self._rates[key]


class Layer(NamedTuple):
    """One step of a draft.

    Attributes:
        nodes: what it chooses.
        new: those of them whose rows are not known.
        context: the shortest context among the guesses that the choice rests on.
        guesses: how many there were; 0: the choice is the target's own.
    """

    nodes: list[Node]
    new: list[Node]
    context: int
    guesses: int

    def holds(self, nodes: Sequence[Node]) -> bool:
        """Whether all of these were chosen."""
        chosen = {(node.parent, node.token) for node in self.nodes}
        return all((node.parent, node.token) in chosen for node in nodes)


class BeamPlan:
    """Drafts for one search.

    Args:
        drafter: guesses what may follow a node.
        curve: cost of a pass by its size; None: all cost the same.
        width: how many texts each step takes.
        farthest: most steps ahead.
        is_eog: whether a token ends a text, which is then not drafted on.
        clock: seconds.
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
        self._drafter = drafter
        self._curve = curve
        self._width = width
        self._partly = PARTLY * (1.0 - 1.0 / width)
        self._farthest = farthest
        self._is_eog = is_eog
        self._clock = clock
        self._coverage = Coverage()
        self._layers: list[Layer] = []
        self._scale = 1.0  # of the curve's seconds
        self._per_token = 0.0  # seconds of other work than the pass, per token in it
        self._spent = self._in_vain = 0.0
        self._steps = self._seconds = 0.0  # of the last passes, fading

    def plan(self, live: Sequence[Scored], steps: int, room: int, leaves: int) -> tuple[list[Node], list[Node]]:
        """(nodes to be evaluated ahead, nodes known already that may be needed), both without the live ones.

        Args:
            live: the texts of the next step; some of their rows are missing.
            steps: most steps ahead that can be of use.
            room: most nodes to be evaluated ahead.
            leaves: most leaves of what is kept and evaluated, the live texts among them.
        """
        began = self._clock()
        in_debt = self._curve is not None and self._in_vain > IN_VAIN * self._spent
        self._layers = [] if in_debt else self._draft(live, min(steps, self._farthest), room, leaves)
        sent = self._layers[: self._best(sum(node.likely is None for _, node in live))]
        new = [node for layer in sent for node in layer.new]
        known = [node for layer in self._layers for node in layer.nodes if node.likely is not None]
        # Forget nodes that were imagined but are not sent, and those sent earlier that are no longer hoped for.
        kept = {*new, *known}
        for node in [node for _, node in live] + new + known:
            node.children = {token: child for token, child in node.children.items() if child in kept}
        if not new and not in_debt:
            self._in_vain += self._clock() - began
        return new, known

    def _draft(self, live: Sequence[Scored], steps: int, room: int, leaves: int) -> list[Layer]:
        layers: list[Layer] = []
        front, chance, tips = live, 1.0, len(live)
        size = room + sum(node.likely is None for _, node in live)
        price = self._price()
        for _ in range(steps):
            results: list[tuple[float, Node, int]] = []
            context, guesses = 0, 0
            for score, node in front:
                likely = node.likely
                if likely is None:
                    guess = self._drafter.guess(node)
                    likely = guess.likely
                    context = min(context, guess.context) if guesses else guess.context
                    guesses += 1
                results += [(score + logprob, node, token) for token, logprob in likely]
            results.sort(key=_by_score)
            chosen = [result for result in results[: self._width] if not self._is_eog(result[2])]
            tips += len(chosen) - len({node for _, node, _ in chosen})
            if not chosen or tips > leaves:
                break
            front = [(score, node.child(token)) for score, node, token in chosen]
            nodes = [node for _, node in front]
            new = [node for node in nodes if node.likely is None]
            room -= len(new)
            chance *= self._coverage.rate(context, guesses)
            if room < 0:
                break
            layers.append(Layer(nodes, new, context, guesses))
            if price is not None and not price.pays(chance, size - room - 1):
                break
        return layers

    def _best(self, size: int) -> int:
        """How many of the layers are worth their time, if a pass without them evaluates `size` tokens."""
        if self._curve is None:
            return len(self._layers)
        worth = self._worth(self._curve)
        before = spent = self._cost(self._curve, size)
        best, best_value = 0, 1.0 - worth * spent
        expected = chance = 1.0
        for k, layer in enumerate(self._layers, 1):
            rate = self._coverage.rate(layer.context, layer.guesses)
            size += len(layer.new)
            after = self._cost(self._curve, size)
            spent += (after - before) * (1.0 - chance * (1.0 - rate) * self._partly)
            before = after
            chance *= rate
            expected += chance
            value = expected - worth * spent
            if value > best_value:
                best, best_value = k, value
        return best

    def _worth(self, curve: CostCurve) -> float:
        """Recent steps per second, but no less than plain beam search makes."""
        plain = 1.0 / self._cost(curve, self._width)
        return max(plain, self._steps / self._seconds) if self._seconds else plain

    def _cost(self, curve: CostCurve, size: int) -> float:
        """Seconds of a pass and of the other work that goes with it."""
        switch = curve.switch if size != curve.last else 0.0
        return self._scale * (curve.seconds(size) + switch) + self._per_token * size

    def _price(self) -> TokenPrice | None:
        """What one more token costs a pass, in seconds: a step ahead must be reached often enough to be worth it."""
        curve = self._curve
        if curve is None:
            return None
        slopes = [slope * curve.level * self._scale + self._per_token for slope in curve.slopes(SIZES)]
        return TokenPrice(self._worth(curve), slopes)

    def learn(self, size: int, seconds: float, besides: float, taken: Sequence[Sequence[Node]]) -> None:
        """Learn how the last planned pass went.

        Args:
            size: tokens in it.
            seconds: the time it took.
            besides: the seconds for planning it, reading its rows and choosing by them.
            taken: the live texts of each step taken since.
        """
        for layer, nodes in zip(self._layers, taken, strict=False):
            hit = layer.holds(nodes)
            self._coverage.learn(layer.context, layer.guesses, hit)
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


def _by_score(result: tuple[float, Node, int]) -> float:
    return -result[0]
