"""The conversation that `chat --keep` keeps, and `chat --resume` goes on with: one file, readable by the user alone.

It is always the current conversation, as it is: what is taken back or forgotten is gone from the file too, and where
nothing is to be kept there is no file. Of several chats that keep theirs, the last one to get an answer has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngramspec.conversation import Conversation, ConversationError, Saved, load, save
from ngramspec.storage import state_folder

FILE = "chat_last.json"
"""Its name, in the user's state folder."""


def path() -> Path:
    """Where it is kept."""
    return state_folder() / FILE


def last() -> Saved:
    """The conversation that was kept. Raises ConversationError if there is none, or it cannot be read."""
    if not path().exists():
        raise ConversationError("no conversation is kept; ngramspec chat --keep keeps one")
    return load(path())


@dataclass(slots=True)
class Keeper:
    """Keeps a session's conversation.

    Attributes:
        on: whether it does.
    """

    on: bool = False

    def update(self, conversation: Conversation, *, model: str, sampling: Mapping[str, Any]) -> None:
        """Keep the conversation as it is now, if that is wanted; nothing is left of one without turns.

        Raises:
            ConversationError: it cannot be written; from now on nothing is kept, and what was kept is as before.
        """
        if not self.on:
            return
        if not conversation.turns:
            self.forget()
            return
        try:
            path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            save(conversation, path(), model=model, sampling=sampling)
        except (ConversationError, OSError) as error:
            self.on = False
            raise ConversationError(f"the conversation is not kept: {error}") from error

    def forget(self) -> None:
        """Delete what is kept. Raises ConversationError if that fails."""
        try:
            path().unlink(missing_ok=True)
        except OSError as error:
            raise ConversationError(f"cannot delete {path()}: {error.strerror}") from error
