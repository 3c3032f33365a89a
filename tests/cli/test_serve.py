"""`ngramspec serve` as a program: it answers while it loads, logs no text, and lets requests end when it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.cli_runner import COMMAND, DEMO, PATIENCE

PROMPT = "Once upon a time"
ENDLESS = {"prompt": PROMPT, "n_predict": -1, "ignore_eos": True, "stream": True}


@dataclass
class Served:
    """A server at work."""

    process: subprocess.Popen[bytes]
    errors: Path
    address: str

    def wait_for(self, text: str) -> str:
        return wait_for(self.process, self.errors, text)


def wait_for(process: subprocess.Popen[bytes], errors: Path, text: str) -> str:
    """The line of the log that has a text."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        over = process.poll() is not None
        found = [line for line in errors.read_text().splitlines() if text in line]
        if found:
            return found[0]
        assert not over, errors.read_text()
        time.sleep(0.02)
    raise AssertionError(errors.read_text())


@contextmanager
def serving(env: dict[str, str], folder: Path, *options: str) -> Iterator[Served]:
    """A server of the demo model on a free port, once it listens."""
    errors = folder / "log"
    command = [*COMMAND, "serve", str(DEMO), "--port", "0", "-t", "1", "--exact", "off", *options]
    with errors.open("wb") as log, subprocess.Popen(command, env=env, stderr=log) as process:
        try:
            address = wait_for(process, errors, "listening on ").split()[-1]
            yield Served(process, errors, address)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(env, tmp_path_factory.mktemp("serve"), "-c", "512", "--alias", "toy") as server:
        server.wait_for("is ready")
        yield server


def test_it_answers_and_logs_what_that_cost_without_a_word_of_it(served: Served) -> None:
    messages = [{"role": "user", "content": "Zanzibar?"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    told = httpx.post(f"{served.address}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    assert told["model"] == "toy"
    line = served.wait_for("POST /v1/chat/completions 200")
    assert f"prompt {told['usage']['prompt_tokens']} (" in line
    assert f"{told['usage']['completion_tokens']} tokens" in line
    assert "Zanzibar" not in served.errors.read_text()
    again = httpx.post(f"{served.address}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    assert again["choices"] == told["choices"]
    assert again["timings"]["cache_n"] > 0


def test_text_is_what_the_command_line_gives(served: Served, env: dict[str, str], tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "n_predict": 40, "temperature": 0}
    told = httpx.post(f"{served.address}/completion", json=body, timeout=PATIENCE).json()
    assert told["content"] == completed(env, tmp_path, PROMPT, 40, "off")


def completed(env: dict[str, str], folder: Path, text: str, n: int, exact: str) -> str:
    """What plain decoding on the command line makes of a text; a line break at its end is left out."""
    file = folder / "text"
    file.write_text(text)
    command = [*COMMAND, "complete", str(DEMO), str(file), "-n", str(n), "-c", "512", "-t", "1", "--exact", exact]
    done = subprocess.run([*command, "--no-draft"], env=env, capture_output=True, timeout=PATIENCE, check=True)
    return done.stdout.decode().removesuffix("\n")


def test_a_draft_model_changes_no_text(env: dict[str, str], tmp_path: Path) -> None:
    """Two at once, twice: the demo model drafts for itself, and is right, where it is asked.

    With exact settings, else who shares a pass with whom may decide a near tie.
    """
    texts = (PROMPT, "def add(a, b):")
    bodies = [{"prompt": text, "n_predict": 60, "temperature": 0, "seed": 1} for text in texts]

    def ask(server: Served) -> list[str]:
        def one(body: dict[str, object]) -> str:
            told = httpx.post(f"{server.address}/completion", json=body, timeout=PATIENCE).json()
            return str(told["content"]).removesuffix("\n")

        with ThreadPoolExecutor(2) as clients:
            return list(clients.map(one, bodies))

    with serving(env, tmp_path, "-c", "512", "-np", "2", "-md", str(DEMO), "-td", "1", "--exact", "on") as server:
        server.wait_for("is ready")
        assert ask(server) == ask(server) == [completed(env, tmp_path, text, 60, "on") for text in texts]


def test_a_taken_port_is_one_line(served: Served, env: dict[str, str]) -> None:
    port = served.address.rpartition(":")[2]
    command = [*COMMAND, "serve", str(DEMO), "--port", port]
    done = subprocess.run(command, env=env, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line


def test_a_missing_extra_is_one_line(env: dict[str, str]) -> None:
    script = "import sys; sys.modules['uvicorn'] = None; from ngramspec_cli.app import main; main()"
    command = [sys.executable, "-c", script, "serve", str(DEMO)]
    done = subprocess.run(command, env=env, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert "pip install 'ngramspec[server]'" in line


def test_sigterm_lets_a_request_end_and_takes_no_other(env: dict[str, str], tmp_path: Path) -> None:
    with serving(env | {"NGRAMSPEC_API_KEY": "secret"}, tmp_path, "-c", "512") as server:
        server.wait_for("is ready")
        client = httpx.Client(base_url=server.address, timeout=PATIENCE, headers={"Authorization": "Bearer secret"})
        assert httpx.get(f"{server.address}/props").status_code == 401
        with client, client.stream("POST", "/completion", json=ENDLESS) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data")
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("stopping")
            told = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert told[-1]["stop_type"] == "limit"
        assert told[-1]["truncated"] is True
        assert server.process.wait(PATIENCE) == 0


def test_a_second_interrupt_ends_at_once(env: dict[str, str], tmp_path: Path) -> None:
    with serving(env, tmp_path, "-c", "8192") as server:
        server.wait_for("is ready")
        with (
            httpx.Client(base_url=server.address, timeout=PATIENCE) as client,
            client.stream("POST", "/completion", json=ENDLESS) as response,
        ):
            assert next(response.iter_lines()).startswith("data")
            server.process.send_signal(signal.SIGINT)
            server.wait_for("stopping")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(PATIENCE) == 130


def test_a_model_that_cannot_be_loaded_ends_it(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    command = [*COMMAND, "serve", str(tmp_path / "bad.gguf"), "--port", "0"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1].startswith("ngramspec: ")


def test_the_page_is_opened_once_it_can_be(env: dict[str, str], tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > "{opened}"\n')
    browser.chmod(0o755)
    with serving(env | {"BROWSER": f"{browser} %s"}, tmp_path, "-c", "512", "--open") as server:
        server.wait_for("is ready")
        assert opened.read_text() == server.address
        assert "<html" in httpx.get(opened.read_text(), timeout=PATIENCE).text


@pytest.mark.parametrize("suffix_first", [False, True])
def test_gaps_are_shown_as_the_model_wants_them(env: dict[str, str], tmp_path: Path, suffix_first: bool) -> None:
    """What stands first in the prompt is what a second gap with the same suffix finds in the cache."""
    options = ("--spm-infill",) if suffix_first else ()
    with serving(env, tmp_path, "-c", "512", "-np", "1", *options) as server:
        server.wait_for("is ready")
        cached = []
        for prefix in ("def f(x):\n", "class Other:\n"):
            gap = {"input_prefix": prefix, "input_suffix": "    return x\n\n\nprint(f(1))\n" * 3, "n_predict": 1}
            told = httpx.post(f"{server.address}/infill", json=gap, timeout=PATIENCE).json()
            cached.append(told["timings"]["cache_n"])
        assert cached[0] == 0
        assert (cached[1] > 20) == suffix_first
