"""The lexemes of a GBNF grammar, and the grammar as `Lark`.

llguidance reads a text by lexemes, each a regular expression, and uses the longest match. GBNF has no lexemes: a text
is valid if there is any way to read it. So a part of the grammar without recursion becomes one lexeme only if the
longest match cannot miss another reading. If a text of a lexeme R is also the beginning of a longer text of a lexeme S,
no character that may follow R may continue S there. Otherwise S is split into its parts, down to single characters,
which are never the beginning of each other. A grammar without recursion is one lexeme, which needs no check.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_

from ngramspec.grammars.conflicts import Conflicts, Lexeme
from ngramspec.grammars.first_follow import FirstFollow, Item
from ngramspec.grammars.gbnf import (
    Chars,
    Choice,
    FindToken,
    Node,
    Ranges,
    Reference,
    Repetition,
    Sequence,
    Text,
    Token,
    children,
    parse,
    walk,
)
from ngramspec.grammars.lark import Lark, lark, literal
from ngramspec.grammars.rules import Alphabet, check_depth, order_bottom_up


def gbnf_to_lark(text: str, find_token: FindToken = lambda name: None) -> Lark:
    """Return the `Lark` grammar of the texts that a GBNF grammar describes; see `parse` for arguments and errors."""
    return _Writer(parse(text, find_token)).write()


class _Writer:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._alphabet = Alphabet(rules)
        self._conflicts = Conflicts(rules, self._alphabet)
        self._split = set[Node]()  # nodes that are not one lexeme
        self._as_rules = set[str]()  # rules without recursion that are not part of a lexeme
        self._runs: dict[tuple[Node, ...], Sequence] = {}
        self._letters: dict[Node, list[Chars]] = {}
        self._expressions: dict[Node, str] = {}
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._regular: dict[str, bool] = {}
        for name in order_bottom_up(rules):
            self._regular[name] = self._is_regular(rules[name])
        check_depth(rules, self._regular)
        self._sets = FirstFollow(rules, self._alphabet)

    # ------------------------------------------------------------------ lexemes

    def write(self) -> Lark:
        while True:
            items = self._items()
            lexemes = [part for item in items.values() for part in walk(item) if isinstance(part, Lexeme)]
            self._sets.find_follow(items)
            same: dict[str, list[Lexeme]] = defaultdict(list)
            for lexeme in lexemes:
                same[self._expression(lexeme.node)].append(lexeme)
            distinct = [
                Lexeme(group[0].node, follow=reduce(or_, (member.follow for member in group)))
                for group in same.values()
            ]
            conflicts = self._conflicts.find(distinct) if any(lexeme.follow for lexeme in distinct) else []
            if not conflicts:
                return self._text(items)
            for lexeme in [member for node in conflicts for member in same[self._expression(node)]]:
                if isinstance(lexeme.node, Reference):
                    self._as_rules.add(lexeme.node.name)
                self._split.add(lexeme.node)

    def _is_regular(self, node: Node) -> bool:
        return all(
            not isinstance(part, Token) and (not isinstance(part, Reference) or self._regular.get(part.name, False))
            for part in walk(node)
        )

    def _items(self) -> dict[str, Item]:
        """Return the rules that can be reached from the root, with lexemes as parts."""
        items: dict[str, Item] = {}
        waiting = ["root"]
        while waiting:
            name = waiting.pop()
            if name not in items:
                items[name] = self._lower(self._rules[name])
                waiting += [item.name for item in walk(items[name]) if isinstance(item, Reference)]
        return items

    def _can_join(self, node: Node) -> bool:
        """Return True if a node may be a lexeme, or part of one."""
        if node in self._split:
            return False
        match node:
            case Token():
                return False
            case Reference(name):
                return self._regular[name] and name not in self._as_rules
        return all(map(self._can_join, children(node)))

    def _lower(self, node: Node) -> Item:
        if self._can_join(node):
            return self._sets.make_lexeme(node)
        match node:
            case Sequence(parts):
                items: list[Item] = []
                run: list[Node] = []
                for part in parts:
                    if self._can_join(part):
                        run.append(part)
                    else:
                        items += [*self._lower_run(run), self._lower(part)]
                        run = []
                return Sequence([*items, *self._lower_run(run)])
            case Choice(options):
                return Choice([self._lower(option) for option in options])
            case Repetition(part, minimum, maximum):
                return Repetition(self._lower(part), minimum, maximum)
            case Text(text):
                letters = [Chars(((ord(letter), ord(letter)),)) for letter in text]
                return Sequence(list(map(self._sets.make_lexeme, self._letters.setdefault(node, letters))))
        assert isinstance(node, Reference | Token)
        return node

    def _lower_run(self, parts: list[Node]) -> list[Item]:
        """Return the lexemes of consecutive parts: one; if that is split, one and the last part; otherwise one each."""
        if len(parts) < 2:
            return [self._lower(part) for part in parts]
        # A lexeme is identified by its node, so the node must be the same object in every round.
        whole = self._runs.setdefault(tuple(parts), Sequence(parts))
        if whole not in self._split:
            return [self._sets.make_lexeme(whole)]
        *before, last = parts
        if len(before) > 1:
            first = self._runs.setdefault(tuple(before), Sequence(before))
            if first not in self._split:
                return [self._sets.make_lexeme(first), self._lower(last)]
        return [self._lower(part) for part in parts]

    # ------------------------------------------------------------------ the text

    def _expression(self, node: Node) -> str:
        """Return the regular expression of a part without recursion; rules in it are separate terminals."""
        if (cached_expression := self._expressions.get(node)) is not None:
            return cached_expression
        match node:
            case Chars(((low, high),)) if low == high:
                expression = literal(chr(low))
            case Chars(ranges):
                expression = _class(ranges)
            case Text(text):
                expression = literal(text)
            case Reference(name):
                expression = f"PART_{self._numbers[name]}"
            case Sequence(parts):
                expression = f"({' '.join(map(self._expression, parts))})" if parts else '""'
            case Choice(options):
                expression = f"({' | '.join(dict.fromkeys(map(self._expression, options)))})"
            case Repetition(part, minimum, maximum):
                expression = f"({self._expression(part)}){_bounds(minimum, maximum)}"
            case _:
                raise AssertionError(node)
        self._expressions[node] = expression
        return expression

    def _text(self, items: Mapping[str, Item]) -> Lark:
        names = {name: "start" if name == "root" else f"rule_{self._numbers[name]}" for name in items}
        terminals: dict[str, str] = {}  # names by expression

        def write(item: Item) -> str:  # noqa: PLR0911
            match item:
                case Lexeme(node, is_nullable, first):
                    if not first:
                        return '""'
                    expression = self._expression(node)
                    expression = f"({expression}) & /(?s:.+)/" if is_nullable else expression
                    return terminals.setdefault(expression, f"LEXEME_{len(terminals)}") + "?" * is_nullable
                case Reference(name):
                    return names[name]
                case Token(token, negated):
                    return f"<[{'^' * negated}{token}]>"
                case Sequence(parts):
                    return " ".join(map(write, parts)) if parts else '""'
                case Choice(options):
                    return f"({' | '.join(map(write, options))})"
                case Repetition(part, minimum, maximum):
                    return f"({write(part)}){_bounds(minimum, maximum)}"
            raise AssertionError(item)

        lines = [f"{names[name]}: {write(item)}" for name, item in items.items()]
        lines += [f"{name}: {expression}" for expression, name in terminals.items()]
        by_number = list(self._rules.values())
        written_parts, waiting = set[str](), [*terminals]
        while waiting:
            for part in {*_PART.findall(waiting.pop())} - written_parts:
                written_parts.add(part)
                waiting.append(self._expression(by_number[int(part)]))
                lines.append(f"PART_{part}: {waiting[-1]}")
        return lark(*lines)


_PART = re.compile(r"\bPART_([0-9]+)\b")


def _class(ranges: Ranges) -> str:
    inner = "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in _remove_surrogates(ranges))
    return f"/[{inner}]/"


def _remove_surrogates(ranges: Ranges) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        if low < 0xD800:
            yield low, min(high, 0xD7FF)
        if high > 0xDFFF:
            yield max(low, 0xE000), high


def _bounds(minimum: int, maximum: int | None) -> str:
    if maximum is None:
        return {0: "*", 1: "+"}.get(minimum, f"{{{minimum},}}")
    return "?" if (minimum, maximum) == (0, 1) else f"{{{minimum},{maximum}}}"
