"""Grammars of JSON schemas allow what fits and nothing else; what they cannot say is refused, never dropped."""

from __future__ import annotations

import itertools
import json

import pytest

from ngramspec.errors import GrammarError
from ngramspec.llama.json_schema import schema_grammar, schema_rules
from ngramspec.llama.json_values import one_of
from ngramspec.llama.vocabulary import Vocabulary


def fits(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    place = vocabulary.grammar(grammar)
    for token in vocabulary.tokenize(text, add_bos=False):
        if not place.allows(token):
            return False
        place.accept(token)
    return place.allows(next(token for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token)))


NAME = 'q"\\é\n'
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age"],
}
CASES = [
    (
        PERSON,
        ['{"name": "Ada é \\"x\\"", "age": -36}', '{"name": "", "age": 0, "tags": [1, "a", {"b": null}]}'],
        ['{"name": "Ada", "age": "36"}', '{"age": 3}'],
    ),
    ({"enum": ["red", 5, None]}, ["5"], ['"blue"']),
    ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}], "$defs": {"n": {"type": "number"}}}, ["1.5"], ['"x"']),
    ({"type": "number", "minimum": 0}, ["0", "0.5", "12.25"], ["-1", "-0.5"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1", "0.01", "1.0"], ["0", "0.0", "1.5", "2"]),
    ({"type": "number", "minimum": -2, "maximum": 3}, ["-2", "-1.5", "0", "3.0", "2.99"], ["-2.5", "3.1", "-3"]),
    ({"type": "string", "maxLength": 2}, ['""', '"ab"'], ['"abc"']),
    ({"type": "string", "maxLength": 5000}, [f'"{"a" * 5000}"', '""'], [f'"{"a" * 5001}"']),
    ({"minLength": 2600, "maxLength": 2600}, [f'"{"a" * 2600}"'], [f'"{"a" * 2601}"', f'"{"a" * 2599}"']),
    ({"type": "string", "pattern": r"^[a-z]{2,3}-\d+$"}, ['"ab-12"'], ['"a-1"', '"ab-12x"']),
    ({"type": "string", "pattern": "b.d"}, ['"xbadx"', '"bad"'], ['"bd"', '"b"d"']),
    ({"type": "string", "pattern": r"^(?:a|[^b]\.)$"}, ['"a"', '"c."'], ['"b."', '"cx"', '"".']),
    ({"type": "string", "pattern": "^[ -~]+$"}, ['"a !~[]"'], ['"a"b"', '"a\\"', '"é"']),
    ({"type": "string", "pattern": "^[\x01-\x7e]{2}$"}, ['" ]"'], ['"\n]"', '"]\\"']),
    ({"type": "string"}, ['"a\\n"'], ['"a\n"']),
    ({"type": "string", "format": "date"}, ['"2024-01-02"'], ['"2024"']),
    ({"type": "string", "format": "email"}, ['"x"'], ["5"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ['"a"', "null"], ['"b"']),
    ({"type": "integer", "enum": [1, "a"]}, ["1"], ['"a"']),
    ({"enum": [12, 1, "12", 'a"', "a\\n", "é"]}, ["1", "12", '"12"', '"a\\""', '"é"'], ["13", '"1"', '"a"']),
    ({"enum": ["a" * n for n in range(1, 400)]}, ['"a"', f'"{"a" * 399}"'], ['""', f'"{"a" * 400}"']),
    ({"type": ["array", "null"], "items": {"type": "integer"}}, ["[1, 2]", "null", "[]"], ['["a"]']),
    (
        {"properties": {NAME: {"const": 'a"\\'}}, "required": [NAME]},
        [json.dumps({NAME: 'a"\\'}, ensure_ascii=False)],
        [],
    ),
    (
        {"properties": {"a": {}, "n": {"$ref": "#"}}, "required": ["a"]},
        ['{"a": [1,"x"]}', '{"a": 1, "n": {"a": null}}'],
        ["{}", '{"a": 1, "n": 3}'],
    ),
    (
        {
            "allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {"type": "null"}}}],
            "$defs": {"x": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        },
        ['{"a": 1}', '{"a": 1, "b": null}'],
        ["{}"],
    ),
    (
        {
            "properties": {"p": {"$ref": "#/$defs/string"}, "q": {"$ref": "#/x/string"}},
            "required": ["p", "q"],
            "$defs": {"string": {"type": "integer"}},
            "x": {"string": {"type": "null"}},
        },
        ['{"p": 1, "q": null}'],
        ['{"p": "a", "q": null}', '{"p": 1, "q": 1}'],
    ),
    ({"prefixItems": [{"type": "integer"}, {"type": "string"}]}, ['[1, "a"]'], ["[1]", '["a",1]']),
    ({"type": "array", "minItems": 2, "maxItems": 3, "items": {}}, ["[1,{}]", "[1,2,3]"], ["[1]", "[1,2,3,4]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"a": 1}', "{}"], ['{"a": "b"}']),
    ({"type": "object", "required": ["a"]}, ['{"a": "x"}'], ["{}"]),
    ({"properties": {}}, ["{}"], ['{"a": 1}']),
    ({}, ["{}", '{"a": 1}'], ["1"]),
]


def test_choices_share_their_beginnings() -> None:
    assert one_of(["red", "reed", "12", "1", "red"]) == '"1" ("" | "2") | "re" ("d" | "ed")'


def test_schemas(demo_vocabulary: Vocabulary) -> None:
    for schema, good, bad in CASES:
        grammar = schema_grammar(json.dumps(schema))
        assert [text[:40] for text in good if not fits(demo_vocabulary, grammar, text)] == [], schema
        assert [text[:40] for text in bad if fits(demo_vocabulary, grammar, text)] == [], schema


def test_bounds_of_integers(demo_vocabulary: Vocabulary) -> None:
    lows, highs = [None, -120, -1, 0, 7, 99, 100, 1234], [None, -1000, -50, -1, 0, 10, 105, 1999]
    numbers = {end + step for end in (*lows, *highs) if end is not None for step in (-1, 0, 1)} | {12345, -54321}
    for low, high in itertools.product(lows, highs):
        schema = {"type": "integer", "minimum": low, "exclusiveMaximum": None if high is None else high + 1}
        text = json.dumps({key: value for key, value in schema.items() if value is not None})
        if low is not None and high is not None and low > high:
            with pytest.raises(GrammarError, match="no number is within the bounds"):
                schema_grammar(text)
            continue
        grammar = schema_grammar(text)
        for number in numbers:
            within = (low is None or number >= low) and (high is None or number <= high)
            assert fits(demo_vocabulary, grammar, str(number)) == within, (low, high, number)


REFUSED: list[tuple[object, str]] = [
    ({"type": "objekt"}, "'objekt' is no type of JSON"),
    ({"type": 5}, "5 is no type of JSON"),
    ({"not": {}}, "not cannot be said"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be said"),
    ({"multipleOf": 2}, "multipleOf cannot be said"),
    ({"type": "string", "pattern": "a|^b"}, r"pattern 'a\|\^b'"),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
    ({"type": "string", "pattern": "\\bx"}, "pattern"),
    ({"type": "string", "pattern": 'a"'}, "pattern"),
    ({"type": "string", "pattern": "[a\n]"}, ".*holds what JSON escapes"),
    ({"type": "string", "pattern": "("}, "pattern '\\(': it does not parse"),
    ({"type": "string", "pattern": "a", "minLength": 3}, "pattern beside minLength"),
    ({"type": "string", "maxLength": 10**7}, "no more than 1000000 can be counted"),
    ({"type": "array", "maxItems": 5000}, "no more than 2000 can be counted"),
    ({"$ref": "#"}, "# refers to itself"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        r"#/\$defs/a refers",
    ),
    ({"$ref": "x.json"}, "the reference 'x.json' is not one within"),
    ({"$ref": "#/nope"}, "there is no #/nope"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "minimum beside \\$ref"),
    ({"enum": []}, "enum is not a list of values"),
    ({"enum": ["a"], "type": "null"}, "no value of enum is of its type"),
    ({"anyOf": []}, "anyOf is not a list of schemas"),
    ({"anyOf": [{}], "properties": {}}, "properties beside anyOf"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no number is within the bounds"),
    ({"type": "number", "minimum": 0.5}, "minimum of a number can only be said in a grammar where it is whole"),
    ({"type": "integer", "minimum": "1"}, "minimum is not a number"),
    ({"properties": [1]}, "properties is not an object"),
    ({"properties": {"a": {"properties": {"b": False}}}}, "false is no schema at 'a-b'"),
    ({"required": ["a"], "additionalProperties": False}, "'a' is required, and no property"),
    ({"type": "string", "minLength": -1}, "minLength is not a count"),
    ({"items": {"minLength": 3, "maxLength": 2}}, "the least count is above the most at 'item'"),
    ({"allOf": [{"minimum": 3}]}, "minimum in allOf"),
]


def test_what_no_grammar_says() -> None:
    for schema, reason in REFUSED:
        with pytest.raises(GrammarError, match=f"^the JSON schema cannot be turned into a grammar: {reason}") as error:
            schema_grammar(json.dumps(schema))
        assert "\n" not in str(error.value)


X_AND_Y = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "boolean"}}}
EITHER = [{"required": ["x"]}, {"required": ["y"]}]
LEFT_OUT: list[tuple[dict[str, object], list[str], list[str]]] = [
    (X_AND_Y | {"anyOf": EITHER}, ['{"x": 1}', "{}"], ['{"x": "a"}', "[]"]),
    (X_AND_Y | {"allOf": [{"anyOf": EITHER}], "oneOf": EITHER}, ['{"x": 1}'], ['{"x": "a"}']),
    ({"type": "object", "anyOf": EITHER}, ['{"x": 1}'], ["[]"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 3}, ["1", "null"], ['"a"']),
    ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 2.5}, ["0.5", "2", "2.4"], ["-1", "3.5"]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ['"ab"'], ['"A"', "5"]),
    ({"type": "string", "pattern": "^\\p{L}+$", "maxLength": 3}, ['"ab"'], ['"abcd"']),
    ({"type": "object", "properties": {"a": {"type": "null"}, "b": False}}, ['{"a": null}'], ['{"b": 1}']),
    ({"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": {"type": "integer"}}}, ["1"], ['"a"']),
    ({"enum": ["a", "b"], "minLength": 1}, ['"a"'], ['"c"']),
    ({"type": "string", "minimum": 3}, ['"a"'], ["3"]),
]


def test_what_no_grammar_says_is_left_out_where_that_may_be(demo_vocabulary: Vocabulary) -> None:
    for schema, good, bad in LEFT_OUT:
        text = json.dumps(schema)
        with pytest.raises(GrammarError):
            schema_grammar(text)
        grammar = schema_grammar(text, strict=False)
        assert [text for text in good if not fits(demo_vocabulary, grammar, text)] == [], schema
        assert [text for text in bad if fits(demo_vocabulary, grammar, text)] == [], schema


def test_texts_that_are_no_schema() -> None:
    for text in ("", "{'type': 'string'}", '{"type": "object"', "[" * 100_000):
        with pytest.raises(GrammarError, match=r"^the JSON schema is not JSON: ") as error:
            schema_grammar(text)
        assert "\n" not in str(error.value)
    for text, kind in (("[]", "list"), ('"string"', "str"), ("true", "bool")):
        with pytest.raises(GrammarError, match=f"^the JSON schema is a {kind}, but must be an object"):
            schema_grammar(text)


def test_several_schemas_keep_their_references_apart(demo_vocabulary: Vocabulary) -> None:
    one = {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}
    two = {"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}
    grammar = 'root ::= one "," two\n' + schema_rules({"one": one, "two": two})
    assert fits(demo_vocabulary, grammar, "5,null")
    assert not fits(demo_vocabulary, grammar, "5,5")
