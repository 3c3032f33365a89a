"""Tests of chat templates through the server: their variables and functions, and hostile ones, which fail alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.http import ask, get_error, make_server, open_client, send, vocabulary_with
from support.model_files import write_model

from ngramspec import worker as module
from ngramspec.chat import template as template_module
from ngramspec.chat.conversation import ChatTemplate
from ngramspec.chat.template import large_worker, worker
from ngramspec.llama.vocabulary import Vocabulary

USER = {"role": "user", "content": "hi"}
NAMES = ["enable_thinking", "preserve_thinking", "clear_thinking", "reasoning_effort", "reasoning_strength", "color"]
SHOWN = "{# </think> #}" + " ".join(f"{name}={{{{ {name} }}}}" for name in NAMES)
USUAL = {"enable_thinking": "True", "preserve_thinking": "True", "clear_thinking": "False"}


def prompt(template: str, body: Any = None, defaults: Any = None) -> str:
    asked = {"messages": [USER]} | (body or {})
    told, _ = ask("/apply-template", asked, vocabulary=vocabulary_with(template), variables=defaults or {})
    return str(told["prompt"])


@pytest.mark.parametrize(
    ("body", "defaults", "expected"),
    [
        ({}, {}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False, "color": "red"}}, {}, {"enable_thinking": "False"}),
        ({}, {"enable_thinking": False, "color": "red"}, {"enable_thinking": "False", "color": "red"}),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "color": "red"}},
            {"enable_thinking": False, "reasoning_effort": "low"},
            {"color": "red", "reasoning_effort": "low"},
        ),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "low"}, {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, {}, {"reasoning_effort": "high"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {},
            {"reasoning_effort": "low"},
        ),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "low"}, {"enable_thinking": "False"}),
        (
            {"chat_template_kwargs": {"preserve_reasoning": False}},
            {},
            {"preserve_thinking": "False", "clear_thinking": "True"},
        ),
    ],
)
def test_chat_template_receives_variables_of_request_and_server(
    body: dict[str, Any], defaults: dict[str, Any], expected: dict[str, str]
) -> None:
    expected = USUAL | expected
    if "color" in str(body):
        expected["color"] = "red"
    if "reasoning_effort" in expected:
        expected["reasoning_strength"] = expected["reasoning_effort"]
    assert prompt(SHOWN, body, defaults) == " ".join(f"{name}={expected.get(name, '')}" for name in NAMES)


INTEGER = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
TURNS = {"messages": [USER, {"role": "assistant", "content": "é"}, USER]}
EMPTY = "(message['content'] is not defined or message['content'] == '' or message['content']|length == 0)"
NO_CALLS = "(message['tool_calls'] is not defined or message['tool_calls']|length == 0)"
TAGS = '"<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content'
REJECTING = "{%% set message = {'content': ''} %%}{%%- if %s %%}{{ raise_exception('no') }}{%%- endif %%}a"


@pytest.mark.parametrize(
    ("template", "body", "text"),
    [
        # Without reasoning tags, there is no thinking.
        ("{{ enable_thinking }}", {}, "False"),
        ("{{ enable_thinking }}{# <|channel|> <|message|> #}", {}, "True"),
        # Variables may have any other name.
        (
            "{{ tokenizer + check + variables + values }}",
            {"chat_template_kwargs": dict.fromkeys(("self", "tokenizer", "check", "variables", "values", "class"), 1)},
            "4",
        ),
        ("{{ tools is defined }}{% for tool in tools %}{% endfor %}", {}, "False"),
        ("{{ bos_token }}a{{ eos_token }}", {}, "a<|endoftext|>"),  # A completion adds the BOS token.
        # Templates may change lists, and nothing is escaped.
        (
            "{% set names = [] %}{% for m in messages %}{% set _ = names.append(m.role) %}{% endfor %}"
            "{{ names | join }}{{ messages.pop(0).content }}{{ '<'|safe + messages | tojson }}",
            TURNS,
            'userassistantuserhi<[{"role": "assistant", "content": "é"}, {"role": "user", "content": "hi"}]',
        ),
        ("{{ response_format | tojson if response_format }}", {}, ""),
        ("{{ response_format | tojson }}", {"response_format": INTEGER}, '{"type": "integer"}'),
        ("{{ response_format | tojson }}", {"response_format": {"type": "json_object"}}, '{"type": "object"}'),
        # Checks that reject ordinary answers are removed.
        (REJECTING % f"{EMPTY} and {NO_CALLS}", {}, "a"),
        (REJECTING % TAGS, {}, "a"),
    ],
)
def test_chat_template_renders_expected_text(template: str, body: Any, text: str) -> None:
    assert prompt(template, body) == text


def test_chat_template_dates_contain_only_the_day() -> None:
    before = datetime.now()
    text = prompt("{{ date_string }}|{{ datetime }}|{{ strftime_now('%Y-%m-%d') }}")
    days = {f"{day:%d %b %Y}|{day:%b %d %Y}|{day:%Y-%m-%d}" for day in (before, datetime.now())}
    assert text in days


def test_chat_template_kwargs_reject_deeply_nested_value() -> None:
    server, _ = make_server(vocabulary=vocabulary_with("{{ deep | tojson }}"))
    for depth in (450, 600, 900):
        deep = '{"a": ' * depth + "1" + "}" * depth
        body = f'{{"messages": [{{"role": "user", "content": ""}}], "chat_template_kwargs": {{"deep": {deep}}}}}'
        response = send(server, "/apply-template", content=body)
        assert response.status_code in (200, 400), depth
    assert "nested too deeply" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"messages": []}, "'messages' cannot be set"),
        ({"add_generation_prompt": True}, "'add_generation_prompt' cannot be set"),
        ({"enable_thinking": "false"}, "'enable_thinking' must be true or false, got 'false'"),
        ({"preserve_reasoning": 1}, "'preserve_reasoning' must be true or false, got 1"),
    ],
)
def test_chat_template_kwargs_reject_unusable_variable(variables: dict[str, Any], complaint: str) -> None:
    body = {"messages": [USER], "chat_template_kwargs": variables}
    error = get_error("/v1/chat/completions", body)
    assert (error["code"], error["param"]) == (400, "chat_template_kwargs")
    assert error["message"] == f"chat_template_kwargs: the chat template's variable {complaint}"


LOOP = "{% for name in range(99999) %}" * 3 + "{% endfor %}" * 3
SLOW = [LOOP, "{{ (messages | length + 6) ** (7 ** 9) % 10 }}"]
LARGE = [
    "{{ '%9999999999d' % 1 }}",
    "{{ [messages] * 300000000 }}",
    "{% set ns = namespace(x='a' * 10000000) %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
]
LONG = "{% for a in range(99999) %}" + "a" * 1000 + "{% endfor %}"
FORBIDDEN = ["{{ ''.__class__.mro() }}", "{% include 'x' %}", "{{ lipsum.__globals__['os'].getpid() }}"]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit the time of child processes."""
    monkeypatch.setattr(module, "SECONDS", 0.5)
    with worker.session():
        worker.close()
    yield
    with worker.session():
        worker.close()


@pytest.mark.usefixtures("hasty")
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
    error = get_error("/v1/chat/completions", {"messages": [USER]}, vocabulary=vocabulary_with(source))
    assert error["message"].startswith(f"the chat template {complaint}")
    assert "\n" not in error["message"]


@pytest.mark.usefixtures("hasty")
def test_chat_template_with_endless_loop_does_not_block_other_requests() -> None:
    async def run() -> None:
        async with open_client(make_server(vocabulary=vocabulary_with(LOOP))[0]) as client:
            chat = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": [USER]}))
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
        response = send(server, "/v1/chat/completions", {"messages": [USER]})
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
