"""`Server`: what all requests share; `ServedModel`: its model, once loaded; `Call`: one request of a client."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from ngramspec.batching.engine import Engine
from ngramspec.batching.request import Done
from ngramspec.llama.embedder import Embedder
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling
from ngramspec.server.fields import ApiError, Fields, leaving, overflow

EUCLIDEAN = 2  # llama-server's
DEFAULT_TEMPERATURE = 0.8  # llama.cpp's, as in `ngramspec chat`


@dataclass(frozen=True)
class ServedModel:
    """A loaded model."""

    service: Engine
    vocabulary: Vocabulary
    name: str  # that clients are told
    path: str = ""  # of its file, as the user named it
    meta: Mapping[str, Any] = field(default_factory=dict)  # what is known: n_params, n_ctx_train, size and such
    speculative: bool = True  # whether answers are drafted
    suffix_first: bool = False  # whether gaps are shown with what stands behind them first
    exact: bool = False  # whether texts are the same bit for bit whatever is drafted
    drafter: str = ""  # its name; "" for none
    predict: int | None = None  # most tokens of a text where a request does not say; None: as many as the context holds
    embedder: Embedder | None = None  # makes vectors of texts; None: nobody does
    embd_normalize: int = EUCLIDEAN  # how they are scaled where a request does not say; see `embeddings.normalized`
    adapters: Sequence[tuple[str, float]] = ()  # files of LoRA adapters that are always applied, and their scales

    @property
    def n_ctx(self) -> int:
        return self.service.n_ctx

    def check_size(self, characters: int, n_ctx: int | None = None) -> None:
        """Refuse a text of so many characters if they are too many whatever its tokens are; it is not tokenized then.

        `n_ctx`: of the context; None: that of a request.
        """
        room = self.n_ctx if n_ctx is None else n_ctx
        if characters > room and characters > room * self.vocabulary.longest_token:
            raise overflow(-(-characters // self.vocabulary.longest_token), room)

    def most(self, asked: int | None) -> int:
        """Most tokens of a text for which a request asks for so many."""
        return (self.predict or self.n_ctx) if asked is None else asked


@dataclass(slots=True)
class Server:
    """What all requests share."""

    # How tokens are chosen where a request does not say so; seed None: a random one for each request.
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=DEFAULT_TEMPERATURE))
    seed: int | None = None
    ping_seconds: float = 15.0  # of silence, after which a stream says that it is alive
    most_bytes: int = 32 * 2**20  # of a request
    slot_folder: Path | None = None  # where what slots hold may be saved; None: nowhere
    model: ServedModel | None = None  # None until it is loaded
    draining: bool = False  # whether no more requests are taken
    failure: str | None = None  # why there will never be a model
    began: int = field(default_factory=lambda: int(time.time()))  # when it was started, in seconds since 1970

    def ready(self) -> ServedModel:
        """The model; an ApiError where it is not loaded yet, or the server is being stopped."""
        if self.draining:
            raise leaving()
        if self.failure is not None:
            raise ApiError(503, f"the model could not be loaded: {self.failure}")
        if self.model is None:
            raise ApiError(503, "Loading model")
        return self.model


@dataclass(slots=True)
class Counters:
    """What one HTTP request was and cost, for the log; nothing in it was written by a user or a model."""

    method: str = ""
    path: str = "?"  # so where there is no such address
    status: int = 499  # of HTTP; so where the client left before there was one
    took: float = 0.0  # seconds from the request's first byte to the answer's last
    prompt_tokens: int = 0  # of all prompts, cached ones included
    cached: int = 0  # those of them that were in the cache
    tokens: int = 0  # generated
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0  # of generating, prompts not included
    field: str = ""  # that was wrong with it; "" for none

    def add(self, prompt_tokens: int, done: Done) -> None:
        """Count a text that ended."""
        self.prompt_tokens += prompt_tokens
        self.cached += done.cached
        self.tokens += done.stats.generated
        self.drafted += done.stats.drafted
        self.accepted += done.stats.accepted
        self.seconds += done.seconds


@dataclass
class Call:
    """One request: the server, the fields of its JSON (for GET of its query), what it costs, its query and path."""

    server: Server
    given: Fields
    counters: Counters = field(default_factory=Counters)
    query: Fields = field(default_factory=lambda: Fields({}))
    headers: Headers = field(default_factory=Headers)

    @cached_property
    def model(self) -> ServedModel:
        return self.server.ready()

    @property
    def streamed(self) -> bool:
        """Whether the answer is wanted as it comes."""
        return self.given.flag("stream")
