"""Who may ask: a web page that a browser shows must not reach a model that listens on the same machine.

- DNS rebinding: a page of evil.example whose name is made to mean 127.0.0.1 is the same origin as this server to the
  browser. Its requests still name evil.example as their host, which is refused. An address in digits names no page of
  anybody else, so any is fine.
- Another page's requests carry its origin. One that was not allowed is refused, though it could not read the answer: an
  answer costs minutes of the machine.
- With API keys, one of them must be shown. Then containers may call this machine host.docker.internal, too: a page that
  has this name has no key.
- Health checks of HTTP/1.0 name no host; browsers always do.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ngramspec.server.errors import ApiError, worded
from ngramspec.server.http import Endpoint, JsonAnswer


class Access:
    """An ASGI application that only lets requests through that may be asked.

    Args:
        app: what answers them.
        endpoints: by path.
        keys: of the API, of which one must be shown; none: nobody is asked for one.
        origins: whose pages may ask; "*": any.
        hosts: further names of this server.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Endpoint],
        keys: Sequence[str],
        origins: Collection[str],
        hosts: Collection[str],
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._keys = [key.encode() for key in keys]
        self._origins = set(origins)
        self._hosts = {"localhost", *(host.lower() for host in hosts), *(["host.docker.internal"] if keys else ())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            endpoint = self._endpoints.get(scope["path"])
            old = scope.get("http_version") == "1.0"
            error = self._refusal(Headers(scope=scope), endpoint is not None and endpoint.public, old)
            if error is not None:
                wording = worded if endpoint is None else endpoint.wording
                await JsonAnswer(wording(error), error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, public: bool, old: bool) -> ApiError | None:
        host = headers.get("host", "")
        if not self._known(host) and not (public and old and "host" not in headers):
            return ApiError(403, f"this server is not known as {host[:80]!r}; start it with --allow-host to let it be")
        origin = headers.get("origin")
        if origin is not None and not self._origins & {origin, "*"} and origin.partition("://")[2] != host:
            return ApiError(403, f"pages of {origin[:80]!r} may not ask; start the server with --cors to let them")
        if self._keys and not public and not self._shown(headers):
            return ApiError(401, "Invalid API Key")
        return None

    def _known(self, host: str) -> bool:
        name = _without_port(host).lower()
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _shown(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        candidates = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        # Every key is compared to the end, or the time would tell how much of one is right.
        found = [hmac.compare_digest(raw.encode("latin-1"), key) for raw in candidates for key in self._keys]
        return any(found)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
