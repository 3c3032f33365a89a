"""Grammars that llama.cpp would not survive are refused, and no others."""

from __future__ import annotations

import json

import pytest

from ngramspec.errors import GrammarError
from ngramspec.llama.grammar_check import check_grammar
from ngramspec.llama.json_schema import schema_grammar

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
    'root ::= (root | "a"){0,3}',
    'root ::= a | "x"\na ::= b | "y"\nb ::= c | "z"\nc ::= a root "w" | "v"',
    'root ::= a "s" | "x"\na ::= b | c\nb ::= "q"\nc ::= d | "v"\nd ::= b | root',
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
    'root ::= ("a") root "x" | "y"',
    'root ::= a root "x" | "y"\na ::= "b"',
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
