"""The body of a request: read up to a limit, and turned into JSON that holds nothing a text cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.types import Receive, Scope

from ngramspec.server.errors import ApiError, bad_field


class GoneError(Exception):
    """The client left before its request was whole."""


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it has more than `most` bytes.
        GoneError: the client left.
    """
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    if any(not value.isdigit() or len(value) > 15 or int(value) > most for value in lengths):
        raise _too_large(most)
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        more = message.get("more_body", False)
        if size > most:
            raise _too_large(most)
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the request is larger than {most / 2**20:g} MiB, the most that this server reads")


def read_json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: it is none, or holds a nan, an infinity, or half a surrogate pair, which no text can hold.
    """
    try:
        text = raw.decode("utf-8-sig")
        data = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ApiError(400, "the request's JSON is nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ApiError(400, f"the request is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the request must be a JSON object")
    if "\\ud" in text.lower():  # there is no other way to write one
        for path, value in _texts(data):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise bad_field(path, f"{path} holds half a surrogate pair, which is not valid text")
    return data


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not part of JSON")


def _texts(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every text of an object, its keys too, and where it stands."""
    left: list[tuple[str, Any]] = [("", data)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, list):
            left += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, dict):
            for key, item in value.items():
                yield path or "the request", key
                left.append((f"{path}.{key}".lstrip("."), item))
