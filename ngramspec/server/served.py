"""`Server`: what all requests share, and `ServedModel`: the model that they ask for, once it is loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ngramspec.batching.request import Service
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling
from ngramspec.server.errors import ApiError, leaving, loading
from ngramspec.server.sampling_fields import SamplingDefaults

MOST_BYTES = 32 * 2**20
PING_SECONDS = 15.0
DEFAULT_TEMPERATURE = 0.8  # llama.cpp's, as in `ngramspec chat`


@dataclass(frozen=True, slots=True)
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
    """

    service: Service
    vocabulary: Vocabulary
    name: str
    path: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    speculative: bool = True
    suffix_first: bool = False
    exact: bool = False

    @property
    def n_ctx(self) -> int:
        return self.service.n_ctx


@dataclass(slots=True)
class Server:
    """What all requests share.

    Attributes:
        defaults: how tokens are chosen where a request does not say so.
        ping_seconds: of silence, after which a stream says that it is alive.
        most_bytes: of a request.
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
            raise loading()
        return self.model
