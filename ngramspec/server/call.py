"""`Call`: an HTTP request with its body, and `Counters`: its log entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers

from ngramspec.batching.request import Done
from ngramspec.server.body import Body
from ngramspec.server.state import ServedModel, Server

COUNTERS = "ngramspec.counters"
"""Key of a request's counters in its ASGI scope."""


@dataclass(slots=True)
class Counters:
    """Log entry of one HTTP request; it contains no text of a user or a model."""

    method: str = ""
    path: str = ""  # path of the URL, without its query; other characters than printable ASCII are escaped
    status: int = 499  # HTTP status; 499 if the client disconnected before the response
    duration_seconds: float = 0.0  # seconds from the first byte of the request to the last byte of the response
    prompt_tokens: int = 0  # tokens of all prompts, including cached ones
    cached_tokens: int = 0  # tokens of the prompts that were in the cache
    tokens: int = 0  # generated tokens
    decoded_tokens: int = 0  # generated tokens without the first ones, which come from the logits of the prompts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    decode_seconds: float = 0.0  # time of decoding, without prefill
    error: str = ""  # type of the error, if the request failed
    field: str = ""  # name of the invalid field, or code of the error, if it has one

    def add(self, prompt_tokens: int, done: Done) -> None:
        """Add the numbers of a finished request to the engine."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += done.n_cached
        self.tokens += done.stats.generated
        self.decoded_tokens += done.stats.tokens
        self.draft_tokens += done.stats.drafted
        self.accepted_tokens += done.stats.accepted
        self.decode_seconds += done.seconds


B = TypeVar("B", bound=Body)


@dataclass
class Call(Generic[B]):
    """An HTTP request."""

    server: Server
    body: B  # JSON of the request
    data: Mapping[str, Any]  # the same as it came
    counters: Counters = field(default_factory=Counters)
    query: Mapping[str, str] = field(default_factory=dict)  # with the parameters of the path
    headers: Headers = field(default_factory=Headers)

    @cached_property
    def model(self) -> ServedModel:
        return self.server.require_model()
