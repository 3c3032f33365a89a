"""`ngramspec serve`: it answers, logs no text, and lets requests end when it is stopped."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from ngramspec_cli import serve_run
from support.cli_runner import COMMAND, DEMO, PATIENCE, Done, run

SMALL = ("serve", str(DEMO), "-t", "1", "-c", "512", "--exact", "off", "--port")
ENDLESS = {"prompt": "Once upon a time", "n_predict": -1, "ignore_eos": True, "stream": True}


def serve(env: dict[str, str], client: Callable[[httpx.Client], None], *options: str) -> Done:
    """Serve the demo model in this process; once it is ready `client` is called, behind which the server ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http,
        mock.patch.object(serve_run, "wait_for_loss", partial(client, http)),
    ):
        return run(env, *SMALL, str(port), *options)


def test_it_answers_and_logs_the_cost_but_no_text(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pages, answers = [], []
    monkeypatch.setattr(webbrowser, "open", lambda address: pages.append(httpx.get(address).text))

    def client(http: httpx.Client) -> None:
        messages = [{"role": "user", "content": "Zanzibar?"}]
        for _ in range(2):
            body = {"messages": messages, "max_tokens": 12, "temperature": 0}
            answers.append(http.post("/v1/chat/completions", json=body).json())

    done = serve(env, client, "--alias", "toy", "--open").ok()
    assert done.out == ""
    first, again = answers
    assert first["model"] == "toy"
    assert again["choices"] == first["choices"]
    assert again["timings"]["cache_n"] > 0
    line = next(line for line in done.err.splitlines() if "POST /v1/chat/completions 200" in line)
    assert f"prompt {first['usage']['prompt_tokens']} (" in line
    assert f"{first['usage']['completion_tokens']} tokens" in line
    assert "Zanzibar" not in done.err
    assert any(" is ready: " in line and line.endswith("--exact off") for line in done.err.splitlines())
    (page,) = pages
    assert "<html" in page


def test_a_suffix_that_stands_first_is_found_in_the_cache(env: dict[str, str]) -> None:
    cached = []

    def client(http: httpx.Client) -> None:
        # What stands first in the prompt is what a second gap with the same suffix finds in the cache.
        for prefix in ("def f(x):\n", "class Other:\n"):
            gap = {"input_prefix": prefix, "input_suffix": "    return x\n\n\nprint(f(1))\n" * 3, "n_predict": 1}
            cached.append(http.post("/infill", json=gap).json()["timings"]["cache_n"])

    serve(env, client, "--spm-infill").ok()
    assert cached[0] < 20 < cached[1]


def test_sigterm_lets_a_request_end_and_a_key_is_asked_for(env: dict[str, str]) -> None:
    lines, refused = [], []
    with ExitStack() as streams:

        def client(http: httpx.Client) -> None:
            refused.append(http.get("/props").status_code)
            more = {"headers": {"Authorization": "Bearer secret"}, "json": ENDLESS | {"n_predict": 100}}
            response = httpx.stream("POST", http.base_url.join("/completion"), timeout=PATIENCE, **more)
            lines.append(streams.enter_context(response).iter_lines())
            assert next(lines[0]).startswith("data")
            signal.raise_signal(signal.SIGTERM)

        done = serve(env | {"NGRAMSPEC_API_KEY": "secret"}, client).ok()
        told = [json.loads(line.removeprefix("data: ")) for line in lines[0] if line]
    assert refused == [401]
    assert (told[-1]["stop_type"], told[-1]["tokens_predicted"]) == ("limit", 100)
    assert "stopping: running requests have" in done.err


def test_why_it_cannot_serve_is_one_line(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        run(env, "serve", DEMO, "--port", port).failed(f"cannot listen on 127.0.0.1:{port}: Address already in use")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    run(env, "serve", tmp_path / "bad.gguf", "--port", "0").failed("bad.gguf")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    run(env, "serve", DEMO).failed("pip install 'ngramspec[server]'")


@pytest.mark.exhaustive
def test_under_clients_that_come_and_go_until_a_second_interrupt(env: dict[str, str]) -> None:
    """What `tools/measure/soak.py` does for minutes, in short; with an end that takes a process."""
    options = ("0", "-c", "768", "-np", "3", "--exact", "on", "--cache-ram", "4")
    with subprocess.Popen([*COMMAND, *SMALL, *options], env=env, stderr=subprocess.PIPE, text=True) as server:
        log = iter(server.stderr or ())
        address = next(line for line in log if line.startswith("listening on ")).split()[-1]
        assert next(line for line in log if " is ready: " in line).endswith("--exact on\n")
        tool = Path(__file__).parents[2] / "tools" / "measure" / "soak.py"
        soak: list[Any] = [sys.executable, tool, address, "--requests", "150", "--clients", "6"]
        more = ["--kinds", "20", "--pid", str(server.pid)]
        done = subprocess.run([*soak, *more], check=False, capture_output=True, text=True, timeout=300)
        with httpx.stream("POST", f"{address}/completion", json=ENDLESS, timeout=PATIENCE) as response:
            assert next(response.iter_lines()).startswith("data")
            server.send_signal(signal.SIGINT)
            next(line for line in log if "stopping" in line)
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE) == 130
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout
    assert " 0 clients hung up" not in done.stdout
