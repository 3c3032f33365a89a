"""Random JSON schemas of given keywords, and texts drawn at random from what a grammar allows."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer

from ngramspec.grammars.lark import Lark, compile_lark

BYTES = LLTokenizer("byte")
_CLOSE_AFTER = 60  # number of bytes after which `random_text` prefers bytes that end the text
_CLOSING = b'"}]'


def read_bytes(grammar: Lark, raw: bytes) -> tuple[int, bool]:
    """Return how many bytes a grammar allows, and True if the text may end after all of them."""
    matcher = compile_lark(grammar, BYTES)
    count = matcher.try_consume_tokens(list(raw))
    assert not matcher.is_error(), matcher.get_error()
    return count, count == len(raw) and is_complete(matcher)


def is_allowed(grammar: Lark, text: str) -> bool:
    """Return True if a grammar allows the complete text."""
    return read_bytes(grammar, text.encode())[1]


def is_complete(matcher: LLMatcher) -> bool:
    return matcher.is_accepting() or matcher.stop_reason() == "NoExtension"


def random_text(grammar: Lark, rng: random.Random, max_bytes: int = 400) -> str | None:
    """Return a text drawn byte by byte, or `None` if it did not end after `max_bytes` bytes or reached a limit."""
    matcher, text = compile_lark(grammar, BYTES), b""
    while len(text) < max_bytes:
        if is_complete(matcher) and (matcher.is_stopped() or rng.random() < 0.3 or len(text) > _CLOSE_AFTER):
            return text.decode()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return None
        # ASCII only, since an even draw would rarely give ASCII.
        choices = [byte for byte in range(128) if mask[byte // 8] >> byte % 8 & 1] or [
            byte for byte in range(128, 255) if mask[byte // 8] >> byte % 8 & 1
        ]
        if not choices:
            return None
        closing = [byte for byte in choices if byte in _CLOSING]
        letters = [byte for byte in choices if byte > 32 and byte != 92] or choices
        byte = rng.choice(closing if closing and (len(text) > _CLOSE_AFTER or rng.random() < 0.3) else letters)
        matcher.consume_token(byte)
        if matcher.is_error():
            return None
        text += bytes([byte])
    return None


def is_valid(schema: Mapping[str, Any], text: str) -> bool:
    """Return True if a text is valid; the validator knows the formats that require no further package."""
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return bool(jsonschema.Draft202012Validator(schema, format_checker=formats).is_valid(json.loads(text)))


# --------------------------------------------------------------------------- schemas

Make = Any

NAMES = ("a", "b", "name", "size", "x y", 'q"', "\u00e9")
PATTERNS = ("^[a-z]{2,4}$", "^a+b?$", "[0-9]", "^(red|green)$", r"^\d{3}-\d{2}$", "^[^x]{1,5}$", r"^\w+\s\w+$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "duration")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of random keywords that fit together, with at most three levels of nesting."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth < 3:
        kinds += ["object", "object", "array", "array", "anyOf", "oneOf", "allOf", "ref", "types", "map"]
    return _MAKERS[rng.choice(kinds)](rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    kind = rng.random()
    if kind < 0.3:
        schema["pattern"] = rng.choice(PATTERNS)
    elif kind < 0.45:
        schema["format"] = rng.choice(FORMATS)
    if kind > 0.45 and rng.random() < 0.5:
        schema["minLength"] = rng.randint(0, 3)
    if kind > 0.45 and rng.random() < 0.5:
        schema["maxLength"] = rng.randint(3, 9)
    return schema


def _number(rng: random.Random, kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    low = rng.randint(-200, 200) if kind == "integer" else rng.choice([-1.5, 0, 0.25, 3, -100])
    if rng.random() < 0.4:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.4:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(20, 500)
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice([2, 5, 0.5, 10])
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {n: random_schema(rng, depth + 1) for n in names}}
    if names and rng.random() < 0.8:
        schema["required"] = rng.sample(names, rng.randint(1, len(names)))
    if rng.random() < 0.3:
        schema["additionalProperties"] = rng.choice([False, True, {"type": "integer"}])
    return schema


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    inner = random_schema(rng, depth + 1)
    if rng.random() < 0.5:
        schema: dict[str, Any] = {"type": "object", "additionalProperties": inner}
    else:
        schema = {"type": "object", "patternProperties": {"^k[0-9]$": inner}, "additionalProperties": False}
    if rng.random() < 0.5:
        schema["minProperties"] = rng.randint(0, 2)
    if rng.random() < 0.5:
        schema["maxProperties"] = rng.randint(2, 4)
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.5:
            schema["items"] = rng.choice([False, random_schema(rng, depth + 1)])
    elif rng.random() < 0.9:
        schema["items"] = random_schema(rng, depth + 1)
    if rng.random() < 0.4:
        schema["minItems"] = rng.randint(0, 2)
    if rng.random() < 0.4:
        schema["maxItems"] = rng.randint(2, 5)
    return schema


def _branches(rng: random.Random, depth: int) -> list[dict[str, Any]]:
    return [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = rng.sample(["string", "boolean", "null", "array"], 2)
    return {"oneOf": [_MAKERS[kind](rng, depth + 1) for kind in kinds]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, 3)
    parts = [
        {"properties": {name: random_schema(rng, depth + 1)}, "required": [name]}
        if rng.random() < 0.7
        else {"properties": {name: random_schema(rng, depth + 1)}}
        for name in names[:2]
    ]
    return {"type": "object", "properties": {names[2]: random_schema(rng, depth + 1)}, "allOf": parts}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    inner = random_schema(rng, depth + 1)
    name = f"d{rng.randrange(10**6)}"
    return {"$ref": f"#/$defs/{name}", "DEFS": {name: inner}}


def _types(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.sample(["string", "integer", "boolean", "null", "array"], 2)}


_MAKERS: Mapping[str, Make] = {
    "string": _string,
    "integer": lambda rng, depth: _number(rng, "integer"),
    "number": lambda rng, depth: _number(rng, "number"),
    "boolean": lambda rng, depth: {"type": "boolean"},
    "null": lambda rng, depth: {"type": "null"},
    "enum": lambda rng, depth: {
        "enum": rng.sample(["red", "green", 5, -2.5, None, True, 'a"b', [1, "x"], {"k": 1}], 3)
    },
    "const": lambda rng, depth: {"const": rng.choice(["red", 7, None, "\u00e9\n", [], {"a": [1]}])},
    "object": _object,
    "map": _map,
    "array": _array,
    "anyOf": lambda rng, depth: {"anyOf": _branches(rng, depth)},
    "oneOf": _one_of,
    "allOf": _all_of,
    "ref": _reference,
    "types": _types,
}


def whole_schema(rng: random.Random) -> dict[str, Any]:
    """Return a random schema whose definitions are at its root."""
    schema = random_schema(rng)
    definitions: dict[str, Any] = {}

    def collect(value: Any) -> Any:
        if isinstance(value, dict):
            if isinstance(inner_definitions := value.get("DEFS"), dict) and "$ref" in value:
                definitions.update({name: collect(inner) for name, inner in inner_definitions.items()})
            return {key: collect(inner) for key, inner in value.items() if key != "DEFS"}
        return [collect(inner) for inner in value] if isinstance(value, list) else value

    whole = collect(schema)
    return {**whole, "$defs": definitions} if definitions else whole
