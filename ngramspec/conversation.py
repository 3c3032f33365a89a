"""Chat history (`Conversation`): its turns, the prompt that fits in a context, and the file format."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from ngramspec.errors import NGramSpecError, PromptError, get_reason
from ngramspec.storage import utf8, write_whole

_SURROGATE = re.compile("[\ud800-\udfff]")

# {"role": "system" | "user" | "assistant", "content": text}, and "reasoning_content" of an assistant that reasoned
Message = dict[str, str]


class Turn(NamedTuple):
    """A question and its answer."""

    user: str
    assistant: str
    reasoning: str = ""  # the model's reasoning before the answer


@dataclass(slots=True)
class Conversation:
    """An optional system message and the answered turns after it."""

    system: str | None = None  # system message, if there is one
    turns: list[Turn] = field(default_factory=list)  # all turns, oldest first
    # Index of the oldest turn in the last prompt. Earlier turns are saved too, but never return to the prompt, because
    # each return would require a prefill of all later turns.
    first: int = 0

    def messages(self, first: int = 0) -> list[Message]:
        """Return the system message and the turns from `first` on, in the format of chat templates."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[first:]:
            messages.append({"role": "user", "content": turn.user})
            reasoning = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
            messages.append({"role": "assistant", "content": turn.assistant, **reasoning})
        return messages

    def prompt(
        self, question: str, encode: Callable[[list[Message]], list[int]], max_tokens: int
    ) -> tuple[list[int], int]:
        """Return the token ids of the prompt for the next question, and the index of the oldest turn in it.

        If the prompt is too long, leave out as few of the oldest turns as possible, but never the system message or the
        question; if these do not fit, raise a PromptError. This takes O(log turns) calls of `encode`, which must not
        return more tokens for fewer turns. The conversation does not change until `add`.
        """

        def encode_from(first: int) -> list[int]:
            return encode([*self.messages(first), {"role": "user", "content": question}])

        first, tokens = self.first, encode_from(self.first)
        if len(tokens) > max_tokens:
            turns = range(len(self.turns))
            first = bisect_left(turns, True, lo=first, key=lambda i: len(encode_from(i)) <= max_tokens)
            tokens = encode_from(first)
        if len(tokens) > max_tokens:
            what = "the message and the system message make" if self.system else "the message makes"
            raise PromptError(
                f"{what} a prompt of {len(tokens)} tokens, but the context has room for {max_tokens} and an answer;"
                " shorten it or raise -c/--ctx-size"
            )
        return tokens, first

    def add(self, turn: Turn, first: int) -> None:
        """Append an answered turn; `first` is the index of the oldest turn in its prompt."""
        self.first = first
        self.turns.append(turn)

    def undo(self) -> Turn:
        """Remove and return the last turn; raise an IndexError without one."""
        turn = self.turns.pop()
        self.first = min(self.first, len(self.turns))
        return turn


def answer_room(n_ctx: int, max_tokens: int) -> int:
    """Return the number of tokens that a prompt must leave free: `max_tokens`, at most a quarter of the context."""
    return max(1, min(max_tokens, n_ctx // 4))


def save(conversation: Conversation, path: Path, *, model: str, sampling: Mapping[str, Any]) -> None:
    """Write a conversation atomically as JSON: {"messages": [...], "model": ..., "sampling": {...}}.

    It raises an NGramSpecError if the file exists and is not a saved conversation, or cannot be written.
    """
    data = {"messages": conversation.messages(), "model": model, "sampling": dict(sampling)}
    try:
        if path.exists():
            try:
                load(path)
            except NGramSpecError as error:
                raise NGramSpecError(f"{path} exists and is not a saved conversation; use another name") from error
        path = path.resolve()  # a link stays a link
        write_whole(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise NGramSpecError(f"cannot write {path}: {get_reason(error)}") from error


def load(path: Path) -> tuple[Conversation, str]:
    """Return a saved conversation and the name of its model ("" if not recorded).

    It raises an NGramSpecError if the file cannot be read, or its messages are not an optional system message followed
    by turns of user and assistant.
    """
    try:
        data = json.loads(utf8(path.read_bytes()))
    except OSError as error:
        raise NGramSpecError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, UnicodeError) else "not valid JSON"
        raise NGramSpecError(f"{path} is not a saved conversation: it is {reason}") from error
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        raise NGramSpecError(f'{path} is not a saved conversation: it has no list "messages"')
    messages = [_message(path, i, message) for i, message in enumerate(data["messages"], 1)]
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    has_system = system is not None
    for i, role in enumerate(message["role"] for message in messages):
        expected_role = ("user", "assistant")[i % 2]
        if role != expected_role:
            raise NGramSpecError(
                f"{path}: message {i + 1 + has_system} must have the role {expected_role!r}, got {role!r}"
            )
    if len(messages) % 2:
        raise NGramSpecError(f"{path}: the last message has no answer")
    turns = [
        Turn(question["content"], answer["content"], answer["reasoning_content"])
        for question, answer in zip(messages[::2], messages[1::2], strict=True)
    ]
    model = data.get("model")
    return Conversation(system, turns), model if isinstance(model, str) else ""


def _message(path: Path, number: int, message: object) -> Message:
    if isinstance(message, dict):
        texts = {"reasoning_content": ""} | message
        fields = {name: texts.get(name) for name in ("role", "content", "reasoning_content")}
        # JSON can contain half a surrogate pair, which cannot be encoded as UTF-8.
        if all(isinstance(text, str) and not _SURROGATE.search(text) for text in fields.values()):
            return cast(Message, fields)
    raise NGramSpecError(f'{path}: message {number} requires "role" and "content" strings')
