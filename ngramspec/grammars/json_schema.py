"""JSON schemas as expressions of a `Lark` grammar; llguidance does the work.

Six things are settled here, because the standard leaves them open or llguidance decides otherwise:

- An object with `properties` or `required` contains only the properties that the schema names, unless the schema
  mentions others (`additionalProperties`, `patternProperties`). Models would add properties without end.
- `oneOf` means `anyOf`, and an unknown `format` is a comment.
- A schema without `type` is of the type that its other keywords are about, and an array with `prefixItems` contains no
  further items unless `items` allows them.
- White space is what models write: nothing, a space, or one or two line ends and an indentation.
- Lengths of 2^32 or more and bounds outside of 64 bits, or of +-10^18 if numbers need not be integers, limit nothing.
- A schema that is not strict loses what no engine supports, such as `not`, `if`, `uniqueItems` and lookarounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher

from ngramspec.data import GrammarError
from ngramspec.grammars.lark import Lark, failure, lark

# Formats that are enforced.
FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_MAX_INTEGER = 2**63 - 1
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
_OPEN_KEYS = ("additionalProperties", "patternProperties")
# Keywords that are about one type each.
_TYPES: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", *_OPEN_KEYS, "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "minLength", "maxLength"}),
    "number": frozenset({*_BOUNDS, "multipleOf"}),
}
# Keywords that llguidance does not know, and their values that constrain nothing here.
_EMPTY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **{"uniqueItems": (False,), "unevaluatedProperties": (False, True), "minContains": (0, 1)},
}
# Keywords that are left out one group after the other until a schema that is not strict compiles.
_LENIENT = (
    (),
    ("multipleOf", "patternProperties", "minProperties", "maxProperties"),
    (*_BOUNDS, "minLength", "maxLength", "minItems", "maxItems"),
    ("allOf", "format", "pattern"),
)
MAX_SCHEMAS = 20_000  # in one, with those that references repeat


def json_rule(schema: Mapping[str, Any], *, strict: bool = True) -> str:
    """Return the Lark expression of JSON that is valid by a schema ({}: any object); raise a GrammarError."""
    return "%json " + _to_json(_prepare(schema or {"type": "object"}, strict=strict), strict=strict)


def call_rule(name: str, key: str, parameters: Mapping[str, Any], *, strict: bool = True) -> str:
    """Return the Lark expression of a call as an object: {"name": NAME, KEY: arguments}; see `json_rule` for errors."""
    # With a separate id, references in the parameters point into the parameters.
    arguments = {"$id": "arguments:", **_prepare(parameters, strict=strict)}
    properties = {"name": {"const": name}, key: arguments}
    whole = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return "%json " + _to_json(whole, strict=strict)


def _prepare(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return a schema in the form for llguidance, which can compile it; see `json_rule` for errors."""
    problem: str | None = None
    omitted_keys: set[str] = set()
    for group in _LENIENT[:1] if strict else _LENIENT:
        omitted_keys |= {*group}
        try:
            prepared: dict[str, Any] = _Preparation(schema, strict, omitted_keys).convert(schema, closed=True)
        except RecursionError as error:
            raise _make_error("it is nested too deeply") from error
        prepared.pop("x-guidance", None)
        if (problem_here := failure(LLMatcher.grammar_from_json_schema(_to_json(prepared, strict=strict)))) is None:
            return prepared
        problem = problem or problem_here
    raise _make_error(problem or "it is too large")


def _to_json(schema: Mapping[str, Any], *, strict: bool) -> str:
    options = {
        "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
        "coerce_one_of": True,
        "json_allow_general_unicode_escapes": True,
        "lenient": not strict,
    }
    try:
        # As the last key: llguidance puts the last one in its place, and takes the order of properties from the keys.
        return json.dumps({**schema, "x-guidance": options})
    except (TypeError, ValueError, RecursionError) as error:
        raise _make_error(f"it is nested too deeply, or is not JSON: {error}") from error


def schema_grammar(schema: str, *, strict: bool = True) -> Lark:
    """Return the grammar of a JSON schema that is given as JSON text; see `json_rule` for arguments and errors."""
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise GrammarError(f"the JSON schema is a {type(value).__name__}, but must be an object")
    return lark(f"start: {json_rule(value, strict=strict)}")


def find_target(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema that `$ref` points to; `None` without one, or if only llguidance finds it."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target: Any = root
    for step in reference[2:].split("/") if reference != "#" else []:
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else None


def _make_error(why: str) -> GrammarError:
    return GrammarError(f"the JSON schema cannot be used: {' '.join(why.split())}")


def _find_unwritable(value: Any) -> int | float | None:
    """Return a number in a value that llguidance, with doubles and 64 bits, would write as another one, or fail on."""
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return next((number for number in map(_find_unwritable, inner) if number is not None), None)
    if not isinstance(value, int | float) or abs(value) <= 2**53 or value == _MAX_INTEGER:
        return None
    return value if abs(value) >= 2**63 or float(value) != value else None


def _find_problem(key: str, value: Any) -> str | None:
    """Return why llguidance would hang on a keyword or enforce another value; `None` otherwise."""
    if key in {"const", "enum"} and (number := _find_unwritable(value)) is not None:
        return f"{str(number)[:40]} in {key} has more digits than llguidance can write; use a string"
    if key == "multipleOf" and isinstance(value, int | float) and math.isfinite(value):
        # It makes a state for each remainder: 100,003 take a second, and 2^32 / 10 or more have no end.
        n_digits = len(Decimal(repr(value)).normalize().as_tuple().digits)
        if n_digits > 5 or value > 10**8:
            return f"multipleOf {str(value)[:40]} has more than 5 significant digits or is too large"
    return None


class _Preparation:
    """One pass over a schema that brings it into the form for llguidance; `omitted_keys`: keywords to remove."""

    def __init__(self, root: Mapping[str, Any], strict: bool, omitted_keys: set[str]) -> None:
        self._root, self._strict, self._omitted_keys = root, strict, omitted_keys
        self._count = 0

    def convert(self, schema: Any, *, closed: bool) -> Any:
        """Prepare a schema; anything else that the user put there is left to llguidance, which rejects it.

        `closed` allows only the named properties, but not in a part of a conjunction, whose other parts name further.
        """
        if not isinstance(schema, Mapping):
            return schema
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise _make_error(f"it consists of more than {MAX_SCHEMAS:,} schemas")
        if not closed and (target := find_target(schema, self._root)) is not None:
            schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
            return self.convert(schema, closed=False)
        self._check_circle(schema)
        keywords = {key: value for key, value in schema.items() if self._is_kept(key, value)}
        inner_closed = closed and self._is_alone(keywords)
        prepared_schema = {key: self._value(key, value, closed=inner_closed) for key, value in keywords.items()}
        if keywords.keys().isdisjoint({*_IN_PLACE, "type", "const", "enum"}):
            kinds = [kind for kind in _TYPES if _TYPES[kind] & keywords.keys()]
            prepared_schema |= {"type": kinds[0]} if kinds else {}
        self._fit_bounds(prepared_schema)
        if "prefixItems" in keywords:
            prepared_schema.setdefault("items", False)
        if closed and not (inner_closed and keywords.keys() & {*_IN_PLACE}):
            self._close(schema, prepared_schema)
        return prepared_schema

    def _value(self, key: str, value: Any, *, closed: bool) -> Any:
        if key in {"properties", "patternProperties", "$defs", "definitions"} and isinstance(value, Mapping):
            return {name: self.convert(inner, closed=True) for name, inner in value.items()}
        if key in (*_LISTS, *_SINGLE) and isinstance(value, list):
            return [self.convert(inner, closed=closed or key not in _IN_PLACE) for inner in value]
        return self.convert(value, closed=True) if key in _SINGLE else value

    def _is_kept(self, key: str, value: Any) -> bool:
        if key == "format":
            return value in FORMATS and key not in self._omitted_keys if isinstance(value, str) else True
        if key == "pattern" and not self._strict and isinstance(value, str):
            alone = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": value}))
            return key not in self._omitted_keys and failure(alone) is None
        if (problem := _find_problem(key, value)) is not None:
            if self._strict:
                raise _make_error(problem)
            return False
        return key not in self._omitted_keys and not (key in _EMPTY and value in _EMPTY[key])

    def _fit_bounds(self, schema: dict[str, Any]) -> None:
        """Round large bounds inwards, since llguidance reads them as doubles, and remove those that limit nothing."""
        types = schema.get("type")
        is_integer = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
        limit = _MAX_INTEGER if is_integer else 10**18
        for key in _BOUNDS & schema.keys():
            value = schema[key]
            if not isinstance(value, int | float) or not abs(value) > 2**53:
                continue
            sign = 1 if key.endswith("aximum") else -1
            top = sign * value - (is_integer and key.startswith("exclusive"))  # the values are at most this, times sign
            if top > limit + 1 or (top < -limit and not self._strict):
                del schema[key]
            elif top < -limit:
                raise _make_error(f"{key} {str(value)[:40]} is beyond what llguidance can express")
            elif is_integer and sign > 0 and top >= limit:
                schema[key] = limit  # which llguidance reads exactly, unlike other bounds of this size
            else:
                rounded = float(min(top, 2**63 - 1024))  # that is the last double below 2^63
                rounded = math.nextafter(rounded, -math.inf) if rounded > top else rounded
                schema[key] = sign * (int(rounded) if is_integer else rounded)
        if isinstance(length := schema.get("maxLength"), int) and length >= 2**32:
            del schema["maxLength"]

    @staticmethod
    def _is_alone(schema: Mapping[str, Any]) -> bool:
        """Return True if a schema leaves it to at most one other place which properties there are."""
        parts = [key for key in _IN_PLACE if key in schema]
        if not parts:
            return True
        several = parts == ["allOf"] and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1
        return len(parts) == 1 and not several and schema.keys().isdisjoint({"properties", *_OPEN_KEYS})

    def _close(self, schema: Mapping[str, Any], prepared_schema: dict[str, Any]) -> None:
        """Forbid properties that no part of a schema names."""
        names: dict[str, None] = {}
        for part in self._parts(schema):
            if any(key in part for key in _OPEN_KEYS):
                return
            if isinstance(properties := part.get("properties"), Mapping):
                names |= dict.fromkeys(properties)
            required_names = part.get("required", ())
            names |= dict.fromkeys(name for name in required_names if isinstance(name, str))
        properties_schema = prepared_schema.get("properties", {})
        if ("properties" not in schema and not names) or not isinstance(properties_schema, Mapping):
            return
        prepared_schema["properties"] = {**properties_schema, **dict.fromkeys(names, True), **properties_schema}
        prepared_schema["additionalProperties"] = False
        # llguidance takes the order of properties from the keyword that comes first.
        for key in [key for key in prepared_schema if key in _IN_PLACE]:
            prepared_schema[key] = prepared_schema.pop(key)

    def _parts(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield a schema and all others that it applies in place, each once."""
        waiting, visited = [schema], set[int]()
        while waiting:
            part = waiting.pop()
            if not isinstance(part, Mapping) or id(part) in visited:
                continue
            visited.add(id(part))
            yield part
            for key in ("oneOf", "anyOf", "allOf"):
                if isinstance(inner := part.get(key), list):
                    waiting += reversed(inner)
            waiting.append(find_target(part, self._root))

    def _check_circle(self, schema: Mapping[str, Any]) -> None:
        """Refuse a reference that leads to itself, which llguidance takes for a grammar without any text."""
        visited, part = set[int](), schema
        while (target := find_target(part, self._root)) is not None:
            if id(target) in visited:
                raise _make_error(f"{schema['$ref']} refers to itself")
            visited.add(id(target))
            part = target
