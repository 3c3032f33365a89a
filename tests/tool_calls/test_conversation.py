"""Conversations with tools, as templates want them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from jinja2 import Environment

from ngramspec.tool_calls import parser_for
from ngramspec.tool_calls.conversation import ToolTemplate
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Tool

TURN = "[{{ m.role }}]{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }} {{ c.function.name }} ARGUMENTS{% endfor %}"
FULL = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}" + TURN + CALLS + "{% endfor %}"
)
OBJECTS = FULL.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
TEXTS = FULL.replace("ARGUMENTS", "{{ '' ~ c.function.arguments }}")
EITHER = FULL.replace(
    "ARGUMENTS",
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
)
SHORT = OBJECTS.replace("{{ c.id }}", "{% if c.id | length != 9 %}{{ [] / 1 }}{% endif %}{{ c.id }}")
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ [] / 1 }}{% endif %}" + TURN + "{% endfor %}"
)
NO_RESULTS = OBJECTS.replace("{{ m.content }}", "{% if m.role == 'tool' %}{{ [] / 1 }}{% endif %}{{ m.content }}")
UNLISTED = "<｜tool▁calls▁begin｜>" + NO_SYSTEM
UNKNOWN = OBJECTS.replace("<tool_call>", "<strange_call>")

WEATHER = Tool("weather", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}}})
ARGUMENTS = '{"city":  "Paris"}'


def talk(arguments: Any = ARGUMENTS) -> list[dict[str, Any]]:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?", "refusal": None},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "18"},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "19"},
        {"role": "user", "content": "So?"},
    ]


def make(source: str) -> tuple[ToolTemplate, Any]:
    template = Environment().from_string(source)

    def render(values: Mapping[str, Any]) -> str:
        return template.render(**values)

    return ToolTemplate(source, render), render


def prompt(source: str, messages: list[dict[str, Any]], tools: tuple[Tool, ...] = (WEATHER,)) -> str:
    template, render = make(source)
    adapted, shown = template.adapt(messages, tools)
    return str(render({"messages": adapted, "tools": shown}))


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (OBJECTS, '<tool_call>call_0123456789 weather {"city": "Paris"}'),
        (EITHER, '<tool_call>call_0123456789 weather {"city": "Paris"}'),
        (TEXTS, f"<tool_call>call_0123456789 weather {ARGUMENTS}"),
    ],
)
def test_arguments_are_what_the_template_wants(source: str, call: str) -> None:
    said = prompt(source, talk()).replace("&#34;", '"').replace('\\"', '"')
    assert said == f"weather[user]Weather?[assistant]I look.{call}[tool]18[tool]19[user]So?"


def test_ids_of_nine_characters_where_they_must_be() -> None:
    adapted, _ = make(SHORT)[0].adapt(talk(), [WEATHER])
    id_ = adapted[1]["tool_calls"][0]["id"]
    assert len(id_) == 9
    assert id_.isalnum()
    assert adapted[2]["tool_call_id"] == id_
    kept, _ = make(OBJECTS)[0].adapt(talk(), [WEATHER])
    assert kept[1]["tool_calls"][0]["id"] == kept[2]["tool_call_id"] == "call_0123456789"


@pytest.mark.parametrize("source", [PLAIN, UNKNOWN])
def test_a_template_that_knows_no_tools_or_whose_calls_nobody_reads(source: str) -> None:
    adapted, shown = make(source)[0].adapt([{"role": "system", "content": "Be nice."}, *talk()], [WEATHER])
    assert shown is None
    assert [message["role"] for message in adapted] == ["system", "user", "assistant", "user"]
    assert adapted[0]["content"].startswith("Be nice.\n\n# Tools")
    assert json.dumps(WEATHER.description) in adapted[0]["content"]
    assert adapted[3]["content"] == "<tool_response>\n18\n</tool_response>\n<tool_response>\n19\n</tool_response>\nSo?"
    # The form that the model is asked for, and that its own calls are shown in, is the one that is read.
    parser = parser_for(source, [WEATHER])
    begun, arguments = [*parser.push(adapted[2]["content"]), *parser.finish()][1:]
    assert isinstance(begun, CallBegin)
    assert begun.name == "weather"
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"city": "Paris"}


def test_a_template_without_system_messages_has_tools_described_in_the_first_turn() -> None:
    adapted, _ = make(NO_SYSTEM)[0].adapt(talk(), [WEATHER])
    assert [message["role"] for message in adapted] == ["user", "assistant", "user"]
    assert adapted[0]["content"].startswith("# Tools")
    assert adapted[0]["content"].endswith("\n\nWeather?")


def test_tools_are_described_in_the_form_of_the_family() -> None:
    adapted, _ = make(UNLISTED)[0].adapt(talk(), [WEATHER])
    assert "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>" in adapted[0]["content"]
    parser = parser_for(UNLISTED, [WEATHER])
    assert [type(delta) for delta in parser.push(adapted[1]["content"])] == [Content, CallBegin, CallArguments]


def test_results_alone_may_be_unknown() -> None:
    adapted, shown = make(NO_RESULTS)[0].adapt(talk(), [WEATHER])
    assert shown is not None
    assert "tool_calls" in adapted[1]
    assert [message["role"] for message in adapted] == ["user", "assistant", "user"]


def test_without_tools_and_calls_nothing_is_tried_or_changed() -> None:
    def render(values: Mapping[str, Any]) -> str:
        raise AssertionError

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "reasoning_content": "hm"}]
    assert ToolTemplate(OBJECTS, render).adapt(messages, []) == (messages, None)


def test_thoughts_have_the_name_that_the_template_asks_for() -> None:
    messages = [{"role": "assistant", "content": content, "reasoning_content": "hm"} for content in ("", "ho")]
    named = make(OBJECTS + "{{ message.thinking }}")[0].adapt(messages, [])[0]
    assert named == [{"role": "assistant", "content": "", "thinking": "hm"}, messages[1]]


@pytest.mark.parametrize("arguments", ["{", "[]", "5", '"a"', "[" * 100_000])
def test_arguments_that_are_no_object(arguments: str) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not a JSON object"):
        make(OBJECTS)[0].adapt(talk(arguments), [WEATHER])


def test_no_arguments_are_an_empty_object() -> None:
    for arguments in ("", None, {}):
        assert make(OBJECTS)[0].adapt(talk(arguments), [WEATHER])[0][1]["tool_calls"][0]["function"]["arguments"] == {}
