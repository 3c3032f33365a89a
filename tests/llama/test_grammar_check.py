"""Grammars that llama.cpp would not survive are refused, and no others: against unfolding them step by step."""

from __future__ import annotations

import json
import random
import sys
from contextlib import suppress

import pytest
from support.cli_runner import DEMO, run_process

from ngramspec.errors import GrammarError
from ngramspec.llama.grammar_check import check_grammar
from ngramspec.llama.json_schema import schema_grammar
from ngramspec.llama.vocabulary import Vocabulary

RECURSIVE = [
    'root ::= a? root "x"\na ::= "a"',
    'root ::= a root "x" | "y"\na ::= b\nb ::= "c"?',
    'root ::= a root "x" | "y"\na ::= b b\nb ::= "c"*',
    'root ::= one\none ::= two "x" | "y"\ntwo ::= "z"{0,3} one "w"',
    'root ::= (("a"?)* root)* "b"',
    'root ::= ("a" | ("b"? | "c")){0,3} (root "d" | "e")',
    'root ::= ("a"{0,3}){2,5} root "x" | "y"',
    'root ::= root "x" | "y"',
    'root ::= "x" a\na ::= b a "x" | "y"\nb ::= ""',
    'root ::= "x" a\na ::= [] a "x" | "y"',
    'root ::= ("a"? root "b"){0,\n# 2\n3} "c"',
]
EXPLOSIVE = [
    'root ::= c{0,900}\nc ::= b{0,900}\nb ::= a{0,900}\na ::= "x"{0,900}',
    "\n".join(f'r{i} ::= r{i + 1} "a" | r{i + 1} "b"' for i in range(40)) + '\nr40 ::= "x"\nroot ::= r0',
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(9000)) + '\nr9000 ::= "x"',
    'root ::= "' + "x" * 100_000 + '"{2000}',
]
FINE = [
    'root ::= ("a"*)*',
    'root ::= (("a"?)* "b"?)* "x"',
    'root ::= "a" root "b" | "c"',
    'root ::= list\nlist ::= item list?\nitem ::= "x"',
    'root ::= "x"{0,2000}',
    'root ::= ("a"{0,40}){0,40}',
    'root ::= "a"\nunused ::= b unused "x"\nb ::= "c"?',
    'root ::= ("a" # root ::= root "x"\n | "root"\n)\n',
]
SCHEMAS = [
    {},
    {"type": "string", "maxLength": 500},
    {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(30)}},
    {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "maxItems": 30}, "maxItems": 30},
]


def test_left_recursion_is_named_with_rule_and_line() -> None:
    for text in RECURSIVE:
        with pytest.raises(GrammarError, match=r"^the grammar's rule '\w+' in line \d can begin with itself") as error:
            check_grammar(text)
        assert "\n" not in str(error.value)
    with pytest.raises(GrammarError, match="rule 'bad' in line 5 can"):
        check_grammar('root ::= "a" (\n  "b" |\n  bad)\n# bad ::= bad\nbad ::= e bad "x" | "y"\ne ::= f\nf ::= "g"?\n')


@pytest.mark.parametrize("text", EXPLOSIVE, ids=lambda text: text[:20])
def test_what_unfolds_too_far_is_refused(text: str) -> None:
    with pytest.raises(GrammarError, match=r"^the grammar's .* in line \d+ .*llama.cpp"):
        check_grammar(text)


def test_grammars_that_work_pass_and_what_does_not_parse_is_left_to_llama() -> None:
    wrong = ("", "root ::= ", "root ::= (", 'root ::= "a', "root ::= *", "x", "root ::= nowhere", "root : a")
    for text in (*FINE, *map(schema_grammar, map(json.dumps, SCHEMAS)), *wrong):
        check_grammar(text)


_UNCHECKED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
from ngramspec.llama import grammar
from ngramspec.llama.vocabulary import Vocabulary
grammar.check_grammar = lambda text: None
Vocabulary(sys.argv[1]).grammar(sys.argv[2])
"""


@pytest.mark.exhaustive
def test_llama_would_not_survive(env: dict[str, str]) -> None:
    """Else there is nothing to refuse: a newer llama.cpp may find these itself."""
    assert run_process(env, DEMO, RECURSIVE[1], command=[sys.executable, "-c", _UNCHECKED]).code < 0


# ---------------------------------------------------------------------- random grammars

# A rule is a list of ways, a way a list of parts: a letter, the name of a rule, or (ways, least, most).
Part = str | tuple[list[list["Part"]], int, int | None]
Ways = list[list[Part]]


def written(ways: Ways, rng: random.Random) -> str:
    def one(part: Part) -> str:
        if isinstance(part, str):
            return f'"{part}"' if len(part) == 1 else part
        inner, least, most = part
        marks = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        bounds = f"{{{least},{'' if most is None else most}}}"
        return f"({written(inner, rng)}){marks.get((least, most), bounds) if rng.random() < 0.8 else bounds}"

    return " | ".join(" ".join(one(part) for part in way) or '""' for way in ways)


def drawn(rng: random.Random, depth: int = 0) -> Ways:
    def part() -> Part:
        kind = rng.random()
        if kind < 0.4:
            return rng.choice("abc")
        if kind < 0.75 or depth > 1:
            return rng.choice(("root", "one", "two"))
        return drawn(rng, depth + 1), *rng.choice([(0, None), (1, None), (0, 1), (0, 3), (1, 2), (2, 2)])

    return [[part() for _ in range(rng.randint(0 if rng.random() < 0.3 else 1, 3))] for _ in range(rng.randint(1, 2))]


def grows_forever(rules: dict[str, Ways]) -> bool:
    """Whether unfolding some reachable rule, in the way of llama.cpp's stacks, makes ever longer ones."""
    plain: dict[str, list[list[str]]] = {}

    def flat(way: list[Part]) -> list[str]:
        out: list[str] = []
        for part in way:
            if isinstance(part, str):
                out.append(part)
                continue
            inner, least, most = part
            name = f"rule{len(plain)}"
            plain[name] = []
            plain[name] += [flat(one) for one in inner]
            out += [name] * least
            rest = 1 if most is None else most - least
            last: list[str] = []
            for _ in range(rest):
                more = f"rule{len(plain)}"
                plain[more] = [[name, *([more] if most is None else last)], []]
                last = [more]
            out += last
        return out

    for name, ways in rules.items():
        plain[name] = []
        plain[name] += [flat(way) for way in ways]
    reached, todo = {"root"}, ["root"]
    while todo:
        for part in (part for way in plain[todo.pop()] for part in way if len(part) > 1):
            if part not in reached:
                reached.add(part)
                todo.append(part)
    for start in reached:
        seen: set[tuple[tuple[str, int, int], ...]] = set()
        stacks = [((start, way, 0),) for way in range(len(plain[start]))]
        while stacks:
            stack = stacks.pop()
            *below, (rule, way, at) = stack
            parts = plain[rule][way]
            if stack in seen:
                continue
            seen.add(stack)
            if len(stack) > 60:
                return True
            if at == len(parts):
                if below:
                    stacks.append(tuple(below))
            elif len(parts[at]) > 1:
                rest = [(rule, way, at + 1)] if at + 1 < len(parts) else []
                stacks += [(*below, *rest, (parts[at], i, 0)) for i in range(len(plain[parts[at]]))]
    return False


@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.exhaustive)])
def test_random_grammars_against_unfolding_them(count: int, demo_vocabulary: Vocabulary) -> None:
    rng = random.Random(4)
    found = {True: 0, False: 0}
    for _ in range(count):
        rules = {name: drawn(rng) for name in ("root", "one", "two")}
        text = "\n".join(f"{name} ::= {written(ways, rng)}" for name, ways in rules.items())
        expected = grows_forever(rules)
        found[expected] += 1
        if expected:
            with pytest.raises(GrammarError, match="can begin with itself"):
                check_grammar(text)
            continue
        check_grammar(text)
        # Nothing here takes llama.cpp's time or memory; it may still refuse the text.
        with suppress(GrammarError):
            demo_vocabulary.grammar(text).allows(1)
    assert min(found.values()) > count // 8
