"""A thousand requests that no client should send: each gets an answer, none a 5xx, and the server goes on."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

from support.fake_service import Script
from support.http import asking, scripted

from ngramspec.sampling.option import options
from ngramspec.sampling.settings import Sampling
from ngramspec.server.app import ENDPOINTS

REQUESTS = 1000

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "r"},
]
COMMON = {"max_tokens": 4, "stop": ["x"], "seed": 1, "stream": True, "logit_bias": {"5": 1}, "id_slot": 1, "n": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": TOOL["parameters"]}},
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
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
    "/tokenize": {"content": "a", "add_special": True, "with_pieces": True, "parse_special": False},
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}]},
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}],
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["x"],
        "max_tokens": 4,
        "stream": True,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "instructions": "s",
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": TOOL["parameters"]}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 4,
        "stream": True,
    },
}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 10**400, -(10**30), 0.5, 1e308, -0.0, "", "x", "\0", "é" * 300, "1"),
    *("<|im_end|>", "root ::= root", "[" * 50, [], {}, [[]], [{}], [None], [1, 2], ["x"], {"a": {}}),
    *({"": 1}, {"type": None}, {"role": "user"}, [["x", 1]], [[5, "x"]], "word " * 2000, [5] * 2000, [[5], "x"]),
    *({"$ref": "#/nowhere"}, {"type": "string", "pattern": "^("}, {"properties": 5}, {"enum": []}, {"type": "object"}),
]
PIECES = [b"\\ud800", b"NaN", b"1e999", b"\xff", b"\x00", b"}", b'"', b",", b"[" * 5000, b"\\u0000", b"9" * 5000]


def mangled(value: Any, rng: random.Random) -> Any:
    """The value with something in it replaced, taken away or added."""
    if isinstance(value, dict) and value and rng.random() < 0.97:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            del value[name]
        elif rng.random() < 0.1:
            value[rng.choice([*options(Sampling), "x", ""])] = copy.deepcopy(rng.choice(JUNK))
        else:
            value[name] = mangled(value[name], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        value[at] = mangled(value[at], rng)
        return value
    return copy.deepcopy(rng.choice(JUNK))


def request(rng: random.Random) -> tuple[str, str, bytes]:
    """Method, path and body of a request."""
    path = rng.choice(list(BODIES))
    body = copy.deepcopy(BODIES[path])
    for name in rng.sample(sorted(body), k=rng.randrange(len(body))):  # contradictions hide what comes after them
        if name not in ("messages", "prompt", "input", "content", "max_tokens"):
            del body[name]
    for _ in range(rng.randrange(1, 4)):
        body = mangled(body, rng)
        if not isinstance(body, dict):
            break
    raw = json.dumps(body).encode()
    if rng.random() < 0.2:
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.choice(PIECES) + raw[at + rng.randrange(3) :]
    method = "POST" if rng.random() < 0.97 else rng.choice(["GET", "PUT", "DELETE", "HEAD"])
    return method, path if rng.random() < 0.97 else path + rng.choice(["/", "x", "?a=%ff", "//"]), raw


def test_every_address_is_among_them() -> None:
    known = {path for endpoint in ENDPOINTS if endpoint.method == "POST" for path in endpoint.paths}
    handlers = {id(endpoint.handler) for endpoint in ENDPOINTS if endpoint.method == "POST"}
    tried = {id(e.handler) for e in ENDPOINTS if e.method == "POST" and set(e.paths) & set(BODIES)}
    assert set(BODIES) <= known
    assert handlers == tried


def test_none_of_a_thousand_malformed_requests_is_a_5xx() -> None:
    rng = random.Random(11)
    seen: dict[int, int] = {}

    async def run() -> None:
        server, service = scripted(Script(step=2), n_ctx=300)
        async with asking(server) as client:
            for _ in range(REQUESTS):
                method, path, raw = request(rng)
                response = await client.request(method, path, content=raw)
                seen[response.status_code] = seen.get(response.status_code, 0) + 1
                assert response.status_code < 500, (method, path, raw, response.text)
                if response.status_code >= 400 and method != "HEAD":
                    told = response.json()["error"]
                    assert told["message"], (method, path, raw)
            answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES})
            assert answer.json()["choices"][0]["message"]["content"] == "Hello, world"
        for ticket in service.tickets:
            assert ticket.ended.wait(20)

    asyncio.run(run())
    assert seen[200] > REQUESTS / 20
    assert seen[400] > REQUESTS / 2
