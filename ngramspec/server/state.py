"""`Server`: what all requests share; `ServedModel`: its model, once loaded; `Call`: one request of a client."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ngramspec.batching.engine import Engine
from ngramspec.batching.request import Done
from ngramspec.llama.embedder import Embedder
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling
from ngramspec.server.fields import ApiError, Fields, leaving, overflow

MOST_BYTES = 32 * 2**20
PING_SECONDS = 15.0
EUCLIDEAN = 2  # llama-server's
DEFAULT_TEMPERATURE = 0.8  # llama.cpp's, as in `ngramspec chat`


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that says nothing gets; `seed` None: a random one for each request."""

    sampling: Sampling
    seed: int | None = None


@dataclass(frozen=True)
class ServedModel:
    """A loaded model.

    Attributes:
        service: what answers.
        vocabulary: of the model.
        name: that clients are told.
        path: of its file, as the user named it.
        meta: what is known of the model: n_params, n_ctx_train, size in bytes and such.
        speculative: whether answers are drafted.
        suffix_first: whether the model fills gaps shown with what stands behind them first.
        exact: whether texts are the same bit for bit whatever is drafted.
        drafter: its name; "" for none.
        predict: most tokens of a text where a request does not say; None: as many as the context holds.
        embedder: makes vectors of texts; None: nobody does.
        embd_normalize: how these are scaled where a request does not say; see `ngramspec.server.embeddings.normalized`.
    """

    service: Engine
    vocabulary: Vocabulary
    name: str
    path: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    speculative: bool = True
    suffix_first: bool = False
    exact: bool = False
    drafter: str = ""
    predict: int | None = None
    embedder: Embedder | None = None
    embd_normalize: int = EUCLIDEAN

    @property
    def n_ctx(self) -> int:
        return self.service.n_ctx

    def check_size(self, characters: int, n_ctx: int | None = None) -> None:
        """Refuse a text that has too many characters for the context, whatever its tokens are: it is not tokenized.

        Args:
            characters: of the text.
            n_ctx: of the context; None: that of a request.

        Raises:
            ApiError: the overflow that clients know.
        """
        room = self.n_ctx if n_ctx is None else n_ctx
        if characters > room and characters > room * self._longest_token:
            raise overflow(-(-characters // self._longest_token), room)

    @cached_property
    def _longest_token(self) -> int:
        """Most characters of a token."""
        return max(len(self.vocabulary.piece(token)) for token in range(self.vocabulary.n_vocab))

    def most(self, asked: int | None) -> int:
        """Most tokens of a text for which a request asks for so many."""
        return (self.predict or self.n_ctx) if asked is None else asked


@dataclass(slots=True)
class Server:
    """What all requests share.

    Attributes:
        defaults: how tokens are chosen where a request does not say so.
        ping_seconds: of silence, after which a stream says that it is alive.
        most_bytes: of a request.
        slot_folder: where what slots hold may be saved; None: nowhere.
        model: None until it is loaded.
        draining: whether no more requests are taken.
        failure: why there will never be a model.
        began: when the server was started, in seconds since 1970.
    """

    defaults: SamplingDefaults = field(
        default_factory=lambda: SamplingDefaults(Sampling(temperature=DEFAULT_TEMPERATURE))
    )
    ping_seconds: float = PING_SECONDS
    most_bytes: int = MOST_BYTES
    slot_folder: Path | None = None
    model: ServedModel | None = None
    draining: bool = False
    failure: str | None = None
    began: int = field(default_factory=lambda: int(time.time()))

    def ready(self) -> ServedModel:
        """The model.

        Raises:
            ApiError: it is not loaded yet, or the server is being stopped.
        """
        if self.draining:
            raise leaving()
        if self.failure is not None:
            raise ApiError(503, f"the model could not be loaded: {self.failure}")
        if self.model is None:
            raise ApiError(503, "Loading model")
        return self.model


@dataclass(slots=True)
class Counters:
    """What one HTTP request cost, for the log.

    Attributes:
        prompt_tokens: of all prompts, cached ones included.
        cached: those of them that were in the cache.
        tokens: generated.
        drafted, accepted: draft tokens.
        seconds: of generating, prompts not included.
        field: that was wrong with it; "" for none.
    """

    prompt_tokens: int = 0
    cached: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    field: str = ""

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

    @cached_property
    def model(self) -> ServedModel:
        """The model. Raises ApiError as `Server.ready` does."""
        return self.server.ready()

    @property
    def streamed(self) -> bool:
        """Whether the answer is wanted as it comes."""
        return self.given.flag("stream")
