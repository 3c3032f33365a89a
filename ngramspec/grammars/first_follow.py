"""`FirstFollow`: the parts of a grammar that may be empty, and the characters that may begin a part or follow a lexeme.

These are the NULLABLE, FIRST and FOLLOW sets of compiler construction, with characters in place of tokens. In

    root ::= word ("," word)*        word ::= [a-z]+

no part is empty except the repetition, `word` begins with a to z, and a comma or the end may follow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ngramspec.grammars.conflicts import Lexeme
from ngramspec.grammars.gbnf import Chars, Choice, Node, Reference, Repetition, Sequence, Text, Token, walk
from ngramspec.grammars.rules import Alphabet

Item = Lexeme | Reference | Token | Sequence | Choice | Repetition  # the last three contain items


class FirstFollow:
    """The sets of a grammar with these rules and characters."""

    def __init__(self, rules: Mapping[str, Node], alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._nullable = dict.fromkeys(rules, False)
        self._firsts = dict.fromkeys(rules, 0)
        users: dict[str, set[str]] = defaultdict(set)
        for name, rule in rules.items():
            for node in walk(rule):
                if isinstance(node, Reference):
                    users[node.name].add(name)
        waiting = list(rules)
        while waiting:
            name = waiting.pop()
            sets = self.is_nullable(rules[name]), self.first(rules[name])
            if sets != (self._nullable[name], self._firsts[name]):
                self._nullable[name], self._firsts[name] = sets
                waiting += users[name]

    def make_lexeme(self, node: Node) -> Lexeme:
        """Return the lexeme of a part without recursion."""
        return Lexeme(node, self.is_nullable(node), self.first(node))

    def is_nullable(self, node: Node | Item) -> bool:
        """Return True if a part may be the empty text."""
        match node:
            case Lexeme():
                return node.is_nullable
            case Reference(name):
                return self._nullable[name]
            case Sequence(parts):
                return all(map(self.is_nullable, parts))
            case Choice(options):
                return any(map(self.is_nullable, options))
            case Repetition(part, minimum):
                return minimum == 0 or self.is_nullable(part)
        return False

    def first(self, node: Node | Item) -> int:
        """Return the characters that a part may begin with."""
        mask = 0
        match node:
            case Lexeme():
                mask = node.first
            case Chars(ranges):
                mask = self._alphabet.mask(ranges)
            case Text(text):
                mask = self._alphabet.letter(text[0])
            case Reference(name):
                mask = self._firsts[name]
            case Sequence(parts):
                for part in parts:
                    mask |= self.first(part)
                    if not self.is_nullable(part):
                        break
            case Choice(options):
                for option in options:
                    mask |= self.first(option)
            case Repetition(part):
                mask = self.first(part)
        return mask

    def find_follow(self, items: Mapping[str, Item]) -> None:
        """Set the characters that may follow each lexeme, from the items of the rules by name."""
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
                        follow = self.first(part) | (follow if self.is_nullable(part) else 0)
                case Choice(options):
                    for option in options:
                        spread(option, follow)
                case Repetition(part, _, maximum):
                    can_repeat = maximum is None or maximum > 1
                    spread(part, follow | (self.first(part) if can_repeat else 0))

        while changed_rules:
            name = changed_rules.pop()
            spread(items[name], follows[name])
