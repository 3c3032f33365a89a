"""`Conversation`: the turns of a chat, the prompt they make within a context, and the file they are kept in."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ngramspec.errors import NGramSpecError, PromptError
from ngramspec.storage import write_whole

_SURROGATE = re.compile("[\ud800-\udfff]")

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


class Turn(NamedTuple):
    """A question and its answer."""

    user: str
    assistant: str


@dataclass(slots=True)
class Conversation:
    """Answered turns behind an optional system message."""

    system: str | None = None  # the system message, or None
    turns: list[Turn] = field(default_factory=list)  # all turns, oldest first
    # The oldest turn that the last prompt had room for. Those before it are saved too, but never return to the prompt:
    # each return would cost a prefill from there on.
    first: int = 0

    def messages(self, first: int = 0) -> list[Message]:
        """The system message and the turns from `first` on, as a chat template takes them."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[first:]:
            found.append({"role": "user", "content": turn.user})
            found.append({"role": "assistant", "content": turn.assistant})
        return found

    def prompt(self, question: str, encode: Callable[[list[Message]], list[int]], most: int) -> tuple[list[int], int]:
        """The prompt that asks `question` next, as token ids, and the oldest turn that is still in it.

        Where all would be too long, drops as few turns as possible, never the system message, never the question. The
        conversation stays as it is until `add`. O(log turns) calls of `encode`.

        Args:
            question: the new user message.
            encode: messages to token ids; a prompt with fewer turns must not be longer.
            most: most token ids in the prompt; PromptError where the question alone does not fit.
        """

        def encoded(first: int) -> list[int]:
            return encode([*self.messages(first), {"role": "user", "content": question}])

        first, tokens = self.first, encoded(self.first)
        if len(tokens) > most:
            turns = range(len(self.turns))
            first = bisect_left(turns, True, lo=first, key=lambda i: len(encoded(i)) <= most)
            tokens = encoded(first)
        if len(tokens) > most:
            what = "the message and the system message make" if self.system else "the message makes"
            raise PromptError(
                f"{what} a prompt of {len(tokens)} tokens, but the context has room for {most} and an answer;"
                " shorten it or raise -c/--ctx-size"
            )
        return tokens, first

    def add(self, question: str, answer: str, first: int) -> None:
        """Append a turn that was answered from a prompt which began with turn `first`."""
        self.first = first
        self.turns.append(Turn(question, answer))

    def undo(self) -> Turn:
        """Take the last turn back. Raises IndexError if there is none."""
        turn = self.turns.pop()
        self.first = min(self.first, len(self.turns))
        return turn


def answer_room(n_ctx: int, max_tokens: int) -> int:
    """Tokens of the context that a prompt leaves free: a quarter of it, or `max_tokens` if that is less."""
    return max(1, min(max_tokens, n_ctx // 4))


def save(conversation: Conversation, path: Path, *, model: str, sampling: Mapping[str, Any]) -> None:
    """Write a conversation as JSON: {"messages": [...], "model": ..., "sampling": {...}}, whole or not at all.

    Overwrites a file that `load` accepts, and no other: NGramSpecError. `model` and `sampling`: what the answers
    were made with, for the record.
    """
    data = {"messages": conversation.messages(), "model": model, "sampling": dict(sampling)}
    try:
        if path.exists() and not _is_saved(path):
            raise NGramSpecError(f"{path} exists and is not a saved conversation; use another name")
        path = path.resolve()  # a link stays a link
        write_whole(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise NGramSpecError(f"cannot write {path}: {getattr(error, 'strerror', error)}") from error


def _is_saved(path: Path) -> bool:
    try:
        load(path)
    except NGramSpecError:
        return False
    return True


def load(path: Path) -> tuple[Conversation, str]:
    """Read what `save` wrote: a conversation, and the name of the model that it was had with ("" if not recorded).

    Raises NGramSpecError: the messages are not an optional system message followed by turns of user and assistant.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise NGramSpecError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise NGramSpecError(f"{path} is not a saved conversation: it is not valid JSON") from error
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        raise NGramSpecError(f'{path} is not a saved conversation: it has no list "messages"')
    pairs = [_message(path, i, message) for i, message in enumerate(data["messages"], 1)]
    system = pairs.pop(0)[1] if pairs and pairs[0][0] == "system" else None
    skipped = system is not None
    for i, (role, _) in enumerate(pairs):
        expected = ("user", "assistant")[i % 2]
        if role != expected:
            raise NGramSpecError(f"{path}: message {i + 1 + skipped} must have the role {expected!r}, got {role!r}")
    if len(pairs) % 2:
        raise NGramSpecError(f"{path}: the last message has no answer")
    turns = [Turn(pairs[i][1], pairs[i + 1][1]) for i in range(0, len(pairs), 2)]
    model = data.get("model")
    return Conversation(system, turns), model if isinstance(model, str) else ""


def _message(path: Path, number: int, message: object) -> tuple[str, str]:
    """(role, content) of a message in a file."""
    if isinstance(message, dict):
        role, content = message.get("role"), message.get("content")
        # JSON can spell half a surrogate pair, which no text can hold.
        if isinstance(role, str) and isinstance(content, str) and not _SURROGATE.search(content):
            return role, content
    raise NGramSpecError(f'{path}: message {number} requires "role" and "content" strings')
