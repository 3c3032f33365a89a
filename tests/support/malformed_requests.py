"""Malformed requests for every endpoint of the server: valid bodies, and seeded changes to them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from ngramspec.sampling.settings import Sampling, options

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TEXT = {"type": "text", "text": "u"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [TEXT]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "r"},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": [TEXT]}, {"type": "refusal", "refusal": "r"}],
        "reasoning": "t",
    },
    {"role": "user", "content": "u"},
]
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"at": [1]}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "is_error": False, "content": [TEXT]}
PAPER = {"type": "content", "content": [TEXT]}
PART = {"type": "input_text", "text": "u"}
FUNCTION = {"type": "function", **TOOL}
PATCH = {"type": "custom", "name": "p", "description": "d", "format": {"type": "grammar", "definition": "x"}}
COMMON = {"max_tokens": 4, "stop": ["x"], "seed": 1, "stream": True, "logit_bias": {"5": 1}, "id_slot": 1, "n": 2}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": TOOL["parameters"]}},
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning": {"effort": "low", "enabled": True, "max_tokens": 9},
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "think": True,
        "enable_thinking": False,
        "logprobs": True,
        "top_logprobs": 2,
        **COMMON,
    },
    "/v1/completions": {"prompt": ["a", "b"], "echo": True, "suffix": "s", "logprobs": 2, "best_of": 2, **COMMON},
    "/completion": {
        "prompt": ["a", 5, "b"],
        "n_probs": 2,
        "response_fields": ["content", "timings/prompt_n"],
        "samplers": ["top_k", "temperature"],
        "t_max_predict_ms": 100,
        "n_indent": 1,
        "grammar": 'root ::= "a"',
        "json_schema": {"type": "object"},
        "return_progress": True,
        **COMMON,
    },
    "/infill": {
        "input_prefix": "a",
        "input_suffix": "b",
        "prompt": "c",
        "input_extra": [{"filename": "f", "text": "t"}],
        **COMMON,
    },
    "/v1/embeddings": {"input": ["a", [5, 6]], "encoding_format": "base64", "dimensions": 3, "embd_normalize": 2},
    "/embedding": {"content": ["a", [5, 6]], "embd_normalize": 2},
    "/tokenize": {"content": "a", "add_special": True, "with_pieces": True, "parse_special": False},
    "/detokenize": {"tokens": [5, 6]},
    "/markdown": {"text": "a *b*", "drafted": [[0, 1], [3, 4]]},
    "/apply-template": {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}]},
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "h", "signature": "s"}, USE]},
            {"role": "user", "content": [RESULT, {"type": "document", "title": "t", "source": PAPER}]},
            {"role": "system", "content": "s"},
        ],
        "system": [TEXT | {"cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "input_schema": TOOL["parameters"]}, {"type": "web_search_20250305", "name": "w"}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": TOOL["parameters"]}},
        "stop_sequences": ["x"],
        "max_tokens": 4,
        "stream": True,
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "developer", "content": [PART]},
            {"role": "user", "content": "a"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "x"},
            {"type": "local_shell_call", "call_id": "e", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "function_call_output", "call_id": "c", "output": [PART]},
            {"type": "local_shell_call_output", "id": "e", "output": "x"},
            {"type": "additional_tools", "tools": []},
        ],
        "instructions": "s",
        "tools": [FUNCTION, PATCH, {"type": "namespace", "name": "n", "tools": [FUNCTION]}, {"type": "web_search"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": TOOL["parameters"]}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "top_logprobs": 2,
        "truncation": "disabled",
        "max_output_tokens": 4,
        "stream": True,
    },
}
OPTIONS = {"temperature": 0.5, "num_predict": 4, "stop": ["x"], "seed": 1, "num_ctx": 2048, "mirostat": 1}
OLLAMA = {
    "model": "m",
    "options": OPTIONS,
    "format": TOOL["parameters"],
    "keep_alive": "5m",
    "think": False,
    "logprobs": True,
    "top_logprobs": 2,
}
BODIES["/api/chat"] = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "images": []},
        {"role": "assistant", "content": "", "thinking": "h", "tool_calls": [{"function": USE | {"arguments": {}}}]},
        {"role": "tool", "content": "r", "tool_name": "f"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    **OLLAMA,
}
BODIES["/api/generate"] = {"prompt": "a", "system": "s", "raw": False, "suffix": "", "context": [5, 6], **OLLAMA}
BODIES["/api/embed"] = {"input": ["a", "b"], "truncate": True, "dimensions": 2, "options": OPTIONS}
BODIES["/api/embeddings"] = {"prompt": "a"}
BODIES["/api/show"] = {"model": "m", "verbose": True}
BODIES["/lora-adapters"] = [{"id": 0, "scale": 0.5}]
SLOTS = "/slots/{id_slot}"
BODIES[SLOTS] = {"filename": "a"}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
for endpoint in ("/v1/chat/completions", "/v1/responses"):
    BODIES[f"{endpoint}/input_tokens"] = BODIES[endpoint]
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 10**400, -(10**30), 0.5, 1e308, -0.0, "", "x", "\0", "é" * 300, "1"),
    *("<|im_end|>", "root ::= root", "[" * 50, [], {}, [[]], [{}], [None], [1, 2], ["x"], {"a": {}}),
    *({"": 1}, {"type": None}, {"role": "user"}, [["x", 1]], [[5, "x"]], "word " * 2000, [5] * 2000, [[5], "x"]),
    *({"$ref": "#/nowhere"}, {"type": "string", "pattern": "^("}, {"properties": 5}, {"enum": []}, {"type": "object"}),
]
PIECES = [b"\\ud800", b"NaN", b"1e999", b"\xff", b"\x00", b"}", b'"', b",", b"[" * 5000, b"\\u0000", b"9" * 5000]


def walk_parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each part of a value, at any depth, as its container and its key or index in it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield value, name
        yield from walk_parts(part)


def mangle(body: dict[str, Any], rng: random.Random) -> None:
    """Replace, delete or add one part of a body."""
    where, name = rng.choice([*walk_parts(body or {"x": 1})])
    junk, chance = copy.deepcopy(rng.choice(JUNK)), rng.random()
    if chance < 0.2:
        del where[name]
    elif chance < 0.3 and isinstance(where, dict):
        where[rng.choice([*options(Sampling), "x", ""])] = junk
    else:
        where[name] = junk


def make_request(rng: random.Random) -> tuple[str, str, bytes]:
    """Return the method, the path and the body of a malformed request."""
    path = rng.choice(list(BODIES))
    body = copy.deepcopy(BODIES[path])
    for name in rng.sample(sorted(body), k=rng.randrange(len(body))):  # The first error hides others.
        if name not in ("messages", "prompt", "input", "content", "max_tokens"):
            del body[name]
    for _ in range(rng.randrange(1, 4)):
        mangle(body, rng)
    raw = json.dumps(body if rng.random() < 0.98 else rng.choice(JUNK)).encode()
    if rng.random() < 0.2:
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.choice(PIECES) + raw[at + rng.randrange(3) :]
    method = "POST" if rng.random() < 0.97 else rng.choice(["GET", "PUT", "DELETE", "HEAD"])
    path = path.replace(SLOTS, "/slots/1?action=restore")
    return method, path if rng.random() < 0.97 else path + rng.choice(["/", "x", "?a=%ff", "//"]), raw
