"""Find grammars that would hang llama.cpp, use up all RAM or end the process, from their text.

llama.cpp follows a grammar as a set of stacks, each of which holds what is still to come. Before each character it
unfolds the rule on top of every stack; if that rule may be empty, it unfolds what comes after it too. A rule that
begins with itself therefore unfolds forever. Its own check finds that where the rules in front are empty by an
alternative of their own, as in `root ::= "a"? root "b"`, and misses `root ::= a root "b"` with `a ::= b` and
`b ::= "c"?`. Stacks may also be finite, and too many, as in `a ::= "x"{0,900}`, `b ::= a{0,900}`,
`root ::= b{0,900}`. A text can come to either at any place, so trying how a grammar begins would not find them.

So the rules are built here as its parser builds them, except that the n - 1 rules of `x{0,n}` are one that counts n.
What does not parse is left to llama.cpp to complain of.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ngramspec.errors import GrammarError

MOST_STACKS = 10_000
"""Most stacks that one rule may make at one place: with this many, one token takes llama.cpp seconds to minutes."""

_MOST_STEPS = 10_000_000
_DEEPEST = 5000  # rules that begin with one another: llama.cpp's search calls itself once for each
_DEEPEST_BRACKETS = 2500  # its parser calls itself for each
_MOST_ELEMENTS = 50_000_000  # of 8 bytes
_ENDLESS = 2000  # llama.cpp's MAX_REPETITION_THRESHOLD: more is no limit

_TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\r\n]*', re.DOTALL)
_TOKEN = re.compile(
    r"""(?P<define>[A-Za-z0-9-]+[ \t]*::=)|(?P<name>[A-Za-z0-9-]+)
    |"(?P<text>(?:\\.|[^"\\])*)"|\[(?P<range>(?:\\.|[^\]\\])*)\]|(?P<any>\.)
    |\{\s*(?P<least>\d+)\s*(?P<to>,\s*(?P<most>\d*)\s*)?\}|(?P<repeat>[*+?])|(?P<mark>[()|])|(?P<wrong>\S)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(slots=True, eq=False)
class _Rule:
    """A rule, or one that a bracket or a repetition makes; an element is another one, or the length of a text."""

    name: str
    line: int
    ways: list[list[_Rule | int]] = field(default_factory=lambda: [[]])
    times: int = 1
    nullable: bool = False

    def parts(self) -> Iterator[_Rule]:
        """The rules in it."""
        return (part for way in self.ways for part in way if isinstance(part, _Rule))

    def firsts(self) -> Iterator[tuple[_Rule | int, bool]]:
        """What it can begin with, and whether something of the rule is left behind it."""
        for way in self.ways:
            for i, part in enumerate(way):
                yield part, i + 1 < len(way) or self.times > 1
                if isinstance(part, int) or not part.nullable:
                    break

    def refused(self, why: str) -> GrammarError:
        return GrammarError(f"the grammar's rule {self.name!r} in line {self.line} {why}")


def check_grammar(text: str) -> None:
    """Refuse a grammar that llama.cpp would not survive by a GrammarError; linear in the text and its repetitions."""
    text = _TEXT_OR_COMMENT.sub(lambda found: "" if found[0].startswith("#") else found[0], text)
    tokens = list(_TOKEN.finditer(text))
    _check_tokens(tokens, text)
    try:
        root = _parse(tokens, text)
    except ValueError:  # no grammar
        return
    rules = _postorder([root], _Rule.parts)
    _find_nullable(rules)
    order = _postorder(rules, _first_rules)
    circle = _circles(order)
    for rule in rules:
        # One that leaves nothing behind comes back to the same stack, which llama.cpp notices.
        if any(rest and isinstance(part, _Rule) and circle[part] is circle[rule] for part, rest in rule.firsts()):
            raise rule.refused(
                "can begin with itself (left recursion), which takes llama.cpp all memory; write the repetition"
                " behind, as in: list ::= item list?"
            )
    _count(order, circle)


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _check_tokens(tokens: Iterable[re.Match[str]], text: str) -> None:
    """Refuse what ends the process while llama.cpp parses, also in what does not parse."""
    depth = 0
    for token in tokens:
        if token[0] in "<!":
            line = _line(text, token.start())
            raise GrammarError(f"the grammar names tokens in line {line}: llama.cpp may end the process on them")
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth > _DEEPEST_BRACKETS:
            line = _line(text, token.start())
            raise GrammarError(f"the grammar is nested more than {_DEEPEST_BRACKETS} brackets deep in line {line}")


def _parse(tokens: Iterable[re.Match[str]], text: str) -> _Rule:
    """The rule root. Ends of lines are not looked at: where one is missing, llama.cpp says so."""
    rules: dict[str, _Rule] = {}
    defined: set[str] = set()
    open_: list[tuple[_Rule, int]] = []
    current = _Rule("", 0)
    start = elements = read = line = 0
    for token in tokens:
        line += text.count("\n", read, token.start())
        read = token.start()
        way = current.ways[-1]
        match token.lastgroup:
            case "define" if not open_:
                name = token["define"].removesuffix("::=").rstrip()
                current = rules.setdefault(name, _Rule(name, 0))
                current.line, current.ways, start = line + 1, [[]], 0
                defined.add(name)
            case "mark" if token[0] == "(":
                open_.append((current, len(way)))
                current, start = _Rule(current.name, line + 1), 0
            case "mark" if token[0] == "|":
                current.ways.append([])
                start = 0
            case "mark" if open_:
                group = current
                current, start = open_.pop()
                current.ways[-1].append(group)
            case "repeat" | "least" | "to":
                elements += _repeat(current.name, line + 1, way, start, *_bounds(token))
                if elements > _MOST_ELEMENTS:
                    raise GrammarError(
                        f"the grammar's repetitions in line {line + 1} come to too much for llama.cpp's memory"
                    )
            case "name":
                start = len(way)
                way.append(rules.setdefault(token[0], _Rule(token[0], 0)))
            case "text" | "range" | "any" as kind:
                start = len(way)
                way += [len(token[kind])] if token[kind] else []
            case _:
                raise ValueError
    if open_ or defined != rules.keys() or "root" not in defined:
        raise ValueError
    return rules["root"]


def _bounds(token: re.Match[str]) -> tuple[int, int | None]:
    if token["repeat"]:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token[0]]
    least = int(token["least"])
    most = int(token["most"]) if token["most"] else None if token["to"] else least
    return least, None if most is not None and most > _ENDLESS else most


def _repeat(name: str, line: int, way: list[_Rule | int], start: int, least: int, most: int | None) -> int:
    """Repeat the last part of a way, which begins at `start`; how many elements that makes."""
    what = way[start:]
    if not what or least > _ENDLESS or (most is not None and most < least):
        raise ValueError
    del way[start:]
    way += what * least
    if most is None:
        more = _Rule(name, line)
        more.ways = [[*what, more], []]
        way.append(more)
    elif most > least:
        way.append(_Rule(name, line, [what, []], most - least))
    return sum(part if isinstance(part, int) else 1 for part in what) * (most or least + 1)


def _postorder(roots: Iterable[_Rule], parts: Callable[[_Rule], Iterator[_Rule]]) -> list[_Rule]:
    """All that is reached from some rules, each rule after what it reaches, circles apart (no recursion)."""
    seen: set[_Rule] = set()
    order: list[_Rule] = []
    for root in roots:
        path = [(root, parts(root))] if root not in seen else []
        seen.add(root)
        while path:
            rule, others = path[-1]
            part = next((part for part in others if part not in seen), None)
            if part is not None:
                seen.add(part)
                path.append((part, parts(part)))
            else:
                order.append(rule)
                path.pop()
    return order


def _find_nullable(rules: list[_Rule]) -> None:
    changed = True
    while changed:
        changed = False
        for rule in rules:
            if not rule.nullable and any(all(isinstance(p, _Rule) and p.nullable for p in way) for way in rule.ways):
                rule.nullable = changed = True


def _first_rules(rule: _Rule) -> Iterator[_Rule]:
    return (part for part, _ in rule.firsts() if isinstance(part, _Rule))


def _circles(order: list[_Rule]) -> dict[_Rule, _Rule]:
    """Of each rule one that stands for all that begin with one another (Kosaraju's components)."""
    begun_by: dict[_Rule, list[_Rule]] = defaultdict(list)
    for rule in order:
        for part in _first_rules(rule):
            begun_by[part].append(rule)
    circle: dict[_Rule, _Rule] = {}

    def left(part: _Rule) -> Iterator[_Rule]:
        return (rule for rule in begun_by[part] if rule not in circle)

    for rule in reversed(order):
        if rule not in circle:
            circle.update(dict.fromkeys(_postorder([rule], left), rule))
    return circle


def _count(order: list[_Rule], circle: dict[_Rule, _Rule]) -> None:
    """Refuse what unfolds into too many stacks, or keeps llama.cpp's own search for left recursion busy.

    That search goes every way through the first rules, calling itself, and stops at the first circle.
    """
    counts: dict[_Rule, tuple[int, int, int]] = {}
    for rule in order:
        stacks = depth = 0
        steps = 1
        for part, _ in rule.firsts():
            if isinstance(part, int):
                stacks += 1
            elif circle[part] is not circle[rule]:
                more, walked, deep = counts[part]
                stacks, steps, depth = stacks + more, steps + walked, max(depth, deep)
        # What a repetition repeats may itself be empty: the next round can begin at once.
        goes_on = all(isinstance(part, _Rule) and part.nullable for part in rule.ways[0])
        again = rule.times if rule.nullable and goes_on else 1
        counts[rule] = stacks * again + rule.nullable, steps * again, depth + again
        for count, most, what in (
            (counts[rule][0], MOST_STACKS, "unfolds into too many possibilities at one place"),
            (counts[rule][1], _MOST_STEPS, "can begin in too many ways"),
            (counts[rule][2], _DEEPEST, "begins with too long a chain of rules"),
        ):
            if count > most:
                raise rule.refused(f"{what} for llama.cpp")
