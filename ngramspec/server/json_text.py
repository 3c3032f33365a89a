"""JSON text of responses and of the chunks of streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.responses import Response

encode_json = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode
"""Function that encodes an object as JSON on one line. It rejects nan and infinity, which JSON lacks."""

quote = encode_basestring_ascii
"""Function that returns a string as JSON, in the same form as `encode_json`."""


def members(fields: Mapping[str, Any]) -> str:
    """Return fields as JSON that continues an object after its first member."""
    return f",{encode_json(fields)[1:-1]}" if fields else ""


def json_response(data: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(encode_json(data), status, media_type="application/json")
