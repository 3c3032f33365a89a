"""Properties of the rules of a grammar: its characters, which rules are recursive, and how deep they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from ngramspec.errors import GrammarError
from ngramspec.grammars.gbnf import LAST, Chars, Node, Reference, Text, children, walk

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
        self._masks: dict[tuple[tuple[int, int], ...], int] = {}

    def letter(self, letter: str) -> int:
        return self.mask(((ord(letter), ord(letter)),))

    def mask(self, ranges: tuple[tuple[int, int], ...]) -> int:
        if ranges not in self._masks:
            mask = 0
            for low, high in ranges:
                start, end = bisect_left(self._edges, low), bisect_left(self._edges, high + 1)
                mask |= (1 << end) - (1 << start)
            self._masks[ranges] = mask
        return self._masks[ranges]


def find_references(rules: Mapping[str, Node]) -> dict[str, list[str]]:
    """Return the names in each rule, each once."""
    return {
        name: list(dict.fromkeys(node.name for node in walk(rule) if isinstance(node, Reference)))
        for name, rule in rules.items()
    }


def find_recursive(rules: Mapping[str, Node]) -> set[str]:
    """Return the rules that lead back to themselves (Tarjan's components, without recursion)."""
    references = find_references(rules)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack = set[str]()
    recursive_rules = set[str]()
    for start in rules:
        if start in index:
            continue
        path = [(start, iter(references[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while path:
            name, references_left = path[-1]
            reference = next(references_left, None)
            if reference is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[name])
                if low[name] == index[name]:
                    component: list[str] = []
                    while not component or component[-1] != name:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    if len(component) > 1 or name in references[name]:
                        recursive_rules |= {*component}
            elif reference not in index:
                index[reference] = low[reference] = len(index)
                stack.append(reference)
                on_stack.add(reference)
                path.append((reference, iter(references[reference])))
            elif reference in on_stack:
                low[name] = min(low[name], index[reference])
    return recursive_rules


def order_bottom_up(rules: Mapping[str, Node], recursive: set[str]) -> list[str]:
    """Return all rules, each without recursion after those that it refers to."""
    references = find_references(rules)
    order: list[str] = []
    visited = set[str]()
    for start in rules:
        path = [(start, iter(references[start]))] if start not in visited else []
        visited.add(start)
        while path:
            name, references_left = path[-1]
            reference = next((name_below for name_below in references_left if name_below not in visited), None)
            if reference is None:
                order.append(name)
                path.pop()
            else:
                visited.add(reference)
                path.append((reference, iter(references[reference])))
    return order


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
