"""A small Hugging Face hub on the loopback interface that can list and serve files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """The files of the hub and the requests it received.

    Attributes:
        repos: Content by file path, by owner/repo.
        gated: Repositories whose files require the token "let-me-in"; the list of files is public.
        error_status: Status of the response to every request, if not `None`.
        url: URL of the hub.
        requests: Requests as (method, path), in order.
    """

    repos: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    error_status: int | None = None
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Return (status, headers, body) of the response to a GET."""
        if self.error_status is not None:
            return self.error_status, {}, b""
        parts = unquote(path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        files = self.repos[repo]
        if api:
            siblings = [{"rfilename": name} for name in files]
            body = {"id": repo, "sha": COMMIT, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
        if repo in self.gated and token != "Bearer let-me-in":
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        name = "/".join(parts[4:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        etag = hashlib.sha256(files[name]).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, files[name]


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the hub in a thread and set `hub.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append((self.command, path))
            status, headers, content = hub.answer(path, self.headers.get("Authorization"))
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
