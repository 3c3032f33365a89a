"""Tests of JSON schemas: the supported, rejected and ignored parts, checked with the package jsonschema."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.json_texts import is_allowed, is_valid, random_text, whole_schema
from support.schema_keywords import KEYWORDS

from ngramspec.data import GrammarError
from ngramspec.grammars.json_schema import MAX_SCHEMAS, call_rule, json_rule, schema_grammar
from ngramspec.grammars.lark import Lark, choice_grammar, encode_controls, lark, pattern_grammar


def grammar_of(schema: object, *, strict: bool = True) -> Lark:
    return schema_grammar(json.dumps(schema), strict=strict)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age"],
}
X = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
Y = {"properties": {"b": {"type": "null"}}}
NAME = 'q"\\\u00e9\n'
INT64 = ["0", "-1", str(2**63 - 1), str(-(2**63) + 1024)]
SETTLED: list[tuple[object, list[str], list[str]]] = [
    # Objects contain the named properties only, unless the schema mentions others.
    (
        PERSON,
        ['{"name": "Ada \u00e9 \\"x\\"", "age": -36}', '{"name":"","age":0,"tags":[1,{"b":null}]}'],
        ['{"age":1}'],
    ),
    (PERSON, [], ['{"name": "", "age": 0, "more": 1}']),
    ({**PERSON, "additionalProperties": True}, ['{"name": "", "age": 0, "more": 1}'], []),
    ({"properties": {}}, ["{}"], ['{"a": 1}', "5"]),
    ({"required": ["a"]}, ['{"a": "x"}'], ["{}", '{"b": 1, "a": 1}']),
    ({}, ["{}", '{"a": 1}'], ["1"]),
    ({"properties": {"a": {"properties": {"b": {}}}}}, ['{"a": {"b": 1}}'], ['{"a": {"c": 1}}']),
    # The same applies to conjunctions, with the names of all of their parts.
    (
        {"allOf": [{"$ref": "#/$defs/x~1y"}, Y], "$defs": {"x/y": X}},
        ['{"a": 1, "b": null}', '{"a": 1}'],
        ["{}", '{"c": 1}'],
    ),
    ({**X, "allOf": [Y]}, ['{"a": 1, "b": null}'], ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}']),
    ({**X, "anyOf": [Y, {"required": ["c"]}]}, ['{"a": 1, "b": null}', '{"a": 1, "c": 5}'], ['{"a": 1, "d": 1}']),
    ({"anyOf": [X, Y]}, ['{"a": 1}', '{"b": null}'], ['{"a": 1, "b": null}', '{"b": 5}']),
    ({"$ref": "#/$defs/x", "$defs": {"x": X}}, ['{"a": 1}'], ['{"a": 1, "c": 1}']),
    ({"properties": {"a": {}, "n": {"$ref": "#"}}}, ['{"a": 1, "n": {"n": {}}}'], ['{"n": 3}', '{"n": {"m": 1}}']),
    ({**X, "patternProperties": {"^x": {}}}, ['{"a": 1, "xy": 1}'], []),
    # Without `type`, the other keywords imply one.
    ({"minLength": 2}, ['"ab"'], ["5"]),
    ({"prefixItems": [{"type": "integer"}, {}]}, ['[1, "a"]'], ['["a", 1]', "5", "[1, 2, 3]"]),
    ({"items": {"type": "null"}}, ["[null]"], ["{}"]),
    # `oneOf` means `anyOf`, and an unknown format is ignored.
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["1", "1.5"], ['"a"']),
    ({"type": "string", "format": "phone"}, ['"x"'], ["5"]),
    ({"type": "string", "unheard": "phone", "title": "x"}, ['"x"'], ["5"]),
    # White space is bounded; the text ends with its last character.
    ({"items": {}}, ["[1, 2]", "[1,2]", "[\n  1,\n\n  2\n]"], ["[1,  2]", "[1,\n\n\n2]", "[1] ", " [1]"]),
    ({"type": "string"}, ['"a\\n\\u00e9\\ud83d\\ude00"'], ['"a\n"', '"\\ud83d"', '"\x7f"']),
    (
        {"properties": {NAME: {"const": 'a"\\'}}, "required": [NAME]},
        [json.dumps({NAME: 'a"\\'}, ensure_ascii=False)],
        [],
    ),
    ({"enum": [12, 1, "12", 'a"']}, ["1", "12", '"12"', '"a\\""'], ["13", '"1"']),
    # llguidance reads bounds as doubles, and those of integers as integers of 64 bits.
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, INT64, [str(-(2**63) - 1), str(2**63)]),
    (
        {"type": ["integer", "null"], "minimum": -1e19, "maximum": 1e19},
        ["null", *INT64, str(2**64), str(-(2**64))],
        ["1.5"],
    ),
    ({"type": "integer", "exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63}, INT64, [str(2**63)]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**64 - 1)], ["-1"]),
    ({"type": "integer", "maximum": 2**53 + 3}, [str(2**53)], [str(2**53 + 4)]),
    ({"type": "integer", "exclusiveMaximum": 2**60}, [str(2**60 - 1000)], [str(2**60)]),
    ({"type": "integer", "minimum": -(2**60) - 1}, [str(-(2**60))], [str(-(2**60) - 2)]),
    ({"minimum": -(2**63), "maximum": 2**63 - 1}, ["-1.5", *INT64, "1e18"], []),
    (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1.7976931348623157e308},
        ["0.5", "1" + "0" * 300],
        ["0", "-1"],
    ),
    ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, ["-1.5", "6.02e23"], []),
    ({"type": "string", "minLength": 1, "maxLength": 2**63 - 1}, ['"a"'], ['""']),
    ({"enum": [2**53, 2**63 - 1, 2**62, 0.1, -1e18]}, [str(2**53), str(2**63 - 1), str(2**62), "0.1"], ["1"]),
    (
        {
            "$ref": "#/x/s",
            "minimum": 3,
            "x": {"s": {"$ref": "#/$defs/string"}},
            "$defs": {"string": {"type": "integer"}},
        },
        ["3"],
        ["2", '"a"'],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), SETTLED, ids=lambda value: str(value)[:30])
def test_schema_grammar_settles_cases_left_open_by_standard(schema: object, good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(schema)
    assert [text for text in good if not is_allowed(grammar, text)] == []
    assert [text for text in bad if is_allowed(grammar, text)] == []


PLAIN_ESCAPES = [r"\u0041", r"\u00e9", r"\ud83d\ude00"]
ESCAPES = [r"\"", r"\\", r"\b", r"\f", r"\n", r"\r", r"\t", r"\u0008", r"\u001F", *PLAIN_ESCAPES, r"\/"]


@pytest.mark.parametrize(
    ("make", "gap"),
    [
        (lambda value: {"type": "string"}, [r"\/"]),
        (lambda value: {"type": "string", "minLength": 3, "maxLength": 3}, [r"\/"]),
        (lambda value: {}, [r"\/"]),
        (lambda value: {"additionalProperties": {"pattern": "^x[^q]y$"}}, [*PLAIN_ESCAPES, r"\/"]),
        (lambda value: {"additionalProperties": {"const": value}}, [*PLAIN_ESCAPES, r"\/"]),
        (lambda value: {"additionalProperties": {"enum": ["", value]}}, [*PLAIN_ESCAPES, r"\/"]),
    ],
    ids=["string", "length", "object", "pattern", "const", "enum"],
)
def test_schema_grammar_allows_escapes_except_known_gaps(make: Callable[[str], object], gap: list[str]) -> None:
    """Each character can be written without the escapes in the gaps, which llguidance does not know."""
    missing = []
    for escape in ESCAPES:
        text = f'"x{escape}y"'
        schema = make(json.loads(text))
        grammar = grammar_of(schema)
        if schema == {} or "additionalProperties" in schema:
            text = f'{{"k": {text}}}'
        shortest = json.dumps(json.loads(text), ensure_ascii=False)
        assert is_allowed(grammar, shortest)
        missing += [escape] * (not is_allowed(grammar, text))
    assert missing == gap


def judge(seeds: range, texts: int) -> Counter[str]:
    """Return the number of random schemas that compiled, and the number of valid texts."""
    counts = Counter[str]()
    for seed in seeds:
        rng = random.Random(seed)
        schema = whole_schema(rng)
        try:
            grammar = grammar_of(schema)
        except GrammarError:
            counts["refused"] += 1
            continue
        counts["compiled"] += 1
        for _ in range(texts):
            text = random_text(grammar, rng)
            counts["endless" if text is None else "valid" if is_valid(schema, text) else "invalid"] += 1
    return counts


@pytest.mark.parametrize(
    ("seeds", "texts"), [(range(60), 2), pytest.param(range(5000, 7000), 3, marks=pytest.mark.exhaustive)]
)
def test_schema_grammar_of_random_schemas_yields_valid_texts(seeds: range, texts: int) -> None:
    """An object may repeat a name that matches a pattern, and then has too few properties: a gap of llguidance."""
    counts = judge(seeds, texts)
    assert counts["compiled"] > 0.99 * len(seeds)
    assert counts["invalid"] < 0.003 * counts["valid"]
    assert counts["valid"] > 0.9 * texts * len(seeds)


def chain(length: int) -> dict[str, Any]:
    """Return a schema with a chain of this many references."""
    inner = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**inner, f"d{length}": {"type": "null"}}}


REFUSED: list[tuple[object, str]] = [
    ({"type": "objekt"}, "Invalid type: objekt"),
    ({"not": {}}, "unsupported keywords: not"),
    ({"if": {}, "then": {}}, "unsupported keywords: if, then"),
    ({"type": "array", "contains": {}}, "unsupported keywords: contains"),
    ({"type": "array", "uniqueItems": True}, "unsupported keywords: uniqueItems"),
    ({"type": "object", "propertyNames": {}}, "unsupported keywords: propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "unsupported keywords: dependentRequired"),
    ({"type": "string", "pattern": "(?=a)b"}, "a regular expression does not parse: look-around"),
    ({"type": "string", "pattern": "\\bx"}, "lookarounds not supported"),
    ({"type": "string", "pattern": "("}, "a regular expression does not parse: unclosed group"),
    ({"$ref": "#"}, "# refers to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/\\$defs/a refers"),
    ({"$ref": "x.json"}, ".*x.json"),
    ({"$ref": "#/nope"}, ".*nope"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "integer", "minimum": "1"}, ".*minimum"),
    ({"properties": [1]}, "properties must be an object"),
    ({"type": "integer", "minimum": 2**64}, "minimum 18446744073709551616 is beyond"),
    ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "maximum -9223372036854775808 is beyond"),
    ({"const": -(2**63)}, "-9223372036854775808 in const has more digits"),
    ({"enum": ["a", {"b": [175928847299117063]}]}, "175928847299117063 in enum has more digits"),
    ({"const": 2**64 - 1}, "18446744073709551615 in const has more digits"),
    ({"type": "integer", "multipleOf": 2**31}, "multipleOf 2147483648 has more than 5"),
    ({"type": "number", "multipleOf": 1e9}, "multipleOf 1000000000.0 has more than 5"),
    ({"type": "number", "multipleOf": 0.999999999}, "multipleOf 0.999999999 has more than 5"),
    ({"type": "integer", "enum": [-1e19]}, "-1e\\+19 in enum has more digits"),
    ({"required": ["a"], "additionalProperties": False}, "Unsatisfiable schema: required property 'a'"),
    ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, "min/maxProperties only"),
    ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "it is nested too deeply"),
    ({"anyOf": [{"type": "null"}] * (MAX_SCHEMAS + 1)}, f"it consists of more than {MAX_SCHEMAS:,} schemas"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_schema_grammar_rejects_unsupported_schemas(schema: object, reason: str) -> None:
    with pytest.raises(GrammarError, match=f"^the JSON schema cannot be used: {reason}") as error:
        grammar_of(schema)
    assert "\n" not in str(error.value)


def test_schema_grammar_with_long_reference_chain_does_not_crash() -> None:
    assert is_allowed(grammar_of(chain(3)), '{"a": {"a": {"a": null}}}')
    assert not is_allowed(grammar_of(chain(1500)), "null")


LEFT_OUT: list[tuple[dict[str, object], list[str], list[str]]] = [
    ({**PERSON, "not": {}, "if": {}, "then": {}}, ['{"name": "", "age": 1}'], ['{"name": 1, "age": 1}']),
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, ["[null, null]"], ["[1]"]),
    ({"type": "string", "pattern": "(?=a)b", "maxLength": 2}, ['"xy"'], ['"xyz"', "5"]),
    ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, ['{"a": 1}'], ['{"d": 1}']),
    ({"properties": {"n": {"type": "number", "maximum": 1e300, "minimum": 1e299}}}, ['{"n": 5}'], ['{"n": "x"}']),
    ({"type": "integer", "minimum": 2**64}, ["5"], ['"x"']),
    ({"type": "integer", "multipleOf": 2**31}, ["5"], ['"x"']),
    ({"properties": {"n": {"type": "integer", "const": 2**64 - 1}}}, ['{"n": 5}'], ['{"n": "x"}']),
    ({"patternProperties": {"^a": {}, "a$": {"type": "null"}}}, ['{"ab": 1}'], []),
]


@pytest.mark.parametrize(("schema", "good", "bad"), LEFT_OUT, ids=lambda value: str(value)[:40])
def test_schema_grammar_without_strict_ignores_unsupported_parts(
    schema: dict[str, object], good: list[str], bad: list[str]
) -> None:
    with pytest.raises(GrammarError):
        grammar_of(schema)
    grammar = grammar_of(schema, strict=False)
    assert [text for text in good if not is_allowed(grammar, text)] == []
    assert [text for text in bad if is_allowed(grammar, text)] == []


def test_schema_grammar_rejects_text_that_is_not_a_schema() -> None:
    for text in ("", "{'type': 'string'}", '{"type": "object"', "[" * 100_000):
        with pytest.raises(GrammarError, match=r"^the JSON schema is not JSON: ") as error:
            schema_grammar(text)
        assert "\n" not in str(error.value)
    for text, kind in (("[]", "list"), ('"string"', "str"), ("true", "bool")):
        with pytest.raises(GrammarError, match=f"^the JSON schema is a {kind}, but must be an object"):
            schema_grammar(text)


def test_call_rule_resolves_references_within_parameters() -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "$defs": {"n": {"type": "integer"}}}
    grammar = lark(f"start: {call_rule('f', 'arguments', parameters)} | {json_rule({'properties': {'x': {}}})}")
    assert is_allowed(grammar, '{"name": "f", "arguments": {"a": 5}}')
    assert is_allowed(grammar, '{"x": 5}')
    assert not is_allowed(grammar, '{"name": "f", "arguments": {"a": "x"}}')


# --------------------------------------------------------------------------- regular expressions, choices, marks


def test_pattern_grammar_matches_whole_text() -> None:
    for pattern, good, bad in (
        (r"\d{3}-(?:a|b)+", ["123-ab"], ["12-a", "x123-a", "123-ac"]),
        ("^a|b$", ["a", "b"], ["ab", ""]),
        (r"5\$/", ["5$/"], ["5"]),
        ("[^\n]*\\s", ["a \n", "\u00e9 "], ["a"]),
        ("a?", ["", "a"], ["aa"]),
        ("(a?){100}a{100}", ["a" * 100, "a" * 200], ["a" * 99, "a" * 201]),
    ):
        grammar = pattern_grammar(pattern)
        assert [text for text in good if not is_allowed(grammar, text)] == [], pattern
        assert [text for text in bad if is_allowed(grammar, text)] == [], pattern
    for pattern in ("(?=a)a+", "(", r"(a)\1", r"a\b", "a$b"):
        with pytest.raises(GrammarError, match=r"^the pattern cannot be used: "):
            pattern_grammar(pattern)


def test_choice_grammar_accepts_only_given_texts() -> None:
    grammar = choice_grammar(["ab", "a", 'q"\\\n', "\u00e9", "ab"])
    assert [is_allowed(grammar, text) for text in ("ab", "a", 'q"\\\n', "\u00e9", "", "b")] == [True] * 4 + [False] * 2
    assert [is_allowed(choice_grammar(texts), "") for texts in ([""], ["a", ""], ["a"])] == [True, True, False]
    assert is_allowed(choice_grammar([f"word{number}" for number in range(3000)]), "word2999")
    with pytest.raises(GrammarError, match=r"character 1 of"):
        choice_grammar(["a\ud800"])


def test_marked_replaces_control_tokens_by_ids() -> None:
    controls = {"<|a|>": 5, "<|ab|>": 7, "|a|": 9}
    assert encode_controls("x<|a|><|ab|>\n", controls) == '"x" <[5]> <[7]> "\\n"'
    assert encode_controls("<|c|>", controls) == '"<|c|>"'


# ------------------------------------------------------------

README = Path(__file__).parents[2] / "ngramspec/server/README.md"


VERDICTS = ("refused", "ignored", "too strict", "kept")  # the worst one first


def ours(schema: Mapping[str, Any], good: str, bad: str) -> str:
    try:
        grammar = schema_grammar(json.dumps(schema))
    except GrammarError:
        return "refused"
    if not is_allowed(grammar, good):
        return "too strict"
    rng = random.Random(1)
    texts = [text for _ in range(10) if (text := random_text(grammar, rng)) is not None]
    return "kept" if all(is_valid(schema, text) for text in texts) and not is_allowed(grammar, bad) else "ignored"


def test_readme_keyword_table_equals_schema_support() -> None:
    lines = ["| keyword | ngramspec, `strict` | llama-server | OpenAI's subset |", "|---|---|---|---|"]
    for keyword, (llama_server, openai, examples) in KEYWORDS.items():
        for schema, good, bad in examples:
            assert is_valid(schema, good), (keyword, good)
            assert not is_valid(schema, bad), (keyword, bad)
        mine = min([ours(*example) for example in examples], key=VERDICTS.index)
        lines.append(f"| {keyword} | {mine} | {llama_server} | {openai} |")
    table = "\n".join(lines)
    assert table in README.read_text("utf-8"), f"the table in {README} must be:\n{table}"
