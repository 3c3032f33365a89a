"""Properties of the rules of a grammar: their characters, their order and their depth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

from ngramspec.data import GrammarError
from ngramspec.grammars.gbnf import LAST, Chars, Node, Ranges, Reference, Text, children, walk

MAX_DEPTH = 200
"""Maximum depth of a rule, counting brackets, repetitions and the rules without recursion in it."""


class Alphabet:
    """The characters of a grammar in groups that it does not tell apart: a class is a number with a bit for each."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        edges, letters = {0, LAST + 1}, set[str]()
        for rule in rules.values():
            for node in walk(rule):
                if isinstance(node, Chars):
                    edges |= {edge for low, high in node.ranges for edge in (low, high + 1)}
                elif isinstance(node, Text):
                    letters |= {*node.text}
        edges |= {edge for letter in letters for edge in (ord(letter), ord(letter) + 1)}
        self._edges = sorted(edges)
        self._masks: dict[Ranges, int] = {}

    def letter(self, letter: str) -> int:
        return self.mask(((ord(letter), ord(letter)),))

    def mask(self, ranges: Ranges) -> int:
        if ranges not in self._masks:
            mask = 0
            for low, high in ranges:
                start, end = bisect_left(self._edges, low), bisect_left(self._edges, high + 1)
                mask |= (1 << end) - (1 << start)
            self._masks[ranges] = mask
        return self._masks[ranges]


def order_bottom_up(rules: Mapping[str, Node]) -> list[str]:
    """Return all rules, each after those that it refers to; those that lead to a recursive rule are last."""
    sorter = TopologicalSorter(
        {name: {node.name for node in walk(rule) if isinstance(node, Reference)} for name, rule in rules.items()}
    )
    with suppress(CycleError):
        sorter.prepare()
    order: list[str] = []
    while ready := sorter.get_ready():
        order += ready
        sorter.done(*ready)
    return [*order, *(rules.keys() - order)]


def check_depth(rules: Mapping[str, Node], regular: Mapping[str, bool]) -> None:
    """Refuse rules that are nested deeper than the functions above can follow."""
    depths: dict[str, int] = {}
    for name in regular:  # bottom up
        deepest, pending = 0, [(rules[name], 1)]
        while pending:
            node, depth = pending.pop()
            if isinstance(node, Reference) and regular[node.name]:
                depth += depths[node.name]
            deepest = max(deepest, depth)
            pending += [(child, depth + 1) for child in children(node)]
        depths[name] = deepest
        if deepest > MAX_DEPTH:
            raise GrammarError(f"the grammar's rule {name!r} is nested more than {MAX_DEPTH} deep")
