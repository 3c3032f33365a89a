"""`make_assistant_prefill`: the text after a prompt whose answer has begun, as the chat template writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ngramspec.chat_template.environment import Render
from ngramspec.chat_template.variables import template_variables
from ngramspec.errors import ModelError
from ngramspec.tool_calls.families import family_of, find_open_tag, find_reasoning_tags
from ngramspec.tool_calls.template_features import Message

_USER: Message = {"role": "user", "content": "quserq"}


class Marks(NamedTuple):
    """Text of a template around the parts of an answer, after the start of the assistant's turn."""

    before: str  # reasoning, or the text if there is no reasoning
    between: str = ""  # reasoning and text


def make_turns(has_reasoning: bool) -> list[Message]:
    """Return the conversation whose answer `find_marks` looks at."""
    answer: Message = {"role": "assistant", "content": "qtextq"}
    return [_USER, answer | ({"reasoning_content": "qthoughtq"} if has_reasoning else {})]


def find_marks(
    render: Render,
    question: list[Message],
    conversation: list[Message],
    has_reasoning: bool,
    variables: Mapping[str, Any],
) -> Marks | None:
    """Return the marks that a template writes in its last turn; `None` if it begins answers differently.

    `conversation` is `make_turns`, and `question` the same without the answer, both in the form that the template
    requires.
    """
    values = template_variables(variables)
    try:
        prompt_text = render({**values, "messages": question, "add_generation_prompt": True})
        full_text = render({**values, "messages": conversation, "add_generation_prompt": False})
    except ModelError:
        return None
    words = ["quserq", *(["qthoughtq"] if has_reasoning else []), "qtextq"]
    places = [full_text.find(word) for word in words]
    if places[0] < 0 or places != sorted(places) or "quserq" not in prompt_text:
        return None
    turn_start = prompt_text[prompt_text.index("quserq") :]
    before, *between = [
        full_text[places[i] + (0 if i == 0 else len(words[i])) : places[i + 1]] for i in range(len(words) - 1)
    ]
    return Marks(before.removeprefix(turn_start), *between) if before.startswith(turn_start) else None


def make_assistant_prefill(
    template: str | None, opening: str, reasoning: str, text: str, marks: Marks | None = None
) -> list[tuple[str, bool]]:
    """Return an answer that was begun, as it continues a prompt: pieces, each with whether it is the template's own.

    Reasoning is dropped if the template has no tags, and continues if `text` is "". `opening` is the text that the
    prompt ends in (`ChatPrompt.opening`), and `marks` are the template's texts around reasoning and text.
    """
    family, tags = family_of(template), find_reasoning_tags(template)
    if family is not None and family.channels:
        thinking = [("<|channel|>analysis<|message|>", True), (reasoning, False)] if reasoning else []
        end = [("<|end|><|start|>assistant", True)] if thinking and text else []
        return [*thinking, *end, *([("<|channel|>final<|message|>", True), (text, False)] if text else [])]
    if marks is not None:
        reasoning_pieces = [(reasoning, False), *([(marks.between, True)] if text else [])] if reasoning else []
        return [(marks.before, True), *reasoning_pieces, (text, False)]
    tag, pieces = find_open_tag(tags, opening), list[tuple[str, bool]]()
    has_line_ends = opening.endswith("\n")
    if tag is None and reasoning and tags:
        tag = next(iter(tags))
        has_line_ends = tag == "<think>"
        pieces.append((f"{tag}\n" if has_line_ends else tag, True))
    if tag is not None:
        closing = f"\n{tags[tag]}\n\n" if has_line_ends else tags[tag]
        pieces += [(reasoning, False), *([(closing, True)] if text else [])]
    return [*pieces, (text, False)]
