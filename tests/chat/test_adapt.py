"""Tests of conversations with tools in the form that templates expect."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ngramspec.chat.conversation import ChatTemplate, adapt
from ngramspec.chat.families import AnswerParser
from ngramspec.chat.stream import Tool
from ngramspec.chat.template import TemplateFeatures, make_render, openai_tool

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
FIRST_CALL = OBJECTS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
ONE_CALL = OBJECTS.replace("{{ c.id }}", "{% if m.tool_calls | length > 1 %}{{ [] / 1 }}{% endif %}{{ c.id }}")
ALTERNATING = (
    "{% for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ [] / 1 }}{% endif %}{% endfor %}" + OBJECTS
)
LOOPING = OBJECTS.replace(
    "{{ t.function.name }}",
    "{{ t.function.name }}{% for p in t.function.parameters.properties.items() %}{{ p }}{% endfor %}",
)
RECURSIVE = OBJECTS.replace(
    "{{ t.function.name }}",
    "{{ t.function.name }}{% for p in (t.function.parameters.properties or {}).values() %}"
    "{% if p.type and p.type is not string %}{{ [] / 1 }}{% endif %}{% endfor %}",
)
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


def make(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


def adapted(source: str, messages: list[dict[str, Any]], tool: Tool | None = WEATHER) -> list[dict[str, Any]]:
    return adapt(make(source), messages, [tool] if tool else [])[0]


def shown(source: str, messages: list[dict[str, Any]], tool: Tool = WEATHER) -> str:
    """Return the text of a prompt."""
    turns, tools = adapt(make(source), messages, [tool])
    return make_render(source)({"messages": turns, "tools": tools})


def test_template_adapt_passes_arguments_as_object_or_string() -> None:
    for source, arguments in ((OBJECTS, '{"city": "Paris"}'), (EITHER, '{"city": "Paris"}'), (TEXTS, ARGUMENTS)):
        said = shown(source, talk()).replace("&#34;", '"').replace('\\"', '"')
        call = f"<tool_call>call_0123456789 weather {arguments}"
        assert said == f"weather[user]Weather?[assistant]I look.{call}[tool]18[tool]19[user]So?"
    for nothing in ("", None, {}):
        assert adapted(OBJECTS, talk(nothing))[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # Limits cut answers, also those of this project.
        ("{", {}),
        ('{"city": "Par', {"city": "Par"}),
        ('{"city": "Par\\', {"city": "Par\\"}),
        ('{"city": "Paris", "days": [1, {"a": tr', {"city": "Paris", "days": [1, {}]}),
        ('{"city": "Paris", "da', {"city": "Paris"}),
        # Models make mistakes.
        ('{"city": "Paris"}}', {"city": "Paris"}),
        ('{"city": "Paris", "exact": True,}', {"city": "Paris", "exact": True}),
        ('"{\\"city\\": \\"Paris\\"}"', {"city": "Paris"}),
        *((text, {"input": text}) for text in ("[]", "5", '"a"', "Paris", "{Paris}", "[" * 100_000)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_template_adapt_with_invalid_arguments_passes_object_that_they_begin(arguments: str, expected: Any) -> None:
    for source in (OBJECTS, TEXTS, PLAIN):
        assert "18" in shown(source, talk(arguments))
    objects, texts = (adapted(source, talk(arguments))[1]["tool_calls"][0]["function"] for source in (OBJECTS, TEXTS))
    assert objects["arguments"] == json.loads(texts["arguments"]) == expected


def call(number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "function": {"name": "weather", "arguments": json.dumps({"city": f"city{number}"})}}


def result(number: int | None, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text} | ({} if number is None else {"tool_call_id": f"call_{number}"})


@pytest.mark.parametrize(
    ("results", "order"),
    [
        ([result(1, "one"), result(2, "two")], "city1 one city2 two"),
        ([result(2, "two"), result(1, "one")], "city1 one city2 two"),
        ([result(None, "one"), result(None, "two")], "city1 one city2 two"),
        ([result(2, "two")], "city1 city2 two"),
        ([result(1, "one"), result(1, "more"), result(3, "other")], "city1 one more city2 other"),
        ([], "city1 city2"),
    ],
)
def test_template_adapt_for_single_calls_splits_turns(results: list[dict[str, Any]], order: str) -> None:
    """Llama 3's templates reject several calls in a turn, and gpt-oss' shows only the first."""
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call(1), call(2)]}
    for source in (ONE_CALL, FIRST_CALL):
        assert not make(source).features.parallel
        text, messages = (show(source, [USER, turn, *results, ANSWER]) for show in (shown, adapted))
        assert re.findall(r"city\d|one|two|more|other", text) == order.split()
        assert [message["content"] for message in messages if message.get("tool_calls")] == ["I look.", ""]
        assert [message.get("reasoning_content") for message in messages].count("hm") == 1
    assert make(OBJECTS).features.parallel
    assert len(adapted(OBJECTS, [USER, turn, *results])[1]["tool_calls"]) == 2


def test_template_adapt_adds_answer_before_user_only_if_required() -> None:
    """Mistral's templates require an answer between the results of calls and the user's next turn."""
    for source, roles in ((ALTERNATING, "user assistant tool tool assistant user"), (OBJECTS, None)):
        assert "So?" in shown(source, talk())
        assert [message["role"] for message in adapted(source, talk())] == (
            roles or "user assistant tool tool user"
        ).split()


@pytest.mark.parametrize(
    "roles", ["tool user", "system tool user", "user assistant tool user", "user tool [answer] user"]
)
def test_template_adapt_with_results_of_no_call_adds_only_required_answers(roles: str) -> None:
    turns = [{"role": role, "content": role} for role in roles.split() if role != "[answer]"]
    assert [m["role"] if m["content"] else "[answer]" for m in adapted(ALTERNATING, turns)] == roles.split()


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": None},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {"type": ["null", "integer"]}, "b": {"items": [{"type": ["string"]}]}}},
    ],
    ids=str,
)
def test_template_adapt_completes_schemas_only_if_required(parameters: dict[str, Any]) -> None:
    tool = Tool("weather", "", parameters)
    for source in (LOOPING, RECURSIVE, OBJECTS):
        assert "weather" in shown(source, [USER], tool)
    assert adapt(make(OBJECTS), [USER], [tool])[1] == [openai_tool(tool)]


@pytest.mark.parametrize("roles", ["", "user", "user assistant", "user system tool", "user assistant system tool"])
def test_template_adapt_joins_parts_of_roles_that_do_not_support_them(roles: str) -> None:
    source = OBJECTS.replace(
        "{{ m.content }}",
        "{{ m.content if m.content is string or m.role not in '" + roles + "' else m.content | join('+', 'text') }}",
    )
    first = source.replace("| join('+', 'text')", "| map(attribute='text') | first")  # Mistral's system message
    messages = [{"role": role, "content": PARTS} for role in ("system", "user", "assistant", "user")]
    messages += [talk()[1], {"role": "tool", "tool_call_id": "call_0123456789", "content": PARTS}]
    for used, supported in ((source, roles.split()), (first, [])):
        text = shown(used, messages)
        for role in ("system", "user", "assistant", "tool"):
            assert f"[{role}]a{'+' if role in supported else chr(10)}b" in text


def test_template_adapt_shortens_call_ids_only_if_required() -> None:
    _, called, answered, *_ = adapted(SHORT, talk())
    id_ = called["tool_calls"][0]["id"]
    assert len(id_) == 9
    assert id_.isalnum()
    assert answered["tool_call_id"] == id_
    _, called, answered, *_ = adapted(OBJECTS, talk())
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"] == "call_0123456789"


@pytest.mark.parametrize("source", [PLAIN, UNKNOWN])
def test_template_adapt_without_usable_tool_format_describes_tools(source: str) -> None:
    messages, tools = adapt(make(source), [{"role": "system", "content": "Be nice."}, *talk()], [WEATHER])
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be nice.\n\n# Tools")
    assert json.dumps(WEATHER.description) in messages[0]["content"]
    assert messages[3]["content"] == "<tool_response>\n18\n</tool_response>\n<tool_response>\n19\n</tool_response>\nSo?"
    # The parser reads the format that the prompt requests and that shows the model's earlier calls.
    parser = AnswerParser(source, [WEATHER])
    begun, arguments = [*parser.push(messages[2]["content"]), *parser.finish()][1:]
    assert begun.kind == "call"
    assert begun.name == "weather"
    assert arguments.kind == "arguments"
    assert json.loads(arguments.text) == {"city": "Paris"}


def test_template_adapt_without_system_role_puts_tools_in_first_turn() -> None:
    first, *others = adapted(NO_SYSTEM, talk())
    assert [message["role"] for message in (first, *others)] == ["user", "assistant", "user"]
    assert first["content"].startswith("# Tools")
    assert first["content"].endswith("\n\nWeather?")
    first, said, *_ = adapted(UNLISTED, talk())
    assert "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>" in first["content"]
    parser = AnswerParser(UNLISTED, [WEATHER])
    assert [delta.kind for delta in parser.push(said["content"])] == ["text", "call", "arguments"]


def test_template_adapt_without_tool_role_moves_results_to_user_turn() -> None:
    messages, tools = adapt(make(NO_RESULTS), talk(), [WEATHER])
    assert tools is not None
    assert "tool_calls" in messages[1]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


def test_template_adapt_passes_reasoning_in_required_field() -> None:
    def thinking(mark: str) -> list[dict[str, Any]]:
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        messages = [
            {"role": "assistant", "content": "ho", "reasoning_content": "hm"},
            {"role": "assistant", "content": "ho", "reasoning_content": "hm", "tool_calls": [call]},
        ]
        return adapted(OBJECTS + mark, messages, None)

    assert [message["content"] for message in thinking("{# message.thinking #}")] == ["ho", "ho"]
    assert [message["thinking"] for message in thinking("{# message['thinking'] #}")] == ["hm", "hm"]
    assert [message.get("content") for message in thinking("{# message.thinking <|channel|> #}")] == ["ho", None]
    blocks = thinking("{# [TOOL_CALLS] [ARGS] block['thinking'] #}")[0]["content"]
    assert blocks == [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ho"}]


def test_template_adapt_for_early_gemma_4_puts_results_into_call() -> None:
    marks = "{# '<|tool_call>call:' message['tool_responses'] #}<|tool_call>"
    messages = [*talk()[:3], {"role": "tool", "tool_call_id": "x", "content": '{"a": 1}'}]
    messages += [{"role": "assistant", "content": "Warm."}, {"role": "user", "content": "So?"}]
    turns = adapted(OBJECTS + marks, messages)
    assert [message["role"] for message in turns] == ["user", "assistant", "user"]
    assert turns[1]["content"] == "Warm."
    assert turns[1]["tool_responses"] == [{"name": "weather", "response": 18}, {"name": "x", "response": {"a": 1}}]


TYPED = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
BOTH = PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string else m.content | join('', 'text') }}")
THOUGHTS = (
    "{{ reasoning_effort }}{% for m in messages %}"
    + TURN
    + "{% if not clear_thinking %}{{ m.reasoning_content }}{% endif %}{% endfor %}"
)
STEPFUN = PLAIN + "{# You have access to the following functions in JSONSchema format #}"
SYSTEM, USER, ANSWER = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
TEXT = {"role": "user", "content": "a"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
IN_PARTS = {"role": "user", "content": PARTS}


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (NO_SYSTEM, [SYSTEM, USER, ANSWER], [{"role": "user", "content": "system\nuser"}, ANSWER]),
        (NO_SYSTEM, [SYSTEM, ANSWER], [{"role": "user", "content": "system"}, ANSWER]),
        (PLAIN, [SYSTEM, USER], [SYSTEM, USER]),
        (PLAIN, [IN_PARTS], [{"role": "user", "content": "a\nb"}]),
        (TYPED, [IN_PARTS], [IN_PARTS]),
        (TYPED, [TEXT], [{"role": "user", "content": PARTS[:1]}]),
        (BOTH, [IN_PARTS], [IN_PARTS]),
        (
            STEPFUN,
            [{"role": "assistant", "content": " a\n", "reasoning_content": "\nb "}],
            [{"role": "assistant", "content": "a", "reasoning_content": "b"}],
        ),
    ],
)
def test_template_adapt_without_tools_returns_supported_messages(source: str, messages: Any, expected: Any) -> None:
    assert adapted(source, messages, None) == expected
    # If tools are described, parts are joined.
    assert adapted(BOTH, [IN_PARTS])[-1]["content"] == "a\nb"


CALLING = {"tools", "tool_calls", "parallel_tool_calls", "system_role", "string_content"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, {"string_content", "system_role"}),
        (NO_SYSTEM, {"string_content"}),
        (OBJECTS, CALLING | {"object_arguments"}),
        (EITHER, CALLING | {"object_arguments"}),
        (SHORT, CALLING | {"object_arguments"}),
        (TEXTS, CALLING),
        (FIRST_CALL, (CALLING | {"object_arguments"}) - {"parallel_tool_calls"}),
        (TYPED, {"typed_content", "system_role"}),
        (THOUGHTS, {"string_content", "system_role", "preserve_reasoning", "reasoning_effort"}),
    ],
)
def test_capabilities_of_template_equal_expected_features(source: str, expected: set[str]) -> None:
    found = TemplateFeatures(make_render(source)).capabilities()
    assert len(found) == 9
    assert {name.removeprefix("supports_") for name, can in found.items() if can} == expected
