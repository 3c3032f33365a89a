"""Errors of the HTTP APIs: `ApiError`, its JSON, and the conversion of other exceptions to it.

A handler raises an `ApiError` with the HTTP status, a message and, for an invalid field, the field's name:

    raise bad_field("n", "n must be at most 128 for all prompts together, got 200")

becomes status 400 and this body, unless the API has its own format (see `Endpoint.format_error`):

    {"error": {"code": 400, "message": "n must be at most ...", "type": "invalid_request_error", "param": "n"}}

Clients retry requests whose status is 5xx, at the cost of another generation. So the status is 400 if a retry cannot
succeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ngramspec.data import GrammarError, ModelError, NGramSpecError, PromptError, ShutdownError
from ngramspec.sampling.distribution import NoTokenLeft
from ngramspec.server.limits import MAX_MESSAGE

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


def ollama_error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error in Ollama's format."""
    return {"error": error.message}


def bad_field(name: str, message: str) -> ApiError:
    """Return the error for an invalid field; the message must begin with its name."""
    return ApiError(400, message, param=name)


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
    """Return the error for requests during shutdown."""
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
