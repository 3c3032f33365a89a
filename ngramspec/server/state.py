"""State of the server: the loaded model (`ServedModel`), what all requests share (`Server`), and a request (`Call`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic

from starlette.datastructures import Headers
from starlette.types import Scope

from ngramspec.batching.engine import Engine
from ngramspec.batching.request import Done
from ngramspec.cpu.thread_governor import ThreadState
from ngramspec.llama.embedder import Embedder
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling
from ngramspec.server.body import B
from ngramspec.server.json_text import ApiError, JsonResponse, context_length_error, error_body, shutdown_error

EUCLIDEAN = 2  # llama-server's default scaling of embeddings
UNLIMITED = -1  # reasoning budget that means no limit, as in llama-server


@dataclass(frozen=True)
class ServedModel:
    service: Engine
    vocabulary: Vocabulary
    name: str  # name of the model for clients
    path: str = ""  # path of the model file, as the user typed it
    meta: Mapping[str, Any] = field(default_factory=dict)  # known metadata: n_params, n_ctx_train, size and so on
    speculative: bool = True  # whether responses are drafted
    suffix_first: bool = False  # whether fill-in-the-middle prompts contain the suffix before the prefix
    exact: bool = False  # whether texts are the same bit for bit with any drafts
    drafter: str = ""  # name of the drafter; "" without drafting
    predict: int | None = None  # default of `max_tokens`; `None` means until the context is full
    embedder: Embedder | None = None  # model that makes embeddings; `None` if they are disabled
    embd_normalize: int = EUCLIDEAN  # default scaling of embeddings; see `embeddings.scale_vectors`
    threads: Callable[[], ThreadState] | None = None  # function that returns the present numbers of threads
    placement: Mapping[str, Any] = field(default_factory=dict)  # devices of the weights, for clients only
    aliases: Sequence[str] = ()  # all names of the model that clients may use
    tags: Sequence[str] = ()  # labels of the model, for clients only
    adapters: Sequence[str] = ()  # files of LoRA adapters; the service has their scales
    variables: Mapping[str, Any] = field(default_factory=dict)  # default variables of the chat template
    reasoning_budget: int = UNLIMITED  # default maximum number of tokens in a block of reasoning
    reasoning_message: str = ""  # text before the closing tag that ends reasoning at its budget

    @property
    def n_ctx(self) -> int:
        return self.service.n_ctx

    def check_size(self, characters: int, n_ctx: int | None = None) -> None:
        """Raise an ApiError for a text that is too long for the context even with the longest tokens."""
        room = self.n_ctx if n_ctx is None else n_ctx
        if characters > room and characters > room * self.vocabulary.longest_token:
            raise context_length_error(-(-characters // self.vocabulary.longest_token), room)


@dataclass(slots=True)
class Server:
    # Sampling settings for requests that do not set them; the temperature is llama.cpp's.
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.8))
    seed: int | None = None  # seed for requests that do not set it; `None` means a random one for each request
    ping_seconds: float = 15.0  # seconds without an event after which a stream sends a sign of life
    max_body_bytes: int = 16 * 2**20  # maximum size of a request
    is_verbose: bool = False  # True if responses contain `__verbose` unless a request sets verbose to false
    has_slots: bool = True  # False if /slots is disabled
    has_page: bool = True  # False if the chat page is disabled
    has_metrics: bool = True  # False if /metrics is disabled
    slot_folder: Path | None = None  # folder in which slots can be saved; `None` disables saving
    model: ServedModel | None = None  # the model; `None` until it is loaded
    draining: bool = False  # whether the server rejects new requests
    started_at: int = field(default_factory=lambda: int(time.time()))  # time of the start, in seconds since 1970

    def require_model(self) -> ServedModel:
        """Return the model; raise an ApiError if it is not loaded, or the server is shutting down."""
        if self.draining:
            raise shutdown_error()
        if self.model is None:
            raise ApiError(503, "Loading model")
        return self.model


COUNTERS = "ngramspec.counters"
"""Key of a request's counters in its ASGI scope."""

FORMAT = "ngramspec.format"
"""Key of the function in the scope that returns the JSON of an error in the format of the request's API."""


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


@dataclass
class Call(Generic[B]):
    server: Server
    body: B  # JSON of the request
    data: Mapping[str, Any]  # the same as it came
    counters: Counters = field(default_factory=Counters)
    query: Mapping[str, str] = field(default_factory=dict)  # with the parameters of the path
    headers: Headers = field(default_factory=Headers)
    format_error: Callable[[ApiError], dict[str, Any]] = error_body
    started_at: float = field(default_factory=time.monotonic)

    @cached_property
    def model(self) -> ServedModel:
        return self.server.require_model()


def error_response(error: ApiError, scope: Scope) -> JsonResponse:
    counters: Counters = scope[COUNTERS]
    counters.error, counters.field = error.type, error.param or (error.code if isinstance(error.code, str) else "")
    response = JsonResponse(scope[FORMAT](error), error.status)
    if error.is_final:
        response.headers["X-Should-Retry"] = "false"  # the clients of OpenAI and Anthropic obey it
    return response
