"""A small Hugging Face hub on the loopback interface that can list and serve files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.wsgi import serve_wsgi

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """The files of the hub and the requests it received."""

    repos: dict[str, dict[str, bytes]]  # content by file path, by owner/repo
    gated: set[str] = field(default_factory=set)  # repositories that require the token "let-me-in" for files
    error_status: int | None = None  # status of the response to every request, if not `None`
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)  # as (method, path), in order

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Return (status, headers, body) of the response to a GET."""
        if self.error_status is not None:
            return self.error_status, {}, b""
        parts = path.strip("/").split("/")
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

    def application(request: dict[str, Any], begin: Callable[..., Any]) -> list[bytes]:
        path = request["PATH_INFO"]
        hub.requests.append((request["REQUEST_METHOD"], path))
        status, headers, content = hub.answer(path, request.get("HTTP_AUTHORIZATION"))
        begin(f"{status} of a test", [*headers.items(), ("Content-Length", str(len(content)))])
        return [content] if request["REQUEST_METHOD"] == "GET" else []

    with serve_wsgi(application) as hub.url:
        yield hub
