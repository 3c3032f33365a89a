"""`Connection`: HTTP on one connection, with limits on the size of the headers and on the time without progress.

`HttpServer` runs the application with enough threads.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ngramspec.server.json_text import ApiError, encode_json, error_body

HEADER_SECONDS = 20.0  # maximum time for the headers of a request
BODY_SECONDS = 20.0  # maximum time without a byte of a body
MAX_HEADER_BYTES = 65536  # maximum size of the URL and the headers of a request together, and of the trailers
MAX_THREADS = 64  # maximum number of requests that are read, tokenized and checked at once
MAX_PIPELINED = 8  # number of requests on a connection, running and waiting, up to which the connection is read
SENDING_SECONDS = 2.0  # maximum time for sending responses after the server was asked to stop

_HEADER_NAME = re.compile(rb"(?m)^[a-z][a-z0-9-]*(?=: )")


def max_connections() -> int:
    """Return the maximum number of connections that leaves enough file descriptors for the rest of the process."""
    try:
        import resource
    except ImportError:  # Windows
        return 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Half of the files are for the model, the child processes and the libraries.
    return 4096 if soft == resource.RLIM_INFINITY else max(16, min(4096, soft // 2))


class ResponseTransport(asyncio.Transport):
    """The transport of one response, which sends header names in their usual spelling, such as Content-Type.

    uvicorn writes them in lower case, and some clients look for the usual spelling.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._has_sent_head = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._has_sent_head:  # "100 Continue" has no headers; every other response has at least a date
            data, n_replaced = _HEADER_NAME.subn(lambda name: name[0].title(), data)
            self._has_sent_head = n_replaced > 0
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class Connection(HttpToolsProtocol):  # type: ignore[misc, unused-ignore]
    """HTTP on one connection. It is closed if a client stops sending in the middle of a request."""

    connection_limit: ClassVar[int] = max_connections()

    _timer: asyncio.TimerHandle | None = None
    _awaits_headers = True
    _error: ApiError | None = None
    _n_parsed = 0  # number of parts of requests, other than headers, that the parser has reported
    _pending = 0  # bytes since the last of them

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._cycles = deque[RequestResponseCycle]()  # requests without a complete response; all but the first wait
        super().connection_made(transport)  # type: ignore[arg-type, unused-ignore]
        if len(self.connections) > self.connection_limit:
            self._error = ApiError(503, f"the server has reached its maximum of {self.connection_limit} connections")
            self.send_400_response("")
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        before = self._n_parsed
        super().data_received(data)
        self._pending = self._pending + len(data) if self._n_parsed == before else 0
        if self._pending > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._error = _make_size_error()
            self.send_400_response("")
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn does this only for the last request of several on a connection.
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._stop_timer()

    def on_message_begin(self) -> None:
        self._n_parsed += 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._n_parsed += 1
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            self._error = _make_size_error()
            raise self._error  # the parser stops, and `data_received` calls `send_400_response`
        super().on_headers_complete()
        self.cycle.transport = ResponseTransport(self.transport)
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._cycles.append(self.cycle)
        if len(self._cycles) <= MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn has paused it, and would not notice that the client disconnects

    def on_body(self, body: bytes) -> None:
        self._n_parsed += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._n_parsed += 1
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not valid HTTP or exceeds a limit, and close the connection."""
        if not self._is_working():
            error = self._error or ApiError(400, "the request is not valid HTTP")
            body = encode_json(error_body(error)).encode()
            head = b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _is_working(self) -> bool:
        """Return True if the headers of a request have arrived, and the response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Start or stop the clock for the next bytes of a request."""
        if self.transport.is_closing():
            self._stop_timer()
        elif not self._is_working():
            if self._timer is None or not self._awaits_headers:
                self._start_timer(HEADER_SECONDS)
            self._awaits_headers = True
        else:
            self._stop_timer()
            self._awaits_headers = False
            if self.cycle.more_body:
                self._start_timer(BODY_SECONDS)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._is_working() and self.flow.read_paused:
            self._watch()  # the server does not take bytes at the moment
        elif not self._is_working() or self.cycle.more_body:
            self.transport.close()


def _make_size_error() -> ApiError:
    return ApiError(431, f"the URL and the headers are larger than {MAX_HEADER_BYTES // 1024} KiB")


class HttpServer(uvicorn.Server):
    """uvicorn's server, with enough threads for requests that wait.

    Requests are read, tokenized and checked on threads, of which asyncio has only a few on a small machine. A few
    requests that wait for the worker of grammars or templates would then block all other clients.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS, "request"))
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(SENDING_SECONDS, self._abort)
        await super().shutdown(sockets)
        timer.cancel()

    def _abort(self) -> None:
        """Close all connections. uvicorn would cancel the tasks of their requests, and log that as exceptions."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
