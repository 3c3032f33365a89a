"""An HTTP request (`Call`), its JSON (`Fields`), the error sent to the client (`ApiError`), and the server's state.

Fields are checked when they are read. A null field is treated as a missing one. Unknown fields are ignored, because
clients send many that other servers support. Clients retry requests whose status is 5xx, at the cost of another
generation. So the status is 400 if a retry cannot succeed.
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
"""Function that encodes an object as JSON on one line. It rejects nan and infinity, which JSON lacks."""


def json_answer(data: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(dumped(data), status, media_type="application/json")


MAX_MESSAGE = 2000
"""Maximum number of characters of an error message, which may quote a request or a model file."""


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


def worded(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error in the format of llama-server and OpenAI."""
    told: dict[str, Any] = {"code": error.code, "message": error.message, "type": error.type}
    if error.param is not None:
        told["param"] = error.param
    return {"error": told | error.details}


def bad_field(name: str, message: str) -> ApiError:
    """Return the error for an invalid field; the message must begin with its name."""
    return ApiError(400, message, param=name)


def overflow(prompt_tokens: int, n_ctx: int) -> ApiError:
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


def leaving() -> ApiError:
    """Return the error for requests during shutdown."""
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
    """A JSON object of a request.

    All methods that read a field raise an ApiError if it has another type or value; `needed_...` also if it is missing.

    Args:
        data: The object.
        path: Prefix of the fields' names in error messages, such as "messages[0].".
    """

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self.data = data
        self.path = path

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def name(self, *names: str) -> str:
        """Return the first of several names of a field that the request contains; without one, the first name."""
        return next((name for name in names if name in self), names[0])

    def wrong(self, name: str, must: str) -> ApiError:
        """Return the error for a field with another type or value than `must` describes."""
        return bad_field(self.path + name, f"{self.path}{name} must be {must}, got {shown(self.data.get(name))}")

    def refused(self, name: str, problem: str) -> ApiError:
        """Return the error for a field that has a valid type but cannot be used."""
        return bad_field(self.path + name, f"{self.path}{name}: {problem}")

    def refused_image(self) -> ApiError:
        """Return the error for an image in a message, with llama-server's status."""
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
        """Return a string that is not empty."""
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
        """Return a whole number. 5.0 is accepted, because JavaScript does not distinguish it from 5."""
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
        """Return a finite number."""
        value = self.data.get(name)
        if value is None:
            return None
        try:
            if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # a whole number that exceeds the range of floats
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
        """Raise an ApiError for a field with more than `most` items."""
        if count > most:
            raise bad_field(self.path + name, f"{self.path}{name} must have at most {most:,} {noun}, got {count:,}")

    def parts(self, name: str, read: Callable[[Fields], str]) -> list[str]:
        """Return the texts of a field that is a string, or a list of objects from which `read` gets the texts."""
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
        """Yield the objects of a list."""
        items = self.list(name)
        self.check_count(name, len(items), MAX_ITEMS, "items")
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                raise bad_field(f"{self.path}{name}", f"{self.path}{name}[{i}] must be an object, got {shown(item)}")
            yield Fields(item, f"{self.path}{name}[{i}].")

    def needed(self, name: str) -> Any:
        """Return a value of any type except null."""
        if name not in self:
            raise bad_field(self.path + name, f"{self.path}{name} is missing")
        return self.data[name]

    def _typed(self, name: str, kind: type[T]) -> T | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, _KINDS[kind])
        return value


def shown(value: Any) -> str:
    """Return a short text of a value for an error message; only the type if the value is long."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else "a long string"
    if isinstance(value, int | float):
        return repr(value) if abs(value) < 10**_SHOWN or isinstance(value, float) else "a very large number"
    return _KINDS[type(value)]


# --------------------------------------------------------------------------- the server

EUCLIDEAN = 2  # llama-server's default scaling of embeddings
UNLIMITED = -1  # reasoning budget that means no limit, as in llama-server
DEFAULT_TEMPERATURE = 0.8  # llama.cpp's, as in `ngramspec chat`


@dataclass(frozen=True)
class ServedModel:
    """A loaded model."""

    service: Engine
    vocabulary: Vocabulary
    name: str  # name of the model for clients
    path: str = ""  # path of the model file, as the user typed it
    meta: Mapping[str, Any] = field(default_factory=dict)  # known metadata: n_params, n_ctx_train, size and so on
    speculative: bool = True  # whether responses are drafted
    suffix_first: bool = False  # whether fill-in-the-middle prompts contain the suffix before the prefix
    exact: bool = False  # whether texts are the same bit for bit with any drafts
    drafter: str = ""  # name of the drafter; "" without drafting
    # Maximum number of tokens for requests that do not set it; `None` means until the context is full.
    predict: int | None = None
    embedder: Embedder | None = None  # model that makes embeddings; `None` if they are disabled
    # Scaling of embeddings for requests that do not set it; see `embeddings.normalized`.
    embd_normalize: int = EUCLIDEAN
    threads: Callable[[], ThreadState] | None = None  # function that returns the present numbers of threads
    aliases: Sequence[str] = ()  # all names of the model that clients may use
    tags: Sequence[str] = ()  # labels of the model, for clients only
    adapters: Sequence[str] = ()  # files of LoRA adapters; the service has their scales
    # Variables of the chat template, for requests that do not set them.
    variables: Mapping[str, Any] = field(default_factory=dict)
    # Maximum number of tokens in a block of reasoning, for requests that do not set it.
    reasoning_budget: int = UNLIMITED
    reasoning_message: str = ""  # text before the closing tag that ends reasoning at its budget

    @property
    def n_ctx(self) -> int:
        return self.service.n_ctx

    def check_size(self, characters: int, n_ctx: int | None = None) -> None:
        """Raise an ApiError for a text that is too long for the context even with the longest tokens.

        Such a text need not be tokenized.

        Args:
            characters: Number of characters of the text.
            n_ctx: Size of the context; `None` means that of a request.
        """
        room = self.n_ctx if n_ctx is None else n_ctx
        if characters > room and characters > room * self.vocabulary.longest_token:
            raise overflow(-(-characters // self.vocabulary.longest_token), room)

    def most(self, asked: int | None) -> int:
        """Return the maximum number of tokens of a response; `asked` is the number in the request."""
        return (self.predict or self.n_ctx) if asked is None else asked


@dataclass(slots=True)
class Server:
    """State shared by all requests."""

    # Sampling settings for requests that do not set them.
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=DEFAULT_TEMPERATURE))
    seed: int | None = None  # seed for requests that do not set it; `None` means a random one for each request
    ping_seconds: float = 15.0  # seconds without an event after which a stream sends a sign of life
    most_bytes: int = 16 * 2**20  # maximum size of a request
    is_verbose: bool = False  # True if responses contain `__verbose` unless a request sets verbose to false
    has_slots: bool = True  # False if /slots is disabled
    has_page: bool = True  # False if the chat page is disabled
    has_metrics: bool = True  # False if /metrics is disabled
    slot_folder: Path | None = None  # folder in which slots can be saved; `None` disables saving
    model: ServedModel | None = None  # the model; `None` until it is loaded
    draining: bool = False  # whether the server rejects new requests
    failure: str | None = None  # error with which the model failed to load
    began: int = field(default_factory=lambda: int(time.time()))  # time of the start, in seconds since 1970

    def ready(self) -> ServedModel:
        """Return the model; raise an ApiError if it is not loaded, or the server is shutting down."""
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
    path: str = "?"  # path of the endpoint; "?" for an unknown one
    status: int = 499  # HTTP status; 499 if the client disconnected before the response
    took: float = 0.0  # seconds from the first byte of the request to the last byte of the response
    prompt_tokens: int = 0  # tokens of all prompts, including cached ones
    cached: int = 0  # tokens of the prompts that were in the cache
    tokens: int = 0  # generated tokens
    decoded: int = 0  # generated tokens without the first ones, which come from the logits of the prompts
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0  # time of decoding, without prefill
    field: str = ""  # name of the invalid field, if the request had one

    def add(self, prompt_tokens: int, done: Done) -> None:
        """Add the numbers of a finished text."""
        self.prompt_tokens += prompt_tokens
        self.cached += done.cached
        self.tokens += done.stats.generated
        self.decoded += done.stats.tokens
        self.drafted += done.stats.drafted
        self.accepted += done.stats.accepted
        self.seconds += done.seconds


@dataclass
class Call:
    """An HTTP request."""

    server: Server
    given: Fields  # fields of the JSON, or of the query of a GET request
    counters: Counters = field(default_factory=Counters)
    query: Fields = field(default_factory=lambda: Fields({}))
    headers: Headers = field(default_factory=Headers)
    requests: Sequence[Request] = ()  # requests to the engine, after their prompts are known

    @cached_property
    def model(self) -> ServedModel:
        return self.server.ready()

    @property
    def streamed(self) -> bool:
        """True if the client asks for a stream."""
        return self.given.flag("stream")
