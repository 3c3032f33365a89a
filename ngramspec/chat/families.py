"""Model families (`FAMILIES`): the markers of their templates and the form of their calls; parsers and grammars.

If the calls of a family contain no JSON, or their form is unknown, forced calls are written in Hermes' form, which the
family's parser reads too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from ngramspec.chat.calls import (
    TO,
    ReadCall,
    make_invoke_parsers,
    make_list_parsers,
    read_function,
    read_gemma4,
    read_hermes,
    read_message,
    read_named,
    read_objects,
    read_python,
)
from ngramspec.chat.stream import Answer, Delta, Reads, Tool, to_json
from ngramspec.data import GrammarError
from ngramspec.grammars.json_schema import call_rule, json_rule
from ngramspec.grammars.lark import Lark, encode_controls, lark, literal


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    markers: tuple[tuple[str, ...], ...]  # groups of strings; a chat template of the family contains all of one group
    # Parsers of the text after the start of a call, by that start, which may be anywhere. None is a prefix of another.
    starts: Mapping[str, ReadCall] = field(default_factory=dict)
    # Text before and after the JSON arguments of a call; %(name)s is the tool's name, %(json)s is the name as JSON.
    call: tuple[str, str] = ('<tool_call>\n{"name": %(json)s, "arguments": ', "}\n</tool_call>")
    # Text before the first call, between two calls (`None` allows only one), and after the last.
    around: tuple[str, str | None, str] = ("", "\n", "")
    # Parser of calls without a start, which are only at the beginning of an answer or after another call.
    bare: ReadCall | None = None
    channels: bool = False  # whether an answer consists of messages in gpt-oss' channels, some of which are calls
    short_ids: bool = False  # whether ids of calls have nine characters
    only_own: bool = False  # whether calls in Hermes' form are content

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls, given as names and arguments in JSON."""
        (before, after), (begin, between, end) = self.call, self.around
        texts = [before % {"name": name, "json": to_json(name)} + arguments + after for name, arguments in calls]
        return begin + (between or "").join(texts) + end


_DSML = "｜DSML｜"
_DEEPSEEK_LIST, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
# V3.1 writes name, separator, arguments. V3 and R1 write "function", separator, name, and arguments in a code fence.
_DEEPSEEK = make_list_parsers(
    {_DEEPSEEK_LIST: _DEEPSEEK_END},
    _DEEPSEEK_CALL,
    partial(read_named, separator=_DEEPSEEK_SEPARATOR, name="(.+)", end=_DEEPSEEK_CALL_END, fence="```json"),
)
# An answer may be JSON without being a call, so the name must be a tool's, and the keys those of calls.
_LLAMA = partial(read_objects, ends=(";",), known_only=True)
_FENCE_CALL = partial(read_objects, ends=("```",), known_only=True)

HERMES_START = "<tool_call>"  # in the answers of all families, except `only_own`
HERMES = Family("hermes", ((HERMES_START,), ("<tool_calls>",)), {"<tool_calls>": read_hermes})
_MISTRAL = Family(
    "mistral",
    (("[TOOL_CALLS]", "[ARGS]"),),
    {
        "[TOOL_CALLS]": partial(
            read_named, separator="[ARGS]", name=r"(?!\[CALL_ID\])(.+?)\s*(?:\[CALL_ID\].*)?", or_objects=True
        )
    },
    call=("[TOOL_CALLS]%(name)s[ARGS]", ""),
    around=("", "", ""),
    short_ids=True,
    only_own=True,
)
FAMILIES = (
    Family(
        "harmony",
        (("<|channel|>", "<|message|>"),),
        {mark: partial(read_message, start=mark) for mark in ("<|channel|>", "<|start|>")},
        call=("<|channel|>commentary to=functions.%(name)s <|constrain|>json<|message|>", ""),
        around=("", None, ""),
        bare=read_message,
        channels=True,
        only_own=True,
    ),
    Family("deepseek-v3.2", ((_DSML,),), make_invoke_parsers(_DSML, f"{_DSML}function_calls", f"{_DSML}tool_calls")),
    Family(
        "deepseek-v3",
        ((_DEEPSEEK_LIST, "```json"),),
        _DEEPSEEK,
        call=(f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEPARATOR}%(name)s\n```json\n", f"\n```{_DEEPSEEK_CALL_END}"),
        around=(_DEEPSEEK_LIST, "\n", _DEEPSEEK_END),
    ),
    Family(
        "deepseek-v3.1",
        ((_DEEPSEEK_LIST,),),
        _DEEPSEEK,
        call=(f"{_DEEPSEEK_CALL}%(name)s{_DEEPSEEK_SEPARATOR}", _DEEPSEEK_CALL_END),
        around=(_DEEPSEEK_LIST, "", _DEEPSEEK_END),
    ),
    Family(
        "kimi",
        (("<|tool_calls_section_begin|>",),),
        make_list_parsers(
            {"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"},
            "<|tool_call_begin|>",
            partial(
                read_named,
                separator="<|tool_call_argument_begin|>",
                name=r"(?:functions\.)?([^\n]+?)(?::\d+)?",
                end="<|tool_call_end|>",
            ),
        ),
    ),
    Family("minimax", (("<minimax:tool_call>",),), make_invoke_parsers("", "minimax:tool_call")),
    Family("glm", (("<arg_key>",),)),
    Family("qwen-coder", (("<function=",),), {"<seed:tool_call>": read_hermes, "<function=": read_function}),
    HERMES,
    Family("granite", (("<|tool_call|>",),), {"<|tool_call|>": read_hermes}),
    Family(
        "nemotron-v2",
        (("<TOOLCALL>",),),
        {"<TOOLCALL>": partial(read_objects, ends=("</TOOLCALL>",))},
        call=('{"name": %(json)s, "arguments": ', "}"),
        around=("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    ),
    Family("gemma4", (("<|tool_call>",),), {"<|tool_call>": read_gemma4}),
    Family(
        "lfm2",
        (("<|tool_call_start|>",), ("List of tools: [",), ("<|tool_list_start|>",)),
        {"<|tool_call_start|>": partial(read_python, end="<|tool_call_end|>")},
    ),
    _MISTRAL,
    replace(
        _MISTRAL,
        name="mistral-list",
        markers=(("[TOOL_CALLS]",),),
        call=('{"name": %(json)s, "arguments": ', "}"),
        around=("[TOOL_CALLS][", ", ", "]"),
    ),
    Family(
        "llama",
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters": ')),
        {"<|python_tag|>": _LLAMA},
        call=('{"name": %(json)s, "parameters": ', "}"),
        around=("", "; ", ""),
        bare=_LLAMA,
        only_own=True,
    ),
    Family(
        "gemma",
        (("<start_of_turn>",),),
        {
            "```tool_code": partial(read_python, end="```", known_only=True),
            "```tool_call": _FENCE_CALL,
            "```json": _FENCE_CALL,
        },
    ),
)
"""All families, in the order in which their markers are looked for in a chat template."""


@lru_cache(8)
def family_of(template: str | None) -> Family | None:
    for family in FAMILIES:
        if template and any(all(marker in template for marker in group) for group in family.markers):
            return family
    return None


_REASONING_TAGS = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought\n": "<channel|>",
    "<mm:think>": "</mm:think>",
}


@lru_cache(8)
def find_reasoning_tags(template: str | None) -> dict[str, str]:
    """Return the tags around reasoning that a chat template mentions, closing ones by opening ones."""
    source = template or ""
    return {start: end for start, end in _REASONING_TAGS.items() if start.strip() in source or end in source}


MARKS = frozenset(
    [part.strip() for tag in _REASONING_TAGS.items() for part in tag]
    + """
    <|channel|> <|start|> <|message|> <|constrain|> <|end|> <|call|> <|return|> <|python_tag|> <|tool_call|> ｜DSML｜
    <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
    <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|>
    <|tool_call_start|> <|tool_call_end|> <|channel> <channel|> <|tool_call> <tool_call|> <|"|>
    [TOOL_CALLS] [ARGS] [CALL_ID] <TOOLCALL> </TOOLCALL> <tool_call> </tool_call> <tool_calls> </tool_calls>
    <seed:tool_call> </seed:tool_call> <minimax:tool_call> </minimax:tool_call>
    <arg_key> </arg_key> <arg_value> </arg_value> <function= </function> <parameter= </parameter>
    """.split()  # noqa: SIM905 - a list would take a page
)
"""Names of tokens that the parsers of answers read. If they are control tokens, answers must contain their names."""


def reasoning_tags(template: str | None) -> dict[str, str]:
    """Return the tags around reasoning in responses, closing ones by opening ones; {} if the model does not reason."""
    family = family_of(template)
    has_channels = family is not None and family.channels
    return {"<|channel|>analysis<|message|>": "<|end|>"} if has_channels else find_reasoning_tags(template)


def missing_turn(template: str | None, opening: str) -> str:
    """Return the start of the assistant's turn if a template omits it: Gemma 4's after a turn with calls and text."""
    family = family_of(template)
    return "<|turn>model\n" if family is not None and family.name == "gemma4" and opening.endswith("<turn|>\n") else ""


def find_open_tag(tags: Mapping[str, str], opening: str) -> str | None:
    """Return the tag that the end of a prompt opens, so that the answer begins with reasoning; `None` without a tag."""
    return next((tag for tag in tags if opening.rstrip().endswith(tag.rstrip())), None)


def answer_grammar(
    tools: Sequence[Tool],
    *,
    choice: str = "auto",
    parallel: bool = True,
    json: str = "",
    template: str | None = None,
    opening: str = "",
    controls: Mapping[str, int] | None = None,
) -> Lark:
    """Return the grammar of answers for `AnswerParser` that call tools or are JSON, perhaps after reasoning.

    `choice` is "required", the name of the tool that must be called once (a ValueError for another), or "auto":
    then the answer may also be the JSON of the expression `json`, made by `json_rule`. `controls` has the ids of the
    marks that are control tokens. An unsupported schema raises a GrammarError.
    """
    controls = controls or {}
    allowed_tools = [tool for tool in tools if choice in {"auto", "required", tool.name}]
    if choice != "auto" and not allowed_tools:
        raise ValueError(f"tool_choice {choice!r} is not one of the tools")
    family = family_of(template) or HERMES
    answers, rules = list[str](), list[str]()
    if allowed_tools:
        calls = [_call(family, tool, controls) for tool in allowed_tools]
        begin, between, end = family.around
        allows_several = parallel and choice in {"auto", "required"} and between is not None
        more = f"({encode_controls(between or '', controls)} call)*" if allows_several else ""
        answers.append("calls")
        rules += [
            f"calls: {encode_controls(begin, controls)} call {more} {encode_controls(end, controls)}",
            f"call: {' | '.join(f'call_{number}' for number in range(len(calls)))}",
            *(f"call_{number}: {call}" for number, call in enumerate(calls)),
        ]
    if choice == "auto" and json:
        answers.append("json")
        rules.append(f"json: {json}")
    return lark(*_make_reasoning_rules(template, opening, controls), f"answer: {' | '.join(answers)}", *rules)


def _call(family: Family, tool: Tool, controls: Mapping[str, int]) -> str:
    parameters: dict[str, Any] = {"type": "object", **tool.parameters}
    before, after = family.call
    try:
        if (key := re.fullmatch(r'\{"name": %\(json\)s, "([a-z]+)": ', before)) is not None:
            # The call must be one JSON rule, which can be distinguished from a JSON answer by its first property.
            return call_rule(tool.name, key[1], parameters, strict=tool.strict)
        arguments = json_rule(parameters, strict=tool.strict)
    except GrammarError as error:
        raise GrammarError(f"the parameters of the tool {tool.name!r}: {error}") from error
    names = {"%(name)s": tool.name, "%(json)s": to_json(tool.name)}  # text, even if it looks like a control token
    parts = [
        literal(names[part]) if part in names else encode_controls(part, controls)
        for part in re.split(r"(%\((?:name|json)\)s)", before)
    ]
    return " ".join([*parts, arguments, encode_controls(after, controls)])


def _make_reasoning_rules(template: str | None, opening: str, controls: Mapping[str, int]) -> list[str]:
    """Return rules whose start is `answer`, after reasoning that the prompt opened, or that the template mentions."""
    tags = find_reasoning_tags(template)
    open_tag = find_open_tag(tags, opening)
    if open_tag is not None:
        return ["start: thoughts_0 /[ \\n]*/ answer", _make_suffix_rule("thoughts_0", tags[open_tag], controls)]
    if not tags:
        return ["start: answer"]
    choices = [f"{encode_controls(start, controls)} thoughts_{number}" for number, start in enumerate(tags)]
    rules = [_make_suffix_rule(f"thoughts_{number}", end, controls) for number, end in enumerate(tags.values())]
    return [f"start: (({' | '.join(choices)}) /[ \\n]*/)? answer", *rules]


def _make_suffix_rule(name: str, end: str, controls: Mapping[str, int]) -> str:
    if end in controls:
        return f"{name}: /(?s:.*)/ {encode_controls(end, controls)}"
    return f"{name}[suffix={literal(end)}]: /(?s:.*)/"


class AnswerParser:
    """A parser of one answer, which raises no errors, whatever the text is; without tools, calls are content.

    `opening` is the text at the end of the prompt (`ChatPrompt.opening`), which may open reasoning. Without `parallel`,
    the answer ends after its first call.
    """

    def __init__(
        self, template: str | None, tools: Sequence[Tool] = (), *, opening: str = "", parallel: bool = True
    ) -> None:
        # Whether the answer has ended after a call; `None` if it ends only with the text, as it may have several calls.
        self.ended: bool | None = None if parallel or not tools else False
        family = family_of(template) or HERMES
        self._answer = Answer({tool.name: tool for tool in tools}, family.short_ids, parallel)
        tags = {} if family.channels else find_reasoning_tags(template)
        self._reads = _read_answer(self._answer, family, tags, opening)

    def push(self, text: str) -> list[Delta]:
        """Parse a further piece of the answer, including control tokens."""
        answer = self._answer
        answer.text += text
        try:
            next(self._reads)
        except StopIteration:
            self.ended = answer.is_full or self.ended
            # An incomplete call that is left over is dropped, and the space before it.
            return answer.drain(is_complete=answer.at == len(answer.text))
        return answer.drain(is_complete=False)

    def finish(self, cut: bool = False) -> list[Delta]:
        """Return the held-back text at the end; `cut`: a limit ended it, so an incomplete call is dropped."""
        self._answer.ended, self._answer.cut = True, cut
        return self.push("")


def _read_answer(answer: Answer, family: Family, tags: Mapping[str, str], opening: str) -> Reads[None]:
    """Parse reasoning, at the beginning or opened by the prompt, then content and calls."""
    tag: str | None = find_open_tag(tags, opening)
    if tag is None and tags:
        tag = yield from answer.skip_space(*tags)
    if tag is None:
        answer.at = 0
    elif (yield from answer.read_until((tags[tag],), partial(answer.add_content, kind="reasoning"))) is None:
        return  # a closing tag that a limit cut is no content
    if not answer.tools and not family.channels:
        yield from answer.read_until((), answer.add_content)
        return
    starts = family.starts if family.only_own else {HERMES_START: read_hermes, **family.starts}
    answer.is_cut_off = False
    # If a limit cut the text within a call, the rest of the text belongs to the call.
    while not (answer.is_full or answer.is_cut_off):
        # Calls without a start may only begin here. Calls with a start may begin anywhere after this place.
        if family.bare:
            before = answer.at
            if (yield from family.bare(answer)):
                continue
            answer.at = before
            if answer.cut and _is_cut_call(answer.text[before:], TO if family.channels else "", answer.tools):
                return
        while (start := (yield from answer.read_until(starts, answer.add_content))) is not None:
            before = answer.at - len(start)
            yield from answer.skip_all(*([] if family.channels else [start]))
            end = answer.at
            answer.is_cut_off = False
            if (yield from starts[start](answer)):
                break
            answer.at = before
            if answer.cut and _is_cut_call(answer.text[before:], start, answer.tools):
                return
            answer.at = end
            answer.add_content(answer.text[before:end])
        else:
            return


def _is_cut_call(text: str, start: str, tools: Collection[str]) -> bool:
    """Return True if a text would have become a call, with this start or as an object, if a limit had not cut it."""
    if not start:
        match = re.match(r'\s*\{\s*"name"\s*:\s*"([^"]+)', text)
        return match is not None and any(name.startswith(match[1]) for name in tools)
    rest = text.removeprefix(start).strip()
    # A short text may still become a call, and a longer one has its name near the start.
    is_near = len(rest) < 12 or rest[0] in "{[<" or any(name in rest[:80] for name in tools)
    return text.startswith(start) and is_near
