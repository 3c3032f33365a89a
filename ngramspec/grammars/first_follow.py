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
        """Set the characters that may come after each lexeme."""
        users: dict[str, set[str]] = defaultdict(set)
        for name, item in items.items():
            for leaf in leaves(item):
                if isinstance(leaf, Reference):
                    users[leaf.name].add(name)
        firsts: dict[str, int] = dict.fromkeys(items, 0)
        starts: dict[int, int] = {}

        def first_of(item: Item) -> int:
            match item:
                case Lexeme():
                    if id(item) not in starts:
                        starts[id(item)] = self.first(item.node)
                    return starts[id(item)]
                case Reference(name):
                    return firsts[name]
                case Sequence(parts):
                    mask = 0
                    for part in parts:
                        mask |= first_of(part)
                        if not self.is_nullable(part):
                            break
                    return mask
                case Choice(options):
                    mask = 0
                    for option in options:
                        mask |= first_of(option)
                    return mask
                case Repetition(part):
                    return first_of(part)
            return 0

        waiting = list(items)
        while waiting:
            name = waiting.pop()
            if (mask := first_of(items[name])) != firsts[name]:
                firsts[name] = mask
                waiting += users[name]
        follows: dict[str, int] = dict.fromkeys(items, 0)
        changed_rules = set[str]()

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
                        follow = first_of(part) | (follow if self.is_nullable(part) else 0)
                case Choice(options):
                    for option in options:
                        spread(option, follow)
                case Repetition(part, _, maximum):
                    spread(part, follow | (first_of(part) if maximum is None or maximum > 1 else 0))

        changed_rules |= items.keys()
        while changed_rules:
            name = changed_rules.pop()
            spread(items[name], follows[name])

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
