"""`Access` and `CrossOrigin`: middleware that decides which hosts, web pages and clients may use the server."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ngramspec.server.json_text import ApiError
from ngramspec.server.state import error_response

_LOCAL_PAGE = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:/?#@\s]*))(?::[0-9]{0,5})?")


_PUBLIC = ("/health", "/v1/health", "/")
"""Paths that require no API key, which users enter on the page."""


class Access:
    """Middleware that rejects requests of web pages that must not use a model on this machine, and of unknown clients.

    - DNS rebinding: evil.example can resolve to 127.0.0.1, and its pages then have the same origin as this server.
      Their requests still have evil.example as `Host`, which is rejected. No page of others has an IP address as its
      host, so all addresses are accepted.
    - Requests of other pages have an `Origin`. Unless it is allowed, they are rejected: the page could not read the
      answer, but an answer takes minutes of the machine. Pages of this machine, on any port, are allowed: only a
      program of the user can serve them, and it needs no browser to use this server.
    - With API keys, a request must have one of them. Containers may then also call this machine host.docker.internal,
      since a page with this name does not have a key.
    - Health checks that use HTTP/1.0 have no `Host`; browsers always send one.

    The arguments are those of `make_app`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        origins: Collection[str],
        hosts: Collection[str],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._origins = set(origins)
        self._hosts = {"localhost", *(host.lower() for host in hosts), *(["host.docker.internal"] if keys else ())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            is_public = scope["path"] in _PUBLIC
            needs_host = not (is_public and scope.get("http_version") == "1.0")
            error = self._find_error(Headers(scope=scope), is_public, needs_host)
            if error is not None:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _find_error(self, headers: Headers, is_public: bool, needs_host: bool) -> ApiError | None:
        host = headers.get("host", "")
        if len(headers.getlist("host")) > 1:
            return ApiError(400, "the request has more than one Host header")
        if not self._is_known(host) and (needs_host or "host" in headers):
            return ApiError(403, f"unknown host name {host[:80]!r}; start the server with --allow-host to accept it")
        origin = headers.get("origin")
        allowed = self._origins & {origin, "*"} or _LOCAL_PAGE.fullmatch(origin or "")
        if origin is not None and not allowed and not _is_same(origin, host):
            problem = f"requests from pages of {origin[:80]!r} are not allowed"
            return ApiError(403, f"{problem}; start the server with --cors to allow them")
        if self._keys and not is_public and not self._has_key(headers):
            return ApiError(401, "Invalid API Key")
        return None

    def _is_known(self, host: str) -> bool:
        name = _strip_port(host).lower()
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        candidates = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        # Every key is compared up to its end, so that the time does not reveal how much of a key is correct.
        matches = [hmac.compare_digest(raw.encode("latin-1"), key) for raw in candidates for key in self._keys]
        return any(matches)


class CrossOrigin(CORSMiddleware):
    """Middleware that lets browsers read the responses to pages of allowed origins, and of this machine.

    Preflight requests of other origins get status 200 without permission, as llama-server answers them.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_origin_regex=_LOCAL_PAGE.pattern,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        return Response(headers={"Vary": "Origin"})


def _strip_port(host: str) -> str:
    """Return the name or address of a `Host`; "" if it is neither."""
    match = _HOST.fullmatch(host)
    return "" if match is None else match["address"] or match["name"] or ""


def _is_same(origin: str, host: str) -> bool:
    """Return True if pages of this origin come from a server with this `Host`."""
    scheme, _, name = origin.partition("://")
    return scheme in ("http", "https") and name == host
