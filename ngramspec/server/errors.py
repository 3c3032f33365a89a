"""`ApiError`: an error as a client is told of it, and what becomes one. Its words are llama-server's.

A client retries what is answered with 5xx, at the cost of another generation: what a retry cannot mend is a 400.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ngramspec.batching.request import ClosedError
from ngramspec.errors import GrammarError, ModelError, NGramSpecError, PromptError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

_FIELDS = {GrammarError: "grammar", PromptError: "prompt", ModelError: "messages"}
"""What is wrong with a request, by the error that tells."""


class ApiError(Exception):
    """A request that gets no answer, or no whole one.

    Args:
        status: of HTTP.
        message: for whoever wrote the client.
        param: the field that is wrong.
        type: one of llama-server's; None: what goes with the status.
        code: what clients tell errors apart by; None: the status.
        details: further fields.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        type: str | None = None,
        code: int | str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.type = type or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.code = status if code is None else code
        self.details = dict(details or {})


Wording = Callable[[ApiError], dict[str, Any]]
"""An error as the JSON of a dialect."""


def worded(error: ApiError) -> dict[str, Any]:
    """An error as llama-server and OpenAI word it."""
    told: dict[str, Any] = {"code": error.code, "message": error.message, "type": error.type}
    if error.param is not None:
        told["param"] = error.param
    return {"error": told | error.details}


def bad_field(name: str, message: str) -> ApiError:
    """A field of the request is wrong; the message says so beginning with its name."""
    return ApiError(400, message, param=name)


def overflow(prompt_tokens: int, n_ctx: int) -> ApiError:
    """The prompt leaves no room for an answer.

    Clients shorten a conversation when they see this, and know it by different parts of it: the code, the type, or one
    of the two phrases.
    """
    return ApiError(
        400,
        f"request ({prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens);"
        f" this model's maximum context length is {n_ctx} tokens",
        type="exceed_context_size_error",
        code="context_length_exceeded",
        details={"n_prompt_tokens": prompt_tokens, "n_ctx": n_ctx},
    )


def leaving() -> ApiError:
    """The server is being stopped."""
    return ApiError(503, "the server is shutting down")


def of_failure(error: Exception, *, started: bool = False) -> ApiError:
    """What an exception of the engine, the vocabulary or the template is to a client.

    Args:
        error: a ValueError or an NGramSpecError.
        started: whether the engine had taken the request in, and so found nothing wrong with it.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClosedError):
        return leaving()
    for kind, param in _FIELDS.items():
        if isinstance(error, kind):
            return ApiError(400, str(error), param=param)
    return ApiError(500 if started or isinstance(error, NGramSpecError) else 400, str(error))
