"""`Attack`: a hostile request; functions that its generators share."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

MIB = 2**20
LIMIT = 16 * MIB  # of a body
HEAD = "{} {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "stream": True, "ignore_eos": True}


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


def format_request(path: str, body: Any, method: str = "POST") -> bytes:
    """Return an HTTP request whose response ends the connection."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = HEAD.format(method, path) + f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    return head.encode("utf-8", "replace") + raw


def random_size(rng: random.Random, low: int, high: int) -> int:
    """Return a number between two limits, whose logarithm is uniform."""
    return min(high, int(low * (high / low) ** rng.random()))
