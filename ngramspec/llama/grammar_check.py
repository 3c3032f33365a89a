"""Find grammars that would hang llama.cpp or use up all RAM, from their text, before llama.cpp reads them.

llama.cpp follows a grammar as a set of stacks, each of which holds what is still to come. Before each character it
unfolds the rule on top of every stack; if that rule may be empty, it unfolds what comes after it too. A rule that
begins with itself therefore unfolds forever. Its own check finds that where the rules in front are empty by an
alternative of their own, as in `root ::= "a"? root "b"`, and misses `root ::= a root "b"` with `a ::= b` and
`b ::= "c"?`. Stacks may also be finite, and too many, as in `a ::= "x"{0,900}`, `b ::= a{0,900}`,
`root ::= b{0,900}`.

So the rules are built here as its parser builds them, with one difference: the n - 1 rules of `x{0,n}`, which differ
only in how often they may go on, are one that counts n. What does not parse is left to llama.cpp to complain of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ngramspec.errors import GrammarError

MOST_STACKS = 10_000
"""Most stacks that one rule may make at one place: with this many, one token takes llama.cpp seconds to minutes."""

_MOST_STEPS = 10_000_000
_DEEPEST = 5000  # rules that begin with one another: llama.cpp's search calls itself once for each
_MOST_ELEMENTS = 50_000_000  # of 8 bytes

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\#[^\r\n]*)|(?P<line>\r\n|\r|\n)|(?P<define>[A-Za-z0-9-]+[ \t]*::=)|(?P<name>[A-Za-z0-9-]+)
    |"(?P<text>(?:\\.|[^"\\])*)"|\[(?P<range>(?:\\.|[^\]\\])*)\]|(?P<any>\.)
    |\{(?:\s|\#[^\r\n]*)*(?P<least>\d+)(?:\s|\#[^\r\n]*)*
     (?P<to>,(?:\s|\#[^\r\n]*)*(?:(?P<most>\d+)(?:\s|\#[^\r\n]*)*)?)?\}
    |(?P<mark>[*+?()|])""",
    re.VERBOSE | re.DOTALL,
)
_ENDLESS = 2000  # llama.cpp's MAX_REPETITION_THRESHOLD: more is no limit


@dataclass(slots=True)
class _Rule:
    """A rule, or one that a bracket or a repetition makes; an element is another one, or the length of a text."""

    name: str
    line: int
    ways: list[list[_Rule | int]] = field(default_factory=lambda: [[]])
    times: int = 1
    nullable: bool = False


def check_grammar(text: str) -> None:
    """Refuse a grammar that llama.cpp would not survive.

    Time: linear in the text and its repetitions.

    Raises:
        GrammarError: with the rule and its line.
    """
    try:
        root = _Parser(text).parse()
    except ValueError:  # no grammar
        return
    rules = _reachable(root)
    _find_nullable(rules)
    firsts = {id(rule): list(_firsts(rule)) for rule in rules}
    component, order = _walked(rules, firsts)
    for rule in _left_recursive(rules, firsts, component):
        raise GrammarError(
            f"the grammar's rule {rule.name!r} in line {rule.line} can begin with itself (left recursion), which takes"
            " llama.cpp all memory; write the repetition behind, as in: list ::= item list?"
        )
    _count(order, firsts, component)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._rules: dict[str, _Rule] = {}
        self._elements = 0

    def parse(self) -> _Rule:
        defined: set[str] = set()
        token = self._next(True)
        while token is not None:
            if token.lastgroup != "define":
                raise ValueError
            name = token["define"].removesuffix("::=").rstrip()
            rule = self._rule(name)
            rule.line, rule.ways = self._line, [[]]
            defined.add(name)
            token = self._body(rule)
        if defined != self._rules.keys() or "root" not in defined:
            raise ValueError
        return self._rules["root"]

    def _rule(self, name: str) -> _Rule:
        return self._rules.setdefault(name, _Rule(name, self._line))

    def _next(self, lines: bool) -> re.Match[str] | None:
        """The next token that is no space, nor with `lines` the end of a line; None at the end of the text."""
        while self._at < len(self._text):
            token = _TOKEN.match(self._text, self._at)
            if token is None:
                raise ValueError
            self._at = token.end()
            if token.lastgroup == "line":
                self._line += 1
            if token.lastgroup != "space" and (token.lastgroup != "line" or not lines):
                return token
            self._line += token[0].count("\n") if token.lastgroup != "line" else 0
        return None

    def _body(self, rule: _Rule) -> re.Match[str] | None:
        """Read a rule up to the next one, whose definition is returned."""
        open_: list[tuple[_Rule, int]] = []
        current, start = rule, 0
        lines = True  # behind ::= and | a rule goes on in the next line, and so within brackets
        while True:
            token = self._next(lines or bool(open_))
            kind = token.lastgroup if token is not None else None
            if token is None or kind in ("line", "define"):
                if open_:
                    raise ValueError
                return self._next(True) if kind == "line" else token
            lines = False
            way = current.ways[-1]
            if kind == "mark" and token[0] in "()|":
                if token[0] == "(":
                    open_.append((current, len(way)))
                    current, start = _Rule(rule.name, self._line), 0
                elif token[0] == "|":
                    current.ways.append([])
                    start, lines = 0, True
                elif open_:
                    group = current
                    current, start = open_.pop()
                    current.ways[-1].append(group)
                else:
                    raise ValueError
            elif kind in ("mark", "least", "to", "most"):
                self._repeat(rule.name, way, start, *_bounds(token))
            else:
                start = len(way)
                if kind == "name":
                    way.append(self._rule(token[0]))
                elif length := len(token[kind or 0]):
                    way.append(length)
                self._line += token[0].count("\n")

    def _repeat(self, name: str, way: list[_Rule | int], start: int, least: int, most: int | None) -> None:
        what = way[start:]
        if not what or least > _ENDLESS or (most is not None and most < least):
            raise ValueError
        del way[start:]
        way += what * least
        size = sum(part if isinstance(part, int) else 1 for part in what)
        self._elements += size * (most or least + 1)
        if self._elements > _MOST_ELEMENTS:
            raise GrammarError(
                f"the grammar's repetitions in line {self._line} come to too much for llama.cpp's memory"
            )
        if most is None:
            more = _Rule(name, self._line)
            more.ways = [[*what, more], []]
            way.append(more)
        elif most > least:
            way.append(_Rule(name, self._line, [what, []], most - least))


def _bounds(token: re.Match[str]) -> tuple[int, int | None]:
    if token.lastgroup == "mark":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token[0]]
    least = int(token["least"])
    most = (int(token["most"]) if token["most"] else None) if token["to"] else least
    return least, None if most is not None and most > _ENDLESS else most


def _reachable(root: _Rule) -> list[_Rule]:
    found, todo = {id(root): root}, [root]
    while todo:
        for way in todo.pop().ways:
            for part in way:
                if isinstance(part, _Rule) and id(part) not in found:
                    found[id(part)] = part
                    todo.append(part)
    return list(found.values())


def _find_nullable(rules: list[_Rule]) -> None:
    changed = True
    while changed:
        changed = False
        # In turns, since a rule usually stands before or behind all that it needs.
        rules = rules[::-1]
        for rule in rules:
            if not rule.nullable and any(all(isinstance(p, _Rule) and p.nullable for p in way) for way in rule.ways):
                rule.nullable = changed = True


def _firsts(rule: _Rule) -> Iterator[tuple[_Rule | int, bool]]:
    """What a rule can begin with, and whether something of the rule is left behind it."""
    for way in rule.ways:
        for i, part in enumerate(way):
            yield part, i + 1 < len(way) or rule.times > 1
            if isinstance(part, int) or not part.nullable:
                break


_Firsts = dict[int, list[tuple[_Rule | int, bool]]]


def _left_recursive(rules: list[_Rule], firsts: _Firsts, component: dict[int, int]) -> Iterator[_Rule]:
    """Rules that begin with themselves and leave something behind: their stacks grow forever.

    One that leaves nothing behind comes back to the same stack, which llama.cpp notices.
    """
    for rule in rules:
        for part, rest in firsts[id(rule)]:
            if rest and isinstance(part, _Rule) and component[id(part)] == component[id(rule)]:
                yield rule


def _walked(rules: list[_Rule], firsts: _Firsts) -> tuple[dict[int, int], list[_Rule]]:
    """The strongly connected component of each rule in the graph of first rules (Tarjan 1972, without recursion).

    And the rules in an order in which what a rule begins with comes before it, circles apart.
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    component: dict[int, int] = {}
    order: list[_Rule] = []
    path: list[int] = []
    work: list[tuple[_Rule, Iterator[tuple[_Rule | int, bool]]]] = []

    def enter(rule: _Rule) -> None:
        index[id(rule)] = low[id(rule)] = len(index)
        path.append(id(rule))
        work.append((rule, iter(firsts[id(rule)])))

    for root in rules:
        if id(root) not in index:
            enter(root)
        while work:
            rule, parts = work[-1]
            for part, _ in parts:
                if isinstance(part, int):
                    continue
                if id(part) not in index:
                    enter(part)
                    break
                if id(part) not in component:
                    low[id(rule)] = min(low[id(rule)], index[id(part)])
            else:
                work.pop()
                order.append(rule)
                if work:
                    outer = id(work[-1][0])
                    low[outer] = min(low[outer], low[id(rule)])
                if low[id(rule)] == index[id(rule)]:
                    while id(rule) not in component:
                        component[path.pop()] = index[id(rule)]
    return component, order


def _count(order: list[_Rule], firsts: _Firsts, component: dict[int, int]) -> None:
    """Refuse what unfolds into too many stacks, or keeps llama.cpp's own search for left recursion busy.

    That search goes every way through the first rules, calling itself, and stops at the first circle.
    """
    stacks: dict[int, int] = {}
    steps: dict[int, int] = {}
    depth: dict[int, int] = {}
    for rule in order:
        own = deep = 0
        walked = 1
        for part, _ in firsts[id(rule)]:
            if isinstance(part, int):
                own += 1
            elif component[id(part)] != component[id(rule)]:
                own += stacks[id(part)]
                walked += steps[id(part)]
                deep = max(deep, depth[id(part)])
        # What a repetition repeats may itself be empty: the next round can begin at once.
        goes_on = all(isinstance(part, _Rule) and part.nullable for part in rule.ways[0])
        again = rule.times if rule.nullable and goes_on else 1
        stacks[id(rule)], steps[id(rule)], depth[id(rule)] = own * again + rule.nullable, walked * again, deep + again
        for count, most, what in (
            (stacks[id(rule)], MOST_STACKS, "unfolds into too many possibilities at one place"),
            (steps[id(rule)], _MOST_STEPS, "can begin in too many ways"),
            (depth[id(rule)], _DEEPEST, "begins with too long a chain of rules"),
        ):
            if count > most:
                raise GrammarError(f"the grammar's rule {rule.name!r} in line {rule.line} {what} for llama.cpp")
