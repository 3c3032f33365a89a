"""Tests of `parser_for` with answers, however they are split, and with texts that are not answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from ngramspec.tool_calls.deltas import Delta, Tool
from ngramspec.tool_calls.families import FAMILIES
from ngramspec.tool_calls.parser import parser_for

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

TAGS = ("<think>", "[THINK]", "<|channel>")
THINKS = {"granite": "", "mistral": "[THINK]", "gemma4": "<|channel>thought\n"}
TEMPLATES = {family.name: "".join(family.markers[0]) + THINKS.get(family.name, "<think>") for family in FAMILIES}
"""Templates that only contain the markers of each family."""

PARIS = {"city": "Paris"}
TWO = [("weather", PARIS), ("clock", {})]


class Answer(NamedTuple):
    family: str
    text: str
    calls: list[tuple[str, Any]]
    content: str = ""
    thoughts: str = ""


ANSWERS = [
    Answer(
        "hermes",
        "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        TWO,
        content="I look.",
        thoughts="Hm.",
    ),
    Answer("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', TWO[:1]),
    Answer("hermes", '<tool_call>{"name": "clock"}</tool_call>', TWO[1:]),
    Answer("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', TWO[:1]),
    Answer("hermes", '<tool_call>{"name": "other", "id": [1, {"a": 2}], "arguments": null}', [("other", {})]),
    Answer("hermes", '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "clock"}]', TWO),
    Answer(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\u00e9\\n", "at": [-1.5e3, null]}}</tool_call>',
        [("weather", {"city": "a\nbé\n", "at": [-1500.0, None]})],
    ),
    Answer(
        "qwen-coder",
        "Look:\n<tool_call>\n<function=weather>\n<parameter=city>\nPa\n</b>\nris\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=at>\n[1, 2]\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        [("weather", {"city": "Pa\n</b>\nris", "days": 3, "exact": True, "at": [1, 2]}), ("clock", {})],
        content="Look:",
    ),
    Answer("qwen-coder", '<function=weather>{"city": "Paris"}</function>', TWO[:1]),
    Answer(
        "glm",
        "<think>a</think>b\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>7</arg_value>\n<arg_key>free</arg_key><arg_value>{"a": 1}</arg_value><arg_key>maybe</arg_key>'
        "<arg_value>null</arg_value><arg_key>exact</arg_key><arg_value>perhaps</arg_value></tool_call>"
        "<tool_call>clock</tool_call>",
        [("weather", {"city": "7", "days": 7, "free": {"a": 1}, "maybe": None, "exact": "perhaps"}), ("clock", {})],
        content="b",
        thoughts="a",
    ),
    Answer(
        "nemotron-v2",
        'x<TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "clock"}]</TOOLCALL>',
        TWO,
        "x",
    ),
    Answer("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "clock"}]', TWO),
    Answer("llama", '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "clock", "parameters": {}}', TWO),
    Answer(
        "llama", 'So:\n<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}', TWO[1:], content="So:"
    ),
    Answer(
        "mistral",
        '[THINK]a[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[CALL_ID]1[ARGS]{}',
        TWO,
        thoughts="a",
    ),
    Answer(
        "mistral-list",
        'a [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "1"}, {"name": "clock"}]',
        TWO,
        content="a",
    ),
    Answer(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
        "<|call|><|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}",
        TWO,
        content="I look.",
        thoughts="Hm.",
    ),
    Answer(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        [],
        content="Hi",
        thoughts="Hm.",
    ),
    Answer(
        "deepseek-v3",
        "a\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        TWO,
        content="a",
    ),
    Answer(
        "deepseek-v3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        TWO,
    ),
    Answer(
        "deepseek-v3.2",
        'a\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        TWO,
        content="a",
    ),
    Answer(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        TWO,
    ),
    Answer(
        "minimax",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        TWO,
    ),
    Answer(
        "gemma4",
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:weather{city:<|"|>Pa"ris<|"|>,days:3,at:[1,[],'
        '-2.5],free:{a:true,<|"|>b c<|"|>:null}}<tool_call|><|tool_call>call:clock{}<tool_call|>',
        [
            ("weather", {"city": 'Pa"ris', "days": 3, "at": [1, [], -2.5], "free": {"a": True, "b c": None}}),
            ("clock", {}),
        ],
        thoughts="Hm.",
    ),
    Answer("gemma", 'So:\n```tool_code\n[weather(city="Paris"), clock()]\n```', TWO, content="So:"),
    Answer("gemma", '```json\n{"name": "weather", "parameters": {"city": "Paris"}}\n```', TWO[:1]),
    Answer("lfm2", "<|tool_call_start|>[weather(city='Paris'), clock()]<|tool_call_end|>ok", TWO, content="ok"),
]
# These texts contain no call.
PROSE = [
    *("", " hi \n", "a <tool_call> b", "x<think>y", "<|chan", "ends in white space <tool_call> \n\n "),
    *('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": "weather", "argum', "<tool_call>weather"),
    '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    *("<tool_call><function=weather>x", "<tool_call>\n<func", "<|python_tag|>import os", "[1, 2, 3]"),
    *('{"name": "Bob", "parameters": {}}', '{"name": "weather"}', '{"name": "weather", "age": 5}'),
    *('[TOOL_CALLS]weather{"a": 1}', "[TOOL_CALLS]", "<|tool_call>call weather{}"),
    *("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"),
    "```tool_code\nprint(weather(city=open('x')))\n```\n```json\n{}\n```",
    *("<|tool_call_start|>[__import__('os')]<|tool_call_end|>", "<|channel|>weird <|end|>"),
    *("a to=functions.weather b", '<minimax:tool_call><invoke name="weather"></minimax:tool_call>'),
]


def parse(pieces: Sequence[str], family: str, *, tools: Sequence[Tool] = TOOLS, opening: str = "") -> list[Delta]:
    parser = parser_for(TEMPLATES[family], tools, opening=opening)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return [*deltas, *parser.finish()]


def joined(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return content, reasoning, and calls with their arguments."""
    content = "".join(delta.text for delta in deltas if delta.kind == "text")
    thoughts = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.kind == "call":
            assert delta.call == len(calls)
            calls.append((delta.name, ""))
        elif delta.kind == "arguments":
            calls[delta.call] = (calls[delta.call][0], calls[delta.call][1] + delta.text)
    return content, thoughts, calls


def cut(text: str, chance: random.Random) -> list[str]:
    """Split a text into pieces, some of them empty."""
    places = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 30)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def untagged(text: str) -> bool:
    """Return True if a text cannot contain reasoning."""
    return not any(tag in text for tag in (*TAGS, "<|channel|>"))


def test_parser_test_answers_cover_every_family() -> None:
    assert set(TEMPLATES) == {answer.family for answer in ANSWERS}


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.family)
def test_parser_with_any_split_returns_same_result(answer: Answer) -> None:
    family, text = answer.family, answer.text
    whole = joined(parse([text], family))
    content, thoughts, calls = whole
    assert (content, thoughts) == (answer.content, answer.thoughts)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == answer.calls
    assert joined(parse(list(text), family)) == whole
    chance = random.Random(text)
    for _ in range(30):
        assert joined(parse(cut(text, chance), family)) == whole
    # Without tools, the parser finds no calls.
    content, without, calls = joined(parse([text], family, tools=()))
    assert (without, calls) == (thoughts, [])
    assert content == text or not untagged(text)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.family)
def test_parser_with_incomplete_answer_keeps_reported_calls(answer: Answer) -> None:
    chance = random.Random(answer.text)
    for length in range(len(answer.text)):
        begun = answer.text[:length]
        content, _, calls = joined(parse(cut(begun, chance), answer.family))
        # Reported calls never change; their arguments only get longer.
        assert [name for name, _ in calls] == [name for name, _ in answer.calls][: len(calls)]
        if not calls and untagged(begun):
            assert content == begun
        parser = parser_for(TEMPLATES[answer.family], TOOLS)
        parser.push(begun)
        parser.finish(cut=True)  # It must end, wherever a limit cut the answer.


@pytest.mark.parametrize("family", TEMPLATES)
def test_parser_returns_text_without_calls_as_content(family: str) -> None:
    for text in PROSE:
        assert joined(parse([text], family)) == (text, "", [])
        assert joined(parse(list(text), family)) == (text, "", [])


MARKS = """
<think> </think> [THINK] <channel|> <|start|> <|message|> <|end|> weather clock { } [ ] " : , \\ 1 - null é < |
</tool_call> <parameter=city> </parameter> </function> <arg_key> </arg_key> <arg_value> </arg_value> [ARGS]
<｜tool▁sep｜> ```json ``` call:weather{ <|"|> <tool_call|> <|tool_call_begin|> <|tool_call_argument_begin|>
to=functions.weather weather> </invoke> <|tool_call_end|> \\u12
"""
SCRAPS = [
    *MARKS.split(),
    *sorted({mark for family in FAMILIES for mark in family.starts}),
    *('{"name": "weather", "arguments": {', '"city": "', "<|channel>thought\n", "\n", " ", "\0"),
    *('<invoke name="weather">', '<parameter name="city">', "(city='x')"),
]


def garbage(family: str, chance: random.Random) -> str:
    """Draw fragments of all families, or an answer of the family with some pieces lost, doubled or replaced."""
    if chance.random() < 0.5:
        return "".join(chance.choice(SCRAPS) for _ in range(chance.randrange(1, 25)))
    pieces = cut(chance.choice([answer.text for answer in ANSWERS if answer.family == family]), chance)
    return "".join(chance.choice([piece] * 6 + ["", piece * 2, chance.choice(SCRAPS)]) for piece in pieces)


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_parser_with_random_fragments_returns_consistent_result(family: str, count: int) -> None:
    chance = random.Random(family)
    begun = 0
    for _ in range(count):
        text = garbage(family, chance)
        opening = chance.choice(["", "<think>\n", "<think>\n\n</think>\n\n"])
        whole = joined(parse([text], family, opening=opening))
        assert joined(parse(cut(text, chance), family, opening=opening)) == whole
        content, thoughts, calls = whole
        begun += len(calls)
        assert all(arguments.startswith("{") for _, arguments in calls)
        if not calls and not thoughts and untagged(text + opening):
            assert content == text
    assert begun > 0


def test_parser_with_deeply_nested_brackets_does_not_raise() -> None:
    deep = "[" * 5000
    for before in ('{"name": "weather", "arguments": {"at": ', '{"arguments": {"at": '):
        text = f"<tool_call>{before}{deep}{']' * 5000}" + '}, "name": "weather"}</tool_call>'
        content, _, calls = joined(parse([text], "hermes"))
        assert content == text or calls[0][0] == "weather"
    assert joined(parse(["```tool_code\nweather(at=" + deep + "```"], "gemma"))[2] == []


# ------------------------------------------------------------------------------------ streaming


def test_parser_streams_call_arguments() -> None:
    for family, text in (
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pari'),
        ("llama", '{"name": "weather", "parameters": {"city": "Pari'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Pari'),
        ("deepseek-v3.1", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Pari'),
        ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": "Pari'),
        ("qwen-coder", "<tool_call><function=weather><parameter=city>\nPari"),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Pari"),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Pari'),
    ):
        parser = parser_for(TEMPLATES[family], TOOLS)
        assert joined(parser.push(text))[2] == [("weather", '{"city": "Pari')]
        assert parser.push("s") == [Delta("arguments", "s", 0)]


def test_parser_streams_content_before_possible_call() -> None:
    parser = parser_for(TEMPLATES["hermes"], TOOLS)
    assert parser.push("a <") == [Delta("text", "a")]
    assert parser.push("b> <tool_") == [Delta("text", " <b>")]
    assert parser.push("box>") == [Delta("text", " <tool_box>")]
    assert parser.finish() == []


def test_parser_call_ids_are_unique_and_match_family_format() -> None:
    text = '<tool_call>{"name": "clock"}</tool_call>' * 2
    ids = [delta.id for delta in parse([text], "hermes") if delta.kind == "call"]
    assert len(set(ids)) == 2
    assert all(id_.startswith("call_") for id_ in ids)
    mistral = [delta.id for delta in parse(["[TOOL_CALLS]clock[ARGS]{}"], "mistral") if delta.kind == "call"]
    assert len(mistral[0]) == 9
    assert mistral[0].isalnum()


# ------------------------------------------------------------------------------------- thoughts


def test_parser_separates_reasoning_from_content() -> None:
    turn = "<|im_start|>assistant\n"
    for opening, text, said in (
        ("<think>\n", "Hm.\n</think>\n\nHi", ("Hi", "Hm.")),
        ("<think>\n", "Hm.", ("", "Hm.")),
        ("<think>\n\n</think>\n\n", "Hi", ("Hi", "")),
        ("", "\n<think>Hm.</think>Hi", ("Hi", "Hm.")),
        ("", "Say <think>Hm.</think>", ("Say <think>Hm.</think>", "")),
    ):
        for tools in (TOOLS, ()):
            for pieces in ([text], list(text)):
                assert joined(parse(pieces, "hermes", tools=tools, opening=turn + opening))[:2] == said
    # For a template without tags, tags are text.
    assert joined(parse(["<think>a</think>b"], "granite"))[:2] == ("<think>a</think>b", "")


# ------------------------------------------------------------------------------------ malformed


def test_parser_with_malformed_arguments_ends_call_and_returns_rest() -> None:
    said = joined(parse(['<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>'], "hermes"))
    assert said == ("Paris}}</tool_call>", "", [("weather", '{"city": ')])
    text = "<tool_call><function=weather><parameter=city>a</parameter> so <b>"
    assert joined(parse([text], "qwen-coder")) == ("so <b>", "", [("weather", '{"city": "a"}')])


@pytest.mark.parametrize(
    ("template", "text", "content"),
    [
        # Calls that end before their name are omitted.
        ("<tool_call>", 'I look.\n<tool_call>\n{"name": "lo', "I look."),
        ("<tool_call>", "I look.\n<tool_ca", "I look."),
        ("<arg_key>", "I look.\n<tool_call>loo", "I look."),
        ("<tool_call>", "I look.\n<tool_call>\n<function=lo", "I look."),
        ("[TOOL_CALLS] [ARGS]", "I look.[TOOL_CALLS]look[AR", "I look."),
        ("<|tool_call_start|>", "I look.<|tool_call_start|>[look(at=", "I look."),
        (
            "<|channel|> <|message|>",
            "<|channel|>final<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=look",
            "I look.",
        ),
        ("<|python_tag|>", '{"name": "look", "param', ""),
        ("<|python_tag|>", '{"name": "lo', ""),
        # Other JSON and texts that mention calls are complete.
        ("<|python_tag|>", '{"name": "Ann", "a', None),
        ("<tool_call>", "Between <tool_call> and </tool_call> there stands what is called, as a < b says", None),
    ],
)
def test_parser_of_truncated_answer_omits_only_incomplete_calls(template: str, text: str, content: str | None) -> None:
    def content_of(cut: bool) -> str:
        parser = parser_for(template, [Tool("look")])
        deltas = [*parser.push(text), *parser.finish(cut)]
        assert not any(delta.kind == "call" for delta in deltas)
        return "".join(delta.text for delta in deltas if delta.kind == "text")

    assert content_of(cut=True) == (text if content is None else content)
    assert (content_of(cut=False) == content_of(cut=True)) == (
        content is None
    )  # A complete answer is returned in full.
