"""`begun_answer`: the text after a prompt whose answer has begun, as the chat template writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ngramspec.chat_template.environment import Render
from ngramspec.chat_template.variables import template_variables
from ngramspec.errors import ModelError
from ngramspec.tool_calls.abilities import Message
from ngramspec.tool_calls.families import family_of, opened, thought_tags

Adapt = Callable[[list[Message]], list[Message]]

_USER: Message = {"role": "user", "content": "quserq"}


class Marks(NamedTuple):
    """Text of a template around the parts of an answer, after the start of the assistant's turn."""

    before: str  # reasoning, or the text if there is no reasoning
    between: str = ""  # reasoning and text


def turn(thoughts: bool) -> list[Message]:
    """Return the conversation whose answer `find_marks` looks at."""
    answer: Message = {"role": "assistant", "content": "qtextq"}
    return [_USER, answer | ({"reasoning_content": "qthoughtq"} if thoughts else {})]


def find_marks(
    render: Render, question: list[Message], answered: list[Message], thoughts: bool, variables: Mapping[str, Any]
) -> Marks | None:
    """Return the marks that a template writes in its last turn; `None` if it begins answers differently.

    Args:
        render: Template.
        question: `turn` without the answer, in the form that the template requires.
        answered: `turn`.
        thoughts: True if the answer contains reasoning.
        variables: Variables of the template.
    """
    values = template_variables(variables)
    try:
        asked = render({**values, "messages": question, "add_generation_prompt": True})
        said = render({**values, "messages": answered, "add_generation_prompt": False})
    except ModelError:
        return None
    words = ["quserq", *(["qthoughtq"] if thoughts else []), "qtextq"]
    places = [said.find(word) for word in words]
    if places[0] < 0 or places != sorted(places) or "quserq" not in asked:
        return None
    begun = asked[asked.index("quserq") :]
    before, *between = [
        said[places[i] + (0 if i == 0 else len(words[i])) : places[i + 1]] for i in range(len(words) - 1)
    ]
    return Marks(before.removeprefix(begun), *between) if before.startswith(begun) else None


def begun_answer(
    template: str | None, opening: str, thoughts: str, text: str, marks: Marks | None = None
) -> list[tuple[str, bool]]:
    """Return an answer that was begun, as it continues a prompt: pieces, each with whether it is the template's own.

    Args:
        template: Chat template of the model.
        opening: Text that the prompt ends in (`ChatPrompt.opening`).
        thoughts: Reasoning of the answer. It is dropped if the template has no tags, and continues if `text` is "".
        text: Content of the answer.
        marks: Text of the template around them.
    """
    family, tags = family_of(template), thought_tags(template)
    if family is not None and family.channels:
        thinking = [("<|channel|>analysis<|message|>", True), (thoughts, False)] if thoughts else []
        end = [("<|end|><|start|>assistant", True)] if thinking and text else []
        return [*thinking, *end, *([("<|channel|>final<|message|>", True), (text, False)] if text else [])]
    if marks is not None:
        reasoning = [(thoughts, False), *([(marks.between, True)] if text else [])] if thoughts else []
        return [(marks.before, True), *reasoning, (text, False)]
    tag, begun = opened(tags, opening), list[tuple[str, bool]]()
    lines = opening.endswith("\n")
    if tag is None and thoughts and tags:
        tag = next(iter(tags))
        lines = tag == "<think>"
        begun.append((f"{tag}\n" if lines else tag, True))
    if tag is not None:
        closing = f"\n{tags[tag]}\n\n" if lines else tags[tag]
        begun += [(thoughts, False), *([(closing, True)] if text else [])]
    return [*begun, (text, False)]
