"""JSON of responses, and errors: `JsonResponse`, `ApiError`, its JSON, and the conversion of other exceptions to it.

Clients retry requests whose status is 5xx, at the cost of another generation. So the status is 400 if a retry cannot
succeed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngramspec.data import GrammarError, ModelError, NGramSpecError, PromptError, ShutdownError
from ngramspec.sampling.distribution import NoTokenLeft
from ngramspec.server.limits import MAX_MESSAGE, MAX_SENT

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

_FIELDS = {GrammarError: "grammar", PromptError: "prompt", ModelError: "messages"}
"""Field of a request that an error refers to, by the type of the error."""


class ApiError(Exception):
    """An error that is sent to the client instead of a response or of its rest."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,  # name of the invalid field
        type: str | None = None,  # one of llama-server's types; `None` means that of the status
        code: int | str | None = None,  # code by which clients distinguish errors; `None` means the status
        details: Mapping[str, Any] | None = None,  # further fields
        is_final: bool = False,  # True if the client should not retry, whatever the status is
    ) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} ..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.type = type or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.code = status if code is None else code
        self.details = dict(details or {})
        self.is_final = is_final


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error in the format of llama-server and OpenAI."""
    fields: dict[str, Any] = {"code": error.code, "message": error.message, "type": error.type}
    if error.param is not None:
        fields["param"] = error.param
    return {"error": fields | error.details}


def context_length_error(prompt_tokens: int, n_ctx: int) -> ApiError:
    """Return the error for a prompt that leaves no room for an answer.

    Clients recognise it by the code, the type, or one of the two phrases in the message, and then shorten the prompt.
    """
    return ApiError(
        400,
        f"request ({prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens);"
        f" this model's maximum context length is {n_ctx} tokens",
        type="exceed_context_size_error",
        code="context_length_exceeded",
        details={"n_prompt_tokens": prompt_tokens, "n_ctx": n_ctx},
    )


def shutdown_error() -> ApiError:
    return ApiError(503, "the server is shutting down")


def to_api_error(error: Exception, *, started: bool = False) -> ApiError:
    """Map an exception to the error sent to the client; `started` means that the engine had accepted the request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ShutdownError):
        return shutdown_error()
    if isinstance(error, NoTokenLeft):
        return ApiError(400, str(error))
    for kind, param in _FIELDS.items():
        if isinstance(error, kind):
            return ApiError(400, str(error), param=param)
    return ApiError(500 if started or isinstance(error, NGramSpecError) else 400, str(error))


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
