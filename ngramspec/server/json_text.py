"""JSON as the server writes it: compact, and never a nan or an infinity, which are none."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def dumped(data: Any) -> str:
    """An object as JSON, in one line."""
    return json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


class JsonAnswer(Response):
    """A response that is JSON."""

    media_type = "application/json"

    def __init__(self, data: Any, status: int = 200) -> None:
        super().__init__(dumped(data), status)
