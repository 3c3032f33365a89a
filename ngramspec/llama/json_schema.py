"""JSON schemas as GBNF grammars, in which no constraint is lost: what cannot be said is refused.

`llama_cpp`'s converter does the work on schemas that are first brought into a form that it gets right. By itself it
drops what stands beside `$ref`, `anyOf` or a list of types, and bounds of numbers; it lets line breaks into strings,
which then are no JSON; and it makes grammars that do not parse of quotes in names and constants.

Where a schema leaves a choice, the grammar may be stricter: objects hold no properties but those named (if `properties`
names any or says that there are none), in the schema's order, required ones first; tuples no items but those named.
`oneOf` means `anyOf`. `format` is enforced for uuid, date, time and date-time, and else is a comment, as the standard
has it; so are keywords that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llama_cpp.llama_grammar import PRIMITIVE_RULES, BuiltinRule, SchemaConverter

from ngramspec.errors import GrammarError
from ngramspec.llama.json_values import literal, number_rule, one_of, repeated, translated

TYPES: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties", "allOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""The constraints that each type may have here."""

_CHOICES = ("$ref", "anyOf", "oneOf", "const", "enum", "type")
_KNOWN = frozenset().union(*TYPES.values()) - {"format"}
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("not", "if", "then", "else", "propertyNames", "contains", "unevaluatedItems"), ()),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies", "patternProperties"), ({},)),
    **dict.fromkeys(("minProperties", "minContains"), (0,)),
    **dict.fromkeys(("maxProperties", "maxContains", "multipleOf", "additionalItems", "$dynamicRef"), ()),
    **{"uniqueItems": (False,), "unevaluatedProperties": (False, True), "$recursiveRef": ()},
}
"""Constraints that no grammar here says, and their values that say nothing."""

_PYTHON: Mapping[object, tuple[type, ...]] = {
    **{"object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),)},
    **{"integer": (int,), "number": (int, float)},
}

_CHARACTER = BuiltinRule(r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})')


def schema_rules(schemas: Mapping[str, Mapping[str, Any]], *, strict: bool = True, trimmed: bool = False) -> str:
    """GBNF rules of JSON that fits schemas, by the names that the rules shall have. {} is any object.

    Args:
        schemas: the schemas.
        strict: whether constraints that a grammar cannot say are refused; else they are left out.
        trimmed: whether the JSON ends with its last character, not with white space.

    Raises:
        GrammarError: a schema that is none, or says what a grammar cannot; the message names the place in it.
    """
    lines: dict[str, None] = {}
    for name, schema in schemas.items():
        converter = _Converter(name, schema, strict)
        try:
            rule = converter.visit(schema or {"type": "object"}, f"{name}-value")
        except GrammarError:
            raise
        except Exception as error:  # asserts and whatever a strange schema runs into
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
            reason = " ".join(reason.split())
            raise GrammarError(f"the JSON schema cannot be turned into a grammar: {reason}") from error
        rule = converter.trimmed(rule) if trimmed else rule
        lines |= dict.fromkeys([f"{name} ::= {rule}", *converter.format_grammar().splitlines()])
    return "\n".join(lines)


def schema_grammar(schema: str, *, strict: bool = True, trimmed: bool = False) -> str:
    """The GBNF grammar of a JSON schema, given as JSON; arguments and errors as of `schema_rules`."""
    try:
        loaded = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise GrammarError(f"the JSON schema is a {type(loaded).__name__}, but must be an object")
    return "root ::= schema\n" + schema_rules({"schema": loaded}, strict=strict, trimmed=trimmed)


def pattern_grammar(pattern: str) -> str:
    """The GBNF grammar of the texts that a regular expression matches as a whole.

    Quotes, backslashes and control characters are left out of what a class or a dot matches.

    Raises:
        GrammarError: it is none, or holds what is not known here: lookaheads, references, characters that JSON escapes.
    """
    converter = _Converter("text", {}, strict=True, raw=True)
    inner = pattern.removeprefix("^")
    inner = inner.removesuffix("$") if not inner.endswith("\\$") else inner
    try:
        rule = converter._visit_pattern(translated(f"^(?:{inner})$"), "text")
    except (ValueError, AssertionError, RecursionError) as error:
        raise GrammarError(f"the pattern cannot be turned into a grammar: {error}") from error
    return f"root ::= {rule}\n{converter.format_grammar()}"


class _Converter(SchemaConverter):  # type: ignore[misc]
    """The converter, kept to what it gets right.

    The names of its rules begin with `name`; references point into `root`; `raw`: what a pattern matches is the text
    itself, not a JSON string.
    """

    def __init__(self, name: str, root: Mapping[str, Any], strict: bool, raw: bool = False) -> None:
        super().__init__(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=raw)
        self._name, self._root, self._strict = name, root, strict
        self._places: dict[str, str] = {}

    def trimmed(self, rule: str, depth: int = 8) -> str:
        """A rule without white space behind it, as far as that is found within so many rules."""
        choices = rule.split(" | ")
        if len(choices) > 1 and self._rules.keys() >= set(choices):
            return " | ".join([self.trimmed(choice, depth) for choice in choices])
        if rule in self._rules and depth:
            found = self.trimmed(self._rules[rule], depth - 1)
            return rule if found == self._rules[rule] else found
        return rule.removesuffix(" space")

    def visit(self, schema: Any, name: str) -> str:
        """The name of a rule for a schema; `name` is a proposal, and says where in the whole it is."""
        try:
            return self._visit(schema, name)
        except ValueError as error:
            place = name.removeprefix(f"{self._name}-value").strip("-")
            reason = " ".join(str(error).split()) + (f" at {place!r}" if place else "")
            raise GrammarError(f"the JSON schema cannot be turned into a grammar: {reason}") from error

    def _visit(self, schema: Any, name: str) -> str:
        """The same; what cannot be said in a grammar is a ValueError, here and in all that follows."""
        if schema is True or schema == {}:
            return str(self._add_primitive("value", PRIMITIVE_RULES["value"]))
        if not isinstance(schema, Mapping):
            raise ValueError(f"{json.dumps(schema)} is no schema")
        schema = self._said(schema)
        for keyword, harmless in _REFUSED.items():
            if keyword in schema and schema[keyword] not in harmless:
                raise ValueError(f"{keyword} cannot be said in a grammar")
        for keyword in _CHOICES:
            if keyword in schema:
                return getattr(self, f"_visit_{keyword.lstrip('$').lower()}")(schema, name)  # type: ignore[no-any-return]
        for kind, keywords in TYPES.items():
            if (keywords - {"format"}) & schema.keys():
                return self._visit_kind({**schema, "type": kind}, name)
        return self.visit({}, name)

    # ------------------------------------------------------------------ what may stand alone

    def _visit_ref(self, schema: Mapping[str, Any], name: str) -> str:
        reference = str(schema["$ref"])
        if reference not in self._places:
            target = self._target(schema)
            place = f"{self._name}-ref-{len(self._places)}"
            self._places[reference] = place
            self._rules[place] = self.visit(target, f"{place}-value")
            if self._rules[place] == place or self._rules.get(self._rules[place]) == place:
                raise ValueError(f"{reference} refers to itself")
        return self._places[reference]

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What a reference, which stands alone, points to."""
        self._alone(schema, "$ref")
        reference, target = schema["$ref"], self._root
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise ValueError(f"the reference {reference!r} is not one within the schema")
        for step in reference[2:].split("/") if reference != "#" else []:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or key not in target:
                raise ValueError(f"there is no {reference}")
            target = target[key]
        return target

    def _visit_anyof(self, schema: Mapping[str, Any], name: str) -> str:
        keyword = "anyOf" if "anyOf" in schema else "oneOf"
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise ValueError(f"{keyword} is not a list of schemas")
        beside = {key: value for key, value in schema.items() if key != keyword}
        objects = all(isinstance(one, Mapping) and one.get("type") == "object" for one in branches)
        if objects and beside.get("type") == "object":
            del beside["type"]
        if not self._strict and (TYPES["object"] | set(_CHOICES)) & beside.keys():
            return self.visit(beside, name)
        self._alone(beside, keyword)
        return str(self._add_rule(name, self._generate_union_rule(name, branches)))

    _visit_oneof = _visit_anyof

    def _visit_const(self, schema: Mapping[str, Any], name: str) -> str:
        return self._visit_enum({**schema, "enum": [schema["const"]]}, name)

    def _visit_enum(self, schema: Mapping[str, Any], name: str) -> str:
        self._alone({key: value for key, value in schema.items() if key not in {"type", "const"}}, "enum")
        kinds = schema.get("type", list(TYPES))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        values = schema["enum"] if isinstance(schema["enum"], list) else []
        fitting = [value for value in values if any(_is(value, kind) for kind in kinds)]
        if not fitting:
            raise ValueError("no value of enum is of its type" if values else "enum is not a list of values")
        choices = one_of([json.dumps(value, ensure_ascii=False) for value in fitting])
        return str(self._add_rule(name, f"({choices}) space"))

    def _visit_type(self, schema: Mapping[str, Any], name: str) -> str:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in TYPES:
                raise ValueError(f"{kind!r} is no type of JSON")
        shared = {key: value for key, value in schema.items() if key not in _KNOWN}
        allowed = frozenset().union(*(TYPES[kind] for kind in kinds))
        if self._strict and (stray := sorted(_KNOWN & schema.keys() - allowed)):
            raise ValueError(f"{stray[0]} does not go with the type {' or '.join(kinds)}")
        each = [{**shared, **{key: schema[key] for key in TYPES[kind] & schema.keys()}, "type": kind} for kind in kinds]
        if len(each) == 1:
            return self._visit_kind(each[0], name)
        rules = [self.visit(one, f"{name}-{one['type']}") for one in each]
        return str(self._add_rule(name, " | ".join(rules)))

    # ------------------------------------------------------------------------------- one type

    def _visit_kind(self, schema: Mapping[str, Any], name: str) -> str:
        kind = schema["type"]
        if kind in {"object", "array", "string"}:
            return getattr(self, f"_visit_{kind}")(schema, name)  # type: ignore[no-any-return]
        if TYPES[kind] & schema.keys():
            numbers = number_rule(schema, whole=kind == "integer", strict=self._strict)
            return str(self._add_rule(name, f"{numbers} space"))
        return str(self._add_primitive(kind, PRIMITIVE_RULES[kind]))

    def _visit_object(self, schema: Mapping[str, Any], name: str) -> str:
        properties, required, more = self._members(schema)
        if not properties and not required:
            if more is True and schema.keys().isdisjoint({"properties", "allOf"}):
                return str(self._add_primitive("object", PRIMITIVE_RULES["object"]))
            return str(self._add_rule(name, self._build_object_rule([], set(), name, more is not True and more)))
        for key in required - properties.keys():
            if more is False:
                raise ValueError(f"{key!r} is required, and no property")
            properties[key] = more
        return str(self._add_rule(name, self._build_object_rule(list(properties.items()), required, name, False)))

    def _members(self, schema: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], Any]:
        """Properties, those required, and the schema of further ones, of a schema and all of its `allOf`."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise ValueError("properties is not an object")
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise ValueError("required is not a list of names")
        found, wanted, more = dict(properties), set(required), schema.get("additionalProperties", True)
        parts = schema.get("allOf", [])
        if not isinstance(parts, list):
            raise ValueError("allOf is not a list of schemas")
        for part in parts:
            target = self._target(part) if isinstance(part, Mapping) and "$ref" in part else part
            target = self._said(target) if isinstance(target, Mapping) else target
            if not isinstance(target, Mapping) or target.get("type", "object") != "object":
                raise ValueError("allOf of anything but objects cannot be said in a grammar")
            simple = TYPES["object"] - {"allOf"}
            if stray := (_KNOWN | _REFUSED.keys() | set(_CHOICES) - {"type"}) - simple & target.keys():
                raise ValueError(f"{min(stray)} in allOf cannot be said in a grammar")
            inner, needed, others = self._members(target)
            if twice := {key for key in inner.keys() & found.keys() if inner[key] != found[key]}:
                raise ValueError(f"allOf constrains {min(twice)!r} twice, which cannot be said in a grammar")
            if others is not True or more is not True:
                raise ValueError("additionalProperties beside allOf cannot be said in a grammar")
            found |= inner
            wanted |= needed
        return found, wanted, more

    def _visit_array(self, schema: Mapping[str, Any], name: str) -> str:
        items = schema.get("prefixItems", schema.get("items", True))
        least, most = self._count(schema, "minItems") or 0, self._count(schema, "maxItems")
        if isinstance(items, list):
            if least > len(items) or (most is not None and most < len(items)):
                raise ValueError("minItems or maxItems contradict the items named")
            rules = [self.visit(item, f"{name}-tuple-{number}") for number, item in enumerate(items)]
            return str(self._add_rule(name, '"[" space ' + ' "," space '.join(rules) + ' "]" space'))
        item = self.visit(items, f"{name}-item")
        if most == 0:
            return str(self._add_rule(name, '"[" space "]" space'))
        further = repeated(f'("," space {item})', max(least - 1, 0), None if most is None else most - 1)
        rule = f"{item} {further}" if least else f"({item} {further})?"
        return str(self._add_rule(name, f'"[" space {rule} "]" space'))

    def _visit_string(self, schema: Mapping[str, Any], name: str) -> str:
        least, most = self._count(schema, "minLength"), self._count(schema, "maxLength")
        if "pattern" in schema:
            if self._strict and (least or most is not None):
                raise ValueError("pattern beside minLength or maxLength cannot be said in a grammar")
            try:
                return str(self._visit_pattern(translated(schema["pattern"]), name))
            except (ValueError, AssertionError) as error:
                if not self._strict:
                    return self.visit({key: value for key, value in schema.items() if key != "pattern"}, name)
                raise ValueError(f"pattern {schema['pattern']!r}: {error}") from error
        if least or most is not None:
            character = self._add_primitive("char", _CHARACTER)
            block = self._add_rule("char-block", f"{character}{{500}}")
            rule = repeated(character, least or 0, most, block=(block, 500))
            return str(self._add_rule(name, f'"\\"" {rule} "\\"" space'))
        known = {"uuid", "date", "time", "date-time"} & {str(schema.get("format"))}
        return str(super().visit({"type": "string", **({"format": min(known)} if known else {})}, name))

    # ---------------------------------------------------------------------------------- tools

    def _said(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema without the constraints that are left out."""
        if self._strict:
            return schema
        said = {key: value for key, value in schema.items() if key not in _REFUSED}
        if schema.get("patternProperties"):
            said.pop("additionalProperties", None)  # further properties may come after all
        if isinstance(named := said.get("properties"), Mapping):
            said["properties"] = {key: value for key, value in named.items() if value is not False}
        if "allOf" in said:
            try:
                self._members(said)
            except ValueError:
                del said["allOf"]
        return said

    def _count(self, schema: Mapping[str, Any], keyword: str) -> int | None:
        count = schema.get(keyword)
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise ValueError(f"{keyword} is not a count")
        return count

    def _alone(self, schema: Mapping[str, Any], keyword: str) -> None:
        if self._strict and (beside := sorted((_KNOWN | set(_CHOICES)) & schema.keys() - {keyword})):
            raise ValueError(f"{beside[0]} beside {keyword} cannot be said in a grammar")

    def _add_primitive(self, name: str, rule: BuiltinRule) -> Any:
        return super()._add_primitive(name, _CHARACTER if name == "char" else rule)

    def _format_literal(self, text: str) -> str:
        if text.startswith('"'):  # a name, whose letters need no escapes
            text = json.dumps(json.loads(text), ensure_ascii=False)
        return literal(text)


def _is(value: Any, kind: object) -> bool:
    """Whether a value is of a type of JSON."""
    if isinstance(value, float) and kind == "integer":
        return value.is_integer()
    return type(value) in _PYTHON.get(kind, ())
