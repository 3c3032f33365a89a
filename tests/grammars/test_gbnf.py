"""Tests of the conversion of GBNF to `Lark`: both describe the same texts, and the result has few lexemes."""

from __future__ import annotations

import random
import re

import pytest
from support.json_texts import read_bytes
from support.llama_chain import read_with_llama

from ngramspec.data import GrammarError
from ngramspec.grammars.gbnf import MAX_DEPTH, gbnf_to_lark
from ngramspec.llama.vocabulary import Vocabulary

JSON = r"""
# llama.cpp's grammars/json.gbnf
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = """root ::= (expr "=" ws term "\\n")+\r
expr ::= term ([-+*/] term)*\r
term ::= ident | num | "(" ws expr ")" ws\r
ident ::= [a-z] [a-z0-9_]* ws\r
num ::= [0-9]+ ws\r
ws ::= [ \\t\\n]*"""


def random_rule(rng: random.Random, later: list[str], every: list[str], depth: int = 0) -> str:
    """Return the right side of a rule.

    It refers to arbitrary rules only after a character, since llama.cpp hangs otherwise.
    """

    def part() -> str:
        return random_rule(rng, later, every, depth + 1)

    kind = rng.random()
    if depth > 3 or kind < 0.3:
        return rng.choice(
            ['"a"', '"b"', '"ab"', '"ba"', '"aba"', "[ab]", "[^a]", "[a-c]", '"c"', '""', ".", '"\\u00e9"']
        )
    if kind < 0.5:
        return " ".join(part() for _ in range(rng.randint(1, 3)))
    if kind < 0.65:
        return f"({' | '.join(part() for _ in range(rng.randint(1, 3)))})"
    if kind < 0.8:
        return f"({part()}){rng.choice(['*', '+', '?', '{2}', '{0,2}', '{1,}', '{2,3}', '{0}', '{0,0}'])}"
    if kind < 0.88 and later:
        return rng.choice(later)
    name = rng.choice(every)
    return rng.choice([f'"a" {name}', f'[ab] {name} "b"', f'"c" {name}?', f'"b" ({name} "a")*'])


def random_grammar(rng: random.Random) -> str:
    names = ["root", "x", "y"]
    return "\n".join(
        f"{name} ::= {' | '.join(random_rule(rng, names[i + 1 :], names) for _ in range(rng.randint(1, 2)))}"
        for i, name in enumerate(names)
    )


@pytest.mark.parametrize(
    ("seeds", "minimum"), [(range(30), 8), pytest.param(range(100, 400), 100, marks=pytest.mark.exhaustive)]
)
def test_gbnf_to_lark_of_random_grammars_accepts_same_texts_as_llama_cpp(
    seeds: range, minimum: int, word_vocabulary: Vocabulary
) -> None:
    several = 0  # number of grammars that need several lexemes
    for seed in seeds:
        rng = random.Random(seed)
        text = random_grammar(rng)
        grammar = gbnf_to_lark(text)
        several += "LEXEME_1" in grammar
        for _ in range(10):
            raw = "".join(rng.choice("aaabbbc\u00e9") for _ in range(rng.randint(0, 8))).encode()
            assert read_with_llama(word_vocabulary, text, raw) in (read_bytes(grammar, raw), None), (
                seed,
                text,
                raw,
                grammar,
            )
    assert several > minimum


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        (
            JSON,
            [
                '{"a": [1, -2.5e1, "x\\n\\u00e9"], "b": {}}',
                "{\n  }",
                '{"a":"é"}',
                "[]",
                '{"a": 01}',
                '{"a":1}  ',
                '{"\\x',
            ],
        ),
        (ARITHMETIC, ["a=1\n", "a+b*(c-1)=2\n", "ab12 + 3 = 4\n5=6\n", "a b=1\n", "1a=1\n", "(a=1\n"]),
        ('root ::= ("a" | "ab") "bc"? root?', ["abc", "abbc", "ab", "aabc", "bc"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\"\\\[\]" [\]\-^a] "x"', ['A\u00e9\U0001f600\t"\\[]-x', "A", "B"]),
        (
            'root ::= "x" (item "b"){0,0} (item | [a-z]{0} "y"){2}\nitem ::= "a"{0} item{0} "c"',
            ["x", "xcy", "xyyy", "xab"],
        ),
        ("root ::= item{2,3} # two or three\nitem ::= [^\\n,]+ ','?".replace("'", '"'), ["a,b", "a,b,c,", "ab", ","]),
    ],
    ids=["json", "arithmetic", "ambiguous", "escapes", "zero", "bounds"],
)
def test_gbnf_to_lark_of_written_grammars_accepts_same_texts_as_llama_cpp(
    text: str, texts: list[str], word_vocabulary: Vocabulary
) -> None:
    grammar = gbnf_to_lark(text)
    for one in texts:
        raw = one.encode()
        assert read_bytes(grammar, raw) == read_with_llama(word_vocabulary, text, raw), one


@pytest.mark.parametrize(
    ("word", "rest", "text"),
    [
        ('"b" [ab]* "b"', '("ac" root | "d")', "bbacbbd"),
        ('"e" "ab"?', '("ac" root | "d")', "eaced"),
        ('"e" ("ab"? "a")', '("bc" root | "d")', "eabcead"),
        ('"e" ("a" "ab"?)+', '("bc" root | "d")', "eaabcead"),
        ('"e" "a"+', '("ac" root | "d")', "eaacead"),
        ('"e" ("a" | "ab")', '("bc" root | "d")', "eabcead"),
        ('"e" "ea"?', '(word | "g" root)* "d"', "eed"),
    ],
)
def test_gbnf_to_lark_splits_words_that_the_longest_match_reads_too_far(word: str, rest: str, text: str) -> None:
    grammar = f"root ::= word {rest}\nword ::= {word}"
    assert read_bytes(gbnf_to_lark(grammar), text.encode()) == (len(text), True)


def test_gbnf_to_lark_treats_nul_and_line_ends_as_characters() -> None:
    assert read_bytes(gbnf_to_lark(r'root ::= "\x00" [\x00-\x01] .'), b"\0\1\n") == (3, True)
    assert read_bytes(gbnf_to_lark('root ::= [^a-z"\\\\]*'), b"\r\n/\xc3\xa9#") == (6, True)


def test_gbnf_to_lark_of_json_string_or_rules_without_recursion_returns_one_lexeme() -> None:
    """With several lexemes, a mask would take a hundred times as long."""
    assert gbnf_to_lark("root ::= a b* | c\na ::= [a-z]+ b\nb ::= c{2,}\nc ::= [0-9]").count("\nLEXEME_") == 1
    assert gbnf_to_lark(JSON).count("\nLEXEME_") == 10
    string = gbnf_to_lark('root ::= "[" root "]" | "\\"" [^"\\\\]* "\\""')
    assert re.search(r'^LEXEME_2: \("\\"" \(/.*/\)\* "\\""\)$', string, re.MULTILINE), string


def test_gbnf_to_lark_with_large_choice_or_long_chain_stays_small() -> None:
    words = " | ".join(f'"word{number}"' for number in range(3000))
    assert read_bytes(gbnf_to_lark(f"root ::= {words}"), b"word2999") == (8, True)
    chain = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(8))
    assert read_bytes(gbnf_to_lark(f'root ::= r0\n{chain}\nr8 ::= "a"?'), b"aaa") == (3, True)


def test_gbnf_to_lark_rejects_deeply_nested_rules() -> None:
    chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(MAX_DEPTH + 5))
    with pytest.raises(GrammarError, match=f"is nested more than {MAX_DEPTH} deep"):
        gbnf_to_lark(f'root ::= r0\n{chain}\nr{MAX_DEPTH + 5} ::= "a"')
    with pytest.raises(GrammarError, match=f"is nested more than {MAX_DEPTH} deep"):
        gbnf_to_lark('root ::= "a"' + "?" * 5000)
    recursive = "\n".join(f'r{i} ::= "a" r{i + 1} | "b" root' for i in range(2000))
    assert read_bytes(gbnf_to_lark(f'root ::= r0\n{recursive}\nr2000 ::= "x"'), b"aabax") == (4, False)
