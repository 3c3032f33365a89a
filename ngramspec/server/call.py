"""`Call`: a request of a `Server` and its `ServedModel`; `Fields`: its JSON, each field checked when it is read;
`ApiError`: what is wrong with it, as a client is told.

Null means what a field's absence means. Whatever is not asked for is not looked at, since clients send much that other
servers know. A client retries what is answered with 5xx, at the cost of another generation: what a retry cannot fix is
a 400.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response

from ngramspec.batching.engine import Engine
from ngramspec.batching.request import ClosedError, Done
from ngramspec.cpu.thread_governor import ThreadState
from ngramspec.errors import GrammarError, ModelError, NGramSpecError, PromptError, ShutdownError
from ngramspec.llama.embedder import Embedder
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.request import Request
from ngramspec.sampling.distribution import NoTokenLeft
from ngramspec.sampling.settings import Sampling

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

_FIELDS = {GrammarError: "grammar", PromptError: "prompt", ModelError: "messages"}
"""Field of a request that an error refers to, by the type of the error."""

dumped = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode
"""An object as JSON in one line, which never holds a nan or an infinity: these are no JSON."""


def json_answer(data: Any, status: int = 200) -> Response:
    """A response that is JSON."""
    return Response(dumped(data), status, media_type="application/json")


MAX_MESSAGE = 2000
"""Maximum number of characters of an error message, which may quote a request or a model file."""


class ApiError(Exception):
    """A request that gets no answer, or no whole one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,  # the field that is wrong
        type: str | None = None,  # one of llama-server's; None: what goes with the status
        code: int | str | None = None,  # what clients tell errors apart by; None: the status
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
    """The prompt leaves no room for an answer. Clients, which then shorten it, know this by the code, the type, or
    one of the two phrases.
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
    return ApiError(503, "the server is shutting down")


def of_failure(error: Exception, *, started: bool = False) -> ApiError:
    """Map an exception of the engine, the vocabulary or the chat template to the error sent to the client.

    Args:
        error: The exception.
        started: True if the engine had accepted the request.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClosedError | ShutdownError):
        return leaving()
    if isinstance(error, NoTokenLeft):
        return ApiError(400, str(error))
    for kind, param in _FIELDS.items():
        if isinstance(error, kind):
            return ApiError(400, str(error), param=param)
    return ApiError(500 if started or isinstance(error, NGramSpecError) else 400, str(error))


# --------------------------------------------------------------------------- fields


MAX_ITEMS = 10_000
"""Maximum number of objects in a list: messages, parts of a message, tools."""

MAX_STRINGS = 1024
"""Maximum number of strings in a list, such as stop strings."""

MAX_CHARACTERS = 16_384
"""Maximum number of characters of such a list."""

_MOST = 2**31 - 1
_SHOWN = 60

T = TypeVar("T")

_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}


LIST = "adapters"
"""Field that contains the request of an endpoint whose JSON is a list."""


class Fields:
    """A JSON object of a request; `path`: what its fields' names begin with in errors: "messages[0]."

    All methods that read a field raise an ApiError if it has another type or value; `needed_...` also if it is missing.
    """

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self.data = data
        self.path = path

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def name(self, *names: str) -> str:
        """The first of several names of one field that is there; the first of all if none is."""
        return next((name for name in names if name in self), names[0])

    def wrong(self, name: str, must: str) -> ApiError:
        """The error that a field is not what it must be."""
        return bad_field(self.path + name, f"{self.path}{name} must be {must}, got {shown(self.data.get(name))}")

    def refused(self, name: str, problem: str) -> ApiError:
        """The error that a field of the right type still cannot be."""
        return bad_field(self.path + name, f"{self.path}{name}: {problem}")

    def refused_image(self) -> ApiError:
        """Return the error that a part of a message is an image. The status is llama-server's."""
        problem = "image input is not supported; this model accepts only text"
        return ApiError(500, f"{self.path}type: {problem}", param=f"{self.path}type", is_final=True)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._typed(name, bool)
        return default if value is None else value

    def text(self, name: str) -> str | None:
        return self._typed(name, str)

    def needed_text(self, name: str) -> str:
        self.needed(name)
        return self.text(name) or ""

    def needed_name(self, name: str) -> str:
        """A text that is not empty."""
        value = self.needed_text(name)
        if not value:
            raise self.refused(name, "must not be empty")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self.data.get(name)
        if value is not None and value not in allowed:
            raise self.wrong(name, f"one of {', '.join(allowed)}")
        return default if value is None else str(value)

    def needed_choice(self, name: str, allowed: Sequence[str]) -> str:
        self.needed_text(name)
        return self.choice(name, allowed, "")

    def whole(self, name: str, default: int | None = None, *, least: int = 0, most: int = _MOST) -> int | None:
        """A whole number. 5.0 is one: JavaScript does not tell them apart."""
        value = self.data.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limits = f"of at least {least}" if most == _MOST else f"from {least} to {most}"
            raise self.wrong(name, f"a whole number {limits}")
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.data.get(name)
        if value is None:
            return None
        try:
            if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # a whole number beyond all floats
            pass
        raise self.wrong(name, "a finite number")

    def texts(self, name: str, *, most: int = MAX_STRINGS, characters: int = MAX_CHARACTERS) -> list[str]:
        """Return a list of strings, which may also be given as one string.

        Args:
            name: Name of the field.
            most: Maximum number of strings.
            characters: Maximum number of characters of all strings together.
        """
        value = self.data.get(name)
        if value is None:
            return []
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.wrong(name, "a string or a list of strings")
        self.check_count(name, len(found), most, "strings")
        self.check_count(name, sum(map(len, found)), characters, "characters")
        return found

    def check_count(self, name: str, count: int, most: int, noun: str) -> None:
        """Refuse a field with more than so many items."""
        if count > most:
            raise bad_field(self.path + name, f"{self.path}{name} must have at most {most:,} {noun}, got {count:,}")

    def parts(self, name: str, read: Callable[[Fields], str]) -> list[str]:
        """The texts of a field that holds one, or a list of objects, each of which `read` makes a text of."""
        value = self.data.get(name)
        return [value] if isinstance(value, str) else [read(part) for part in self.objects(name)]

    def object(self, name: str) -> Fields | None:
        value = self._typed(name, dict)
        return None if value is None else Fields(value, f"{self.path}{name}.")

    def needed_object(self, name: str) -> Fields:
        self.needed(name)
        return self.object(name) or Fields({})

    def list(self, name: str) -> list[Any]:
        return self._typed(name, list) or []

    def objects(self, name: str) -> Iterator[Fields]:
        """Return the objects of a list."""
        items = self.list(name)
        self.check_count(name, len(items), MAX_ITEMS, "items")
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                raise bad_field(f"{self.path}{name}", f"{self.path}{name}[{i}] must be an object, got {shown(item)}")
            yield Fields(item, f"{self.path}{name}[{i}].")

    def needed(self, name: str) -> Any:
        """Any value but null."""
        if name not in self:
            raise bad_field(self.path + name, f"{self.path}{name} is missing")
        return self.data[name]

    def _typed(self, name: str, kind: type[T]) -> T | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, _KINDS[kind])
        return value


def shown(value: Any) -> str:
    """A value as an error message may show it: short, or only its type."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else "a long string"
    if isinstance(value, int | float):
        return repr(value) if abs(value) < 10**_SHOWN or isinstance(value, float) else "a very large number"
    return _KINDS[type(value)]


# --------------------------------------------------------------------------- the server

EUCLIDEAN = 2  # llama-server's
UNLIMITED = -1  # reasoning budget that means no limit, as in llama-server
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
    threads: Callable[[], ThreadState] | None = None  # returns the numbers of threads at present
    aliases: Sequence[str] = ()  # all names of the model that clients may use
    tags: Sequence[str] = ()  # labels of the model, for clients only
    adapters: Sequence[str] = ()  # files of LoRA adapters; the service has their scales
    # variables of the chat template, for requests that do not set them
    variables: Mapping[str, Any] = field(default_factory=dict)
    # maximum number of tokens in a block of reasoning, for requests that do not say
    reasoning_budget: int = UNLIMITED
    reasoning_message: str = ""  # text before the closing tag that ends reasoning at its budget

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
    """State shared by all requests."""

    # How tokens are chosen where a request does not say so; seed None: a random one for each request.
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=DEFAULT_TEMPERATURE))
    seed: int | None = None
    ping_seconds: float = 15.0  # of silence, after which a stream says that it is alive
    most_bytes: int = 16 * 2**20  # of a request
    is_verbose: bool = False  # True if responses contain `__verbose` unless a request sets verbose to false
    has_slots: bool = True  # False if /slots is disabled
    has_page: bool = True  # False if the chat page is disabled
    has_metrics: bool = True  # False if /metrics is disabled
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
    """Log entry of one HTTP request; it contains no text of a user or a model."""

    method: str = ""
    path: str = "?"  # so where there is no such address
    status: int = 499  # of HTTP; so where the client left before there was one
    took: float = 0.0  # seconds from the request's first byte to the answer's last
    prompt_tokens: int = 0  # of all prompts, cached ones included
    cached: int = 0  # those of them that were in the cache
    tokens: int = 0  # generated
    decoded: int = 0  # generated after the first tokens, which come from the logits of the prompts
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0  # of generating, prompts not included
    field: str = ""  # that was wrong with it; "" for none

    def add(self, prompt_tokens: int, done: Done) -> None:
        """Count a text that ended."""
        self.prompt_tokens += prompt_tokens
        self.cached += done.cached
        self.tokens += done.stats.generated
        self.decoded += done.stats.tokens
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
    requests: Sequence[Request] = ()  # of the engine, once their prompts are known

    @cached_property
    def model(self) -> ServedModel:
        return self.server.ready()

    @property
    def streamed(self) -> bool:
        """Whether the answer is wanted as it comes."""
        return self.given.flag("stream")
