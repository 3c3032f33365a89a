"""Keywords of JSON Schema, with examples and the support by llama-server and OpenAI's structured outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Example = tuple[dict[str, Any], str, str]
"""(schema, a valid text, an invalid text)."""

AB = {"a": {"type": "integer"}, "b": {"type": "string"}}
STRING, INTEGER = {"type": "string"}, {"type": "integer"}

KEYWORDS: Mapping[str, tuple[str, str, list[Example]]] = {
    "`type`, also several": (
        "kept",
        "kept",
        [({"type": "boolean"}, "true", "1"), ({"type": ["string", "null"]}, "null", "1"), (INTEGER, "-5", "0.5")],
    ),
    "`enum`, `const`": (
        "kept",
        "kept",
        [({"enum": ["a", 5]}, "5", "6"), ({"const": {"k": [1]}}, '{"k":[1]}', '{"k":[2]}')],
    ),
    "`properties`, `required`": (
        "kept",
        "all must be required",
        [({"type": "object", "properties": AB, "required": ["b"]}, '{"b":"x"}', '{"a":1}')],
    ),
    "`additionalProperties`": (
        "kept",
        "must be false",
        [
            ({"type": "object", "additionalProperties": INTEGER}, '{"x":1}', '{"x":"y"}'),
            ({"type": "object", "properties": AB, "additionalProperties": False}, '{"a":1}', '{"c":1}'),
        ],
    ),
    "`patternProperties`": (
        "too strict",
        "refused",
        [
            (
                {"type": "object", "patternProperties": {"^k[0-9]$": INTEGER}, "additionalProperties": False},
                '{"k1":1}',
                '{"x":1}',
            )
        ],
    ),
    "`minProperties`, `maxProperties`": (
        "ignored",
        "refused",
        [
            (
                {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 1},
                '{"x":1}',
                "{}",
            )
        ],
    ),
    "`propertyNames`": (
        "ignored",
        "refused",
        [({"type": "object", "propertyNames": {"maxLength": 1}}, '{"a":1}', '{"ab":1}')],
    ),
    "`dependentRequired`": (
        "ignored",
        "refused",
        [({"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}}, "{}", '{"a":1}')],
    ),
    "`unevaluatedProperties`": (
        "kept",
        "refused",
        [({"type": "object", "properties": AB, "unevaluatedProperties": False}, '{"a":1}', '{"c":1}')],
    ),
    "`items`": ("kept", "kept", [({"type": "array", "items": INTEGER}, "[1,2]", '["a"]')]),
    "`prefixItems`": (
        "refused",
        "refused",
        [
            (
                {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2},
                '[1,"a"]',
                '["a",1]',
            )
        ],
    ),
    "`minItems`, `maxItems`": (
        "kept",
        "kept",
        [({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, "[1]", "[]")],
    ),
    "`uniqueItems`": (
        "ignored",
        "refused",
        [({"type": "array", "items": INTEGER, "uniqueItems": True}, "[1,2]", "[1,1]")],
    ),
    "`contains`": ("ignored", "refused", [({"type": "array", "contains": INTEGER}, "[1]", '["a"]')]),
    "`minLength`, `maxLength`": (
        "kept",
        "refused",
        [({"type": "string", "minLength": 1, "maxLength": 2}, '"ab"', '"abc"')],
    ),
    "`pattern`": ("kept", "kept", [({"type": "string", "pattern": "^[a-z]{2}$"}, '"ab"', '"a1"')]),
    "`pattern` without anchors": ("ignored", "kept", [({"type": "string", "pattern": "[0-9]"}, '"a1"', '"a"')]),
    "`pattern` with a lookaround": (
        "ignored",
        "refused",
        [({"type": "string", "pattern": "^(?=a)[a-z]$"}, '"a"', '"b"')],
    ),
    "`pattern` with a length": (
        "ignored",
        "refused",
        [({"type": "string", "pattern": "^a*$", "maxLength": 2}, '"aa"', '"aaa"')],
    ),
    "`format`: date, time, date-time, uuid": (
        "kept",
        "kept",
        [
            ({"type": "string", "format": "date"}, '"2024-02-28"', '"2024"'),
            ({"type": "string", "format": "uuid"}, '"123e4567-e89b-12d3-a456-426614174000"', '"12"'),
        ],
    ),
    "`format`: email, ipv4, ipv6, hostname, duration": (
        "ignored",
        "kept",
        [
            ({"type": "string", "format": "ipv4"}, '"127.0.0.1"', '"127.0.0"'),
            ({"type": "string", "format": "email"}, '"a@b.cd"', '"a"'),
        ],
    ),
    "`minimum`, `maximum` of integers": (
        "kept",
        "kept",
        [({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, "11", "12")],
    ),
    "`minimum`, `maximum` of numbers": (
        "ignored",
        "kept",
        [({"type": "number", "minimum": 0.5, "maximum": 2}, "0.75", "2.5")],
    ),
    "`multipleOf`": ("ignored", "kept", [({"type": "integer", "multipleOf": 5}, "15", "16")]),
    "`$ref`, `$defs`, recursion": (
        "kept",
        "kept",
        [
            (
                {
                    "$ref": "#/$defs/n",
                    "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
                },
                '{"n":{"n":{}}}',
                '{"n":1}',
            )
        ],
    ),
    "keywords next to `$ref`": (
        "ignored",
        "refused",
        [({"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": INTEGER}}, "3", "2")],
    ),
    "`anyOf`": ("kept", "kept, not at the root", [({"anyOf": [INTEGER, {"type": "null"}]}, "null", '"a"')]),
    "keywords next to `anyOf`": (
        "ignored",
        "refused",
        [
            (
                {"type": "object", "properties": AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
                '{"a":1}',
                "{}",
            )
        ],
    ),
    "`oneOf`": ("ignored", "refused", [({"oneOf": [INTEGER, {"type": "number"}]}, "0.5", "1")]),
    "`allOf` of objects": (
        "too strict",
        "refused",
        [
            (
                {"allOf": [{"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, {"required": ["b"]}]},
                '{"a":1,"b":"x"}',
                '{"a":1}',
            )
        ],
    ),
    "`allOf` of other types": ("too strict", "refused", [({"allOf": [INTEGER, {"minimum": 3}]}, "3", "2")]),
    "`not`": ("ignored", "refused", [({"type": "integer", "not": {"const": 5}}, "6", "5")]),
    "`if`, `then`, `else`": (
        "ignored",
        "refused",
        [({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 9}}, "9", "10")],
    ),
}
"""For each keyword: its support by llama-server (`tools/schemas.py`), its support by OpenAI's documentation,
and examples."""
