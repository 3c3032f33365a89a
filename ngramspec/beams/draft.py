"""What may follow each beam: the prompt's n-grams, and what the target itself said after the same tokens before.

Beam search needs more from a drafter than one chain after one text: several continuations of several texts, each with
its probability, so that they can be ranked. There are two sources, and the one that rests on the longer context counts:

    rows    the likeliest tokens that the target gave the last time after the same 1 to 3 tokens, with their
            probabilities (as in Token Recycling, Luo et al. 2024, arXiv 2408.08696). Beams differ in a token and
            then go on alike, so that most rows are met again soon.
    copies  what followed the longest suffix of the beam that was seen in the prompt, or in what all beams agree on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ngramspec.backend import Likely, Node
from ngramspec.drafting.fading import FadingRate
from ngramspec.drafting.suffix_automaton import SuffixAutomaton

ORDERS = 3
"""Most tokens of context that a row is remembered by."""

AHEAD = 2
"""A copy's context must be this much longer than a row's to be preferred: a row says more."""

LONGEST = 8
"""Contexts are told apart by their length up to here."""

CLEARLY = 2
"""As in `ngramspec.drafting.suffix`."""

FADE = 0.98
"""Factor by which earlier counts fade at each new count."""

SUREST = 0.99


class Guess(NamedTuple):
    """What may come next.

    Attributes:
        likely: tokens with their estimated probabilities.
        context: tokens of context that it rests on, at most LONGEST; 0: nothing is known.
    """

    likely: Likely
    context: int


@dataclass(slots=True)
class _Place:
    """Where a node stands in the drafter's text, and the copy proposed after it.

    Attributes:
        state: of the automaton, for the longest suffix that was seen.
        match: its length.
        copy: the token proposed; -1: none.
        trust: how far such copies are trusted, by the probabilities that the target gave them.
    """

    state: int
    match: int
    copy: int = -1
    trust: FadingRate | None = None


class BeamDrafter:
    """Guesses continuations of the nodes of a tree. One instance serves many searches, one at a time."""

    def begin(self, prompt: Sequence[int], root: Node) -> None:
        """Start a search; `root` stands for the prompt."""
        self._prompt_end = prompt[-ORDERS:]
        self._text = SuffixAutomaton()
        self._text.extend(prompt)
        # The prompt as a whole was seen once, so this is its longest suffix that was seen before.
        root.notes = self._at(self._text.link[self._text.last])
        self._rows: dict[tuple[int, ...], Likely] = {}
        self._trust: defaultdict[tuple[int, int], FadingRate] = defaultdict(lambda: FadingRate(1.0, 2.0, fade=FADE))

    def settle(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens that all beams agree on, after those settled before."""
        self._text.extend(tokens)

    def see(self, node: Node, likely: Likely) -> None:
        """What the target says after `node`."""
        tail = self._tail(node)
        for order in range(len(tail)):
            self._rows[tail[order:]] = likely
        place: _Place | None = node.notes
        if place is not None and place.trust is not None:
            place.trust.add(sum(math.exp(logprob) for token, logprob in likely if token == place.copy))

    def guess(self, node: Node) -> Guess:
        """What may follow `node`."""
        tail = self._tail(node)
        order, row = 0, None
        for start in range(len(tail)):
            row = self._rows.get(tail[start:])
            if row is not None:
                order = len(tail) - start
                break
        place = self._place(node)
        if place.match < order + AHEAD:
            return Guess(row or (), order)
        return Guess(self._copy(place, order, row), min(place.match, LONGEST))

    def _copy(self, place: _Place, order: int, row: Likely | None) -> Likely:
        """Give the copy the probability that copies are trusted with; the row, or other copies, share the rest."""
        text, state = self._text, place.state
        edge, latest = text.best[state], text.latest[state]
        if text.count[edge] < CLEARLY * text.count[latest]:
            edge = latest
        place.copy = token = text.token[edge]
        place.trust = self._trust[min(place.match, LONGEST), order]
        trust = min(place.trust.value, SUREST)
        others = row or [(t, math.log(n / text.total[state])) for t, n in text.counts(state).items()]
        instead = sum(math.exp(logprob) for other, logprob in others if other == token)
        likely = [(token, math.log(trust))]
        if instead < 1.0:
            shift = math.log((1.0 - trust) / (1.0 - instead))
            likely += [(other, logprob + shift) for other, logprob in others if other != token]
        return sorted(likely, key=_by_probability)

    def _tail(self, node: Node) -> tuple[int, ...]:
        """The last ORDERS tokens up to a node, oldest first."""
        tail: list[int] = []
        at = node
        while at.parent is not None and len(tail) < ORDERS:
            tail.append(at.token)
            at = at.parent
        if len(tail) < ORDERS:
            tail += self._prompt_end[len(tail) - ORDERS :][::-1]
        return tuple(tail[::-1])

    def _place(self, node: Node) -> _Place:
        """Where a node stands, from where the node before it stands."""
        text = self._text
        place: _Place | None = node.notes
        if place is None:
            assert node.parent is not None
            before = self._place(node.parent)
            state, match = before.state, before.match
            edge = text.find(state, node.token)
            while edge < 0 and state > 0:
                state = text.link[state]
                match = text.length[state]
                edge = text.find(state, node.token)
            place = node.notes = self._at(text.goal[edge], match + 1) if edge >= 0 else self._at(0)
            return place
        # The text may have grown: a state is split where its shorter contexts were seen elsewhere.
        found = self._at(place.state, place.match)
        place.state, place.match = found.state, found.match
        return place

    def _at(self, state: int, match: int | None = None) -> _Place:
        """The place of the longest suffix of a state's contexts, at most `match` long, that anything followed."""
        text = self._text
        if state < 0:
            return _Place(0, 0)
        match = text.length[state] if match is None else match
        while state > 0 and (match <= text.length[text.link[state]] or text.total[state] == 0):
            state = text.link[state]
            match = min(match, text.length[state])
        return _Place(state, match)


def _by_probability(guess: tuple[int, float]) -> float:
    return -guess[1]
