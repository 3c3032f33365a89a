"""GBNF, llama.cpp's language for grammars, and its conversion to `Lark`.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from operator import or_
from typing import NamedTuple

from llguidance import LLTokenizer, TokenizerWrapper

from ngramspec.data import GrammarError
from ngramspec.grammars.lark import MAX_SIZE, Lark, compile_lark, lark, literal
from ngramspec.worker import Worker

# llguidance limits what it compiles, but some limits allow minutes, and some grammars end the process. So requests
# call `compile_grammar` in this child first, and then repeat what it finished in time.
worker = Worker("the grammar", "prepare", GrammarError, cache=8 * 2**20)

LAST = 0x10FFFF  # the last code point
MAX_BRACKETS = 60  # within each other
MAX_DEPTH = 200  # of a rule, counting brackets, repetitions and the rules without recursion in it
MAX_REPETITIONS = 1_000_000  # maximum bound of a repetition

Ranges = tuple[tuple[int, int], ...]  # code points from and to, both included, ascending


@dataclass(slots=True, eq=False)
class Token:  # one token, or any other than this
    token: int
    is_negated: bool


@dataclass(slots=True, eq=False)
class Sequence:  # parts one after the other
    parts: list[Node]


@dataclass(slots=True, eq=False)
class Choice:  # one of several
    options: list[Node]


@dataclass(slots=True, eq=False)
class Repetition:  # a part several times; a `maximum` of `None` means no limit, and it is not 0
    part: Node
    minimum: int
    maximum: int | None


Node = Ranges | str | Token | Sequence | Choice | Repetition  # ranges: one character of a class; a string: a rule

FindToken = Callable[[str], int | None]  # returns the token with a name such as "<think>"


def gbnf_to_lark(text: str, find_token: FindToken = lambda name: None) -> Lark:
    """Return the `Lark` grammar of the texts that a GBNF grammar describes; a GrammarError names a wrong line."""
    if len(text) > MAX_SIZE:
        raise GrammarError(f"the grammar has {len(text):,} characters, but may have at most {MAX_SIZE:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"the grammar does not parse: character {error.start} of it is not valid text") from error
    return _Writer(_Parser(text, find_token).read_rules()).write()


def walk(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += {*children(node)}  # equal letters once


def children(node: Node) -> list[Node]:
    match node:
        case Sequence(inner) | Choice(inner):
            return inner
        case Repetition(part):
            return [part]
    return []


_SPACE = r"(?:[ \t]|#[^\r\n]*)*"
_SPACE_AND_LINES = r"(?:[ \t\r\n]|#[^\r\n]*)*"
_NAME = r"[A-Za-z0-9_-]+"


class _Parser:
    def __init__(self, text: str, find_token: FindToken) -> None:
        self._text, self._find_token = text, find_token
        self._at = self._depth = 0
        self._places: dict[str, int] = {}  # of the first references to rules

    def read_rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._take(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._take(_NAME, "expected the name of a rule")
            self._take(_SPACE)
            self._take("::=", "expected ::=")
            self._take(_SPACE_AND_LINES)
            rules[name[0]] = self._choice()
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("expected a line end")
            self._take(_SPACE_AND_LINES)
        if "root" not in rules:
            raise GrammarError("the grammar has no rule named root")
        for reference, at in self._places.items():
            if reference not in rules:
                what = f"there is no rule {reference!r}, in line {_line(self._text, at)}"
                raise GrammarError(f"the grammar does not parse: {what}")
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._next_is("|"):
            self._take(_SPACE_AND_LINES)
            options.append(self._sequence())
        return Choice(options) if len(options) > 1 else options[0]

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)\r\n":
            parts.append(self._part())
            self._skip_inside()
            self._repeat(parts)
        return Sequence(parts) if len(parts) != 1 else parts[0]

    def _part(self) -> Node:
        start, character = self._at, self._text[self._at]
        if self._next_is('"'):
            letters: list[Node] = []
            while not self._next_is('"'):
                code = self._character("the text that begins", start)
                letters.append(((code, code),))
            return Sequence(letters) if len(letters) != 1 else letters[0]
        if self._next_is("["):
            return self._class(start)
        if self._next_is("."):
            return ((0, LAST),)
        if self._next_is("("):
            return self._group(start)
        if character in "<!":
            match = self._take(r"(!?)<(?:\[(\d{1,9})\]|([^>\r\n]*))>", "expected a token: <[ID]> or <NAME>")
            token = int(match[2]) if match[2] is not None else self._find_token(f"<{match[3]}>")
            if token is None:
                raise self._error("the vocabulary has no such token", start)
            return Token(token, is_negated=bool(match[1]))
        what = "expected something to repeat before it" if character in "*+?{" else "unexpected character"
        name = self._take(_NAME, what)[0]
        self._places.setdefault(name, start)
        return name

    def _class(self, start: int) -> Node:
        is_negated = self._next_is("^")
        ranges: list[tuple[int, int]] = []
        while not self._next_is("]"):
            low = high = self._character("the class that begins", start)
            if self._text.startswith("-", self._at) and not self._text.startswith("]", self._at + 1):
                self._at += 1
                high = self._character("the class that begins", start)
            ranges.append((low, high))
        merged_ranges = _merge(ranges)
        merged_ranges = _complement(merged_ranges) if is_negated else merged_ranges
        if not merged_ranges:
            raise self._error("the class contains no character", start)
        return merged_ranges

    def _character(self, what: str, start: int) -> int:
        """Read a character or an escape; `what` and `start` are the element and its place, for error messages."""
        at = self._at
        if at >= len(self._text):
            raise self._error(f"{what} here has no end", start)
        if self._text[at] != "\\":
            self._at += 1
            return ord(self._text[at])
        match = self._take(
            r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([trn\\\"\[\]^-]))", "unknown escape"
        )
        if match[4] is not None:
            return ord({"t": "\t", "r": "\r", "n": "\n"}.get(match[4], match[4]))
        code = int(match[1] or match[2] or match[3], 16)
        if code > LAST or 0xD800 <= code < 0xE000:
            raise self._error("the escape is not a character", at)
        return code

    def _group(self, start: int) -> Node:
        self._depth += 1
        if self._depth > MAX_BRACKETS:
            line = _line(self._text, start)
            raise GrammarError(f"the grammar is nested more than {MAX_BRACKETS} brackets deep in line {line}")
        self._take(_SPACE_AND_LINES)
        node = self._choice()
        if not self._next_is(")"):
            raise self._error("expected ')'")
        self._depth -= 1
        return node

    def _repeat(self, parts: list[Node]) -> None:
        """Apply the suffixes that follow to the last part."""
        while self._at < len(self._text) and (suffix := self._text[self._at]) in "*+?{":
            start = self._at
            if suffix == "{":
                bounds = self._take(r"\{\s*(\d{1,18})\s*(?:(,)\s*(\d{1,18})?\s*)?\}", "expected {N}, {N,} or {N,M}")
                minimum = int(bounds[1])
                maximum = int(bounds[3]) if bounds[3] else None if bounds[2] else minimum
            else:
                self._at += 1
                minimum, maximum = {"*": (0, None), "+": (1, None), "?": (0, 1)}[suffix]
            if max(minimum, maximum or 0) > MAX_REPETITIONS or (maximum is not None and maximum < minimum):
                raise self._error(f"the bounds must ascend and be at most {MAX_REPETITIONS:,}", start)
            parts[-1] = Repetition(parts[-1], minimum, maximum) if maximum != 0 else Sequence([])
            self._skip_inside()

    def _next_is(self, mark: str) -> bool:
        """Return True if a mark comes next, and read it."""
        is_next = self._text.startswith(mark, self._at)
        self._at += len(mark) * is_next
        return is_next

    def _take(self, pattern: str, problem: str = "") -> re.Match[str]:
        """Read and return what a pattern matches, which comes next unless there is a problem."""
        match = re.compile(pattern).match(self._text, self._at)
        if match is None:
            raise self._error(problem)
        self._at = match.end()
        return match

    def _skip_inside(self) -> None:
        """Skip white space; within brackets line ends are white space."""
        self._take(_SPACE_AND_LINES if self._depth else _SPACE)

    def _error(self, what: str, at: int | None = None) -> GrammarError:
        at = self._at if at is None else at
        near = self._text[at:].split("\n", 1)[0].strip()[:40] if at < len(self._text) else ""
        place = f", at {near!r}" if near else ""
        return GrammarError(f"the grammar does not parse: {what} in line {_line(self._text, at)}{place}")


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in ascending order that do not touch each other; those that are empty are dropped."""
    merged_ranges: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if low > high:
            continue
        if merged_ranges and low <= merged_ranges[-1][1] + 1:
            merged_ranges[-1] = merged_ranges[-1][0], max(merged_ranges[-1][1], high)
        else:
            merged_ranges.append((low, high))
    return tuple(merged_ranges)


def _complement(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), LAST + 1]
    return tuple((low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True) if low + 1 <= high - 1)


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
        is_nullable = self.is_nullable or minimum == 0
        if maximum == 1:
            return self._replace(is_nullable=is_nullable)
        rest = self.rest | self.first
        may_go_on = is_nullable or minimum != maximum
        more = rest if self.more & self.first else self.more | (self.first if may_go_on else 0)
        return Sets(is_nullable, self.first, rest, more, self.size)

    @staticmethod
    def choose(options: list[Sets]) -> Sets:
        first = shared = rest = more = 0
        for option in options:
            shared |= first & option.first
            first, rest, more = first | option.first, rest | option.rest, more | option.more
        for option in options:
            more |= option.rest if option.first & shared else 0  # another option may be the start of this one
        is_nullable = any(option.is_nullable for option in options)
        return Sets(is_nullable, first, rest, more, sum(option.size for option in options))


class _Writer:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._split: set[Node] = set()  # nodes that are not one lexeme, and rules that are not part of one
        self._can_join = cache(self._find_join)  # cleared if `_split` changes
        self._runs: dict[tuple[Node, ...], Sequence] = {}
        self._expression = cache(self._find_expression)
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._mask = cache(self._find_mask)
        edges = {0, LAST + 1}
        for node in (node for rule in rules.values() for node in walk(rule)):
            if isinstance(node, tuple):
                edges |= {edge for low, high in node for edge in (low, high + 1)}
        self._edges = sorted(edges)
        references = {name: {node for node in walk(rule) if isinstance(node, str)} for name, rule in rules.items()}
        order = _order_bottom_up(references)
        self._regular: dict[str, bool] = {}  # whether rules have neither recursion nor tokens
        depths: dict[str, int] = {}

        def depth(node: Node, level: int = 1) -> int:
            if isinstance(node, str) and self._regular.get(node):
                return 1 + depths[node]
            if level > MAX_DEPTH:  # deeper than recursive functions can follow
                return 1
            return 1 + max((depth(child, level + 1) for child in {*children(node)}), default=0)

        for name in order:
            is_plain = all(self._regular.get(inner, False) for inner in references[name])
            self._regular[name] = is_plain and not any(isinstance(part, Token) for part in walk(rules[name]))
            depths[name] = depth(rules[name])
            if depths[name] > MAX_DEPTH:
                raise GrammarError(f"the grammar's rule {name!r} is nested more than {MAX_DEPTH} deep")
        self._rule_sets = dict.fromkeys(rules, Sets(is_nullable=False))
        users: dict[str, list[str]] = defaultdict(list)
        for name, inner_names in references.items():
            for inner in inner_names:
                users[inner].append(name)
        waiting = order[::-1]
        while waiting:
            name = waiting.pop()
            sets = self._find_sets(rules[name])
            if not self._regular[name]:
                sets = Sets(sets.is_nullable, sets.first)  # the others are only needed in lexemes
            if sets != self._rule_sets[name]:
                self._rule_sets[name] = sets
                waiting += users[name]
        self._sets = cache(self._find_sets)

    def _find_sets(self, node: Node) -> Sets:  # noqa: PLR0911
        match node:
            case tuple():
                return Sets(False, self._mask(node), size=1)
            case str():
                return self._rule_sets[node]
            case Choice(options):
                return Sets.choose([self._find_sets(option) for option in options])
            case Repetition(part, minimum, maximum):
                return self._find_sets(part).repeat(minimum, maximum)
            case Sequence(parts):
                masks = [self._mask(part) for part in parts if isinstance(part, tuple)]
                if masks and len(masks) == len(parts):  # a literal, which may be long
                    return Sets(False, masks[0], reduce(or_, masks[1:], 0), size=len(masks))
                return reduce(Sets.then, map(self._find_sets, parts), Sets())
        return Sets(is_nullable=False)  # of a token

    def _find_mask(self, ranges: Ranges) -> int:
        places = [(bisect_left(self._edges, low), bisect_left(self._edges, high + 1)) for low, high in ranges]
        return sum((1 << end) - (1 << start) for start, end in places)

    def write(self) -> Lark:
        while True:
            self._can_join.cache_clear()
            names, follows = self._find_follow()
            conflicts = self._find_conflicts(follows)
            if not conflicts:
                return self._text(names)
            self._split.update(conflicts)

    def _find_conflicts(self, follows: Mapping[Node, int]) -> list[Node]:
        """Return the lexemes to split, because the longest match may miss another reading."""
        same: dict[str, list[Node]] = defaultdict(list)
        for node in follows:
            same[self._expression(node)].append(node)
        lexemes = [
            (nodes, self._sets(nodes[0]), reduce(or_, (follows[node] for node in nodes))) for nodes in same.values()
        ]
        if len(lexemes) > 2000:  # too many to compare
            return [node for nodes, sets, _ in lexemes if sets.rest for node in nodes]
        conflicts = [node for nodes, sets, follow in lexemes if follow & sets.more for node in nodes]
        followed = [lexeme for lexeme in lexemes if lexeme[2]]
        for longer in [lexeme for lexeme in lexemes if lexeme[1].rest]:
            for lexeme in followed:
                may_continue = lexeme[1].first & longer[1].first and lexeme[2] & longer[1].rest
                if may_continue and lexeme is not longer:
                    # The larger one is split, so that a string stays whole if there is a string with a colon.
                    conflicts += max(longer, lexeme, key=lambda lexeme: lexeme[1].size)[0]
        return conflicts

    def _find_follow(self) -> tuple[list[str], dict[Node, int]]:
        """Return the rules that can be reached, and the characters that may follow each lexeme, as masks."""
        follows: dict[Node, int] = defaultdict(int)
        rule_follows, changed_rules = {"root": 0}, {"root"}

        def spread(node: Node, follow: int) -> None:
            if self._can_join(node):
                follows[node] |= follow
                return
            match node:
                case str() if node not in rule_follows or follow & ~rule_follows[node]:
                    rule_follows[node] = rule_follows.get(node, 0) | follow
                    changed_rules.add(node)
                case Sequence(parts):
                    for part in reversed(self._join_runs(parts)):
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
            spread(self._rules[name], rule_follows[name])
        return [*rule_follows], follows

    def _find_join(self, node: Node) -> bool:
        """Return True if a node may be a lexeme, or part of one."""
        if isinstance(node, Token) or node in self._split:
            return False
        return self._regular[node] if isinstance(node, str) else all(map(self._can_join, {*children(node)}))

    def _join_runs(self, parts: list[Node]) -> list[Node]:
        """Join consecutive parts of lexemes into one, unless that is split."""
        joined: list[Node] = []
        for can_join, group in groupby(parts, self._can_join):
            run = list(group)
            if can_join and len(run) > 1:
                # A lexeme is identified by its node, so the node must be the same object in every round.
                whole = self._runs.setdefault(tuple(run), Sequence(run))
                run = run if whole in self._split else [whole]
            joined += run
        return joined

    def _find_expression(self, node: Node) -> str:
        """Return the regular expression of a part without recursion; rules in it are separate terminals."""
        match node:
            case tuple():
                return literal(_letter(node)) if _letter(node) else _class(node)
            case str():
                return f"PART_{self._numbers[node]}"
            case Sequence(parts):
                texts: list[str] = []
                for are_letters, group in groupby(parts, lambda part: bool(_letter(part))):
                    run = list(group)
                    texts += [literal("".join(map(_letter, run)))] if are_letters else map(self._expression, run)
                return f"({' '.join(texts)})" if len(texts) > 1 else "".join(texts) or '""'
            case Choice(options):
                return f"({' | '.join(dict.fromkeys(map(self._expression, options)))})"
            case Repetition(part, minimum, maximum):
                return f"({self._expression(part)}){_bounds(minimum, maximum)}"
        raise AssertionError(node)

    def _text(self, rule_names: list[str]) -> Lark:
        names = {name: "start" if name == "root" else f"rule_{self._numbers[name]}" for name in rule_names}
        terminals: dict[str, str] = {}  # names by expression

        def write(node: Node) -> str:  # noqa: PLR0911
            if self._can_join(node):
                is_nullable, first, *_ = self._sets(node)
                if not first:
                    return '""'
                expression = self._expression(node)
                expression = f"({expression}) & /(?s:.+)/" if is_nullable else expression
                return terminals.setdefault(expression, f"LEXEME_{len(terminals)}") + "?" * is_nullable
            match node:
                case str():
                    return names[node]
                case Token(token, negated):
                    return f"<[{'^' * negated}{token}]>"
                case Sequence(parts):
                    return " ".join(map(write, self._join_runs(parts))) if parts else '""'
                case Choice(options):
                    return f"({' | '.join(map(write, options))})"
                case Repetition(part, minimum, maximum):
                    return f"({write(part)}){_bounds(minimum, maximum)}"
            raise AssertionError(node)

        lines = [f"{names[name]}: {write(self._rules[name])}" for name in names]
        lines += [f"{name}: {expression}" for expression, name in terminals.items()]
        by_number = list(self._rules.values())
        written_parts, waiting = set[str](), [*terminals]
        while waiting:
            for part in {*re.findall(r"\bPART_([0-9]+)\b", waiting.pop())} - written_parts:
                written_parts.add(part)
                waiting.append(self._expression(by_number[int(part)]))
                lines.append(f"PART_{part}: {waiting[-1]}")
        return lark(*lines)


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


def _letter(node: Node) -> str:
    """Return the only character that a node matches; "" for other nodes."""
    match node:
        case ((low, high),) if low == high:
            return chr(low)
    return ""


def _class(ranges: Ranges) -> str:
    parts = [
        f"\\x{{{max(low, first):X}}}-\\x{{{min(high, last):X}}}"
        for low, high in ranges
        for first, last in ((0, 0xD7FF), (0xE000, LAST))  # without surrogates
        if low <= last and high >= first
    ]
    return f"/[{''.join(parts)}]/"


def _bounds(minimum: int, maximum: int | None) -> str:
    if maximum is None:
        return {0: "*", 1: "+"}.get(minimum, f"{{{minimum},}}")
    return "?" if (minimum, maximum) == (0, 1) else f"{{{minimum},{maximum}}}"


def compile_grammar(text: str, names: Mapping[str, int], n_vocab: int) -> Lark:
    """Convert a grammar in `Lark`, or in GBNF that may name tokens, to one that llguidance can compile."""
    grammar = text if isinstance(text, Lark) else gbnf_to_lark(text, names.get)
    compile_lark(grammar, _tokenizer(n_vocab))
    return grammar


@lru_cache(1)
def _tokenizer(n_vocab: int) -> LLTokenizer:
    """Return a vocabulary of all bytes and further tokens without a text, which replaces the real one."""

    class Bytes:
        bos_token_id, eos_token_id = None, 255
        tokens = tuple(bytes([i]) if i < 255 else b"\xff[%d]" % i for i in range(max(n_vocab, 256)))
        special_token_ids = ()

        def __call__(self, text: bytes) -> list[int]:
            return [*text]

    return LLTokenizer(TokenizerWrapper(Bytes()))
