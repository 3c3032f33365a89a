"""`highlight`: code as pieces with a class of the page's style sheet, by pygments.

The lexers of some languages take minutes for some texts, so the page calls this in the worker's process.
"""

from __future__ import annotations

from functools import lru_cache

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String, _TokenType
from pygments.util import ClassNotFound

_CLASSES: dict[_TokenType, str] = {
    Comment: "comment",
    Generic.Deleted: "deleted",
    Generic.Inserted: "string",
    Keyword: "keyword",
    Name.Attribute: "number",
    Name.Builtin: "number",
    Name.Class: "name",
    Name.Decorator: "number",
    Name.Function: "name",
    Name.Tag: "name",
    Number: "number",
    Operator.Word: "keyword",
    String: "string",
}


def highlight(code: str, language: str) -> list[tuple[str, str]]:
    """Return code as pieces with a class and a text; the class is "" if the language is unknown."""
    try:
        # PHP code in answers usually lacks its opening tag.
        lexer = _find_lexer(language, startinline=True)
    except ClassNotFound:
        return [("", code)]
    return [(_class(kind), text) for _, kind, text in lexer.get_tokens_unprocessed(code)]


_find_lexer = lru_cache(maxsize=16)(get_lexer_by_name)


@lru_cache(maxsize=512)
def _class(kind: _TokenType | None) -> str:
    """Return the class of a kind of token, or of the next wider kind that has one."""
    while kind is not None:
        if kind in _CLASSES:
            return _CLASSES[kind]
        kind = kind.parent
    return ""
