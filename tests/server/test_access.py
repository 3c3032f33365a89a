"""Pages of others, other names of this machine, and clients without a key get nothing from the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.http import asking, scripted


def status(path: str = "/props", headers: dict[str, str] | None = None, method: str = "GET", **settings: Any) -> int:
    server, _ = scripted()

    async def run() -> Any:
        async with asking(server, **settings) as client:
            return await client.request(method, path, headers=headers)

    response = asyncio.run(run())
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
    return int(response.status_code)


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8080", "LOCALHOST", "127.0.0.1:1", "[::1]:8080", "[::1]", "192.168.1.5:80", "me.lan:8080"],
)
def test_the_names_of_this_server_are_known(host: str) -> None:
    assert status(headers={"Host": host}, hosts=["me.lan"]) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "localhost.evil", "[x]"]
)
def test_a_rebound_name_is_not(host: str) -> None:
    assert status(headers={"Host": host}, hosts=["me.lan"]) == 403
    assert status("/health", headers={"Host": host}) == 403


def test_a_page_of_another_origin_may_not_ask() -> None:
    assert status(headers={"Origin": "https://evil.example"}) == 403
    assert status(headers={"Origin": "null"}) == 403
    assert status(headers={"Origin": "http://127.0.0.1"}) == 200  # the server's own page
    assert status(headers={"Origin": "https://good.example"}, origins=["https://good.example"]) == 200
    assert status(headers={"Origin": "https://evil.example"}, origins=["https://good.example"]) == 403
    assert status(headers={"Origin": "https://any.example"}, origins=["*"]) == 200


def test_an_allowed_page_is_told_that_it_is() -> None:
    async def run() -> None:
        server, _ = scripted()
        asked = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
        async with asking(server, origins=["https://good.example"], keys=["k"]) as client:
            response = await client.options("/completion", headers=asked)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://good.example"
            response = await client.get("/props", headers={"Origin": "https://good.example"})
            assert response.status_code == 401
            assert response.headers["access-control-allow-origin"] == "https://good.example"
        async with asking(server) as client:
            response = await client.get("/props")
            assert "access-control-allow-origin" not in response.headers

    asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Basic schlüssel"}, 401),
        ({"Authorization": "Bearer schlüssel"}, 200),
        ({"authorization": "bearer schlüssel"}, 200),
        ({"X-Api-Key": "schlüssel"}, 200),
        ({"X-Api-Key": "second"}, 200),
        ({"X-Api-Key": ""}, 401),
    ],
)
def test_a_key_must_be_shown(headers: dict[str, str], expected: int) -> None:
    raw = {name: value.encode() for name, value in headers.items()}
    assert status(headers=raw, keys=["schlüssel", "second"]) == expected  # type: ignore[arg-type]


def test_health_needs_no_key() -> None:
    assert status("/health", keys=["k"]) == 200
    assert status("/v1/health", keys=["k"]) == 200
    assert status("/nothing", keys=["k"]) == 401
