"""Colours of code as it is written: a line's colours depend on the lines above it, never on later ones."""

from __future__ import annotations

from functools import lru_cache

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String, _TokenType
from pygments.util import ClassNotFound
from rich.text import Text

# The terminal's own colours, so that they can be read on any background.
_STYLES: dict[_TokenType, str] = {
    Comment: "dim",
    Generic.Deleted: "red",
    Generic.Heading: "bold",
    Generic.Inserted: "green",
    Keyword: "magenta",
    Name.Attribute: "cyan",
    Name.Builtin: "cyan",
    Name.Class: "blue",
    Name.Decorator: "cyan",
    Name.Function: "blue",
    Name.Tag: "blue",
    Number: "cyan",
    Operator.Word: "magenta",
    String: "green",
}

_MOST = 8_000
"""Characters of an open string or comment that are read again for its next line; a longer one loses its colours."""


class CodeColours:
    """Colours the lines of one block of code.

    Each line is read by itself, or together with the lines above it where those left a string or a comment open. So
    a line costs what its own length costs.

    Args:
        language: what stands behind the opening fence; unknown ones are not coloured.
    """

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language.lower())
        self._open = ""

    def line(self, line: str) -> Text:
        """The next line, whole."""
        text, self._open = self._coloured(line)
        return text

    def unfinished(self, line: str) -> Text:
        """What is there of the next line; it counts only once it is whole."""
        return self._coloured(line)[0]

    def _coloured(self, line: str) -> tuple[Text, str]:
        """The line in colours, and what is to be read again with the next one."""
        text = Text(line)
        if self._lexer is None or len(self._open) > _MOST:
            return text, self._open
        source = f"{self._open}{line}\n"
        start, kind = len(self._open), None
        for at, kind, piece in self._lexer.get_tokens_unprocessed(source):
            if at + len(piece) > start and (style := _style(kind)):
                text.stylize(style, max(at - start, 0), at + len(piece) - start)
        return text, source if kind in String or kind in Comment else ""


@lru_cache(maxsize=16)
def _lexer(language: str) -> Lexer | None:
    if not language:
        return None
    try:
        # For PHP, whose code in answers mostly lacks its opening tag.
        return get_lexer_by_name(language, startinline=True)
    except ClassNotFound:
        return None


@lru_cache(maxsize=512)
def _style(kind: _TokenType) -> str:
    """Of the kind itself, or of the next wider one that has a style."""
    wider: _TokenType | None = kind
    while wider is not None:
        if wider in _STYLES:
            return _STYLES[wider]
        wider = wider.parent
    return ""
