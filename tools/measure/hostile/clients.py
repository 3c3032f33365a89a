"""The processes of clients: ordinary ones, whose waits are measured, and hostile ones."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from hostile.attack import Attack
from hostile.bodies import make_extreme, make_mutated, make_variables
from hostile.grammars import make_grammar_attack
from hostile.raw_http import make_raw_http

PATIENCE = 30.0  # seconds for a hostile request, after which its client leaves
MAX_SHOWN = 2000  # bytes of a response that are shown

GENERATORS: Mapping[str, Callable[[random.Random], Attack]] = {
    "mutated": make_mutated,
    "extreme": make_extreme,
    "http": make_raw_http,
    "grammar": make_grammar_attack,
    "variables": make_variables,
}
"""Generators of hostile requests by kind."""

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "stream": True}
CLIENTS = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "completion": ("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 4}),
    "health": ("GET", "/health", None),
    "models": ("GET", "/v1/models", None),
}


def serve_clients(port: int, stop: Any, results: Any) -> None:
    """Run the clients until `stop` is set, and put their waits, as (client, start, end, status), into `results`."""
    waits: list[tuple[str, float, float, int]] = []

    def loop(name: str) -> None:
        method, path, body = CLIENTS[name]
        connection: http.client.HTTPConnection | None = None
        while not stop.is_set():
            began, status = time.monotonic(), 0
            try:
                connection = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
                connection.request(method, path, None if body is None else json.dumps(body))
                response = connection.getresponse()
                status = response.status
                while response.readline() if body and body.get("stream") else response.read():
                    now = time.monotonic()
                    waits.append((name, began, now, status))
                    began = now
            except (OSError, http.client.HTTPException):
                waits.append((name, began, time.monotonic(), 0))
                connection = None
            time.sleep(0.02)

    threads = [threading.Thread(target=loop, args=(name,), daemon=True) for name in CLIENTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(waits)


def make_attack(kind: str, index: int, seed: int) -> Attack:
    """Return the hostile request of a kind, an index and a seed."""
    return GENERATORS[kind](random.Random(f"{seed} {kind} {index}"))


def read_response(connection: socket.socket, attack: Attack, deadline: float) -> tuple[str, bytes]:
    """Return how a response ended, and its start."""
    start = b""
    try:
        while True:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                return "cut", start
            part = connection.recv(2**16 if attack.reading == "whole" else 1)
            if not part:
                return "", start
            if b'"code":500' in part:
                return "500 in stream", part[-MAX_SHOWN:]
            start += part[: MAX_SHOWN - len(start)]
            if attack.reading == "slowly":
                time.sleep(0.01)
    except TimeoutError:
        return "cut" if start else "silent", start
    except OSError as error:
        return "" if start else type(error).__name__, start


def send(attack: Attack, port: int) -> tuple[str, bytes]:
    """Send a hostile request; return its status (or how it ended) and the start of the response."""
    patience = PATIENCE if attack.reading == "whole" else PATIENCE / 3
    deadline, connections, ending, response = time.monotonic() + patience, list[socket.socket](), "left", b""
    with ExitStack() as stack:
        try:
            address = ("127.0.0.1", port)
            for _ in range(attack.connections):
                connections.append(stack.enter_context(socket.create_connection(address, timeout=PATIENCE)))
            for step in attack.steps:
                for connection in connections if isinstance(step, bytes) else ():
                    connection.sendall(step)
                if not isinstance(step, bytes):
                    time.sleep(step)
        except OSError as error:
            ending = f"{type(error).__name__} while sending"
        if connections and attack.reading != "never":
            ending, response = read_response(connections[-1], attack, deadline)
    status = response[9:12].decode("latin-1") if response.startswith(b"HTTP/1.1 ") else ""
    return f"{status} {ending}".strip() or "closed", response


def attack_server(kind: str, port: int, seed: int, counter: Any, go: Any, events: Any) -> None:
    """Send hostile requests of a kind while `go` is set.

    `events` receives (kind, index, start, end, status, response), first without an end, and again at the end.
    """
    os.nice(5)
    while True:
        go.wait()
        with counter.get_lock():
            index = counter.value
            counter.value += 1
        attack = make_attack(kind, index, seed)
        began = time.monotonic()
        events.put((kind, index, began, None, "", b""))
        status, response = send(attack, port)
        events.put((kind, index, began, time.monotonic(), status, response))
