"""Tests of connections: limits on the size of headers, on the time without progress, and on their number."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.cli_runner import PATIENCE
from support.fake_service import Script
from support.http import make_server, run_server

from ngramspec.server import connection
from ngramspec.server.connection import MAX_HEADER_BYTES, Connection

HEAD = b"Host: localhost\r\n"
TOO_LARGE = f"the URL and the headers are larger than {MAX_HEADER_BYTES // 1024} KiB"


@contextmanager
def sockets(count: int) -> Iterator[list[socket.socket]]:
    """Connect several times to a server."""
    with run_server(make_server()[0]) as address:
        port = int(address.rpartition(":")[2])
        made = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(count)]
        try:
            yield made
        finally:
            for one in made:
                one.close()


def post(path: str, body: bytes, headers: bytes = b"") -> bytes:
    """Return the bytes of a request."""
    return b"POST %s HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n%s" % (path.encode(), HEAD, headers, len(body), body)


def read(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionError:  # The server closed it before it read all bytes.
        pass
    return b"".join(parts)


def exchange(*parts: bytes) -> bytes:
    """Send bytes on a connection, and return the response after the server has closed it."""
    with sockets(1) as (client,):
        try:
            for part in parts:
                client.sendall(part)
        except ConnectionError:
            pass
        return read(client)


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_connection_with_unfinished_headers_times_out(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.2)
    assert exchange(begun) == b""


def test_connection_with_stalled_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.2)
    assert exchange(b"POST /tokenize HTTP/1.1\r\n" + HEAD + b"Content-Length: 100\r\n\r\n{") == b""


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health?" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\n" + HEAD + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + HEAD + b"X-Long: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HEAD + b"a: b\r\n" * (MAX_HEADER_BYTES // 4) + b"\r\n",
    ],
    ids=["url", "header", "many headers"],
)
def test_connection_rejects_large_headers_with_431(request_: bytes) -> None:
    head, _, body = exchange(request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["message"] == TOO_LARGE


@pytest.mark.parametrize("begun", [b"GET /health HTTP/1.1\r\nX-Long: ", b"GET /"])
def test_connection_with_endless_headers_closes(begun: bytes) -> None:
    # The system may drop the response together with the unread bytes.
    assert exchange(begun + b"a" * 2**23).partition(b" ")[2][:4] in (b"", b"431 ")


@pytest.mark.parametrize(
    "parts",
    [
        (b"0\r\nX-Long: ", b"a" * 2**23),  # a trailer
        (b"1;", b"a" * 2**23),  # an extension of a chunk
    ],
    ids=["trailer", "chunk extension"],
)
def test_connection_with_endless_chunk_metadata_closes(parts: tuple[bytes, bytes]) -> None:
    assert exchange(b"POST /tokenize HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *parts) == b""


def test_connection_accepts_headers_and_bodies_within_limits() -> None:
    large = b"X-Long: " + b"a" * (MAX_HEADER_BYTES - 1000) + b"\r\n"
    content = json.dumps({"content": "a" * 2**18}).encode()
    request = post("/tokenize", content, large)
    last = b"GET /health HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n"
    assert exchange(request + request + last).count(b"HTTP/1.1 200 ") == 3


def test_connection_with_invalid_http_returns_400() -> None:
    head, _, body = exchange(b"\0\0\0\0\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"] == "the request is not valid HTTP"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /health HTTP/1.0\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\n", b"403"),
        (b"GET /props HTTP/1.0\r\n", b"403"),
        (b"GET /props HTTP/1.1\r\nHost: evil.example\r\n" + HEAD, b"400"),
    ],
)
def test_connection_requires_one_host_except_for_health_in_http_1_0(request_: bytes, status: bytes) -> None:
    assert exchange(request_ + b"Connection: close\r\n\r\n").split()[1] == status


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (
            b"GET /metrics HTTP/1.1\r\nOrigin: http://localhost\r\n",
            {b"Date", b"Server", b"Content-Length", b"Content-Type", b"Process-Start-Time-Unix"},
        ),
        (b"GET /unknown HTTP/1.1\r\n", {b"Date", b"Server", b"Content-Length", b"Content-Type"}),
        (b"POST /tokenize HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n", {b"Content-Type"}),
        (b"\0\r\n", {b"Content-Type", b"Connection", b"Content-Length"}),
    ],
    ids=["own", "error", "continue", "invalid"],
)
def test_connection_response_header_names_are_title_case(request_: bytes, names: set[bytes]) -> None:
    answer = exchange(request_ + HEAD + b"Connection: close\r\n\r\n", b"{}")
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    sent = {line.partition(b": ")[0] for line in head.split(b"\r\n")[1:]}
    assert names <= sent
    assert all(name == name.title() for name in sent)
    assert body


def test_connection_stream_keeps_lines_unchanged() -> None:
    request = post("/completion", b'{"prompt": "x", "stream": true}', b"Connection: close\r\n")
    assert b"\r\ndata: {" in exchange(request)


def test_connection_beyond_maximum_returns_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "connection_limit", 2)
    with sockets(3) as (first, _, third):
        assert read(third).startswith(b"HTTP/1.1 503 ")
        first.sendall(b"GET /health HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n")
        assert read(first).startswith(b"HTTP/1.1 200 ")


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the messages that uvicorn logs."""
    messages: list[str] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda text, *_, **__: messages.append(text))
    return messages


def test_connection_shutdown_ends_requests_without_exceptions(
    errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SENDING_SECONDS", 0.1)
    server, service = make_server(Script(begin=threading.Event()))
    request = post("/completion", b'{"prompt": "x"}')
    with socket.socket() as waiting, socket.socket() as sending:
        with run_server(server) as address:
            for client, sent in ((waiting, request), (sending, request[:-5])):
                client.connect(("127.0.0.1", int(address.rpartition(":")[2])))
                client.sendall(sent)
            while not service.tickets:
                time.sleep(0.01)
        assert read(waiting) + read(sending) == b""
    assert service.tickets[0].cancellation.wait(PATIENCE)
    assert not errors


@pytest.mark.parametrize("stream", [True, False])
def test_connection_disconnect_with_queued_requests_cancels_running_one(errors: list[str], stream: bool) -> None:
    script = Script(ends=False, go=threading.Semaphore(0))
    server, service = make_server(script)
    request = post("/completion", json.dumps({"prompt": "x", "stream": stream}).encode())
    with run_server(server) as address:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            client.sendall(request + request)
            while not service.tickets:
                time.sleep(0.01)
        assert service.tickets[0].cancellation.wait(PATIENCE)
        assert service.tickets[0].end.wait(PATIENCE)
    assert len(service.tickets) == 1
    assert not errors
