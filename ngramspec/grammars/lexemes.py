"""The lexemes of a GBNF grammar, and the grammar as `Lark`.

llguidance reads a text by lexemes, each a regular expression, and uses the longest match. GBNF has no lexemes: a text
is valid if there is any way to read it. So a part of the grammar without recursion becomes one lexeme only if the
longest match cannot miss another reading: no character that may follow a lexeme may continue it to a longer one, or
come later in another lexeme with the same first character. Otherwise it is split into its parts, down to single
characters, which are never the beginning of each other. A grammar without recursion is one lexeme.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from operator import or_
from typing import NamedTuple

from ngramspec.data import GrammarError
from ngramspec.grammars.gbnf import (
    LAST,
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

MAX_DEPTH = 200
"""Maximum depth of a rule, counting brackets, repetitions and the rules without recursion in it."""

_MAX_LEXEMES = 2000  # maximum number of lexemes that are compared; of more, all are split


class Sets(NamedTuple):
    """Characters in the texts of a part: masks with a bit for each group of characters that the grammar tells apart."""

    is_nullable: bool = True  # whether the text may be empty
    first: int = 0  # characters that may begin a text
    rest: int = 0  # characters that may come later in a text
    more: int = 0  # characters that may continue a whole text, not empty, to a longer one; perhaps others
    size: int = 0  # number of characters and classes in the part

    def then(self, other: Sets) -> Sets:
        """Return the sets of this part followed by another one."""
        after = other.first if self.first else 0
        rest = self.rest | other.rest | after
        if (self.more | (self.first if self.is_nullable else 0)) & other.first:
            more = rest  # it is not clear where the first part ends
        else:
            more = other.more | (self.more | after if other.is_nullable else 0)
        first = self.first | (other.first if self.is_nullable else 0)
        return Sets(self.is_nullable and other.is_nullable, first, rest, more, self.size + other.size)

    def repeat(self, minimum: int, maximum: int | None) -> Sets:
        """Return the sets of this part several times."""
        is_nullable = self.is_nullable or minimum == 0
        if maximum == 1:
            return self._replace(is_nullable=is_nullable)
        rest = self.rest | self.first
        may_go_on = is_nullable or minimum != maximum
        more = rest if self.more & self.first else self.more | (self.first if may_go_on else 0)
        return Sets(is_nullable, self.first, rest, more, self.size)

    @staticmethod
    def choose(options: list[Sets]) -> Sets:
        """Return the sets of one of several parts."""
        first = shared = rest = more = 0
        for option in options:
            shared |= first & option.first
            first, rest, more = first | option.first, rest | option.rest, more | option.more
        for option in options:
            more |= option.rest if option.first & shared else 0  # another option may be the start of this one
        is_nullable = any(option.is_nullable for option in options)
        return Sets(is_nullable, first, rest, more, sum(option.size for option in options))


@dataclass(slots=True, eq=False)
class Lexeme:
    """A part of the grammar that one regular expression matches."""

    node: Node
    sets: Sets
    follow: int = 0  # mask of the characters that may come after the lexeme


Item = Lexeme | Reference | Token | Sequence | Choice | Repetition  # the last three contain items


def gbnf_to_lark(text: str, find_token: FindToken = lambda name: None) -> Lark:
    """Return the `Lark` grammar of the texts that a GBNF grammar describes; see `parse` for arguments and errors."""
    return _Writer(parse(text, find_token)).write()


class _Writer:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._split = set[Node]()  # nodes that are not one lexeme
        self._as_rules = set[str]()  # rules without recursion that are not part of a lexeme
        self._runs: dict[tuple[Node, ...], Sequence] = {}
        self._letters: dict[Node, list[Chars]] = {}
        self._expressions: dict[Node, str] = {}
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._masks: dict[Ranges, int] = {}
        edges = {0, LAST + 1}
        for node in (node for rule in rules.values() for node in walk(rule)):
            if isinstance(node, Chars):
                edges |= {edge for low, high in node.ranges for edge in (low, high + 1)}
            elif isinstance(node, Text):
                edges |= {edge for letter in node.text for edge in (ord(letter), ord(letter) + 1)}
        self._edges = sorted(edges)
        references = {
            name: {node.name for node in walk(rule) if isinstance(node, Reference)} for name, rule in rules.items()
        }
        order = _order_bottom_up(references)
        self._regular: dict[str, bool] = {}  # whether rules have neither recursion nor tokens
        for name in order:
            parts = walk(rules[name])
            is_plain = all(self._regular.get(inner, False) for inner in references[name])
            self._regular[name] = is_plain and not any(isinstance(part, Token) for part in parts)
        self._check_depth()
        self._rule_sets = dict.fromkeys(rules, Sets(is_nullable=False))
        users: dict[str, set[str]] = defaultdict(set)
        for name, inner_names in references.items():
            for inner in inner_names:
                users[inner].add(name)
        waiting = order[::-1]
        while waiting:
            name = waiting.pop()
            sets = self._sets(rules[name])
            if not self._regular[name]:
                sets = Sets(sets.is_nullable, sets.first)  # the others are only needed in lexemes
            if sets != self._rule_sets[name]:
                self._rule_sets[name] = sets
                waiting += users[name]

    def _check_depth(self) -> None:
        """Refuse rules that are nested deeper than recursive functions can follow."""
        depths: dict[str, int] = {}
        for name in self._regular:  # bottom up
            deepest, pending = 0, [(self._rules[name], 1)]
            while pending:
                node, depth = pending.pop()
                if isinstance(node, Reference) and self._regular[node.name]:
                    depth += depths[node.name]
                deepest = max(deepest, depth)
                pending += [(child, depth + 1) for child in children(node)]
            depths[name] = deepest
            if deepest > MAX_DEPTH:
                raise GrammarError(f"the grammar's rule {name!r} is nested more than {MAX_DEPTH} deep")

    def _sets(self, node: Node | Item) -> Sets:
        sets = Sets(is_nullable=False)  # those of a token
        match node:
            case Lexeme():
                sets = node.sets
            case Chars(ranges):
                sets = Sets(False, self._mask(ranges), size=1)
            case Text(text):
                masks = [self._mask(((ord(letter), ord(letter)),)) for letter in text]
                sets = Sets(False, masks[0], reduce(or_, masks[1:]), size=len(text))
            case Reference(name):
                sets = self._rule_sets[name]
            case Choice(options):
                sets = Sets.choose([self._sets(option) for option in options])
            case Repetition(part, minimum, maximum):
                sets = self._sets(part).repeat(minimum, maximum)
            case Sequence(parts):
                sets = reduce(Sets.then, map(self._sets, parts), Sets())
        return sets

    def _mask(self, ranges: Ranges) -> int:
        if ranges not in self._masks:
            places = [(bisect_left(self._edges, low), bisect_left(self._edges, high + 1)) for low, high in ranges]
            self._masks[ranges] = sum((1 << end) - (1 << start) for start, end in places)
        return self._masks[ranges]

    # ------------------------------------------------------------------ lexemes

    def write(self) -> Lark:
        while True:
            items = self._items()
            self._find_follow(items)
            same: dict[str, list[Lexeme]] = defaultdict(list)
            for lexeme in (part for item in items.values() for part in walk(item) if isinstance(part, Lexeme)):
                same[self._expression(lexeme.node)].append(lexeme)
            for group in same.values():
                group[0].follow = reduce(or_, (lexeme.follow for lexeme in group))
            conflicts = self._find_conflicts([group[0] for group in same.values()])
            if not conflicts:
                return self._text(items)
            for lexeme in [member for conflict in conflicts for member in same[self._expression(conflict.node)]]:
                if isinstance(lexeme.node, Reference):
                    self._as_rules.add(lexeme.node.name)
                self._split.add(lexeme.node)

    def _find_conflicts(self, lexemes: list[Lexeme]) -> set[Lexeme]:
        """Return the lexemes to split, because the longest match may miss another reading."""
        if len(lexemes) > _MAX_LEXEMES:
            return {lexeme for lexeme in lexemes if lexeme.sets.rest}
        conflicts = {lexeme for lexeme in lexemes if lexeme.follow & lexeme.sets.more}
        followed = [lexeme for lexeme in lexemes if lexeme.follow]
        for longer in [lexeme for lexeme in lexemes if lexeme.sets.rest]:
            for lexeme in followed:
                may_continue = lexeme.sets.first & longer.sets.first and lexeme.follow & longer.sets.rest
                if may_continue and lexeme is not longer:
                    # The larger one is split, so that a string stays whole if there is a string with a colon.
                    conflicts.add(max(longer, lexeme, key=lambda one: one.sets.size))
        return conflicts

    def _find_follow(self, items: Mapping[str, Item]) -> None:
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
                        sets = self._sets(part)
                        follow = sets.first | (follow if sets.is_nullable else 0)
                case Choice(options):
                    for option in options:
                        spread(option, follow)
                case Repetition(part, _, maximum):
                    spread(part, follow | (self._sets(part).first if maximum != 1 else 0))

        while changed_rules:
            name = changed_rules.pop()
            spread(items[name], follows[name])

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

    def _lexeme(self, node: Node) -> Lexeme:
        return Lexeme(node, self._sets(node))

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
            return self._lexeme(node)
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
                return Sequence(list(map(self._lexeme, self._letters.setdefault(node, letters))))
        assert isinstance(node, Reference | Token)
        return node

    def _lower_run(self, parts: list[Node]) -> list[Item]:
        """Return the lexemes of consecutive parts: one; if that is split, one and the last part; otherwise one each."""
        if len(parts) < 2:
            return [self._lower(part) for part in parts]
        # A lexeme is identified by its node, so the node must be the same object in every round.
        whole = self._runs.setdefault(tuple(parts), Sequence(parts))
        if whole not in self._split:
            return [self._lexeme(whole)]
        *before, last = parts
        if len(before) > 1:
            first = self._runs.setdefault(tuple(before), Sequence(before))
            if first not in self._split:
                return [self._lexeme(first), self._lower(last)]
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
                case Lexeme(node, (is_nullable, first, *_)):
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


def _order_bottom_up(references: Mapping[str, set[str]]) -> list[str]:
    """Return all rules, each after those that it refers to; those that lead to a recursive rule are last."""
    sorter = TopologicalSorter(references)
    with suppress(CycleError):
        sorter.prepare()
    order: list[str] = []
    while ready := sorter.get_ready():
        order += ready
        sorter.done(*ready)
    return [*order, *(references.keys() - order)]


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
