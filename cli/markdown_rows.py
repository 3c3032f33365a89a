"""Markdown as rows of a terminal: what a block looks like.

Rows say what the source says: HTML and character references stay as they are typed, a line break is one, an item keeps
its number, the destination of a link stands behind its text, and LaTeX keeps its backslashes. Code is never wrapped,
indented or padded, wherever it stands, so that it can be copied; its fences are shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from io import StringIO
from typing import NamedTuple

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

FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})[ \t]*(.*)")
"""A fence of code: its indent, the fence itself, and what stands behind it."""

_console = Console(file=StringIO(), highlight=False, markup=False, emoji=False)  # lays out, and never writes


class Row(NamedTuple):
    """A row of a terminal."""

    text: Text  # no wider than the terminal, unless it is code
    code: bool = False  # shown as it is; may be wider, and belongs at the left edge


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
    """What stands in the blocks of code of a text, wherever they are."""
    return [
        node.content for node in SyntaxTreeNode(_PARSER.parse(source)).walk() if node.type in ("fence", "code_block")
    ]


def is_blank(line: str) -> bool:
    """Whether there is no text in a line."""
    return not line.strip(_BLANK)


def block_rows(node: SyntaxTreeNode, lines: Sequence[str], width: int) -> list[Row]:
    """What a block of `lines`, which were parsed, looks like in so many cells of a terminal."""
    match node.type:
        case "paragraph" | "heading":
            text = _inline(node)
            text.stylize({"h1": "bold underline", "p": ""}.get(node.tag, "bold"))
            rows = _wrapped(text, width)
        case "bullet_list" | "ordered_list":
            rows = _stacked(node.children, lines, width)
        case "list_item":
            rows = _item(node, lines, width)
        case "blockquote":
            inner = _stacked(node.children, lines, _within(width, 2))
            rows = [row if row.code else Row(Text.assemble(("│ ", _FAINT), row.text)) for row in inner]
        case "fence":
            rows = _fence(node)
        case "code_block":
            rows = [Row(Text.assemble((line, _CODE)), True) for line in node.content.removesuffix("\n").split("\n")]
        case "table":
            rows = _table(node, width)
        case "hr":
            rows = [Row(Text.assemble(("─" * min(width, _RULE), _FAINT)))]
        case kind:
            raise AssertionError(f"the parser knows no {kind}")
    return rows


def fence_row(line: str) -> Row:
    """A line that opens or closes a block of code."""
    return Row(Text.assemble((line.strip(), _FAINT)), True)


def _stacked(nodes: Sequence[SyntaxTreeNode], lines: Sequence[str], width: int) -> list[Row]:
    """Blocks one below the other, with blank rows where the source has blank lines."""
    rows: list[Row] = []
    for node in nodes:
        first = node.map[0] if node.map else 0
        if rows and first and is_blank(lines[first - 1]):
            rows.append(Row(Text()))
        rows += block_rows(node, lines, width)
    return rows


def _item(node: SyntaxTreeNode, lines: Sequence[str], width: int) -> list[Row]:
    mark = f"{node.info}{node.markup} " if node.info else "• "
    inner = _stacked(node.children, lines, _within(width, len(mark)))
    if not inner or inner[0].code:
        inner.insert(0, Row(Text()))
    rows = [Row(Text.assemble((mark, _CODE if node.info else ""), inner[0].text))]
    for row in inner[1:]:
        rows.append(row if row.code or not row.text else Row(Text.assemble(" " * len(mark), row.text)))
    return rows


def _fence(node: SyntaxTreeNode) -> list[Row]:
    code = Code(node.info)
    rows = [fence_row(node.markup + node.info)]
    if node.content:
        rows += [code.line(line) for line in node.content.removesuffix("\n").split("\n")]
    return [*rows, fence_row(node.markup)]


def _language(info: str) -> str:
    """The language that is named behind an opening fence; "" for none."""
    found = re.match(r"[\w+#.-]+", info.strip())
    return found[0] if found else ""


def _table(node: SyntaxTreeNode, width: int) -> list[Row]:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    rows = [[_inline(cell) for cell in row.children] for part in node.children for row in part.children]
    for cell, heading in zip(node.children[0].children[0].children, rows[0], strict=True):
        aligned = str(cell.attrs.get("style", "")).removeprefix("text-align:")
        table.add_column(
            heading, justify="right" if aligned == "right" else "center" if aligned == "center" else "left"
        )
    for row in rows[1:]:
        table.add_row(*row)
    options = _console.options.update(width=width)
    found = []
    for line in _console.render_lines(table, options, pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()
        found.append(Row(text))
    return found


def _within(width: int, indent: int) -> int:
    return max(width - indent, _NARROWEST)


def _wrapped(text: Text, width: int) -> list[Row]:
    rows = []
    for line in text.wrap(_console, width):
        line.rstrip()
        rows.append(Row(line))
    return rows


def _inline(node: SyntaxTreeNode) -> Text:
    text = Text()
    for child in node.children:
        for part in child.children:
            _add(text, part, "")
    return text


def _add(text: Text, node: SyntaxTreeNode, style: str) -> None:
    match node.type:
        case "text":
            text.append(node.content, style)
        case "code_inline":
            text.append(node.content, f"{style} {_CODE}")
        case "softbreak" | "hardbreak":
            text.append("\n")
        case "strong" | "em" | "s" | "link" | "image":
            _add_within(text, node, style)
        case _:
            text.append(node.content, style)


_MARKED = {"strong": "bold", "em": "italic", "s": "strike", "link": "underline", "image": "italic"}


def _add_within(text: Text, node: SyntaxTreeNode, style: str) -> None:
    start = len(text)
    for child in node.children:
        _add(text, child, f"{style} {_MARKED[node.type]}")
    to = str(node.attrs.get("href") or node.attrs.get("src") or "")
    if to and to not in (text.plain[start:], f"mailto:{text.plain[start:]}"):
        text.append(f" ({to})", f"{style} {_FAINT}")


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
        self._lexer = _lexer(_language(info).lower())
        self._indent, self._mark = indent, mark
        self._open = ""

    def closes(self, line: str) -> bool:
        """Whether a line ends the block."""
        found = FENCE.fullmatch(line)
        return found is not None and found[2].startswith(self._mark) and not found[3].strip()

    def line(self, line: str) -> Row:
        """The next line, whole."""
        text, self._open = self._coloured(line)
        return Row(text, True)

    def unfinished(self, line: str) -> Row:
        """What is there of the next line; it counts only once it is whole."""
        return Row(self._coloured(line)[0], True)

    def _coloured(self, line: str) -> tuple[Text, str]:
        """The line in colours, without the indent of the fence, and what is to be read again with the next one."""
        indent = len(line) - len(line.lstrip(" "))
        line = line[min(indent, self._indent) :]
        text = Text(line)
        if self._lexer is None or len(self._open) > _MOST:
            return text, self._open
        source = f"{self._open}{line}\n"
        start, kind = len(self._open), None
        for at, kind, piece in self._lexer.get_tokens_unprocessed(source):
            if at + len(piece) > start and (style := _THEME.get_style_for_token(kind)):
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
