"""Hostile bytes on connections: broken requests, slow and leaving clients, pipelining."""

from __future__ import annotations

import random
from collections.abc import Callable

from hostile.attack import CHAT, HEAD, LIMIT, Attack, format_request, random_size

_CHUNKED_HEAD = HEAD.format("POST", "/v1/completions").encode() + b"Transfer-Encoding: chunked\r\n\r\n"


def _make_junk(rng: random.Random, max_size: int) -> bytes:
    return rng.randbytes(random_size(rng, 1, max_size))


def make_raw_http(rng: random.Random) -> Attack:
    """Return bytes that are not one valid request followed by a client that reads the response."""
    chat, model_list = format_request("/v1/chat/completions", CHAT), format_request("/v1/models", b"", "GET")
    keep_alive_request = model_list.replace(b"Connection: close\r\n", b"")
    kinds: tuple[Callable[[], Attack], ...] = (
        lambda: Attack((_make_junk(rng, 10**6),)),
        lambda: Attack((rng.choice([b"GET", b"G\0T", b"POST" * 9999]) + b" / HTTP/9.9\r\n\r\n",)),
        lambda: Attack((b"GET /" + b"a" * random_size(rng, 10, 10**7) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",)),
        lambda: Attack((chat.replace(b"Host", b"X: " + b"y" * random_size(rng, 10, 10**7) + b"\r\nHost"),)),
        lambda: Attack((chat.replace(b"Host", b"X: y\r\n" * random_size(rng, 10, 10**6) + b"Host"),)),
        lambda: Attack((chat.replace(b"Content-Length: ", rng.choice([b"Content-Length: -", b"content-length: 9"])),)),
        lambda: Attack((chat.replace(b"localhost", _make_junk(rng, 100)),)),
        lambda: Attack((chat[: rng.randrange(len(chat))], 0.5), "never"),
        lambda: Attack((chat[: rng.randrange(len(chat))], 25.0)),
        lambda: Attack((chat,), "never"),
        lambda: Attack((chat, rng.random()), "never"),
        lambda: Attack((chat,), "slowly"),
        lambda: Attack((chat,), "slowly", 2),
        lambda: Attack((_CHUNKED_HEAD, b'5\r\n{"a":\r\n', 0.2, _make_junk(rng, 1000))),
        lambda: Attack((_CHUNKED_HEAD, b"FFFFFFFFFFFFFFFFFF\r\n", _make_junk(rng, 10**6))),
        lambda: Attack((_CHUNKED_HEAD, b"1\r\n \r\n" * random_size(rng, 10, 10**6), b"0\r\n\r\n")),
        lambda: Attack((_CHUNKED_HEAD, b"1;" + b"x" * random_size(rng, 10, 10**7) + b"\r\n \r\n0\r\n\r\n")),
        lambda: Attack((_CHUNKED_HEAD, b"0\r\n", b"T: y\r\n" * random_size(rng, 10, 10**6) + b"\r\n")),
        lambda: Attack((keep_alive_request * random_size(rng, 2, 20_000) + model_list,)),
        lambda: Attack((keep_alive_request * random_size(rng, 2, 20_000) + model_list, 1.0), "never"),
        lambda: Attack((format_request("/v1/completions", {"prompt": "a", "max_tokens": 4}) * 20,)),
        lambda: Attack((3.0,), "never", random_size(rng, 10, 2000)),
        lambda: Attack((b"GET /health HTT", 3.0), "never", random_size(rng, 10, 500)),
        lambda: Attack((), "never", random_size(rng, 10, 500)),
        lambda: Attack(tuple(step for byte in chat[:40] for step in (bytes([byte]), 0.1)), "never"),
        lambda: Attack((chat.replace(b"Connection: close", b"Expect: 100-continue"), 0.1)),
        lambda: Attack(
            (keep_alive_request.replace(b"Content", b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent"), 0.5)
        ),
        lambda: Attack((format_request("/v1/completions", b" " * (LIMIT + rng.randrange(-2, 3))),)),
    )
    return rng.choice(kinds)()
