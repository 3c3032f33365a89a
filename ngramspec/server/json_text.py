"""JSON text of responses and of the chunks of streams."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.responses import Response

_MARK = secrets.token_hex(16)  # no client can know it


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part of an object that is JSON already, because the encoder keeps Python's lock until an object is complete."""

    text: str

    @classmethod
    def join(cls, items: Iterable[Any]) -> Encoded:
        """Return a list whose items are encoded one at a time."""
        return cls(f"[{','.join(map(encode_json, items))}]")


def encode_json(data: Any) -> str:
    """Return an object as JSON on one line; nan and infinity, which JSON lacks, raise a ValueError."""
    texts: list[str] = []

    def keep(value: Encoded) -> str:
        texts.append(value.text)
        return _MARK

    encoder = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=keep)
    start, *parts = encoder.encode(data).split(f'"{_MARK}"')
    return start + "".join([text + part for text, part in zip(texts, parts, strict=True)])


quote = encode_basestring_ascii
"""Function that returns a string as JSON, in the same form as `encode_json`."""


def members(fields: Mapping[str, Any]) -> str:
    """Return fields as JSON that continues an object after its first member."""
    return f",{encode_json(fields)[1:-1]}" if fields else ""


def json_response(data: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(encode_json(data), status, media_type="application/json")
