"""`FirstFollow`: the parts of a grammar that may be empty, and the characters that may begin a part or follow a lexeme.

These are the NULLABLE, FIRST and FOLLOW sets of compiler construction, with characters in place of tokens. In

    root ::= word ("," word)*        word ::= [a-z]+

no part is empty except the repetition, `word` begins with a to z, and a comma or the end may follow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ngramspec.grammars.conflicts import Lexeme
from ngramspec.grammars.gbnf import Chars, Choice, Node, Reference, Repetition, Sequence, Text, Token, children, walk
from ngramspec.grammars.rules import Alphabet

Item = Lexeme | Reference | Token | Sequence | Choice | Repetition  # the last three contain items


class FirstFollow:
    """The sets of a grammar with these rules and characters."""

    def __init__(self, rules: Mapping[str, Node], alphabet: Alphabet) -> None:
        self._rules, self._alphabet = rules, alphabet
        self._nullable: dict[str, bool] = {}
        self._firsts: dict[int, int] = {}
        self._find_nullable()

    def _find_nullable(self) -> None:
        users: dict[str, set[str]] = defaultdict(set)
        for name, rule in self._rules.items():
            for node in walk(rule):
                if isinstance(node, Reference):
                    users[node.name].add(name)
        self._nullable = dict.fromkeys(self._rules, False)
        waiting = list(self._rules)
        while waiting:
            name = waiting.pop()
            if not self._nullable[name] and self.is_nullable(self._rules[name]):
                self._nullable[name] = True
                waiting += users[name]

    def is_nullable(self, node: Node | Item) -> bool:
        """Return True if a part may be the empty text."""
        match node:
            case Lexeme():
                return node.nullable
            case Reference(name):
                return self._nullable[name]
            case Sequence(parts):
                return all(map(self.is_nullable, parts))
            case Choice(options):
                return any(map(self.is_nullable, options))
            case Repetition(part, minimum):
                return minimum == 0 or self.is_nullable(part)
        return False

    def find_follow(self, items: Mapping[str, Item]) -> None:
        """Set the characters that may follow each lexeme, from the items of the rules by name."""
        firsts = self._find_firsts(items)
        follows: dict[str, int] = dict.fromkeys(items, 0)
        changed_rules = {*items}

        def spread(item: Item, follow: int) -> None:
            match item:
                case Lexeme():
                    item.follow |= follow
                case Reference(name) if follow & ~follows[name]:
                    follows[name] |= follow
                    changed_rules.add(name)
                case Sequence(parts):
                    for part in reversed(parts):
                        spread(part, follow)
                        follow = self._first_of_item(part, firsts) | (follow if self.is_nullable(part) else 0)
                case Choice(options):
                    for option in options:
                        spread(option, follow)
                case Repetition(part, _, maximum):
                    can_repeat = maximum is None or maximum > 1
                    spread(part, follow | (self._first_of_item(part, firsts) if can_repeat else 0))

        while changed_rules:
            name = changed_rules.pop()
            spread(items[name], follows[name])

    def _find_firsts(self, items: Mapping[str, Item]) -> dict[str, int]:
        """Return the characters that each rule may begin with."""
        users: dict[str, set[str]] = defaultdict(set)
        for name, item in items.items():
            for leaf in leaves(item):
                if isinstance(leaf, Reference):
                    users[leaf.name].add(name)
        firsts: dict[str, int] = dict.fromkeys(items, 0)
        waiting = list(items)
        while waiting:
            name = waiting.pop()
            if (mask := self._first_of_item(items[name], firsts)) != firsts[name]:
                firsts[name] = mask
                waiting += users[name]
        return firsts

    def _first_of_item(self, item: Item, firsts: Mapping[str, int]) -> int:
        mask = 0
        match item:
            case Lexeme():
                mask = self.first(item.node)
            case Reference(name):
                mask = firsts[name]
            case Sequence(parts):
                for part in parts:
                    mask |= self._first_of_item(part, firsts)
                    if not self.is_nullable(part):
                        break
            case Choice(options):
                for option in options:
                    mask |= self._first_of_item(option, firsts)
            case Repetition(part):
                mask = self._first_of_item(part, firsts)
        return mask

    def first(self, node: Node) -> int:
        """Return the characters that a part without recursion may begin with."""
        if (cached_mask := self._firsts.get(id(node))) is not None:
            return cached_mask
        mask = 0
        match node:
            case Chars(ranges):
                mask = self._alphabet.mask(ranges)
            case Text(text):
                mask = self._alphabet.letter(text[0])
            case Reference(name):
                mask = self.first(self._rules[name])
            case Sequence(parts):
                for part in parts:
                    mask |= self.first(part)
                    if not self.is_nullable(part):
                        break
            case Choice(options):
                for option in options:
                    mask |= self.first(option)
            case Repetition(part, _, maximum) if maximum != 0:
                mask = self.first(part)
        self._firsts[id(node)] = mask
        return mask


def leaves(item: Item) -> Iterator[Item]:
    """Yield the items that contain no others."""
    waiting = [item]
    while waiting:
        item = waiting.pop()
        inner: list[Any] = children(item) if isinstance(item, Sequence | Choice | Repetition) else []
        if not inner:
            yield item
        waiting += inner
