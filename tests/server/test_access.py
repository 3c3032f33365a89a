"""Tests of access: the server rejects foreign origins, unknown host names and clients without a key.

The page itself needs no key, and its content security policy is strict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx
from support.http import make_server, send

GOOD = "https://good.example"


def answer(
    path: str = "/props", headers: Mapping[str, Any] | None = None, method: str = "GET", **settings: Any
) -> httpx.Response:
    response = send(make_server()[0], path, None, method, settings=settings, headers=headers)
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
    return response


def status(path: str = "/props", headers: Mapping[str, Any] | None = None, **settings: Any) -> int:
    return answer(path, headers, **settings).status_code


def test_access_accepts_known_host_names_and_rejects_others() -> None:
    known = ("localhost", "localhost:8080", "LOCALHOST", "127.0.0.1:1", "[::1]:8080", "[::1]", "192.168.1.5:80")
    for host in (*known, "me.lan:8080"):
        assert status(headers={"Host": host}, hosts=["me.lan"]) == 200, host
    malformed = ("[localhost]evil", "localhost:evil.example", "[localhost]", "[::1]evil", "localhost:80@evil.example")
    for host in (
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "",
        "localhost.evil",
        "[x]",
        *malformed,
    ):
        assert status(headers={"Host": host}, hosts=["me.lan"]) == 403, host
        assert status("/health", headers={"Host": host}) == 403, host


def test_access_accepts_container_host_only_with_key_or_setting() -> None:
    headers = {"Host": "host.docker.internal:8080", "X-Api-Key": "k"}
    assert status(headers=headers, keys=["k"]) == 200
    assert status(headers=headers) == 403
    assert status(headers=headers, hosts=["host.docker.internal"]) == 200


def test_access_rejects_foreign_origins() -> None:
    own = "http://127.0.0.1"
    for origin, allowed, expected in (
        ("https://evil.example", [], 403),
        ("null", [], 403),
        ("http://localhost:3000", [], 200),
        ("https://127.0.0.1:8443", [], 200),
        ("http://[::1]:5173", [], 200),
        ("http://localhost.evil.example", [], 403),
        ("http://localhost:3000.evil.example", [], 403),
        ("http://notlocalhost:3000", [], 403),
        ("http://localhost", [], 200),
        ("file://localhost", [], 403),
        ("chrome-extension://localhost", [], 403),
        (own, [], 200),
        (GOOD, [GOOD], 200),
        ("https://evil.example", [GOOD], 403),
        ("https://any.example", ["*"], 200),
    ):
        assert status(headers={"Origin": origin}, origins=allowed) == expected, origin


def test_access_sends_cors_header_only_to_allowed_origins() -> None:
    told = "access-control-allow-origin"
    asked = {"Origin": GOOD, "Access-Control-Request-Method": "POST"}
    response = answer("/completion", asked, "OPTIONS", origins=[GOOD], keys=["k"])
    assert (response.status_code, response.headers[told]) == (200, GOOD)
    response = answer(headers={"Origin": GOOD}, origins=[GOOD], keys=["k"])
    assert (response.status_code, response.headers[told]) == (401, GOOD)
    response = answer("/completion", asked | {"Origin": "http://localhost:3000"}, "OPTIONS")
    assert (response.status_code, response.headers[told]) == (200, "http://localhost:3000")
    response = answer("/completion", asked, "OPTIONS")
    assert (response.status_code, response.headers.get(told)) == (200, None)
    assert told not in answer().headers


def test_access_requires_key_except_for_health() -> None:
    for name, value, expected in (
        ("X-Other", "", 401),
        ("Authorization", "Bearer wrong", 401),
        ("Authorization", "Bearer ", 401),
        ("Authorization", "Basic schlüssel", 401),
        ("Authorization", "Bearer schlüssel", 200),
        ("authorization", "bearer schlüssel", 200),
        ("X-Api-Key", "schlüssel", 200),
        ("X-Api-Key", "second", 200),
        ("X-Api-Key", "", 401),
    ):
        assert status(headers={name: value.encode()}, keys=["schlüssel", "second"]) == expected, (name, value)
    for path, expected in (("/health", 200), ("/v1/health", 200), ("/nothing", 401), ("/v1/models", 401)):
        assert status(path, keys=["k"]) == expected, path
    assert send(make_server()[0], "/api/chat", settings={"keys": ["k"]}).json() == {"error": "Invalid API Key"}


def test_page_is_public_and_has_strict_content_security_policy() -> None:
    """`test_page` tests the page in a browser."""
    response = answer("/", keys=["secret"])
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall("'sha256-", policy)) == len(re.findall(r"<style>|<script>", response.text)) == 5
    # The page fetches nothing and turns no text into markup.
    assert re.findall(r"(?:src|href)=\"(?!data:)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", response.text) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", response.text) == []


def test_page_with_matching_etag_returns_304() -> None:
    first = answer("/")
    again = answer("/", {"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert answer("/", {"If-None-Match": '"other"'}).text == first.text
