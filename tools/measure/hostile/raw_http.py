"""Hostile bytes on connections: broken requests, slow and leaving clients, pipelining."""

from __future__ import annotations

import random
from collections.abc import Callable

from hostile.attack import CHAT, HEAD, LIMIT, Attack, as_request, size

_CHUNKED = HEAD.format("POST", "/v1/completions").encode() + b"Transfer-Encoding: chunked\r\n\r\n"


def _junk(rng: random.Random, most: int) -> bytes:
    return rng.randbytes(size(rng, 1, most))


def raw_http(rng: random.Random) -> Attack:
    """Return bytes that are not one valid request followed by a client that reads the response."""
    good, listed = as_request("/v1/chat/completions", CHAT), as_request("/v1/models", b"", "GET")
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
