"""What `parser_for` makes of answers, however they are cut, and of texts that are no answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from ngramspec.tool_calls import parser_for, thoughts_parser
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Delta, Reasoning, Tool
from ngramspec.tool_calls.families import FAMILIES

WEATHER = Tool(
    "weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "at": {"$ref": "#/$defs/At"},
            "free": {},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"At": {"type": ["array", "null"], "items": {"type": "number"}}},
    },
)
CLOCK = Tool("clock")
TOOLS = (WEATHER, CLOCK)

TEMPLATES = {
    "hermes": "{{ tools }}<tool_call><think></think>",
    "qwen-coder": "{{ tools }}<tool_call><function=f><think>",
    "glm": "{{ tools }}<tool_call>f<arg_key><think>",
    "granite": "{{ tools }}<|tool_call|>",
    "llama": '{{ tools }}<|start_header_id|>"parameters": <|python_tag|>',
    "mistral": "{{ tools }}[TOOL_CALLS]f[ARGS][THINK]",
    "mistral-list": "{{ tools }}[TOOL_CALLS][",
    "harmony": "{{ tools }}<|channel|>x<|message|>",
    "deepseek-v3": "<｜tool▁calls▁begin｜>```json<think>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><think>",
    "deepseek-v3.2": "{{ tools }}｜DSML｜<think>",
    "kimi": "{{ tools }}<|tool_calls_section_begin|>",
    "minimax": "{{ tools }}<minimax:tool_call><think>",
    "gemma4": "{{ tools }}<|tool_call>call:<|channel>thought\n<channel|>",
    "gemma": "<start_of_turn>",
    "lfm2": "{{ tools }}<|tool_call_start|>",
}
"""Templates with the marks of each family, and nothing else."""

TAGS = ("<think>", "[THINK]", "<|channel>")
PARIS = {"city": "Paris"}
TWO = [("weather", PARIS), ("clock", {})]

# family, text, content, thoughts, calls
ANSWERS = [
    (
        "hermes",
        "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        "I look.",
        "Hm.",
        TWO,
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', "", "", TWO[:1]),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", "", TWO[1:]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', "", "", TWO[:1]),
    ("hermes", '<tool_call>{"name": "other", "id": [1, {"a": 2}], "arguments": null}', "", "", [("other", {})]),
    ("hermes", '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "clock"}]', "", "", TWO),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\u00e9\\n", "at": [-1.5e3, null]}}</tool_call>',
        "",
        "",
        [("weather", {"city": "a\nbé\n", "at": [-1500.0, None]})],
    ),
    (
        "qwen-coder",
        "Look:\n<tool_call>\n<function=weather>\n<parameter=city>\nPa\n</b>\nris\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=at>\n[1, 2]\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        "Look:",
        "",
        [("weather", {"city": "Pa\n</b>\nris", "days": 3, "exact": True, "at": [1, 2]}), ("clock", {})],
    ),
    (
        "qwen-coder",
        '<function=weather>{"city": "Paris"}</function>',
        "",
        "",
        TWO[:1],
    ),
    (
        "glm",
        "<think>a</think>b\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>7</arg_value>\n<arg_key>free</arg_key><arg_value>{"a": 1}</arg_value><arg_key>maybe</arg_key>'
        "<arg_value>null</arg_value><arg_key>exact</arg_key><arg_value>perhaps</arg_value></tool_call>"
        "<tool_call>clock</tool_call>",
        "b",
        "a",
        [("weather", {"city": "7", "days": 7, "free": {"a": 1}, "maybe": None, "exact": "perhaps"}), ("clock", {})],
    ),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "clock"}]', "", "", TWO),
    ("llama", '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "clock", "parameters": {}}', "", "", TWO),
    ("llama", 'So:\n<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}', "So:", "", TWO[1:]),
    (
        "mistral",
        '[THINK]a[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[CALL_ID]1[ARGS]{}',
        "",
        "a",
        TWO,
    ),
    (
        "mistral-list",
        'a [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "1"}, {"name": "clock"}]',
        "a",
        "",
        TWO,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
        "<|call|><|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}",
        "I look.",
        "Hm.",
        TWO,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        "Hi",
        "Hm.",
        [],
    ),
    (
        "deepseek-v3",
        "a\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "a",
        "",
        TWO,
    ),
    (
        "deepseek-v3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        TWO,
    ),
    (
        "deepseek-v3.2",
        'a\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "a",
        "",
        TWO,
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        "",
        TWO,
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        "",
        "",
        TWO,
    ),
    (
        "gemma4",
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:weather{city:<|"|>Pa"ris<|"|>,days:3,at:[1,[],'
        '-2.5],free:{a:true,<|"|>b c<|"|>:null}}<tool_call|><|tool_call>call:clock{}<tool_call|>',
        "",
        "Hm.",
        [
            ("weather", {"city": 'Pa"ris', "days": 3, "at": [1, [], -2.5], "free": {"a": True, "b c": None}}),
            ("clock", {}),
        ],
    ),
    ("gemma", 'So:\n```tool_code\n[weather(city="Paris"), clock()]\n```', "So:", "", TWO),
    ("gemma", '```json\n{"name": "weather", "parameters": {"city": "Paris"}}\n```', "", "", TWO[:1]),
    ("lfm2", "<|tool_call_start|>[weather(city='Paris'), clock()]<|tool_call_end|>ok", "ok", "", TWO),
]
# Texts in which nothing is a call.
PROSE = [
    "",
    " hi \n",
    "a <tool_call> b",
    '<tool_call>{"name": 5}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "weather", "argum',
    "<tool_call>weather",
    "<tool_call><function=weather>x",
    "<tool_call>\n<func",
    '{"name": "Bob", "parameters": {}}',
    '{"name": "weather"}',
    '{"name": "weather", "age": 5}',
    "[1, 2, 3]",
    '[TOOL_CALLS]weather{"a": 1}',
    "[TOOL_CALLS]",
    "<|python_tag|>import os",
    "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>",
    "<|tool_call>call weather{}",
    "```tool_code\nprint(weather(city=open('x')))\n```\n```json\n{}\n```",
    "<|tool_call_start|>[__import__('os')]<|tool_call_end|>",
    "x<think>y",
    "<|chan",
    "<|channel|>weird <|end|>",
    "a to=functions.weather b",
    '<minimax:tool_call><invoke name="weather"></minimax:tool_call>',
    "ends in white space <tool_call> \n\n ",
]


def template(family: str) -> str:
    return TEMPLATES[family]


def parse(pieces: Sequence[str], family: str, *, tools: Sequence[Tool] = TOOLS, opening: str = "") -> list[Delta]:
    parser = parser_for(template(family), tools, opening=opening)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return [*deltas, *parser.finish()]


def joined(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, thoughts, and calls with their arguments."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    thoughts = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, CallBegin):
            assert delta.call == len(calls)
            calls.append((delta.name, ""))
        elif isinstance(delta, CallArguments):
            calls[delta.call] = (calls[delta.call][0], calls[delta.call][1] + delta.text)
    return content, thoughts, calls


def cut(text: str, chance: random.Random) -> list[str]:
    """A text in pieces, some of them empty."""
    places = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 30)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def test_the_templates_name_all_families() -> None:
    assert {form.name for form in FAMILIES} == set(TEMPLATES)
    assert {family for family, *_ in ANSWERS} == set(TEMPLATES)


@pytest.mark.parametrize(("family", "text", "content", "thoughts", "calls"), ANSWERS)
def test_answers(family: str, text: str, content: str, thoughts: str, calls: list[tuple[str, object]]) -> None:
    said = joined(parse([text], family))
    assert said[:2] == (content, thoughts)
    assert [(name, json.loads(arguments)) for name, arguments in said[2]] == calls


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, text, *_ in ANSWERS])
def test_where_an_answer_is_cut_changes_nothing(family: str, text: str) -> None:
    whole = joined(parse([text], family))
    assert joined(parse(list(text), family)) == whole
    chance = random.Random(text)
    for _ in range(30):
        assert joined(parse(cut(text, chance), family)) == whole


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, text, *_ in ANSWERS])
def test_an_answer_that_breaks_off(family: str, text: str) -> None:
    whole = joined(parse([text], family))
    for length in range(len(text)):
        content, _, calls = joined(parse(list(text[:length]), family))
        assert len(calls) <= len(whole[2])
        if calls:
            # What was said of calls stays said: arguments are only longer in the end.
            assert [name for name, _ in calls] == [name for name, _ in whole[2]][: len(calls)]
        if not calls and not any(tag in text[:length] for tag in TAGS) and family != "harmony":
            assert content == text[:length]


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("text", PROSE)
def test_what_is_no_call_is_content(family: str, text: str) -> None:
    assert joined(parse([text], family)) == (text, "", [])
    assert joined(parse(list(text), family)) == (text, "", [])


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, text, *_ in ANSWERS])
def test_without_tools_nothing_is_a_call(family: str, text: str) -> None:
    content, thoughts, calls = joined(parse([text], family, tools=()))
    assert calls == []
    assert thoughts == joined(parse([text], family))[1]
    if not any(tag in text for tag in TAGS) and family != "harmony":
        assert content == text


SCRAPS = [
    *{mark for form in FAMILIES for mark in (*form.starts, *form.first)},
    *("<think>", "</think>", "[THINK]", "<|channel>thought\n", "<channel|>", "<|start|>", "<|message|>", "<|end|>"),
    *("weather", "clock", "{", "}", "[", "]", '"', ":", ",", "\\", "\n", " ", "1", "-", "null", "é", "<", "|", "\0"),
    *(
        '{"name": "weather", "arguments": {',
        '"city": "',
        "</tool_call>",
        "<parameter=city>",
        "</parameter>",
        "</function>",
    ),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "[ARGS]",
        "<｜tool▁sep｜>",
        "```json",
        "```",
        "call:weather{",
    ),
    *(
        '<|"|>',
        "<tool_call|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "to=functions.weather",
        "weather>",
    ),
    *('<invoke name="weather">', '<parameter name="city">', "</invoke>", "(city='x')", "<|tool_call_end|>", "\\u12"),
]


def garbage(family: str, chance: random.Random) -> str:
    """Scraps of everything, or an answer of the family with some of its pieces lost, doubled, or replaced."""
    if chance.random() < 0.5:
        return "".join(chance.choice(SCRAPS) for _ in range(chance.randrange(1, 25)))
    pieces = cut(chance.choice([text for other, text, *_ in ANSWERS if other == family]), chance)
    return "".join(chance.choice([piece] * 6 + ["", piece * 2, chance.choice(SCRAPS)]) for piece in pieces)


@pytest.mark.parametrize("family", TEMPLATES)
def test_garbage(family: str) -> None:
    chance = random.Random(family)
    begun = 0
    for _ in range(400):
        text = garbage(family, chance)
        opening = chance.choice(["", "<think>\n", "<think>\n\n</think>\n\n"])
        whole = joined(parse([text], family, opening=opening))
        assert joined(parse(cut(text, chance), family, opening=opening)) == whole
        content, thoughts, calls = whole
        begun += len(calls)
        assert all(arguments.startswith("{") for _, arguments in calls)
        if not calls and not thoughts and not any(tag in text + opening for tag in (*TAGS, "<|channel|>")):
            assert content == text
    assert begun > 0


def test_deep_brackets_do_not_raise() -> None:
    deep = "[" * 5000
    for before in ('{"name": "weather", "arguments": {"at": ', '{"arguments": {"at": '):
        text = f"<tool_call>{before}{deep}{']' * 5000}" + '}, "name": "weather"}</tool_call>'
        content, _, calls = joined(parse([text], "hermes"))
        assert content == text or calls[0][0] == "weather"
    assert joined(parse(["```tool_code\nweather(at=" + deep + "```"], "gemma"))[2] == []


# ------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pari'),
        ("llama", '{"name": "weather", "parameters": {"city": "Pari'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Pari'),
        ("deepseek-v3.1", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Pari'),
        ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": "Pari'),
        ("qwen-coder", "<tool_call><function=weather><parameter=city>\nPari"),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Pari"),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Pari'),
    ],
)
def test_arguments_stream(family: str, text: str) -> None:
    parser = parser_for(template(family), TOOLS)
    assert joined(parser.push(text))[2] == [("weather", '{"city": "Pari')]
    assert parser.push("s") == [CallArguments(0, "s")]


def test_content_streams_up_to_what_could_begin_a_call() -> None:
    parser = parser_for(TEMPLATES["hermes"], TOOLS)
    assert parser.push("a <") == [Content("a")]
    assert parser.push("b> <tool_") == [Content(" <b>")]
    assert parser.push("box>") == [Content(" <tool_box>")]
    assert parser.finish() == []


def test_ids() -> None:
    text = '<tool_call>{"name": "clock"}</tool_call>' * 2
    ids = [delta.id for delta in parse([text], "hermes") if isinstance(delta, CallBegin)]
    assert len(set(ids)) == 2
    assert all(id_.startswith("call_") for id_ in ids)
    mistral = [delta.id for delta in parse(["[TOOL_CALLS]clock[ARGS]{}"], "mistral") if isinstance(delta, CallBegin)]
    assert len(mistral[0]) == 9
    assert mistral[0].isalnum()


# ------------------------------------------------------------------------------------- thoughts


@pytest.mark.parametrize(
    ("opening", "text", "said"),
    [
        ("<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nHi", ("Hi", "Hm.")),
        ("<|im_start|>assistant\n<think>\n", "Hm.", ("", "Hm.")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi", ("Hi", "")),
        ("<|im_start|>assistant\n", "\n<think>Hm.</think>Hi", ("Hi", "Hm.")),
        ("<|im_start|>assistant\n", "Say <think>Hm.</think>", ("Say <think>Hm.</think>", "")),
    ],
)
def test_thoughts(opening: str, text: str, said: tuple[str, str]) -> None:
    for tools in (TOOLS, ()):
        assert joined(parse([text], "hermes", tools=tools, opening=opening))[:2] == said
        assert joined(parse(list(text), "hermes", tools=tools, opening=opening))[:2] == said


def test_a_template_without_tags_knows_no_thoughts() -> None:
    assert joined(parse(["<think>a</think>b"], "granite"))[:2] == ("<think>a</think>b", "")


@pytest.mark.parametrize("source", [None, "no tags", "<think>"])
def test_thoughts_alone(source: str | None) -> None:
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    for opening, text in (("", f"<think>Hm.</think>\n{call}"), ("<think>\n", f"Hm.</think>{call}")):
        parser = thoughts_parser(source, opening=opening)
        deltas = [delta for character in text for delta in parser.push(character)] + parser.finish()
        assert joined(deltas) == (call, "Hm.", [])
    other = thoughts_parser("[THINK] and [/THINK]")
    assert joined(other.push("[THINK]Hm.[/THINK]<think>"))[1] == "Hm."


# ------------------------------------------------------------------------------------ malformed


def test_arguments_that_go_astray_end_there_and_the_rest_is_content() -> None:
    said = joined(parse(['<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>'], "hermes"))
    assert said == ("Paris}}</tool_call>", "", [("weather", '{"city": ')])


def test_parameters_that_go_astray_end_the_object() -> None:
    text = "<tool_call><function=weather><parameter=city>a</parameter> so <b>"
    assert joined(parse([text], "qwen-coder")) == ("so <b>", "", [("weather", '{"city": "a"}')])
