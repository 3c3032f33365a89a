"""Tests of hostile chat templates: the request fails, other requests continue, and memory stays small."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.http import get_error, make_server, open_client, send, vocabulary_with
from support.model_files import write_model

from ngramspec import worker as module
from ngramspec.chat import template as template_module
from ngramspec.chat.template import ChatTemplate, large_worker, worker
from ngramspec.llama.vocabulary import Vocabulary

LOOP = "{% for name in range(99999) %}" * 3 + "{% endfor %}" * 3
SLOW = [LOOP, "{{ (messages | length + 6) ** (7 ** 9) % 10 }}"]
LARGE = [
    "{{ '%9999999999d' % 1 }}",
    "{{ [messages] * 300000000 }}",
    "{% set ns = namespace(x='a' * 10000000) %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
]
LONG = "{% for a in range(99999) %}" + "a" * 1000 + "{% endfor %}"
FORBIDDEN = ["{{ ''.__class__.mro() }}", "{% include 'x' %}", "{{ lipsum.__globals__['os'].getpid() }}"]
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit the time of child processes."""
    monkeypatch.setattr(module, "SECONDS", 0.5)
    with worker.session():
        worker.close()
    yield
    with worker.session():
        worker.close()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        *((source, "takes more than 0.5 s to render") for source in SLOW),
        *((source, "takes ") for source in LARGE),  # the memory or the time to fill it
        (LONG, "writes more than 16,777,216 characters"),
        *((source, "rejects this conversation: ") for source in FORBIDDEN),
    ],
)
def test_chat_completions_with_hostile_template_are_rejected(source: str, complaint: str) -> None:
    error = get_error("/v1/chat/completions", {"messages": TALK}, vocabulary=vocabulary_with(source))
    assert error["message"].startswith(f"the chat template {complaint}")
    assert "\n" not in error["message"]


def test_chat_template_with_endless_loop_does_not_block_other_requests() -> None:
    async def run() -> None:
        async with open_client(make_server(vocabulary=vocabulary_with(LOOP))[0]) as client:
            chat = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": TALK}))
            for _ in range(5):
                assert (await client.get("/health")).status_code == 200
            assert (await client.post("/completion", json={"prompt": "a"})).status_code == 200
            assert not chat.done()
            response = await chat
            assert response.status_code == 400
            assert response.json()["error"]["message"] == "the chat template takes more than 0.5 s to render"

    asyncio.run(run())


def test_chat_template_with_invalid_jinja_fails_only_chat_requests(tmp_path: Path) -> None:
    with Vocabulary(write_model(tmp_path / "model.gguf", "llama", chat_template="{% if %}")) as vocabulary:
        server, _ = make_server(vocabulary=vocabulary)
        response = send(server, "/v1/chat/completions", {"messages": TALK})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("the chat template is not valid Jinja: ")
        assert send(server, "/completion", {"prompt": "a"}).status_code == 200
        props = send(server, "/props", method="GET").json()
        assert props["chat_template"] == "{% if %}"
        assert not any(props["chat_template_caps"].values())


def test_chat_template_with_large_conversation_uses_separate_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name, chosen in (("small", worker), ("large", large_worker)):

        def record(*arguments: object, name: str = name, call: Callable[..., object] = chosen.call) -> object:
            calls.append(name)
            return call(*arguments)

        monkeypatch.setattr(chosen, "call", record)
    template = ChatTemplate("{{ messages[0].content }}", {})
    with large_worker.session():
        for length in (1, template_module.LARGE):
            text = "a" * length
            assert template.lay_out({"messages": [{"role": "user", "content": text}]}).text == text
        large_worker.close()
    assert list(dict.fromkeys(calls)) == ["small", "large"]
