"""Tests of `ngramspec serve`: it responds, logs no texts, and completes requests when it is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from architectures.files import write_model as write_with_head
from ngramspec_cli import serve as serve_module
from support.cli_runner import COMMAND, DEMO, PATIENCE, RunResult, run, run_process
from support.model_files import write_adapter
from support.serving import SMALL, serve

from ngramspec import SpeculativeDecoder, Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.server.state import Counters

pytestmark = pytest.mark.usefixtures("_new_workers")

ENDLESS = {"prompt": "Once upon a time", "n_predict": -1, "ignore_eos": True, "stream": True}


@pytest.mark.exhaustive
def test_serve_answers_and_logs_costs_without_texts(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pages = []
    monkeypatch.setattr(webbrowser, "open", lambda address: pages.append(httpx.get(address).text))

    def client(http: httpx.Client) -> Any:
        body = {"messages": [{"role": "user", "content": "Zanzibar?"}], "max_tokens": 12, "temperature": 0}
        return [http.post("/v1/chat/completions", json=body).json() for _ in range(2)]

    (first, again), done = ask(env, client, "--alias", "toy", "--open")
    assert (done.out, first["model"]) == ("", "toy")
    assert again["choices"] == first["choices"]
    assert again["timings"]["cache_n"] > 0
    line = next(line for line in done.err.splitlines() if "POST /v1/chat/completions 200" in line)
    assert f"prompt {first['usage']['prompt_tokens']} (" in line
    assert f"{first['usage']['completion_tokens']} tokens" in line
    assert "Zanzibar" not in done.err
    assert {f"loading {DEMO.name}", "drafts: mixture"} <= set(done.err.splitlines())
    assert any(" is ready: " in line and line.endswith("--exact off") for line in done.err.splitlines())
    (page,) = pages
    assert "<html" in page


FREE_BLOCKS = """
import psutil
from ngramspec_cli import serve
from ngramspec_cli.app import main

def free_blocks():
    first = b"x" * (2 * serve.BLOCK)
    del first
    pairs = [(b"x" * (2 * serve.BLOCK), b"y" * 100_000) for _ in range(20)]
    full = psutil.Process().memory_info().rss
    pairs = [small for _, small in pairs]
    print((full - psutil.Process().memory_info().rss) / serve.BLOCK)

serve.wait_for_signal = free_blocks
main()
"""
"""Serve; then free large blocks between small ones that stay, and print how many blocks less the process has."""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_serve_returns_freed_blocks_to_the_system_despite_small_ones_between_them(env: dict[str, str]) -> None:
    command = [sys.executable, "-c", FREE_BLOCKS, "serve", str(DEMO), *SMALL, "0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert float(done.stdout) > 30


Client = Callable[[httpx.Client], Any]


def ask(env: dict[str, str], client: Client, *options: str, **more: Any) -> tuple[Any, RunResult]:
    """Return the result of a client of a server, and that of the server."""
    results = list[Any]()
    done = serve(env, lambda http: results.append(client(http)), *options, **more).ok()
    return results[0], done


LOG = {
    "POST /a 400, 0.00 s, b, input[0].type": ("POST", 400, {"error": "b", "field": "input[0].type"}),
    "GET /a 404, 0.00 s, not_found_error": ("GET", 404, {"error": "not_found_error"}),
    "POST /a 200, 1.50 s, prompt 9 (3 cached), 1 token": (
        *("POST", 200),
        {"duration_seconds": 1.5, "prompt_tokens": 9, "cached_tokens": 3, "tokens": 1},
    ),
    "POST /a 200, 0.00 s, 8 tokens at 3.5/s": ("POST", 200, {"tokens": 8, "decoded_tokens": 7, "decode_seconds": 2}),
    "POST /a 200, 0.00 s, drafted 3, accepted 2": ("POST", 200, {"draft_tokens": 3, "accepted_tokens": 2}),
    "": ("GET", 503, {}),
}
"""Lines of the log, by the method, the status and the counters of a request."""


def test_serve_logs_counters_and_reason_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    for line, (method, status, counters) in LOG.items():
        serve_module.log(Counters(method, "/a", status, **counters))
        assert capsys.readouterr().err.strip() == line


def test_serve_shortens_the_switch_interval_while_it_runs(env: dict[str, str]) -> None:
    """Otherwise the engine waits 5 ms for Python's lock, hundreds of times per second, while a request is read."""
    before = sys.getswitchinterval()
    assert ask(env, lambda _: sys.getswitchinterval())[0] == pytest.approx(serve_module.SWITCH_SECONDS)
    assert sys.getswitchinterval() == before


def test_serve_spm_infill_reuses_cached_suffix_and_suggests_pooling(env: dict[str, str]) -> None:
    def client(http: httpx.Client) -> Any:
        gap = {"input_suffix": "    return x\n\n\nprint(f(1))\n" * 3, "n_predict": 1}
        gaps = [gap | {"input_prefix": prefix} for prefix in ("def f(x):\n", "class Other:\n")]
        return [http.post("/infill", json=body).json()["timings"]["cache_n"] for body in gaps]

    (first, second), done = ask(env, client, "--spm-infill", "--embeddings")
    assert "--pooling mean" in done.err
    assert first < 20 < second, "the prompt of a second gap with the same suffix starts with cached tokens"


def test_serve_embeddings_during_decoding_returns_both_results(env: dict[str, str]) -> None:
    def client(http: httpx.Client) -> Any:
        story: dict[str, Any] = {"prompt": "Once upon a time", "n_predict": 60, "temperature": 0}
        text = http.post("/completion", json=story).json()["content"]
        body = story | {"stream": True}
        with httpx.stream("POST", http.base_url.join("/completion"), timeout=PATIENCE, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            openai = {"input": ["Dogs bark. " * 30, "Cats do not."], "model": "demo"}
            found = http.post("/v1/embeddings", json=openai).json()["data"]
            streamed = "".join(json.loads(line.removeprefix("data: "))["content"] for line in lines if line)
        return text, streamed, found

    (text, streamed, found), done = ask(env, client, "--embeddings", "--pooling", "mean", "--no-memory")
    assert "embeddings: pooling mean, texts of up to 512 tokens, in a separate context" in done.err
    assert "POST /v1/embeddings 200" in done.err
    assert [sum(x * x for x in one["embedding"]) for one in found] == [pytest.approx(1)] * 2
    assert text.endswith(streamed), "except for the first piece"
    assert len(streamed) > len(text) // 2


@pytest.mark.exhaustive
def test_serve_with_lora_scales_per_request_applies_them_to_its_text(env: dict[str, str], tmp_path: Path) -> None:
    lora = str(write_adapter(tmp_path / "lora.gguf", DEMO, ["attn_q.weight", "ffn_up"], rank=2))
    body = {"prompt": "def add(a, b):\n    return a + b\n\n\n" * 5 + "def", "n_predict": 12, "temperature": 0}
    found: dict[str, Any] = {}

    def client(http: httpx.Client) -> None:
        def text(**fields: Any) -> str:
            response = http.post("/completion", json=body | fields)
            assert response.status_code == 200, response.text
            return str(response.json()["content"])

        def scaled(*scales: float) -> list[dict[str, float]]:
            return [{"id": number, "scale": scale} for number, scale in enumerate(scales)]

        found["listed"] = http.get("/lora-adapters").json()
        wanted = [(), (0.0, 0.0), (0.5,), (1.0, 0.5), (0.0, 3.0), (0.5, 0.0)]
        # Requests with other scales reuse slots and the cache, first one after the other and then at once.
        found["alone"] = [text(lora=scaled(*scales), id_slot=0) for scales in wanted]
        with ThreadPoolExecutor(len(wanted)) as pool:
            found["together"] = [*pool.map(lambda scales: text(lora=scaled(*scales)), wanted)]
        found["changed"] = http.post("/lora-adapters", json=scaled(0.0, 3.0)).json(), http.get("/lora-adapters").json()
        # A prefix from the cache would be evaluated in other batches, whose rounding changes the text at a scale of 3.
        found["after"] = text(cache_prompt=False)
        refused = [http.post("/lora-adapters", json=scales) for scales in (scaled(1, 1, 1), {"id": 0}, [3])]
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "lora": scaled(0.5, 0.5)}
        found["statuses"] = [one.status_code for one in (*refused, http.post("/v1/chat/completions", json=chat))]

    serve(env, client, "--lora-scaled", f"{lora}:0.5", "--lora", lora).ok()

    @cache
    def plain(*scales: float) -> str:
        adapters = [(lora, scale) for scale in scales if scale]
        with Target(DEMO, ctx_size=512, threads=1, exact="off", lora=adapters) as target:
            steps = SpeculativeDecoder(target, drafter=None).generate(
                target.vocabulary.tokenize(body["prompt"]), max_tokens=12
            )
            return "".join(step.text for step in steps)

    expected = [plain(1.0, 0.5), plain(), plain(0.5), plain(1.0, 0.5), plain(0.0, 3.0), plain(0.5)]
    assert len(set(expected)) > 2
    assert found["alone"] == found["together"] == expected
    assert found["listed"] == [{"id": 0, "path": lora, "scale": 1.0}, {"id": 1, "path": lora, "scale": 0.5}]
    assert found["changed"] == (
        {"success": True},
        [found["listed"][0] | {"scale": 0.0}, found["listed"][1] | {"scale": 3.0}],
    )
    assert found["after"] == plain(0.0, 3.0)
    assert found["statuses"] == [400, 400, 400, 200]


def test_serve_mtp_keeps_texts_of_plain_decoding(env: dict[str, str], tmp_path: Path) -> None:
    model = write_with_head(tmp_path / "head.gguf", "glm4moe", head=True, half=False)

    def client(http: httpx.Client) -> Any:
        def answer(i: int) -> str:
            body = {"prompt": f"def f{i}(", "n_predict": 24, "temperature": 0.7 * (i % 2), "seed": i}
            return str(http.post("/completion", json=body).json()["content"])

        with ThreadPoolExecutor(4) as clients:
            return list(clients.map(answer, range(4)))

    drafted, done = ask(env, client, "--mtp", "-np", "4", "--no-memory", model=(str(model),))
    assert "drafts: hybrid" in done.err
    assert drafted == ask(env, client, "--no-draft", "-np", "1", model=(str(model),))[0]
    assert all(drafted)


def test_serve_mtp_without_nextn_layer_warns_and_describes_model(env: dict[str, str]) -> None:
    def client(http: httpx.Client) -> Any:
        return http.get("/props").json(), http.get("/v1/models").json()["data"][0]

    (props, model), done = ask(env, client, "--mtp", "-np", "2")
    assert sum(props["placement"]["layers"].values()) == 9
    assert props["placement"].keys() == {"gpus", "layers", "cpu_experts"}
    assert props["model_alias"] == model["id"] == DEMO.name
    assert props["model_ftype"] == model["meta"]["ftype"] == "Q8_0"
    assert model["meta"]["size"] > model["meta"]["n_params"] > 1_000_000
    assert "--mtp is not used: its file contains no NextN layer" in done.err.splitlines()
    assert "drafts: mixture" in done.err


def test_serve_reasoning_options_apply_as_request_defaults(env: dict[str, str]) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}{# </think> #}"
    )
    budget = ("--reasoning-budget", "3", "--reasoning-budget-message", " so.")

    def client(http: httpx.Client) -> Any:
        body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True, "max_tokens": 20}
        bodies = [body, body | {"chat_template_kwargs": {"enable_thinking": False}}]
        answers = [http.post("/v1/chat/completions", json=each).json() for each in bodies]
        return [answer["choices"][0]["message"] for answer in answers]

    (thinking, quick), done = ask(env, client, "--chat-template", template, "--reasoning", "on", *budget)
    assert thinking["reasoning_content"].endswith(" so.")
    assert thinking["content"]
    assert "reasoning_content" not in quick
    assert "warning" not in done.err
    _, warned = ask(env, lambda _: None, "--reasoning", "off", *budget)
    assert "--reasoning has no effect: the chat template has no variable enable_thinking" in warned.err
    assert "--reasoning-budget has no effect: the chat template has no reasoning tags" in warned.err


def test_serve_with_api_key_completes_request_after_sigterm(env: dict[str, str]) -> None:
    env = env | {"NGRAMSPEC_API_KEY": "secret"}
    told, done = stream_until_sigterm(env, ENDLESS | {"n_predict": 100}, {"Authorization": "Bearer secret"})
    assert (told[-1]["stop_type"], told[-1]["tokens_predicted"]) == ("limit", 100)
    assert "shutting down: waiting" in done.err


def stream_until_sigterm(
    env: dict[str, str], body: dict[str, Any], headers: dict[str, str]
) -> tuple[list[Any], RunResult]:
    """Return the events of a stream after the first one, at which the server gets SIGTERM."""
    lines = []
    with ExitStack() as streams:

        def client(http: httpx.Client) -> None:
            assert http.get("/props").status_code == (401 if headers else 200)
            address = http.base_url.join("/completion")
            response = httpx.stream("POST", address, timeout=PATIENCE, json=body, headers=headers)
            lines.append(streams.enter_context(response).iter_lines())
            assert next(lines[0]).startswith("data")
            signal.raise_signal(signal.SIGTERM)

        done = serve(env, client).ok()
        return [json.loads(line.removeprefix("data: ")) for line in lines[0] if line], done


def test_serve_after_drain_time_ends_stream_with_error(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "DRAIN_SECONDS", 0.0)
    (*parts, last), _ = stream_until_sigterm(env, ENDLESS, {})
    assert not any(part["stop"] for part in parts)
    assert last["error"] == {"code": 503, "message": "the server is shutting down", "type": "unavailable_error"}


def test_serve_that_cannot_start_prints_one_line_error(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        run(env, "serve", DEMO, "--port", port).assert_failed(
            f"cannot listen on 127.0.0.1:{port}: Address already in use"
        )
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    run(env, "serve", tmp_path / "bad.gguf", "--port", "0").assert_failed("bad.gguf")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    run(env, "serve", DEMO).assert_failed("pip install 'ngramspec[server]'")


SCRIPT = """
import atexit, os, signal, threading, httpx
from ngramspec_cli import app, console, serve as serve_module
from ngramspec.batching.engine import Engine
from ngramspec.server.state import ServedModel

plain, address = serve_module.note, ""

def kill(number=signal.SIGTERM):
    threading.Timer(0.2, os.kill, (os.getpid(), number)).start()

def block(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

def send():
    try:
        httpx.post(f"{address}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    except httpx.HTTPError:
        pass

def note(text):
    global address
    plain(text)
    if text.startswith("listening on "):
        address = text.split()[-1]
    on_note(text)
    if " is ready: " in text:
        on_ready()

def on_note(text): pass
on_ready = kill
serve_module.note = note
"""
SOON = "serve_module.DRAIN_SECONDS = serve_module.EXIT_SECONDS = 0.2\n"


BLOCKED = """
def on_ready():
    {} = block
    threading.Thread(target=send, daemon=True).start()
"""

ENDS = {
    # An earlier version waited forever for the engine's thread after a signal before the wait for requests.
    "a second interrupt": (
        """
on_ready = lambda: kill(signal.SIGINT)
on_note = lambda text: "shutting down" in text and signal.raise_signal(signal.SIGINT)
""",
        130,
        "shutting down",
    ),
    "a blocked request": (SOON + BLOCKED.format("ServedModel.check_size"), 0, "did not end within 0.4 s"),
    "a blocked engine": (SOON + BLOCKED.format("Engine._work"), 0, "did not end within 0.4 s"),
    "a blocked log": (
        SOON
        + """
def on_note(text):
    if "shutting down" in text or "did not end" in text:
        threading.Event().wait()  # as a full pipe would
""",
        0,
        "",
    ),
    "a blocked exit handler": ("atexit.register(threading.Event().wait)", 0, ""),
    "a signal while the model is loading": ("serve_module.open_resolved = block", 143, "loading"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name in ("a blocked request", "a blocked exit handler")))
        for name in ENDS
    ],
)
def test_serve_ends_after_signal_despite(env: dict[str, str], name: str) -> None:
    """Run the server in a process in which `SCRIPT` and `changes` replace functions."""
    changes, code, words = ENDS[name]
    command = [sys.executable, "-c", f"{SCRIPT}{changes}\napp.main()"]
    done = run_process(env, "serve", DEMO, *SMALL, "0", command=command)
    assert (done.code, done.raw) == (code, b""), done.err
    assert words in done.err


@pytest.mark.exhaustive
def test_serve_under_changing_clients_answers_until_second_interrupt(env: dict[str, str]) -> None:
    """Run a short version of `tools/measure/soak.py`, with an end that requires a process."""
    options = ("0", "-c", "768", "-np", "3", "--exact", "on", "--cache-ram", "4", "--metrics")
    with subprocess.Popen(
        [*COMMAND, "serve", str(DEMO), *SMALL, *options], env=env, stderr=subprocess.PIPE, text=True
    ) as server:
        log = iter(server.stderr or ())
        address = next(line for line in log if line.startswith("listening on ")).split()[-1]
        assert next(line for line in log if " is ready: " in line).endswith("--exact on\n")
        props = httpx.get(f"{address}/props").json()
        tool = Path(__file__).parents[2] / "tools" / "measure" / "soak.py"
        soak: list[Any] = [sys.executable, tool, address, "--requests", "150", "--clients", "6"]
        more = ["--kinds", "20", "--pid", str(server.pid)]
        done = subprocess.run([*soak, *more], check=False, capture_output=True, text=True, timeout=300)
        with httpx.stream("POST", f"{address}/completion", json=ENDLESS, timeout=PATIENCE) as response:
            assert next(response.iter_lines()).startswith("data")
            server.send_signal(signal.SIGINT)
            next(line for line in log if "shutting down" in line)
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE) == 130
    assert props["exact"] is True
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout
    assert " 0 clients hung up" not in done.stdout


@pytest.mark.exhaustive
def test_serve_accepts_llama_server_command_line(env: dict[str, str], tmp_path: Path) -> None:
    keys, template = tmp_path / "keys.txt", tmp_path / "chat.jinja"
    keys.write_text("first\n\nsecond\n")
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ mood }}")

    def client(http: httpx.Client) -> Any:
        body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
        assert http.post("/v1/chat/completions", json=body).status_code == 401
        http.headers["Authorization"] = "Bearer second"
        answers = (
            http.post("/v1/chat/completions", json=body).json(),
            http.post("/apply-template", json=body).json(),
            http.post("/slots/0?action=save", json={"filename": "a.bin"}).json(),
            http.post("/slots/0?action=erase").json(),
            http.get("/v1/models").json()["data"][0],
        )
        second, paths = f"http://127.0.0.2:{http.base_url.port}", ("/", "/slots", "/metrics")
        statuses = [httpx.get(f"{second}{path}", headers=http.headers).status_code for path in paths]
        origins = ("https://a.example", "http://localhost:99", "https://b.example")
        return answers, [*statuses, *(http.get("/v1/models", headers={"Origin": o}).status_code for o in origins)]

    line = f"""
        -m {DEMO} --n_predict=5 --jinja --metrics --slots -cb -v -np 2 -ngl all -fa 0 -b 64 -kvu --no-warmup
        --spec-type ngram-simple --alias toy,small --tags a,b --no-ui --no-slots -cram 8
        --cors-origins https://a.example,localhost --host 127.0.0.1,127.0.0.2 --api-key-file {keys}
        --chat-template-file {template} --slot-save-path {tmp_path} --reasoning-format deepseek
    """
    options = (*line.split(), "--chat-template-kwargs", '{"mood": "glad"}')
    ((chat, prompt, saved, erased, model), statuses), done = ask(env, client, *options, model=())
    assert chat["usage"]["completion_tokens"] == 5
    assert chat["__verbose"]["prompt"].endswith("<user>hello<assistant>glad")
    assert prompt["prompt"] == "<user>hello<assistant>glad"
    assert saved["n_written"] == (tmp_path / "a.bin").stat().st_size
    assert saved["n_saved"] == erased["n_erased"] > 5
    assert "POST /slots/0 200" in done.err
    assert (model["id"], model["aliases"], model["tags"]) == ("small", ["small", "toy"], ["a", "b"])
    assert statuses == [404, 501, 200, 200, 200, 403]
    for flag in ("--kv-unified", "--no-warmup", "--spec-type"):
        assert f"{flag} has no effect: " in done.err
    assert done.err.count("has no effect") == 3  # Behaviour that is always on gives no note.
    assert "each of 2 requests has a context of 512 tokens; llama-server's -c 512 is -c 256 here" in done.err


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_serve_with_certificate_answers_by_https(env: dict[str, str], tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made, *named], check=True, capture_output=True)

    def client(http: httpx.Client) -> Any:
        address = str(http.base_url).replace("http:", "https:")
        return httpx.get(f"{address}/health", verify=ssl.create_default_context(cafile=certificate)).json()

    status, done = ask(env, client, "--ssl-key-file", str(key), "--ssl-cert-file", str(certificate))
    assert status == {"status": "ok"}
    assert "listening on https://127.0.0.1:" in done.err


@pytest.mark.exhaustive
def test_serve_with_context_zero_uses_model_context(env: dict[str, str]) -> None:
    props, done = ask(env, lambda http: http.get("/props").json(), "-c", "0", "-np", "1", "--embeddings")
    assert "is the context size of each" not in done.err
    assert props["default_generation_settings"]["n_ctx"] > 512


def test_serve_with_many_blocked_requests_answers_other_clients(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asyncio's default pool has four threads more than the machine has cores."""
    waiting, end = threading.Semaphore(0), threading.Event()
    tokenize = Vocabulary.tokenize

    def wait_and_tokenize(self: Vocabulary, text: str, **options: Any) -> list[int]:
        if text == "wait":
            waiting.release()
            assert end.wait(PATIENCE)
        return tokenize(self, text, **options)

    monkeypatch.setattr(Vocabulary, "tokenize", wait_and_tokenize)

    def client(http: httpx.Client) -> None:
        count = (os.cpu_count() or 1) + 8
        with ThreadPoolExecutor(count) as pool:
            try:
                slow = [pool.submit(http.post, "/tokenize", json={"content": "wait"}) for _ in range(count)]
                assert all(waiting.acquire(timeout=PATIENCE) for _ in range(count))
                assert http.post("/tokenize", json={"content": "hello"}).json()["tokens"]
            finally:
                end.set()
            assert [one.result().status_code for one in slow] == [200] * count

    serve(env, client).ok()


JSON = {"Content-Type": "application/json"}
SHORT = {"prompt": "Once upon a time", "n_predict": 2}

NESTED = '{"type": "array", "items": ' * 1000 + "{}" + "}" * 1000
"""Schema of 1,000 levels as JSON, which Python's own encoder cannot write."""


def match(pattern: str) -> dict[str, Any]:
    """Return the fields of a request for a text that matches a pattern."""
    return {"json_schema": {"type": "string", "pattern": pattern}}


def encode(attack: dict[str, Any]) -> str:
    """Return the body of a request."""
    return json.dumps(SHORT | attack).replace('"NESTED"', NESTED)


QUICK: dict[str, dict[str, Any]] = {
    "optional characters": match("^(a?){1000}a{1000}$"),
    "optional characters in GBNF": {"grammar": 'root ::= ("a"?){1000} "a"{1000}'},
    "left recursion": {"grammar": 'root ::= root "a" | "a"'},
    "cycle of references": {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
}
SLOW: dict[str, dict[str, Any]] = {
    "nullable repetitions": {"grammar": 'root ::= ((("a"?)*)*)* "b"'},
    "no end": {"grammar": 'root ::= "a" root'},
    "exponential pattern": match("^(([a-z]+)+)+$"),
    "exponential automaton": match("^(.*a.{40}){3}$"),
    "repeated repetitions": match("^(((a{1,200}){1,200}){1,200}){1,200}$"),
    "100,000 alternatives": {"json_schema": {"enum": [f"choice {i}" for i in range(100_000)]}},
    "1,000 levels": {"json_schema": "NESTED"},
    "1 MB": {"grammar": 'root ::= "a" | ' + " | ".join(f'"{"x" * 90}{i}"' for i in range(10_000))},
    "1,000 optional properties": {
        "json_schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    },
}
ATTACKS = [
    *(pytest.param(body, id=name) for name, body in QUICK.items()),
    *(pytest.param(body, id=name, marks=pytest.mark.exhaustive) for name, body in SLOW.items()),
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_serve_during_hostile_grammar_answers_other_clients(env: dict[str, str], attack: dict[str, Any]) -> None:
    def client(http: httpx.Client) -> Any:
        with ThreadPoolExecutor() as pool:
            hostile = pool.submit(http.post, "/completion", content=encode(attack), headers=JSON)
            answered = 0
            while not hostile.done() or not answered:
                assert http.post("/completion", json=SHORT).status_code == 200
                assert http.get("/health").status_code == 200
                answered += 1
            return hostile.result()

    response, _ = ask(env, client)
    assert "shutting down" not in response.text
    assert response.status_code in (200, 400)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attack", ATTACKS[:2])
def test_serve_during_hostile_grammar_exits_after_sigterm(env: dict[str, str], attack: dict[str, Any]) -> None:
    def client(http: httpx.Client) -> None:
        def send() -> None:
            # The server may close the connection when it ends.
            with suppress(httpx.HTTPError), httpx.Client(base_url=http.base_url, timeout=PATIENCE) as other:
                other.post("/completion", content=encode(attack), headers=JSON)

        threading.Thread(target=send, daemon=True).start()
        assert http.post("/completion", json=SHORT).status_code == 200
        signal.raise_signal(signal.SIGTERM)

    serve(env, client).ok()
