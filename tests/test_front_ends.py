"""Tests of every front end with the demo model in this process: drafts do not change the text of plain decoding.

The library decodes the expected text; for the class that replaces llama-cpp-python's, llama-cpp-python does. All tests
use exact mode, which guarantees equality. All sizes of passes cost almost the same, so that drafts always pay.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import pytest
from ngramspec_cli.serve import ServeOptions, open_served_model
from support.cli_runner import DEMO, run
from support.http import open_client

import ngramspec
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.loading.load import find
from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import Sampling
from ngramspec.server.state import Server

pytestmark = pytest.mark.usefixtures("_comparing", "new_user")

CODE = "".join(f"def value_{i}(self):\n    return self._value_{i}\n\n\n" for i in range(3)) + "def value_3("
"""Text to continue."""

QUESTION = "Repeat: one two three four five six. one two three four five six. one two three"
"""Question to answer."""

CHATS = ("chat", "llm")
"""Front ends that answer the question; the others continue the text."""

GRAMMAR = r'root ::= "{\"name\": \"" [a-z ]{1,9} "\", \"values\": [" [0-9] (", " [0-9]){6} "]}"'
N_CTX, TOKENS = 192, 40
SMALL: tuple[str | Path, ...] = (DEMO, "-t", "1", "-c", str(N_CTX), "-n", str(TOKENS), "--exact", "on")

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.6},
    "grammar": {"temperature": 0.9, "grammar": GRAMMAR},
    "stop string": {"stop": True},
}
"""Settings of a text, in addition to temperature 0 and a seed."""


def settings_of(name: str, front_end: str) -> dict[str, Any]:
    """Return the settings of a name for a front end; several accepted drafts come before the stop string."""
    stop = {"stop": ". one" if front_end in CHATS else "class"} if "stop" in SETTINGS[name] else {}
    return {"temperature": 0.0, "seed": 5, **SETTINGS[name], **stop}


class Told(NamedTuple):
    """A text and the number of its accepted draft tokens."""

    text: str
    accepted: int


Ask = Callable[[dict[str, Any]], Told]
Plain = Callable[[str, dict[str, Any]], str]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(DEMO, ctx_size=N_CTX, threads=1, exact="on") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def parent() -> Iterator[llama_cpp.Llama]:
    llama = llama_cpp.Llama(str(DEMO), n_ctx=N_CTX, n_threads=1, n_threads_batch=1, verbose=False)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def plain(target: Target, parent: llama_cpp.Llama) -> Plain:
    """Return a function that decodes the expected text of a front end with given settings."""
    decoder = SpeculativeDecoder(target, drafter=None, exact="on")
    decoder.kernels.ensure_exact(target.sequences[0])

    def text(front_end: str, settings: dict[str, Any]) -> str:
        if front_end == "Llama":
            return completed(parent, settings)
        chats = [{"role": "user", "content": QUESTION}]
        prompt = target.vocabulary.chats.tokens(chats) if front_end in CHATS else target.vocabulary.tokenize(CODE)
        stop = [settings["stop"]] if "stop" in settings else ()
        sampling = Sampling(**{name: value for name, value in settings.items() if name != "stop"})
        return "".join(s.text for s in decoder.generate(prompt, max_tokens=TOKENS, sampling=sampling, stop=stop))

    return text


def flags(settings: dict[str, Any]) -> list[str]:
    """Return the settings as options of the command line."""
    named = {"temperature": "--temp"}
    return [part for name, value in settings.items() for part in (named.get(name, f"--{name}"), str(value))]


def complete(home: dict[str, str], *more: str | Path) -> Ask:
    def ask(settings: dict[str, Any]) -> Told:
        done = run(home, "complete", *SMALL, *more, *flags(settings), "--json", stdin=CODE.encode())
        assert done.code == 0, done.err
        told = json.loads(done.out)
        return Told(told["text"], told["accepted"])

    return ask


def chat(home: dict[str, str], *more: str | Path) -> Ask:
    def ask(settings: dict[str, Any]) -> Told:
        done = run(home, "chat", *SMALL, *more, *flags(settings), stdin=f"{QUESTION}\n/stats\n".encode())
        assert done.code == 0, done.err
        drafts = re.search(r"(\d+) of \d+ drafted tokens accepted", done.err)
        return Told(done.out, int(drafts[1]) if drafts else 0)

    return ask


def serve(opened: ExitStack, *, second: bool = False) -> Ask:
    """Return the server's application with an engine as `ngramspec serve` opens it."""
    small = str(DEMO) if second else None
    load = LoadSettings(ctx_size=N_CTX, threads=1, exact="on", draft_model=small, draft_max=16, no_memory=True)
    model = open_served_model(load, ServeOptions(parallel=2, cache_ram=16), find(str(DEMO), load))
    opened.callback(model.service.stop)
    server = Server(model=model)

    async def post(body: dict[str, Any]) -> Any:
        async with open_client(server) as client:
            return (await client.post("/completion", json=body, timeout=60)).json()

    def ask(settings: dict[str, Any]) -> Told:
        stop = {"stop": [settings["stop"]]} if "stop" in settings else {}
        told = asyncio.run(post({"prompt": CODE, "n_predict": TOKENS, **settings, **stop}))
        return Told(told["content"], told["timings"].get("draft_n_accepted", 0))

    return ask


def completed(llama: llama_cpp.Llama, settings: dict[str, Any]) -> str:
    """Return the text of a completion by llama-cpp-python's class, or by ours."""
    grammar = settings.get("grammar")
    if grammar is not None:
        settings = {**settings, "grammar": llama_cpp.LlamaGrammar.from_string(grammar, verbose=False)}
    answer: Any = llama.create_completion(CODE, max_tokens=TOKENS, **settings)
    return str(answer["choices"][0]["text"])


def llama(opened: ExitStack, **more: Any) -> Ask:
    """Return the front end `ngramspec.Llama`."""
    loaded = ngramspec.Llama(
        str(DEMO), n_ctx=N_CTX, n_threads=1, n_threads_batch=1, verbose=False, exact="on", persist_stats=False, **more
    )
    opened.callback(loaded.close)

    def ask(settings: dict[str, Any]) -> Told:
        before = loaded.draft_stats.accepted
        return Told(completed(loaded, settings), loaded.draft_stats.accepted - before)

    return ask


def plugin(opened: ExitStack, **more: Any) -> Ask:
    """Return the model of the plugin of `llm`."""
    pytest.importorskip("llm")
    from ngramspec.llm_plugin import NGramSpec

    model = NGramSpec(str(DEMO))
    opened.callback(lambda: model._loaded_model.close() if model._loaded_model is not None else None)
    loading = {"max_tokens": TOKENS, "ctx_size": N_CTX, "threads": 1, "exact": "on", **more}

    def ask(settings: dict[str, Any]) -> Told:
        response = model.prompt(QUESTION, **loading, **settings)
        return Told(response.text(), (response.usage().details or {}).get("accepted", 0))

    return ask


Open = Callable[[dict[str, str], ExitStack], Ask]

NGRAMS: dict[str, Open] = {
    "complete": lambda home, _: complete(home),
    "chat": lambda home, _: chat(home),
    "serve": lambda _, opened: serve(opened),
    "Llama": lambda _, opened: llama(opened),
    "llm": lambda _, opened: plugin(opened),
}
"""Each front end drafts from n-grams, which is the default."""

SECOND_MODELS: dict[str, Open] = {
    "complete": lambda home, _: complete(home, "-md", DEMO, "-td", "1", "--drafter", "model"),
    "chat": lambda home, _: chat(home, "-md", DEMO, "-td", "1"),
    "serve": lambda _, opened: serve(opened, second=True),
    "Llama": lambda _, opened: llama(opened, draft_model=str(DEMO)),
    "llm": lambda _, opened: plugin(opened, draft_model=str(DEMO)),
}
"""Each front end also uses the demo model as its own draft model."""


@pytest.fixture(scope="module", params=NGRAMS)
def front_end(request: pytest.FixtureRequest, new_user: dict[str, str]) -> Iterator[tuple[str, Ask]]:
    """Yield the name of a front end, and the front end."""
    with ExitStack() as opened:
        yield request.param, NGRAMS[request.param](new_user, opened)


@pytest.mark.parametrize("how", SETTINGS)
def test_front_ends_with_ngram_drafts_keep_text_of_plain_decoding(
    how: str, front_end: tuple[str, Ask], plain: Plain
) -> None:
    name, ask = front_end
    settings = settings_of(how, name)
    text, accepted = ask(settings)
    assert text.removesuffix("\n") == plain(name, settings).removesuffix("\n")
    assert accepted > 0


@pytest.mark.parametrize("name", SECOND_MODELS)
def test_front_ends_with_draft_model_keep_text_of_plain_decoding(
    name: str, new_user: dict[str, str], plain: Plain
) -> None:
    with ExitStack() as opened:
        ask = SECOND_MODELS[name](new_user, opened)
        settings = settings_of("sampled", name)
        text, accepted = ask(settings)
        assert text.removesuffix("\n") == plain(name, settings).removesuffix("\n")
        assert accepted > TOKENS // 4
