"""Hostile grammars: GBNF, regular expressions and JSON schemas, in the fields of all APIs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from hostile.attack import Attack, format_request, random_size


def _literal(rng: random.Random) -> str:
    return json.dumps(rng.choice(["a", "ab", "é", " ", "\n", "a" * random_size(rng, 2, 2000), "\U0001f600"]))


def make_gbnf(rng: random.Random) -> str:
    """Return a GBNF grammar: a random one, or one part repeated in a way that is expensive to prepare or to follow."""
    many = random_size(rng, 2, 200_000)
    kinds: tuple[Callable[[], str], ...] = (
        lambda: "root ::= " + " | ".join(f'"{rng.randrange(10**9)}"' for _ in range(min(many, 100_000))),
        lambda: f'root ::= "{"ab" * many}"',
        lambda: f"root ::= {'(' * many}[a-z]{')' * many}{rng.choice(['', '*'])}",
        lambda: f'root ::= {"(" * 9}"a"{"".join(f"){{0,{random_size(rng, 2, 10**6)}}}" for _ in range(9))}',
        lambda: f'root ::= {"(" * 30}"a"{")*" * 30}',
        lambda: (
            "\n".join(["root ::= r0", *(f'r{i} ::= r{i + 1} r{i + 1} | "x"' for i in range(min(many, 20_000)))])
            + f'\nr{min(many, 20_000)} ::= "a"'
        ),
        lambda: 'root ::= root root root | "a" | root "a" | ""',
        lambda: 'root ::= a b\na ::= b a | ""\nb ::= a "x"? | [^\\x00]*',
        lambda: f'root ::= ("a"? ){{{many}}} "a"{{{many}}}',
        lambda: f"root ::= {'.* ' * min(many, 500)}[xyz]",
        lambda: f'root ::= ([a-z]* "x" [a-z]{{{random_size(rng, 2, 5000)}}} )+',
        lambda: f"root ::= [{''.join(chr(rng.randrange(0x100, 0xD000)) for _ in range(min(many, 30_000)))}]+",
        lambda: "#" + " comment" * many + "\nroot ::= [a-z]+",
        lambda: "root ::= <[5]> <|im_end|> <[99999999]>*",
        lambda: f"root ::= {_rule(rng, 0)}\n" + "\n".join(f"r{i} ::= {_rule(rng, 0)}" for i in range(5)),
    )
    return rng.choice((*kinds, kinds[-1], kinds[-1]))()


def _rule(rng: random.Random, depth: int) -> str:
    if depth > 4 or rng.random() < 0.25:
        return rng.choice([_literal(rng), "[a-c]", "[^a]", ".", '""', f"r{rng.randrange(5)}"])
    parts = [_rule(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    count = rng.choice(
        ["", "*", "+", "?", f"{{{random_size(rng, 1, 2000)}}}", f"{{,{random_size(rng, 1, 2000)}}}", "{3,}"]
    )
    return f"({rng.choice([' ', ' | ']).join(parts)}){count}"


def make_regex(rng: random.Random) -> str:
    """Return a regular expression: a random one, or one that is expensive to prepare."""
    many = random_size(rng, 2, 100_000)
    kinds: tuple[Callable[[], str], ...] = (
        lambda: f"{'(' * min(many, 300)}a{')*' * min(many, 300)}",
        lambda: f"(a{{1,{many}}}){{1,{random_size(rng, 2, 1000)}}}",
        lambda: "|".join(str(rng.random()) for _ in range(many)),
        lambda: f"(.*a){{{random_size(rng, 2, 200)}}}.{{{random_size(rng, 2, 2000)}}}",
        lambda: rf"[\p{{L}}\p{{N}}\W]{{{many}}}(?i:é|ß)*$",
        lambda: rng.choice([r"(a)\1", "(?=a)b", "(?<!x)y", "(?P<n>a)(?P=n)", "[", "a{", "\\", "^$^$", "(?i)k" * many]),
        lambda: "(?:" * many,
        lambda: f"(a|aa|aaa|[ab]*b)*{'c?' * min(many, 5000)}",
        lambda: "".join(rng.choice("ab()[]{}*+?|.^$\\d1,-") for _ in range(rng.randint(1, 40))),
    )
    return rng.choice(kinds)()


def make_schema(rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON schema: a random one, or one that is expensive to prepare."""
    if depth == 0 and rng.random() < 0.5:
        return _large_schema(rng)
    inner = [make_schema(rng, depth + 1) for _ in range(2)] if depth < 4 else [True, {}]
    huge = rng.choice([0, 1, -1, 10**3, 10**6, 10**12, 1e300, 0.1, "x", None])
    return rng.choice(
        (
            {"type": "object", "properties": {"a": inner[0], "b": inner[1]}, "maxProperties": huge},
            {"type": "object", "patternProperties": {make_regex(rng): inner[0]}, "additionalProperties": inner[1]},
            {"type": "array", "prefixItems": inner, "items": inner[0], "minItems": huge, "maxItems": huge},
            {"type": "string", "minLength": huge, "maxLength": huge},
            {"type": "string", "pattern": make_regex(rng), "maxLength": rng.choice([5, 10**5])},
            {"type": "number", "minimum": -huge if isinstance(huge, int) else huge, "multipleOf": huge},
            {rng.choice(["anyOf", "oneOf", "allOf"]): inner},
            {"type": ["string", "null", "array"], "format": rng.choice(["email", "uri", "date-time", "regex"])},
            {"$ref": rng.choice(["#", "#/properties/a", "http://localhost/x", "#/$defs/nothing"])},
            {"not": inner[0], "if": inner[1], "contains": inner[0], "uniqueItems": True},
        )
    )


def _large_schema(rng: random.Random) -> Any:
    many = random_size(rng, 2, 20_000)

    def nest() -> Any:
        value: Any = {"type": "string"}
        for _ in range(random_size(rng, 2, 400)):
            value = rng.choice(
                ({"anyOf": [value, {"type": "null"}]}, {"type": "array", "items": value}, {"allOf": [value]})
            )
        return value

    def chain() -> Any:
        links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": "#/$defs/d0"}]} for i in range(many)}
        return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{many}": {"type": "null"}}}

    def wide() -> Any:
        names = {f"p{i}": {"type": "string", "maxLength": i} for i in range(many)}
        return {"type": "object", "properties": names, "required": list(names)[:: rng.randint(1, 9)]}

    kinds: tuple[Callable[[], Any], ...] = (
        nest,
        chain,
        wide,
        lambda: {"$ref": "#"},
        lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        lambda: {"enum": [rng.random() for _ in range(many)]},
        lambda: {"const": "x" * many * 10},
        lambda: {"anyOf": [{"type": "object", "properties": {f"a{i}": True}} for i in range(many)]},
        lambda: {"allOf": [{"type": "integer", "multipleOf": rng.randint(1, 10**6)} for _ in range(min(many, 50))]},
        lambda: {"type": "array", "items": {"pattern": make_regex(rng)}, "minItems": many, "maxItems": 10**9},
    )
    return rng.choice(kinds)()


def make_grammar_attack(rng: random.Random) -> Attack:
    """Return a request whose response has to follow a hostile grammar."""
    completion = {"max_tokens": rng.choice([4, 50]), "stream": rng.random() < 0.5}
    strict, repeat, many = rng.random() < 0.5, rng.choice([1, 1, 3]), random_size(rng, 2, 200_000)
    chat = completion | {"messages": [{"role": "user", "content": "a"}]}
    completion = completion | {"prompt": "a"}

    def tool() -> dict[str, Any]:
        function = {"name": "f", "description": "d", "parameters": make_schema(rng), "strict": strict}
        return {"type": "function", "function": function}

    def form() -> dict[str, Any]:
        return {"name": "n", "schema": make_schema(rng), "strict": strict}

    kinds: tuple[Callable[[], tuple[str, dict[str, Any]]], ...] = (
        lambda: ("/completion", completion | {"grammar": make_gbnf(rng)}),
        lambda: ("/completion", completion | {"json_schema": make_schema(rng)}),
        lambda: ("/v1/completions", completion | {"guided_regex": make_regex(rng)}),
        lambda: ("/v1/completions", completion | {"guided_grammar": make_gbnf(rng), "n": repeat}),
        lambda: ("/v1/completions", completion | {"guided_choice": [str(rng.random()) for _ in range(many)]}),
        lambda: ("/v1/chat/completions", chat | {"response_format": {"type": "json_schema", "json_schema": form()}}),
        lambda: ("/v1/chat/completions", chat | {"guided_json": make_schema(rng)}),
        lambda: ("/v1/chat/completions", chat | {"tools": [tool()] * repeat, "tool_choice": "required"}),
        lambda: ("/v1/chat/completions", chat | {"tools": [tool()], "tool_choice": "auto"}),
        lambda: (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 50, "text": {"format": {"type": "json_schema", **form()}}},
        ),
        lambda: ("/api/chat", chat | {"format": make_schema(rng), "options": {"num_predict": 4}}),
        lambda: (
            "/v1/messages",
            chat | {"tools": [{"name": "f", "input_schema": make_schema(rng)}], "tool_choice": {"type": "any"}},
        ),
    )
    path, body = rng.choice(kinds)()
    return Attack((format_request(path, body),))
