"""Tests of `AnswerParser` with answers, however they are split, other texts, and calls that grammars force."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from ngramspec.chat.families import FAMILIES, HERMES, HERMES_START, AnswerParser, Family, answer_grammar, family_of
from ngramspec.chat.stream import Delta, Tool
from ngramspec.llama.vocabulary import Vocabulary

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
CITY = '{"city": "Paris"}'
CALL = f'{{"name": "weather", "arguments": {CITY}}}'
CALLS = f'{CALL}, {{"name": "clock"}}'


class Answer(NamedTuple):
    family: str
    text: str
    calls: list[tuple[str, Any]]
    content: str = ""
    thoughts: str = ""


ANSWERS = [
    Answer(
        "hermes",
        f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>\n"
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        TWO,
        "I look.",
        "Hm.",
    ),
    Answer("hermes", f'<tool_call>{{"arguments": {CITY}, "name": "weather"}}</tool_call>', TWO[:1]),
    Answer("hermes", '<tool_call>{"name": "clock"}</tool_call>', TWO[1:]),
    Answer("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', TWO[:1]),
    Answer("hermes", '<tool_call>{"name": "other", "id": [1, {"a": 2}], "arguments": null}', [("other", {})]),
    Answer("hermes", f"<tool_call>[{CALLS}]", TWO),
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
        "Look:",
    ),
    Answer("qwen-coder", f"<function=weather>{CITY}</function>", TWO[:1]),
    Answer(
        "glm",
        "<think>a</think>b\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>7</arg_value>\n<arg_key>free</arg_key><arg_value>{"a": 1}</arg_value><arg_key>maybe</arg_key>'
        "<arg_value>null</arg_value><arg_key>exact</arg_key><arg_value>perhaps</arg_value></tool_call>"
        "<tool_call>clock</tool_call>",
        [("weather", {"city": "7", "days": 7, "free": {"a": 1}, "maybe": None, "exact": "perhaps"}), ("clock", {})],
        "b",
        "a",
    ),
    Answer("nemotron-v2", f"x<TOOLCALL>[{CALLS}]</TOOLCALL>", TWO, "x"),
    Answer("granite", f"<|tool_call|>[{CALLS}]", TWO),
    Answer("llama", f'{{"name": "weather", "parameters": {CITY}}}; {{"name": "clock", "parameters": {{}}}}', TWO),
    Answer("llama", 'So:\n<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}', TWO[1:], "So:"),
    Answer(
        "mistral", f"[THINK]a[/THINK][TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]clock[CALL_ID]1[ARGS]{{}}", TWO, "", "a"
    ),
    Answer("mistral-list", f'a [TOOL_CALLS] [{CALL[:-1]}, "id": "1"}}, {{"name": "clock"}}]', TWO, "a"),
    Answer(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CITY}"
        "<|call|><|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}",
        TWO,
        "I look.",
        "Hm.",
    ),
    Answer(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        [],
        "Hi",
        "Hm.",
    ),
    Answer(
        "deepseek-v3",
        "a\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{CITY}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        TWO,
        "a",
    ),
    Answer(
        "deepseek-v3.1",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        TWO,
    ),
    Answer(
        "deepseek-v3.2",
        'a\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        TWO,
        "a",
    ),
    Answer(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{CITY}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{{}}"
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
        "",
        "Hm.",
    ),
    Answer("gemma", 'So:\n```tool_code\n[weather(city="Paris"), clock()]\n```', TWO, "So:"),
    Answer(
        "gemma",
        f'```json\n{{"name": "weather", "parameters": {CITY}}}\n```\n'
        '```json\n{"name": "clock", "parameters": {}}\n```',
        TWO,
    ),
    Answer("gemma", '```tool_code\nweather(city="Paris")\n```\n```tool_code\nclock()\n```\nok', TWO, "ok"),
    Answer("lfm2", "<|tool_call_start|>[weather(city='Paris'), clock()]<|tool_call_end|>ok", TWO, "ok"),
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
    *("a to=functions.weather b", '<minimax:tool_call><invoke name="weather">x</minimax:tool_call>'),
    '<tool_call>{"name": "weather", "city": "Paris"}</tool_call>',
]


def parse(
    pieces: Sequence[str], family: str, *, tools: Sequence[Tool] = TOOLS, opening: str = "", cut: bool = False
) -> list[Delta]:
    parser = AnswerParser(TEMPLATES[family], tools, opening=opening)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return [*deltas, *parser.finish(cut)]


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


def check_answer(answer: Answer, tools: Sequence[Tool] = TOOLS) -> None:
    """Check the parsed parts of an answer, however it is split."""
    family, text = answer.family, answer.text
    whole = joined(parse([text], family, tools=tools))
    content, thoughts, calls = whole
    assert (content, thoughts) == (answer.content, answer.thoughts)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == answer.calls
    assert joined(parse(list(text), family, tools=tools)) == whole
    chance = random.Random(text)
    for _ in range(30):
        assert joined(parse(cut(text, chance), family, tools=tools)) == whole


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.family)
def test_parser_with_any_split_returns_same_result(answer: Answer) -> None:
    check_answer(answer)
    family, text, thoughts = answer.family, answer.text, answer.thoughts
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
        parser = AnswerParser(TEMPLATES[answer.family], TOOLS)
        parser.push(begun)
        parser.finish(cut=True)  # It must end, wherever a limit cut the answer.


@pytest.mark.parametrize("family", TEMPLATES)
def test_parser_returns_text_without_calls_as_content(family: str) -> None:
    for text in PROSE:
        assert joined(parse([text], family)) == (text, "", [])
        assert joined(parse(list(text), family)) == (text, "", [])


MARK = re.compile(
    r"""<\|(?:start|channel)\|>(?:(?!<\|(?:start|end|call)\|>).)*<\|message\|>"""  # gpt-oss' headers
    r"""|<[^<>\s"]*(?:"[^"<>]*")?[^<>\s]*>?|\[/?[A-Z_]+\]|```\w*|[{}\[\]()",:]|\w+=""",
    re.DOTALL,
)
CLOSER = re.compile(r"</.*|.*(?:end|call)[|｜]>|<.*\|>|[\]})]|\[/.*|```")
WORD = re.compile(r"[^\W\d_]{2,}")
FOREIGN = sorted({HERMES_START, *(mark for family in FAMILIES for mark in family.starts)})


def damage(text: str, chance: random.Random) -> str:
    """Return an answer with one mistake: it is cut, or marks in it are lost, doubled, nested, foreign or swapped."""
    marks = list(MARK.finditer(text)) or [re.match("", text)]
    closers = [mark for mark in marks if mark and CLOSER.fullmatch(mark[0])]
    mark, other, closer = (chance.choice(choices) for choices in (marks, marks, closers or marks))
    assert mark is not None
    assert other is not None
    assert closer is not None
    place, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    return chance.choice(
        [
            text[:place],
            text[: mark.end()] + text[mark.start() :],
            text[: closer.start()] + text[closer.end() :],
            text[: mark.start()] + text[mark.end() :],
            text[: mark.end()] + other[0] + text[mark.end() :],
            text[:place] + other[0] + text[place:],
            text[:place] + chance.choice(FOREIGN) + text[place:],
            text[:place] + text[end:] + text[place:end],
        ]
    )


def words_of(answer: Answer) -> set[str]:
    """Return the words of an answer in which no mark is hidden: its content, its reasoning and the values in calls."""
    values = [list(arguments.values()) for _, arguments in answer.calls]
    text = f"{answer.content} {answer.thoughts} {json.dumps(values, ensure_ascii=False)}"
    return set(WORD.findall(text)) - {"true", "false", "null"}


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_parser_with_damaged_answer_returns_valid_arguments_and_loses_nothing(family: str, count: int) -> None:
    chance = random.Random(family)
    answers = [answer for answer in ANSWERS if answer.family == family]
    n_calls = 0
    for _ in range(count):
        answer = chance.choice(answers)
        text = damage(answer.text, chance)
        text = damage(text, chance) if chance.random() < 0.5 else text
        opening = chance.choice(["", "", "<think>\n", "<think>\n\n</think>\n\n"])
        result = joined(parse([text], family, opening=opening))
        content, thoughts, calls = result
        n_calls += len(calls)
        assert all(name and is_object(arguments) for name, arguments in calls), text
        assert joined(parse(cut(text, chance), family, opening=opening)) == result, text
        shown, plain = f"{content} {thoughts} {calls}", MARK.sub(" ", text)
        lost = [word for word in words_of(answer) if len(re.findall(rf"\b{word}\b", plain)) > shown.count(word)]
        assert not lost, text
        if not calls and not thoughts and untagged(text + opening):
            assert content == text
        # If a limit cut the answer, its calls begin those of the complete one, and only the last may be incomplete.
        result = joined(parse([text], family, opening=opening, cut=True))
        assert joined(parse(cut(text, chance), family, opening=opening, cut=True)) == result, text
        assert all(is_object(arguments) for _, arguments in result[2][:-1]), text
        assert all(whole[1].startswith(begun[1]) for begun, whole in zip(result[2], calls, strict=False)), text
    assert n_calls > count / 4


LS = [("weather", {"city": "ls -la"})]
LS_3 = [("weather", {"city": "ls -la", "days": 3})]
NAMED = (*TOOLS, Tool("get-weather"), Tool("a.b"))
DAMAGED = [
    # Closing marks are missing, at the end of the answer or before the next mark.
    Answer("qwen-coder", "<tool_call>\n<function=weather>\n<parameter=city>\nls -la\n</parameter>", LS),
    Answer("qwen-coder", "<tool_call>\n<function=weather>\n<parameter=city>\nls -la\n", LS),
    Answer("qwen-coder", "<function=weather><parameter=city>\nls -la\n</function>\n</tool_call>", LS),
    Answer("qwen-coder", "<function=weather><parameter=city>\nls -la\n</tool_call>", LS),
    Answer("qwen-coder", "<function=weather><parameter=city>\nls -la\n</function>\n<function=clock>", [*LS, TWO[1]]),
    Answer("qwen-coder", "<function=weather><parameter=city>\nls -la\n<parameter=days>\n3\n</function>", LS_3),
    Answer("qwen-coder", "<tool_call>\n<function=clock>\n</tool_call>", TWO[1:]),
    Answer("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>ls -la</tool_call>", LS),
    Answer("glm", "<tool_call>weather<arg_key>city<arg_value>ls -la<arg_key>days</arg_key>3</tool_call>", LS_3),
    Answer("minimax", '<invoke name="weather"><parameter name="city">ls -la</invoke></minimax:tool_call>', LS),
    Answer("minimax", '<invoke name="weather"><parameter name="city">ls -la</parameter></minimax:tool_call>', LS),
    Answer("deepseek-v3.2", '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">ls -la', LS),
    Answer("gemma4", '<|tool_call>call:weather{city:<|"|>ls -la<|"|>,days:3<tool_call|>', LS_3),
    Answer("lfm2", '<|tool_call_start|>[weather(city="Paris"), clock()]', TWO),
    Answer("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"</tool_call>', TWO[:1]),
    Answer("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris', TWO[:1]),
    Answer("deepseek-v3.1", '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"', TWO[:1]),
    Answer("deepseek-v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n{"city": "Paris"}', TWO[:1]),
    # Marks are incomplete.
    Answer("qwen-coder", "<function=weather\n<parameter=city\nls -la\n</parameter>\n</function>", LS),
    Answer("qwen-coder", "<function=weather>\n<parameter=city>\nls -la\n</parameter/>\n</function/>", LS),
    Answer("minimax", '<invoke name="weather"\n<parameter name="city"ls -la</parameter></invoke>', LS),
    # Marks are doubled or nested.
    Answer(
        "qwen-coder",
        "<tool_call>\n<tool_call>\n<function=weather>\n<function=weather>\n<parameter=city>\nls -la\n</parameter>\n"
        "</parameter>\n<parameter=<parameter=days>3</parameter>\n</function></function>\n</tool_call></tool_call>x",
        LS_3,
        "x",
    ),
    Answer("hermes", '<tool_call><tool_call>{"name": "weather", "arguments": {"city": "Paris"}}}</tool_call>', TWO[:1]),
    Answer(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_begin|>functions.clock:0"
        "<|tool_call_argument_begin|><|tool_call_argument_begin|>{}}<|tool_call_end|><|tool_call_end|>"
        "<|tool_calls_section_end|><|tool_calls_section_end|>",
        TWO[1:],
    ),
    # The text of a value contains marks.
    Answer(
        "qwen-coder",
        "<function=weather><parameter=city>\na </function> b <parameter=x> c\n</tool_call>\nd\n</parameter></function>",
        [("weather", {"city": "a </function> b <parameter=x> c\n</tool_call>\nd"})],
    ),
    # White space in a value belongs to it, except the line breaks of Qwen's form.
    *(
        Answer(family, text, [("weather", {"city": "  a \n"})])
        for family, text in (
            ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>  a \n</arg_value></tool_call>"),
            ("minimax", '<invoke name="weather">\n<parameter name="city">  a \n</parameter>\n</invoke>'),
            ("qwen-coder", "<function=weather>\n<parameter=city>\n  a \n\n</parameter>\n</function>"),
            ("gemma4", '<|tool_call>call:weather{city:<|"|>  a \n<|"|>}'),
        )
    ),
    # Values are written like Python or JavaScript.
    Answer(
        "qwen-coder",
        "<function=weather><parameter=at>[{'a': True, 'b': None,}, {'c': (1, 'it\\'s')}]</parameter></function>",
        [("weather", {"at": [{"a": True, "b": None}, {"c": [1, "it's"]}]})],
    ),
    Answer("qwen-coder", "<function=weather><parameter=city>[1, 'a']</parameter>", [("weather", {"city": "[1, 'a']"})]),
    Answer(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "C:\\dir", "exact": True, "at": [1,],}}</tool_call>',
        [("weather", {"city": "C:\\dir", "exact": True, "at": [1]})],
    ),
    Answer(
        "lfm2",
        "<|tool_call_start|>[weather(exact=true, maybe=null, free={'a': [false]}, city=\"a\n\\d\\u00e9, (')]\")]",
        [("weather", {"exact": True, "maybe": None, "free": {"a": [False]}, "city": "a\n\\dé, (')]"})],
    ),
    Answer(
        "lfm2",
        '<|tool_call_start|>[get-weather(city="Paris"), a.b(user-id=3)]<|tool_call_end|>',
        [("get-weather", PARIS), ("a.b", {"user-id": 3})],
    ),
    # Some parsers of JSON reject halves of surrogate pairs, and numbers that are too large.
    Answer(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "\\ud83d\\ude00\\ud83d \\ude00\\ud83d", "days": 1e999}}',
        [("weather", {"city": "😀� ��", "days": "1e999"})],
    ),
    Answer(
        "qwen-coder",
        "<function=weather><parameter=at>['\\ud83d\\ude00', '\\ude00']</parameter><parameter=days>1e999</parameter>",
        [("weather", {"at": ["😀", "�"], "days": "1e999"})],
    ),
    # One of several calls is not valid.
    Answer("lfm2", '<|tool_call_start|>[clock(), weather("Paris"), clock()]', [TWO[1]] * 2, 'weather("Paris")'),
    Answer("gemma", "```tool_code\nclock()\nprint(open('x'))\n```", TWO[1:], "print(open('x'))"),
    Answer(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>',
        [("weather", {})],
        '"city": Paris}}</tool_call>',
    ),
    Answer(
        "qwen-coder",
        "<tool_call><function=weather><parameter=city>a</parameter> so <b>",
        [("weather", {"city": "a"})],
        "so <b>",
    ),
]


@pytest.mark.parametrize("answer", DAMAGED, ids=lambda answer: answer.family)
def test_parser_with_mistake_of_model_returns_intended_call(answer: Answer) -> None:
    check_answer(answer, NAMED)


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pa\\', '{"city": "Pa'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": 1, "exact": tru', '{"days": 1'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": 1, "exa', '{"days": 1'),
        ("qwen-coder", "<function=weather><parameter=city>\nPa\n</para", '{"city": "Pa'),
        ("qwen-coder", "<function=weather><parameter=city>Pa</parameter><parameter=days>1", '{"city": "Pa"'),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Pa</arg_val", '{"city": "Pa'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Pa<|"|>,days:1', '{"city": "Pa"'),
        # More of the string follows.
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pari', '{"city": "Pari'),
        ("llama", '{"name": "weather", "parameters": {"city": "Pari', '{"city": "Pari'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Pari', '{"city": "Pari'),
        ("deepseek-v3.1", '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Pari', '{"city": "Pari'),
        ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": "Pari', '{"city": "Pari'),
        ("qwen-coder", "<tool_call><function=weather><parameter=city>\nPari", '{"city": "Pari'),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Pari", '{"city": "Pari'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Pari', '{"city": "Pari'),
    ],
)
def test_parser_streams_arguments_and_keeps_those_cut_by_limit_incomplete(
    family: str, text: str, arguments: str
) -> None:
    parser = AnswerParser(TEMPLATES[family], TOOLS)
    assert joined(parser.push(text)) == ("", "", [("weather", arguments)])
    if arguments.endswith("Pari"):
        assert parser.push("s") == [Delta("arguments", "s", 0)]
    for pieces in ([text], list(text)):
        assert joined(parse(pieces, family, cut=True)) == ("", "", [("weather", arguments)])


def test_parser_with_call_cut_by_limit_completes_earlier_calls() -> None:
    text = '<|tool_call_start|>[weather(city="Pa"), clo'
    assert joined(parse([text], "lfm2", cut=True)) == ("", "", [("weather", '{"city": "Pa"}')])
    text = "<function=weather><parameter=city>\nPa\n</function>"
    assert joined(parse([text], "qwen-coder", cut=True)) == ("", "", [("weather", '{"city": "Pa\\n</function>')])


@pytest.mark.parametrize("answer", [a for a in ANSWERS if len(a.calls) == 2], ids=lambda answer: answer.family)
def test_parser_without_parallel_calls_ends_after_first_call(answer: Answer) -> None:
    for pieces in ([answer.text], list(answer.text)):
        parser = AnswerParser(TEMPLATES[answer.family], TOOLS, parallel=False)
        assert parser.ended is False
        deltas, n_read = list[Delta](), 0
        for piece in pieces:
            deltas += parser.push(piece)
            n_read += not parser.ended
        assert parser.ended
        content, _, calls = joined([*deltas, *parser.finish()])
        assert [(name, json.loads(arguments)) for name, arguments in calls] == answer.calls[:1]
        assert answer.content.startswith(content)
    if answer.family not in {"gemma", "lfm2"}:  # their calls are parsed as a whole
        assert "clock" not in answer.text[:n_read]
    for tools, parallel in ((TOOLS, True), ((), False)):
        assert AnswerParser(TEMPLATES[answer.family], tools, parallel=parallel).ended is None


def test_parser_with_deeply_nested_brackets_does_not_raise() -> None:
    deep = "[" * 5000
    for before in ('{"name": "weather", "arguments": {"at": ', '{"arguments": {"at": '):
        text = f"<tool_call>{before}{deep}{']' * 5000}" + '}, "name": "weather"}</tool_call>'
        content, _, calls = joined(parse([text], "hermes"))
        assert content == text or calls[0][0] == "weather"
    assert joined(parse(["```tool_code\nweather(at=" + deep + "```"], "gemma"))[2] == []


def test_parser_streams_content_before_possible_call() -> None:
    parser = AnswerParser(TEMPLATES["hermes"], TOOLS)
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
    assert joined(parse(["<think>Hm.</thin"], "hermes", cut=True))[:2] == ("", "Hm.")
    # For a template without tags, tags are text.
    assert joined(parse(["<think>a</think>b"], "granite"))[:2] == ("<think>a</think>b", "")


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
        parser = AnswerParser(template, [Tool("look")])
        deltas = [*parser.push(text), *parser.finish(cut)]
        assert not any(delta.kind == "call" for delta in deltas)
        return "".join(delta.text for delta in deltas if delta.kind == "text")

    assert content_of(cut=True) == (text if content is None else content)
    assert (content_of(cut=False) == content_of(cut=True)) == (
        content is None
    )  # A complete answer is returned in full.


DAYS = {"type": "integer", "minimum": 1, "maximum": 7}
PROPERTIES = {"city": {"type": "string", "maxLength": 20}, "days": DAYS}
FORECAST = Tool("weather", "", {"type": "object", "properties": PROPERTIES, "required": ["city", "days"]})
CALL = ("weather", '{"city": "Rome", "days": 3}')


def fits(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    """Return True if a grammar allows the complete text."""
    end = next(token for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token))
    tokens = [*vocabulary.tokenize(text, add_bos=False), end]
    return vocabulary.grammar(grammar).count_allowed(tokens) == len(tokens)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_answer_grammar_of_each_family_allows_calls_that_parser_reads(
    family: Family, demo_vocabulary: Vocabulary
) -> None:
    template = " ".join(family.markers[0])
    assert family_of(template) == family
    one, two = [CALL], [CALL, ("clock", "{}")]
    for parallel in (False, True):
        grammar = answer_grammar([FORECAST, CLOCK], choice="required", parallel=parallel, template=template)
        assert fits(demo_vocabulary, grammar, family.write(one))
        assert not fits(demo_vocabulary, grammar, family.write([("weather", '{"city": "Rome", "days": 8}')]))
        assert not fits(demo_vocabulary, grammar, "Hello")
        several = parallel and family.around[1] is not None
        assert fits(demo_vocabulary, grammar, family.write(two)) == several
    for calls in (one, two) if family.around[1] is not None else (one,):
        content, thoughts, found = joined(parse([family.write(calls)], family.name, tools=(FORECAST, CLOCK)))
        assert (content, thoughts) == ("", "")
        assert [(name, json.loads(text)) for name, text in found] == [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize(
    ("opening", "before", "allowed"),
    [
        ("", "", True),
        ("", "<think>\na </thin <</think>\n\n", True),
        ("", "a", False),
        ("", "<think>a", False),
        ("<think>\n", "a </t </</think>\n", True),
        ("<think>\n", "", False),
        ("<think>\n", "</think>a", False),
        ("<think>\n\n</think>\n\n", "", True),
    ],
)
def test_answer_grammar_allows_reasoning_only_before_the_call(
    opening: str, before: str, allowed: bool, demo_vocabulary: Vocabulary
) -> None:
    template = TEMPLATES["hermes"]
    grammar = answer_grammar([CLOCK], choice="required", parallel=False, template=template, opening=opening)
    text = before + HERMES.write([("clock", "{}")])
    assert fits(demo_vocabulary, grammar, text) == allowed
    if allowed:
        content, thoughts, calls = joined(parse([text], "hermes", opening=opening))
        assert (content, calls) == ("", [("clock", "{}")])
        assert thoughts in before
