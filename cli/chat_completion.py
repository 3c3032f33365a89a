"""What Tab completes at the prompt of chat: commands, settings, files, and the models on this disk."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from ngramspec.models.on_disk import names

from .chat_commands import NAMES
from .chat_settings import SETTINGS

_ARGUMENT = re.compile(r"/(\w+)\s+(.*)", re.DOTALL)


class ChatCompleter(Completer):
    """Completes a command, or what stands behind one."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """What the text before the cursor may become."""
        text = document.text_before_cursor
        found = _ARGUMENT.fullmatch(text)
        if found is None:
            return _words(NAMES, text) if text.startswith("/") else ()
        name, argument = found[1].lower(), found[2]
        match name:
            case "file" | "save" | "load":
                return self._paths.get_completions(Document(argument), complete_event)
            case "set":
                return _words(SETTINGS, argument)
            case "model":
                files = self._paths.get_completions(Document(argument), complete_event)
                return [*_words((model for model, _ in names()), argument), *files]
        return ()


def _words(words: Iterable[str], begun: str) -> list[Completion]:
    return [Completion(word, start_position=-len(begun)) for word in words if word.lower().startswith(begun.lower())]
