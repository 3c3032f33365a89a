"""Hostile JSON: mutated requests, extreme values, and variables of chat templates."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.attack import CHAT, LIMIT, MIB, Attack, format_request, random_size

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))

from support.malformed_requests import BODIES, JUNK, TOOL, make_request

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
    "/v1/completions": (("prompt", 5), ("prompt", "a"), ("stop", "x"), ("stop_token_ids", 5), ("x", 10**4000)),
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


def make_text(rng: random.Random, length: int) -> str:
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


def make_extreme(rng: random.Random) -> Attack:
    """Return a request with a long text, a long list, deep JSON, duplicate names or the fields of several endpoints."""
    kind = rng.randrange(5)
    if kind == 0:
        path, name = rng.choice(list(_TEXT_FIELDS.items()))
        long = make_text(rng, random_size(rng, 10, LIMIT // 8))
        value: Any = [{"role": "user", "content": long}] if name == "messages" else long
        return Attack((format_request(path, {name: value, "max_tokens": 4, "stream": rng.random() < 0.5}),))
    if kind == 1:
        path = rng.choice(list(_LISTS))
        name, item = rng.choice(_LISTS[path])
        raw = json.dumps(item)
        items = f"[{','.join([raw] * random_size(rng, 10, LIMIT // (len(raw) + 1)))}]"
        required_fields = {"prompt": "a", "max_tokens": 4} if "completion" in path else {"max_tokens": 4, "text": "a"}
        if "chat" in path or "messages" in path:
            required_fields["messages"] = [{"role": "user", "content": "a"}]  # type: ignore[assignment]
        required_fields.pop(name, None)
        body = json.dumps(required_fields)[:-1] + f', "{name}": {items}}}' if name else items
        return Attack((format_request(path, body.encode()),))
    if kind == 2:
        path, depth = rng.choice(list(BODIES)), random_size(rng, 10, 2 * MIB)
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"anyOf":[', "]}]")))
        name = rng.choice(
            ["messages", "tools", "prompt", "json_schema", "response_format", "chat_template_kwargs", "x"]
        )
        body = f'{{"prompt": "a", "{name}": {opening * depth}1{closing * (depth if rng.random() < 0.8 else 0)}}}'
        return Attack((format_request(path, body.encode()),))
    if kind == 3:
        path, name = rng.choice(list(_TEXT_FIELDS.items()))
        pairs = [f'"{rng.choice([name, "max_tokens", "stream", "n"])}": {json.dumps(rng.choice(JUNK))}'] * 3
        items = [f'"k{i if rng.random() < 0.5 else 0}": {i}' for i in range(random_size(rng, 1, 10**6))]
        return Attack((format_request(path, f"{{{', '.join(items + pairs)}}}".encode()),))
    bodies = [body for body in rng.sample(list(BODIES.values()), 3) if isinstance(body, dict)]
    fields = {name: value for body in bodies for name, value in body.items()}
    return Attack((format_request(rng.choice(list(BODIES)), fields),))


def make_mutated(rng: random.Random) -> Attack:
    """Return a valid request with a few changes."""
    method, path, raw = make_request(rng)
    return Attack((format_request(path, raw, method),))


_NAMES = ("messages", "tools", "bos_token", "add_generation_prompt", "enable_thinking", "loop", "range", "namespace")
_DUNDERS = ("self", "caller", "__class__", "strftime_now", "raise_exception", "cycler", "é", "", "a b", "class")


def make_variables(rng: random.Random) -> Attack:
    """Return a chat with unusual variables for the template."""
    deep: Any = 1
    for _ in range(random_size(rng, 1, 900)):
        deep = rng.choice(([deep], {"a": deep}))
    values: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(JUNK),
        lambda: deep,
        lambda: "x" * random_size(rng, 1, LIMIT // 8),
        lambda: [0] * random_size(rng, 1, MIB),
        lambda: {str(i): i for i in range(random_size(rng, 1, 10**6))},
        lambda: make_text(rng, 1000),
    )
    names = rng.choices([*_NAMES, *_DUNDERS], k=rng.randint(1, 5))
    path = rng.choice(("/v1/chat/completions", "/apply-template", "/v1/chat/completions/input_tokens"))
    kwargs = {name: rng.choice(values)() for name in names}
    return Attack((format_request(path, CHAT | {"max_tokens": 4, "chat_template_kwargs": kwargs}),))
