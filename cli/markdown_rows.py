"""Layout of Markdown blocks as rows of a terminal.

Rows stay close to the source. HTML and character references are shown as typed, and a line break stays a line break.
List items keep their numbers, the destination of a link follows its text, and LaTeX keeps its backslashes. Code is
never wrapped, indented or padded, even inside other blocks, so that it can be copied. The fences of code are shown.
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

_ESCAPABLE = frozenset("*_`~#|.+-")
_NARROWEST = 8
_RULE = 40
_CODE, _FAINT = "cyan", "dim"
_BLANK = " \t>"  # characters allowed in a blank line, also inside a quotation
_INLINE = {
    "code_inline": _CODE,
    "strong": "bold",
    "em": "italic",
    "s": "strike",
    "link": "underline",
    "image": "italic",
}

FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})[ \t]*(.*)")
"""Fence of a code block: indent, fence characters and the rest of the line."""

_console = Console(file=StringIO(), highlight=False, markup=False, emoji=False)  # console for layout that never writes


def _escape(state: StateInline, silent: bool) -> bool:
    """Parse a backslash before a character that is special in Markdown and rarely follows a backslash in LaTeX."""
    at = state.pos
    if state.src[at] != "\\" or at + 1 >= state.posMax or state.src[at + 1] not in _ESCAPABLE:
        return False
    if not silent:
        state.pending += state.src[at + 1]
    state.pos += 2
    return True


def _parser() -> MarkdownIt:
    # Without setext headings and references no line changes the meaning of a block above it.
    rules = ["lheading", "reference", "html_block", "html_inline", "entity"]
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"]).disable(rules)
    parser.inline.ruler.at("escape", _escape)
    parser.normalizeLink = parser.normalizeLinkText = str  # type: ignore[assignment,method-assign]  # keep destinations as typed
    return parser


_PARSER = _parser()


def parse(source: str) -> list[SyntaxTreeNode]:
    """Return the blocks of a text; `map` of a block contains its first line and the line after its last one."""
    return SyntaxTreeNode(_PARSER.parse(source)).children


def code_blocks(source: str) -> list[str]:
    """Return the contents of all code blocks of a text."""
    return [token.content for token in _PARSER.parse(source) if token.type in ("fence", "code_block")]


def is_blank(line: str) -> bool:
    """Return True if a line contains no text."""
    return not line.strip(_BLANK)


def stack_blocks(
    nodes: Sequence[SyntaxTreeNode], lines: Sequence[str], width: int, *, begun: bool = False, gap: bool = False
) -> list[Text]:
    """Return the rows of the blocks of `lines`, with one blank row between blocks if the text has blank lines there.

    Args:
        nodes: Blocks to lay out.
        lines: Lines of the source.
        width: Maximum width of rows, except for code (`no_wrap`), which always starts at the left edge.
        begun: True if there are rows above.
        gap: True if the line above the first of `lines` is blank.
    """
    rows: list[Text] = []
    for node in nodes:
        block_rows = _block(node, lines, width)  # rows of the block; an empty quotation has none
        first = node.map[0] if node.map else 0
        if block_rows and (begun or rows) and (is_blank(lines[first - 1]) if first else gap):
            rows.append(Text())
        rows += block_rows
    return rows


def _block(node: SyntaxTreeNode, lines: Sequence[str], width: int) -> list[Text]:
    match node.type:
        case "paragraph" | "heading":
            text = _inline(node)
            text.stylize({"h1": "bold underline", "p": ""}.get(node.tag, "bold"))
            rows = _strip_rows(text.wrap(_console, width))
        case "bullet_list" | "ordered_list":
            rows = stack_blocks(node.children, lines, width)
        case "list_item":
            rows = _item(node, lines, width)
        case "blockquote":
            inner = stack_blocks(node.children, lines, max(width - 2, _NARROWEST))
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
    """Return the row for the opening or closing line of a code block."""
    return Text.assemble((line.strip(), _FAINT), no_wrap=True)


def _code_lines(node: SyntaxTreeNode) -> list[str]:
    return node.content.removesuffix("\n").split("\n") if node.content else []


def _item(node: SyntaxTreeNode, lines: Sequence[str], width: int) -> list[Text]:
    mark = f"{node.info}{node.markup} " if node.info else "• "
    rows = stack_blocks(node.children, lines, max(width - len(mark), _NARROWEST))
    if not rows or rows[0].no_wrap:
        rows.insert(0, Text())
    first = Text.assemble((mark, _CODE if node.info else ""), rows[0])
    indent = " " * len(mark)
    return [first, *(row if row.no_wrap or not row else Text.assemble(indent, row) for row in rows[1:])]


def _table(node: SyntaxTreeNode, width: int) -> list[Text]:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    headings, *rows = [row.children for part in node.children for row in part.children]
    for cell in headings:
        alignment: Any = str(cell.attrs.get("style", "text-align:left")).removeprefix("text-align:")
        table.add_column(_inline(cell), justify=alignment)
    for row in rows:
        table.add_row(*map(_inline, row))
    lines = _console.render_lines(table, _console.options.update(width=width), pad=False)
    return _strip_rows(Text.assemble(*((part.text, part.style or "") for part in line)) for line in lines)


def _strip_rows(rows: Iterable[Text]) -> list[Text]:
    result = list(rows)
    for row in result:
        row.rstrip()
    return result


def _inline(node: SyntaxTreeNode, around: str = "") -> Text:
    """Return the text of a node in its own style combined with the styles of the nodes around it."""
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

# The terminal's own colours are readable on any background.
_THEME = ANSISyntaxTheme({kind: Style.parse(colour) for kind, colour in _COLOURS.items()})

_MAX_OPEN = 8_000
"""Maximum length in characters of an open string or comment that is read again for its next line.

A longer string or comment loses its colours.
"""


class Code:
    """Syntax highlighter for the lines of one code block; a block in an unknown language stays plain.

    Each line is read alone. Only if a string or comment is open above it, the line is read together with the lines of
    that string or comment. The cost of a line is therefore proportional to its own length.

    `info` is the text after the opening fence `mark`; it starts with the language.
    """

    def __init__(self, info: str, indent: int = 0, mark: str = "```") -> None:
        self._lexer = _lexer(info)
        self._indent, self._mark = indent, mark
        self._open = ""

    def closes(self, line: str) -> bool:
        """Return True if a line ends the block."""
        match = FENCE.fullmatch(line)
        return match is not None and match[2].startswith(self._mark) and not match[3].strip()

    def row(self, line: str, *, whole: bool = True) -> Text:
        """Return the row of the next line without the indent of the fence; an incomplete line is passed again."""
        indent = len(line) - len(line.lstrip(" "))
        text = Text(line[min(indent, self._indent) :], no_wrap=True)
        if self._lexer is None or len(self._open) > _MAX_OPEN:
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
    """Return the lexer of the language that follows an opening fence, or `None` if it is unknown."""
    match = re.match(r"[\w+#.-]+", info.strip())
    with suppress(ClassNotFound):
        # PHP code in answers usually lacks its opening tag, so `startinline` is needed.
        return get_lexer_by_name(match[0].lower(), startinline=True) if match else None
    return None
