"""Seeded generators of hostile input for `fuzz.py`: requests, raw bytes, grammars, chat templates and model files."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.malformed_requests import BODIES, JUNK, TOOL, request

MIB = 2**20
LIMIT = 32 * MIB  # of a body
HEAD = "{} {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True)
class Attack:
    """A hostile request.

    Attributes:
        steps: Bytes to send, and numbers of seconds to wait.
        reading: How the client reads: to the end, one byte at a time, or not at all.
        connections: Number of equal connections.
    """

    steps: tuple[bytes | float, ...]
    reading: Literal["whole", "slowly", "never"] = "whole"
    connections: int = 1


def as_request(path: str, body: Any, method: str = "POST") -> bytes:
    """Return an HTTP request whose response ends the connection."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = HEAD.format(method, path) + f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    return head.encode("utf-8", "replace") + raw


def size(rng: random.Random, low: int, high: int) -> int:
    """Return a number between two limits, whose logarithm is uniform."""
    return min(high, int(low * (high / low) ** rng.random()))


# --------------------------------------------------------------------------- JSON

_SPANS = ((0x300, 0x36F), (0x5D0, 0x7FF), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0xE000, 0xF8FF), (0xFFF0, 0xFFFF))
_SPECIAL = "\0\u200d\u200b\u202e\ufeff\u2028\ufffd\x1b\x7f\U0010ffff<|im_end|>"
_TEXT_FIELDS = {
    "/tokenize": "content",
    "/v1/completions": "prompt",
    "/completion": "prompt",
    "/infill": "input_prefix",
    "/markdown": "text",
    "/api/generate": "prompt",
    "/v1/responses": "input",
    "/apply-template": "messages",
    "/v1/chat/completions": "messages",
    "/api/chat": "messages",
}
_MARKS = ("[", "*a ", "> ", "`", "_a_ ", "![", "](", "<a ", "| a ", "- ", "\t", "&amp;", "$x$ ", "``` py\n", "a\n===\n")
_LISTS = {
    "/v1/completions": (("prompt", 5), ("prompt", "a"), ("stop", "x"), ("stop_token_ids", 5), ("bad_words", "w")),
    "/completion": (("samplers", "top_k"), ("response_fields", "content"), ("logit_bias", [5, 1]), ("prompt", 5)),
    "/infill": (("input_extra", {"text": "a"}),),
    "/detokenize": (("tokens", 5),),
    "/v1/chat/completions": (
        ("messages", {"role": "user", "content": "a"}),
        ("tools", {"type": "function", "function": TOOL}),
        ("dry_sequence_breakers", "x"),
        ("guided_choice", "ab"),
    ),
    "/markdown": (("drafted", [0, 1]),),
    "/v1/messages": (("messages", {"role": "user", "content": "a"}), ("system", {"type": "text", "text": "a"})),
    "/v1/responses": (("input", {"role": "user", "content": "a"}), ("include", "x")),
    "/lora-adapters": (("", {"id": 0, "scale": 1}),),
}


def text(rng: random.Random, length: int) -> str:
    """Return unusual Unicode: characters of one script, a repeated piece, or special characters."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice((*_MARKS, "a", "\n", " ", "ab ", "é", "\U0001f600")) * length
    if kind == 1:
        first, last = rng.choice(_SPANS)
        return "".join(chr(rng.randint(first, last)) for _ in range(min(length, 20_000)))
    if kind == 2:
        return "".join(rng.choice(_SPECIAL) for _ in range(min(length, 20_000)))
    return " ".join(str(rng.random()) for _ in range(min(length // 19 + 1, 200_000)))


def extreme(rng: random.Random) -> Attack:
    """Return a request with a long text, a long list, deep JSON, duplicate names or the fields of several endpoints."""
    kind = rng.randrange(5)
    if kind == 0:
        path, name = rng.choice(list(_TEXT_FIELDS.items()))
        long = text(rng, size(rng, 10, LIMIT // 8))
        value: Any = [{"role": "user", "content": long}] if name == "messages" else long
        return Attack((as_request(path, {name: value, "max_tokens": 4, "stream": rng.random() < 0.5}),))
    if kind == 1:
        path = rng.choice(list(_LISTS))
        name, item = rng.choice(_LISTS[path])
        raw = json.dumps(item)
        many = f"[{','.join([raw] * size(rng, 10, LIMIT // (len(raw) + 1)))}]"
        needed = {"prompt": "a", "max_tokens": 4} if "completion" in path else {"max_tokens": 4, "text": "a"}
        if "chat" in path or "messages" in path:
            needed["messages"] = [{"role": "user", "content": "a"}]  # type: ignore[assignment]
        needed.pop(name, None)
        body = json.dumps(needed)[:-1] + f', "{name}": {many}}}' if name else many
        return Attack((as_request(path, body.encode()),))
    if kind == 2:
        path, depth = rng.choice(list(BODIES)), size(rng, 10, 2 * MIB)
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"anyOf":[', "]}]")))
        name = rng.choice(
            ["messages", "tools", "prompt", "json_schema", "response_format", "chat_template_kwargs", "x"]
        )
        body = f'{{"prompt": "a", "{name}": {opening * depth}1{closing * (depth if rng.random() < 0.8 else 0)}}}'
        return Attack((as_request(path, body.encode()),))
    if kind == 3:
        path, name = rng.choice(list(_TEXT_FIELDS.items()))
        pairs = [f'"{rng.choice([name, "max_tokens", "stream", "n"])}": {json.dumps(rng.choice(JUNK))}'] * 3
        many = [f'"k{i if rng.random() < 0.5 else 0}": {i}' for i in range(size(rng, 1, 10**6))]
        return Attack((as_request(path, f"{{{', '.join(many + pairs)}}}".encode()),))
    mixed = [body for body in rng.sample(list(BODIES.values()), 3) if isinstance(body, dict)]
    fields = {name: value for body in mixed for name, value in body.items()}
    return Attack((as_request(rng.choice(list(BODIES)), fields),))


def mutated(rng: random.Random) -> Attack:
    """Return a valid request with a few changes."""
    method, path, raw = request(rng)
    return Attack((as_request(path, raw, method),))


# --------------------------------------------------------------------------- raw HTTP

_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "stream": True, "ignore_eos": True}
_CHUNKED = HEAD.format("POST", "/v1/completions").encode() + b"Transfer-Encoding: chunked\r\n\r\n"


def _junk(rng: random.Random, most: int) -> bytes:
    return rng.randbytes(size(rng, 1, most))


def raw_http(rng: random.Random) -> Attack:
    """Return bytes that are not one valid request followed by a client that reads the response."""
    good, listed = as_request("/v1/chat/completions", _CHAT), as_request("/v1/models", b"", "GET")
    plain = listed.replace(b"Connection: close\r\n", b"")
    kinds: tuple[Callable[[], Attack], ...] = (
        lambda: Attack((_junk(rng, 10**6),)),
        lambda: Attack((rng.choice([b"GET", b"G\0T", b"POST" * 9999]) + b" / HTTP/9.9\r\n\r\n",)),
        lambda: Attack((b"GET /" + b"a" * size(rng, 10, 10**7) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",)),
        lambda: Attack((good.replace(b"Host", b"X: " + b"y" * size(rng, 10, 10**7) + b"\r\nHost"),)),
        lambda: Attack((good.replace(b"Host", b"X: y\r\n" * size(rng, 10, 10**6) + b"Host"),)),
        lambda: Attack((good.replace(b"Content-Length: ", rng.choice([b"Content-Length: -", b"content-length: 9"])),)),
        lambda: Attack((good.replace(b"localhost", _junk(rng, 100)),)),
        lambda: Attack((good[: rng.randrange(len(good))], 0.5), "never"),
        lambda: Attack((good[: rng.randrange(len(good))], 25.0)),
        lambda: Attack((good,), "never"),
        lambda: Attack((good, rng.random()), "never"),
        lambda: Attack((good,), "slowly"),
        lambda: Attack((good,), "slowly", 2),
        lambda: Attack((_CHUNKED, b'5\r\n{"a":\r\n', 0.2, _junk(rng, 1000))),
        lambda: Attack((_CHUNKED, b"FFFFFFFFFFFFFFFFFF\r\n", _junk(rng, 10**6))),
        lambda: Attack((_CHUNKED, b"1\r\n \r\n" * size(rng, 10, 10**6), b"0\r\n\r\n")),
        lambda: Attack((_CHUNKED, b"1;" + b"x" * size(rng, 10, 10**7) + b"\r\n \r\n0\r\n\r\n")),
        lambda: Attack((_CHUNKED, b"0\r\n", b"T: y\r\n" * size(rng, 10, 10**6) + b"\r\n")),
        lambda: Attack((plain * size(rng, 2, 20_000) + listed,)),
        lambda: Attack((plain * size(rng, 2, 20_000) + listed, 1.0), "never"),
        lambda: Attack((as_request("/v1/completions", {"prompt": "a", "max_tokens": 4}) * 20,)),
        lambda: Attack((3.0,), "never", size(rng, 10, 2000)),
        lambda: Attack((b"GET /health HTT", 3.0), "never", size(rng, 10, 500)),
        lambda: Attack((), "never", size(rng, 10, 500)),
        lambda: Attack(tuple(step for byte in good[:40] for step in (bytes([byte]), 0.1)), "never"),
        lambda: Attack((good.replace(b"Connection: close", b"Expect: 100-continue"), 0.1)),
        lambda: Attack((plain.replace(b"Content", b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent"), 0.5)),
        lambda: Attack((as_request("/v1/completions", b" " * (LIMIT + rng.randrange(-2, 3))),)),
    )
    return rng.choice(kinds)()


# --------------------------------------------------------------------------- grammars


def _literal(rng: random.Random) -> str:
    return json.dumps(rng.choice(["a", "ab", "é", " ", "\n", "a" * size(rng, 2, 2000), "\U0001f600"]))


def gbnf(rng: random.Random) -> str:
    """Return a GBNF grammar: a random one, or one part repeated in a way that is expensive to prepare or to follow."""
    many = size(rng, 2, 200_000)
    kinds: tuple[Callable[[], str], ...] = (
        lambda: "root ::= " + " | ".join(f'"{rng.randrange(10**9)}"' for _ in range(min(many, 100_000))),
        lambda: f'root ::= "{"ab" * many}"',
        lambda: f"root ::= {'(' * many}[a-z]{')' * many}{rng.choice(['', '*'])}",
        lambda: f'root ::= {"(" * 9}"a"{"".join(f"){{0,{size(rng, 2, 10**6)}}}" for _ in range(9))}',
        lambda: f'root ::= {"(" * 30}"a"{")*" * 30}',
        lambda: (
            "\n".join(["root ::= r0", *(f'r{i} ::= r{i + 1} r{i + 1} | "x"' for i in range(min(many, 20_000)))])
            + f'\nr{min(many, 20_000)} ::= "a"'
        ),
        lambda: 'root ::= root root root | "a" | root "a" | ""',
        lambda: 'root ::= a b\na ::= b a | ""\nb ::= a "x"? | [^\\x00]*',
        lambda: f'root ::= ("a"? ){{{many}}} "a"{{{many}}}',
        lambda: f"root ::= {'.* ' * min(many, 500)}[xyz]",
        lambda: f'root ::= ([a-z]* "x" [a-z]{{{size(rng, 2, 5000)}}} )+',
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
    count = rng.choice(["", "*", "+", "?", f"{{{size(rng, 1, 2000)}}}", f"{{,{size(rng, 1, 2000)}}}", "{3,}"])
    return f"({rng.choice([' ', ' | ']).join(parts)}){count}"


def regex(rng: random.Random) -> str:
    """Return a regular expression: a random one, or one that is expensive to prepare."""
    many = size(rng, 2, 100_000)
    kinds: tuple[Callable[[], str], ...] = (
        lambda: f"{'(' * min(many, 300)}a{')*' * min(many, 300)}",
        lambda: f"(a{{1,{many}}}){{1,{size(rng, 2, 1000)}}}",
        lambda: "|".join(str(rng.random()) for _ in range(many)),
        lambda: f"(.*a){{{size(rng, 2, 200)}}}.{{{size(rng, 2, 2000)}}}",
        lambda: rf"[\p{{L}}\p{{N}}\W]{{{many}}}(?i:é|ß)*$",
        lambda: rng.choice([r"(a)\1", "(?=a)b", "(?<!x)y", "(?P<n>a)(?P=n)", "[", "a{", "\\", "^$^$", "(?i)k" * many]),
        lambda: "(?:" * many,
        lambda: f"(a|aa|aaa|[ab]*b)*{'c?' * min(many, 5000)}",
        lambda: "".join(rng.choice("ab()[]{}*+?|.^$\\d1,-") for _ in range(rng.randint(1, 40))),
    )
    return rng.choice(kinds)()


def schema(rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON schema: a random one, or one that is expensive to prepare."""
    if depth == 0 and rng.random() < 0.5:
        return _large_schema(rng)
    inner = [schema(rng, depth + 1) for _ in range(2)] if depth < 4 else [True, {}]
    huge = rng.choice([0, 1, -1, 10**3, 10**6, 10**12, 1e300, 0.1, "x", None])
    return rng.choice(
        (
            {"type": "object", "properties": {"a": inner[0], "b": inner[1]}, "maxProperties": huge},
            {"type": "object", "patternProperties": {regex(rng): inner[0]}, "additionalProperties": inner[1]},
            {"type": "array", "prefixItems": inner, "items": inner[0], "minItems": huge, "maxItems": huge},
            {"type": "string", "minLength": huge, "maxLength": huge},
            {"type": "string", "pattern": regex(rng), "maxLength": rng.choice([5, 10**5])},
            {"type": "number", "minimum": -huge if isinstance(huge, int) else huge, "multipleOf": huge},
            {rng.choice(["anyOf", "oneOf", "allOf"]): inner},
            {"type": ["string", "null", "array"], "format": rng.choice(["email", "uri", "date-time", "regex"])},
            {"$ref": rng.choice(["#", "#/properties/a", "http://localhost/x", "#/$defs/nothing"])},
            {"not": inner[0], "if": inner[1], "contains": inner[0], "uniqueItems": True},
        )
    )


def _large_schema(rng: random.Random) -> Any:
    many = size(rng, 2, 20_000)

    def nested() -> Any:
        value: Any = {"type": "string"}
        for _ in range(size(rng, 2, 400)):
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
        nested,
        chain,
        wide,
        lambda: {"$ref": "#"},
        lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        lambda: {"enum": [rng.random() for _ in range(many)]},
        lambda: {"const": "x" * many * 10},
        lambda: {"anyOf": [{"type": "object", "properties": {f"a{i}": True}} for i in range(many)]},
        lambda: {"allOf": [{"type": "integer", "multipleOf": rng.randint(1, 10**6)} for _ in range(min(many, 50))]},
        lambda: {"type": "array", "items": {"pattern": regex(rng)}, "minItems": many, "maxItems": 10**9},
    )
    return rng.choice(kinds)()


def grammars(rng: random.Random) -> Attack:
    """Return a request whose response has to follow a hostile grammar."""
    plain = {"max_tokens": rng.choice([4, 50]), "stream": rng.random() < 0.5}
    strict, repeat, many = rng.random() < 0.5, rng.choice([1, 1, 3]), size(rng, 2, 200_000)
    said = plain | {"messages": [{"role": "user", "content": "a"}]}
    plain = plain | {"prompt": "a"}

    def tool() -> dict[str, Any]:
        function = {"name": "f", "description": "d", "parameters": schema(rng), "strict": strict}
        return {"type": "function", "function": function}

    def form() -> dict[str, Any]:
        return {"name": "n", "schema": schema(rng), "strict": strict}

    kinds: tuple[Callable[[], tuple[str, dict[str, Any]]], ...] = (
        lambda: ("/completion", plain | {"grammar": gbnf(rng)}),
        lambda: ("/completion", plain | {"json_schema": schema(rng)}),
        lambda: ("/v1/completions", plain | {"guided_regex": regex(rng)}),
        lambda: ("/v1/completions", plain | {"guided_grammar": gbnf(rng), "n": repeat}),
        lambda: ("/v1/completions", plain | {"guided_choice": [str(rng.random()) for _ in range(many)]}),
        lambda: ("/v1/chat/completions", said | {"response_format": {"type": "json_schema", "json_schema": form()}}),
        lambda: ("/v1/chat/completions", said | {"guided_json": schema(rng)}),
        lambda: ("/v1/chat/completions", said | {"tools": [tool()] * repeat, "tool_choice": "required"}),
        lambda: ("/v1/chat/completions", said | {"tools": [tool()], "tool_choice": "auto"}),
        lambda: (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 50, "text": {"format": {"type": "json_schema", **form()}}},
        ),
        lambda: ("/api/chat", said | {"format": schema(rng), "options": {"num_predict": 4}}),
        lambda: (
            "/v1/messages",
            said | {"tools": [{"name": "f", "input_schema": schema(rng)}], "tool_choice": {"type": "any"}},
        ),
    )
    path, body = rng.choice(kinds)()
    return Attack((as_request(path, body),))


# --------------------------------------------------------------------------- templates

_NAMES = ("messages", "tools", "bos_token", "add_generation_prompt", "enable_thinking", "loop", "range", "namespace")
_DUNDERS = ("self", "caller", "__class__", "strftime_now", "raise_exception", "cycler", "é", "", "a b", "class")


def variables(rng: random.Random) -> Attack:
    """Return a chat with unusual variables for the template."""
    deep: Any = 1
    for _ in range(size(rng, 1, 900)):
        deep = rng.choice(([deep], {"a": deep}))
    values: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(JUNK),
        lambda: deep,
        lambda: "x" * size(rng, 1, LIMIT // 8),
        lambda: [0] * size(rng, 1, MIB),
        lambda: {str(i): i for i in range(size(rng, 1, 10**6))},
        lambda: text(rng, 1000),
    )
    names = rng.choices([*_NAMES, *_DUNDERS], k=rng.randint(1, 5))
    path = rng.choice(("/v1/chat/completions", "/apply-template", "/v1/chat/completions/input_tokens"))
    kwargs = {name: rng.choice(values)() for name in names}
    return Attack((as_request(path, _CHAT | {"max_tokens": 4, "chat_template_kwargs": kwargs}),))


def chats(rng: random.Random) -> Attack:
    """Return a chat for a server with a hostile template."""
    path = rng.choice(("/v1/chat/completions", "/apply-template", "/v1/messages", "/api/chat", "/v1/responses"))
    said = [{"role": "user", "content": rng.choice(["a", "b" * 1000])}] * rng.choice([1, 3, 99])
    tools = [{"type": "function", "function": TOOL}] if rng.random() < 0.3 and "messages" not in path else []
    return Attack((as_request(path, {"messages": said, "input": said, "max_tokens": 4, "tools": tools}),))


def template(rng: random.Random) -> str:
    """Return a chat template that is expensive, wrong or reaches for more than its variables."""
    loop = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    many = size(rng, 10, 10**6)
    kinds = (
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 9**9**9 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{% set x = namespace(a='ab') %}{% for i in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}{{ x.a }}",
        "{% set x = namespace(a=[1]) %}{% for i in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}{{ x.a|length }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}{{ self.__dict__ }}{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ raise_exception('x' * 10000000) }}",
        "{{ raise_exception(messages) }}{{ raise_exception() }}",
        "{{ strftime_now('%Y' * 1000000) }}{{ strftime_now('%') }}{{ strftime_now(1) }}",
        "{{ messages|tojson(indent=100000000) }}",
        "{{ lipsum(n=1000000) }}{{ joiner() }}",
        "{{ messages|map(attribute='content')|join('x' * 100000000) }}",
        "{{ (messages * 10000000)|tojson }}",
        "{{ undefined.attribute.of.nothing }}{{ 1 / 0 }}{{ [] [5] }}",
        "{{ range(10**9)|list }}",
        "{{ ('a' * 50000)|wordwrap(1)|title|urlize|center(10**9) }}",
        "{{ messages|sort|unique|batch(10**9, 'x')|list }}",
        "{% if true %}" * many,
        "{% for a in b %}{% endif %}",
        "{{ " + "(" * many + "1" + ")" * many + " }}",
        "{{ " + "-" * many + "1 }}",
        "{{ " + "1 + " * many + "1 }}",
        "{{ [" + "[], " * many + "] }}",
        "{% set a = 1 %}" * many,
        "x" * many * 10,
        "{% raw %}" * many + "{#" * many,
        "<|im_start|>" * many,
        "{% break %}{% generation %}{{ caller() }}{% endgeneration %}",
        "{% for m in messages %}{% set m.content = 'x' %}{{ messages.append(m) }}{% endfor %}",
        "".join(
            rng.choice(("{{ ", " }}", "{% if x %}", "{% endif %}", "m", "|e", "(", "'", "{# ", "-%}"))
            for _ in range(40)
        ),
    )
    return rng.choice((loop, "")) + rng.choice(kinds) + rng.choice((loop, ""))


# --------------------------------------------------------------------------- model files


def mutate_gguf(path: Path, rng: random.Random) -> None:
    """Change a few values of the metadata or of the tensor descriptions of a GGUF file, or a few of its bytes."""
    reader = gguf.GGUFReader(path, "r+")
    described = [part for tensor in reader.tensors for part in tensor.field.parts[1:]]
    scalars = [field.parts[-1] for field in reader.fields.values() if len(field.data) == 1]
    lists = [field.parts[i] for field in reader.fields.values() if field.data[1:] for i in rng.choices(field.data, k=9)]
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        kind, parts = rng.random(), rng.choice([scalars, scalars, lists, lists, described])
        part = rng.choice([part for part in parts if len(part)])
        at = rng.randrange(len(part))
        if kind < 0.5 and part.dtype != np.uint8:
            value = rng.choice([0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, part[at] + 1])
            part[at : at + 1] = np.array([value]).astype(part.dtype)
        elif kind < 0.9:
            raw = part.view(np.uint8)
            at = rng.randrange(len(raw))
            raw[at] = rng.choice([0, 0xFF, 0x80, raw[at] ^ 1 << rng.randrange(8), rng.randrange(256)])
        else:
            header = reader.data[4 : reader.data_offset]
            header[rng.randrange(len(header))] = rng.randrange(256)
    reader.data.flush()
    if rng.random() < 0.05:
        with path.open("r+b") as file:
            file.truncate(rng.randrange(4, path.stat().st_size))


GENERATORS: Mapping[str, Callable[[random.Random], Attack]] = {
    "mutated": mutated,
    "extreme": extreme,
    "http": raw_http,
    "grammar": grammars,
    "variables": variables,
    "chats": chats,
}
"""Generators of hostile requests by kind."""
