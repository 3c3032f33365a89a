"""`Server` and its `ServedModel`; `Endpoint`: an address of it. A request is read, checked, handed on as a `Call`,
counted and logged. It is given up as soon as its client leaves.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngramspec.batching.engine import Engine
from ngramspec.batching.request import Done
from ngramspec.errors import NGramSpecError
from ngramspec.llama.embedder import Embedder
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling
from ngramspec.server.fields import ApiError, Fields, bad_field, json_answer, leaving, of_failure, overflow, worded

_SLOT = re.compile("/slots/[0-9]{1,4}")
_COUNTERS = "ngramspec.counters"  # where a request's scope holds them

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


# --------------------------------------------------------------------------- endpoints


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address of the server that is its application's `state.server`, as ASGI has it."""

    paths: tuple[str, ...]  # its names
    # Raises ApiError or NGramSpecError for what is wrong with a request; anything else is a defect of the server.
    handler: Callable[[Call], Awaitable[Response]]
    method: Literal["GET", "POST"] = "POST"
    wording: Callable[[ApiError], dict[str, Any]] = worded  # its errors as JSON
    public: bool = False  # whether it answers without an API key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server: Server = scope["app"].state.server
        try:
            raw = await _read_body(Request(scope, receive), server.most_bytes)
        except ApiError as error:
            await refusal(error, self)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        work = asyncio.ensure_future(self._respond(server, raw, scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _respond(self, server: Server, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            query = Fields({**QueryParams(scope["query_string"]), **scope.get("path_params", {})})
            # Whoever erases a slot need not send anything.
            fields = Fields(_read_json(raw or b"{}")) if self.method == "POST" else query
            response = await self._handle(Call(server, fields, scope[_COUNTERS], query, Headers(scope=scope)))
        except ApiError as error:
            response = refusal(error, self)
        except Exception:
            await refusal(ApiError(500, "internal error"), self)(scope, receive, send)
            raise
        await response(scope, receive, send)

    async def _handle(self, call: Call) -> Response:
        try:
            return await self.handler(call)
        except (ApiError, NGramSpecError) as error:
            told = of_failure(error)
            call.counters.field = told.param or (told.code if isinstance(told.code, str) else "")
            return refusal(told, self)


def refusal(error: ApiError, endpoint: Endpoint | None) -> Response:
    """An error as a response, in the words of the endpoint, if there is one."""
    return json_answer((worded if endpoint is None else endpoint.wording)(error), error.status)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --------------------------------------------------------------------------- the log


Log = Callable[[Counters], None]


def logged(app: ASGIApp, paths: frozenset[str], log: Log | None) -> ASGIApp:
    """An ASGI application whose requests are counted, and told to a log when they end."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        counters, began = Counters(), time.monotonic()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                counters.status = message["status"]
            await send(message)

        try:
            await app({**scope, _COUNTERS: counters}, receive, noted)
        finally:
            if log is not None and scope["type"] == "http":
                counters.method, counters.took = scope["method"], time.monotonic() - began
                if scope["path"] in paths or _SLOT.fullmatch(scope["path"]):
                    counters.path = scope["path"]
                log(counters)

    return asked


# --------------------------------------------------------------------------- the body


async def _read_body(request: Request, most: int) -> bytes:
    """The body of a request. Raises ApiError beyond `most` bytes, ClientDisconnect where its client left before."""
    too_large = ApiError(413, f"the request is larger than {most / 2**20:g} MiB, the most that this server reads")
    lengths = request.headers.getlist("content-length")
    if any(not value.isdecimal() or len(value) > 15 or int(value) > most for value in lengths):
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_large
    return bytes(body)


def _read_json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; an ApiError where it holds a nan, an infinity, or half a surrogate pair: no text."""
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
