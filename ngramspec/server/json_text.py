"""JSON text of responses and of the chunks of streams."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngramspec.server.limits import MAX_SENT

_MARK = secrets.token_hex(16)  # no client can know it


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part of an object that is JSON already, in several texts.

    The encoder keeps Python's lock until an object is complete, and so does a copy of a large text.
    """

    parts: list[str]

    @classmethod
    def join(cls, items: Iterable[Any]) -> Encoded:
        """Return a list whose items are encoded one at a time."""
        parts = [part for item in items for part in (",", *_encode_parts(item))]
        return cls(["[", *parts[1:], "]"])

    def extend(self, other: Encoded) -> None:
        """Add the items of another list to this list."""
        comma = [","] if len(self.parts) > 2 and len(other.parts) > 2 else []
        self.parts[-1:] = [*comma, *other.parts[1:]]


ENCODER = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def encode_json(data: Any) -> str:
    """Return an object as JSON on one line; nan and infinity, which JSON lacks, raise a ValueError."""
    try:
        return ENCODER.encode(data)
    except TypeError:  # a part is `Encoded`
        return "".join(_encode_parts(data))


def _encode_parts(data: Any) -> list[str]:
    encoded: list[Encoded] = []

    def keep(value: Encoded) -> str:
        encoded.append(value)
        return _MARK

    encoder = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=keep)
    start, *texts = encoder.encode(data).split(f'"{_MARK}"')
    parts = [start]
    for value, text in zip(encoded, texts, strict=True):
        parts += (*value.parts, text)
    return parts


def dump_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON, in the form that models write."""
    return json.dumps(arguments, ensure_ascii=False)


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; `None` if they are incomplete."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class JsonResponse(Response):
    """A JSON response."""

    media_type = "application/json"

    def __init__(self, data: Any, status: int = 200) -> None:
        super().__init__(status_code=status)
        self._parts = _encode_parts(data)
        self.headers["content-length"] = str(sum(map(len, self._parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        parts, n_waiting = list[str](), 0
        for part in self._parts:
            parts.append(part)
            n_waiting += len(part)
            if n_waiting > MAX_SENT:
                await send({"type": "http.response.body", "body": "".join(parts).encode(), "more_body": True})
                parts, n_waiting = [], 0
        await send({"type": "http.response.body", "body": "".join(parts).encode(), "more_body": False})
