"""Markdown as rows of a terminal: what a block looks like.

Rows say what the source says: HTML and character references stay as they are typed, a line break is one, an item keeps
its number, the destination of a link stands behind its text, and LaTeX keeps its backslashes. Code is never wrapped,
indented or padded, wherever it stands, so that it can be copied; its fences are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from io import StringIO
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.tree import SyntaxTreeNode
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String, _TokenType
from pygments.util import ClassNotFound
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.style import Style
from rich.syntax import ANSISyntaxTheme
from rich.table import Table
from rich.text import Text

_ESCAPED = frozenset("*_`~#|.+-")
_NARROWEST = 8
_RULE = 40
_CODE, _FAINT = "cyan", "dim"
_BLANK = " \t>"  # what a line without text may hold, in a quotation too
_INLINE = {
    "code_inline": _CODE,
    "strong": "bold",
    "em": "italic",
    "s": "strike",
    "link": "underline",
    "image": "italic",
}

FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})[ \t]*(.*)")
"""A fence of code: its indent, the fence itself, and what stands behind it."""

_console = Console(file=StringIO(), highlight=False, markup=False, emoji=False)  # lays out, and never writes


def _escape(state: StateInline, silent: bool) -> bool:
    """A backslash before a character that means something in Markdown, and rarely does in LaTeX."""
    at = state.pos
    if state.src[at] != "\\" or at + 1 >= state.posMax or state.src[at + 1] not in _ESCAPED:
        return False
    if not silent:
        state.pending += state.src[at + 1]
    state.pos += 2
    return True


def _parser() -> MarkdownIt:
    # Without setext headings and references no line changes what a block above it means.
    rules = ["lheading", "reference", "html_block", "html_inline", "entity"]
    made = MarkdownIt("commonmark").enable(["table", "strikethrough"]).disable(rules)
    made.inline.ruler.at("escape", _escape)
    made.normalizeLink = made.normalizeLinkText = str  # type: ignore[assignment,method-assign]  # destinations as they are typed
    return made


_PARSER = _parser()


def parse(source: str) -> list[SyntaxTreeNode]:
    """The blocks of a text; `map` of a block are its lines, from and up to."""
    return SyntaxTreeNode(_PARSER.parse(source)).children


def code_blocks(source: str) -> list[str]:
    """Return the contents of all code blocks of a text."""
    return [token.content for token in _PARSER.parse(source) if token.type in ("fence", "code_block")]


def is_blank(line: str) -> bool:
    """Whether there is no text in a line."""
    return not line.strip(_BLANK)


def stacked(
    nodes: Sequence[SyntaxTreeNode], lines: Sequence[str], width: int, *, begun: bool = False, gap: bool = False
) -> list[Text]:
    """Rows of the blocks of `lines`, with a blank row where the text has blank lines.

    Rows are no wider than `width`, but code (`no_wrap`), which belongs at the left edge. `begun`: there are rows above
    them; `gap`: the line above the first of `lines` is blank.
    """
    rows: list[Text] = []
    for node in nodes:
        shown = _block(node, lines, width)  # nothing for an empty quotation
        first = node.map[0] if node.map else 0
        if shown and (begun or rows) and (is_blank(lines[first - 1]) if first else gap):
            rows.append(Text())
        rows += shown
    return rows


def _block(node: SyntaxTreeNode, lines: Sequence[str], width: int) -> list[Text]:
    match node.type:
        case "paragraph" | "heading":
            text = _inline(node)
            text.stylize({"h1": "bold underline", "p": ""}.get(node.tag, "bold"))
            rows = _stripped(text.wrap(_console, width))
        case "bullet_list" | "ordered_list":
            rows = stacked(node.children, lines, width)
        case "list_item":
            rows = _item(node, lines, width)
        case "blockquote":
            inner = stacked(node.children, lines, max(width - 2, _NARROWEST))
            rows = [row if row.no_wrap else Text.assemble(("│ ", _FAINT), row) for row in inner]
        case "fence":
            code = Code(node.info)
            inner = [code.row(line) for line in _code_lines(node)]
            rows = [fence_row(node.markup + node.info), *inner, fence_row(node.markup)]
        case "code_block":
            rows = [Text.assemble((line, _CODE), no_wrap=True) for line in _code_lines(node)]
        case "table":
            rows = _table(node, width)
        case "hr":
            rows = [Text.assemble(("─" * min(width, _RULE), _FAINT))]
        case kind:
            raise AssertionError(f"the parser knows no {kind}")
    return rows


def fence_row(line: str) -> Text:
    """A line that opens or closes a block of code."""
    return Text.assemble((line.strip(), _FAINT), no_wrap=True)


def _code_lines(node: SyntaxTreeNode) -> list[str]:
    return node.content.removesuffix("\n").split("\n") if node.content else []


def _item(node: SyntaxTreeNode, lines: Sequence[str], width: int) -> list[Text]:
    mark = f"{node.info}{node.markup} " if node.info else "• "
    rows = stacked(node.children, lines, max(width - len(mark), _NARROWEST))
    if not rows or rows[0].no_wrap:
        rows.insert(0, Text())
    first = Text.assemble((mark, _CODE if node.info else ""), rows[0])
    indent = " " * len(mark)
    return [first, *(row if row.no_wrap or not row else Text.assemble(indent, row) for row in rows[1:])]


def _table(node: SyntaxTreeNode, width: int) -> list[Text]:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    headings, *rows = [row.children for part in node.children for row in part.children]
    for cell in headings:
        aligned: Any = str(cell.attrs.get("style", "text-align:left")).removeprefix("text-align:")
        table.add_column(_inline(cell), justify=aligned)
    for row in rows:
        table.add_row(*map(_inline, row))
    shown = _console.render_lines(table, _console.options.update(width=width), pad=False)
    return _stripped(Text.assemble(*((part.text, part.style or "") for part in line)) for line in shown)


def _stripped(rows: Iterable[Text]) -> list[Text]:
    """Rows without spaces at their ends."""
    found = list(rows)
    for row in found:
        row.rstrip()
    return found


def _inline(node: SyntaxTreeNode, around: str = "") -> Text:
    """The text of a node, in its style and that of the nodes around it."""
    style = f"{around} {_INLINE.get(node.type, '')}"
    text = Text()
    if node.type in ("softbreak", "hardbreak"):
        text.append("\n")
    elif not node.children:
        text.append(node.content, style)
    for child in node.children:
        text.append_text(_inline(child, style))
    to = str(node.attrs.get("href") or node.attrs.get("src") or "")
    if to and to not in (text.plain, f"mailto:{text.plain}"):
        text.append(f" ({to})", f"{around} {_FAINT}")
    return text


# --------------------------------------------------------------------------- colours of code

_COLOURS: dict[_TokenType, str] = {
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

# The terminal's own colours, so that they can be read on any background.
_THEME = ANSISyntaxTheme({kind: Style.parse(colour) for kind, colour in _COLOURS.items()})

_MOST = 8_000
"""Characters of an open string or comment that are read again for its next line; a longer one loses its colours."""


class Code:
    """Colours the lines of one block of code, as far as `info`, behind its opening fence, names a known language.

    Each line is read by itself, or together with the lines above it where those left a string or a comment open. So
    a line costs what its own length costs.
    """

    def __init__(self, info: str, indent: int = 0, mark: str = "```") -> None:
        self._lexer = _lexer(info)
        self._indent, self._mark = indent, mark
        self._open = ""

    def closes(self, line: str) -> bool:
        """Whether a line ends the block."""
        found = FENCE.fullmatch(line)
        return found is not None and found[2].startswith(self._mark) and not found[3].strip()

    def row(self, line: str, *, whole: bool = True) -> Text:
        """The next line, without the indent of the fence; one that is not `whole` comes again."""
        indent = len(line) - len(line.lstrip(" "))
        text = Text(line[min(indent, self._indent) :], no_wrap=True)
        if self._lexer is None or len(self._open) > _MOST:
            return text
        source = f"{self._open}{text.plain}\n"
        start, kind = len(self._open), None
        for at, kind, piece in self._lexer.get_tokens_unprocessed(source):
            if at + len(piece) > start and (style := _THEME.get_style_for_token(kind)):
                text.stylize(style, max(at - start, 0), at + len(piece) - start)
        if whole:
            self._open = source if kind in String or kind in Comment else ""
        return text


@lru_cache(maxsize=16)
def _lexer(info: str) -> Lexer | None:
    """The lexer of the language that is named behind an opening fence."""
    found = re.match(r"[\w+#.-]+", info.strip())
    with suppress(ClassNotFound):
        # `startinline`: for PHP, whose code in answers mostly lacks its opening tag.
        return get_lexer_by_name(found[0].lower(), startinline=True) if found else None
    return None
