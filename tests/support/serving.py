"""`ngramspec serve` in this process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from unittest import mock

import httpx
from ngramspec_cli import serve as serve_module
from support.cli_runner import DEMO, PATIENCE, RunResult, run

SMALL = ("-t", "1", "-c", "512", "--exact", "off", "--port")


def serve(
    env: dict[str, str], client: Callable[[httpx.Client], None], *options: str, model: tuple[str, ...] = (str(DEMO),)
) -> RunResult:
    """Serve the demo model, call `client` once the server is ready, then stop the server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http,
        mock.patch.object(serve_module, "wait_for_signal", partial(client, http)),
    ):
        return run(env, "serve", *model, *SMALL, str(port), *options)
