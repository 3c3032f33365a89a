"""Markdown of an answer in a terminal: rich's blocks, which a stream rewrites only as long as they may change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from .console import printable

INTERVAL = 1 / 15  # minimum time in seconds between two updates of the open block
SHARE = 1 / 20  # maximum share of the time that is spent on updates, independent of the length of the open block

THEME = Theme({"markdown.code": "cyan", "markdown.block_quote": "none", "markdown.hr": "dim"})

_PARSER = (
    MarkdownIt("commonmark")
    .enable(["table", "strikethrough"])
    # HTML is shown as typed, and so are backslashes, which LaTeX needs. Without setext headings and references no line
    # changes the meaning of a block above it.
    .disable(["html_block", "html_inline", "entity", "escape", "lheading", "reference"])
)
_PARSER.normalizeLink = _PARSER.normalizeLinkText = str  # type: ignore[assignment,method-assign]  # keep them as typed


class _Heading(Heading):
    """Heading at the left edge."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _Code(CodeBlock):
    """Code with its fences, without padding; it is wrapped only in lists and quotations, so that it can be copied."""

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Code:
        code = cls(token.info.partition(" ")[0], "ansi_dark")
        code.opening, code.closing = f"{token.markup}{token.info}", token.markup
        return code

    opening = closing = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        syntax = Syntax("", self.lexer_name, theme=self.theme, background_color="default", tab_size=8)
        code = syntax.highlight(str(self.text).removesuffix("\n"))
        code.rstrip()
        code.no_wrap, code.overflow = (True, "ignore") if options.max_width == console.width else (False, "fold")
        for part in (Text(self.opening, "dim"), code, Text(self.closing, "dim")):
            if part or part is code:
                yield part


class _Blocks(Markdown):
    elements: ClassVar = {**Markdown.elements, "heading_open": _Heading, "fence": _Code, "code_block": _Code}


def _split_blocks(source: str) -> list[tuple[int, list[Token]]]:
    """Return the first line and the tokens of each block; each item of a list is a separate list."""
    blocks: list[tuple[int, list[Token]]] = []
    opening = Token("", "", 0)  # start of a list
    for token in _PARSER.parse(source):
        if token.level == 0 and token.type.endswith(("_list_open", "_list_close")):
            opening = token
            continue
        is_item = token.level == 1 and token.type == "list_item_open"
        if token.map and (token.level == 0 or is_item):
            blocks.append((token.map[0], [opening.copy(attrs={"start": int(token.info or 1)})] if is_item else []))
        blocks[-1][1].append(token)
        if token.level == 1 and token.type == "list_item_close":
            blocks[-1][1].append(opening.copy(type=opening.type.replace("_open", "_close"), nesting=-1))
        for child in token.children or ():
            if child.type == "softbreak":  # a line break stays a line break
                child.type = "hardbreak"
    return blocks


def code_blocks(source: str) -> list[str]:
    return [token.content for token in _PARSER.parse(source) if token.type in ("fence", "code_block")]


class MarkdownStream:
    """Writer of one Markdown text to a terminal.

    Only the last block is open: its rows are rewritten, except those that have left the screen. Only complete lines can
    finish a block, so the final rows do not depend on the pieces in which the text arrives.
    """

    def __init__(self, console: Console, style: str = "", clock: Callable[[], float] = time.perf_counter) -> None:
        self._console, self._style, self._clock = console, style, clock
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._tail = ""  # text from the start of the open block
        self._begun = False  # True if there are finished blocks
        self._has_gap = False  # True if a blank line follows them
        self._n_gone = 0  # number of rows of the open block that have left the screen
        self._due = 0.0

    def push(self, text: str) -> None:
        """Add a piece of the text and show it, unless the last update was too recent."""
        self._tail += printable(text)
        if self._clock() >= self._due:
            self._show()

    def finish(self) -> None:
        self._show(ended=True)
        self._live.stop()

    def _show(self, *, ended: bool = False) -> None:
        start = self._clock()
        lines = self._tail.split("\n")
        blocks = _split_blocks(self._tail if ended else "\n".join(lines[:-1]))
        n_final = len(lines) if ended else blocks[-1][0] if blocks else 0  # number of lines of finished blocks
        final = [*self._rows("\n".join(lines[:n_final]))]
        if n_final:
            self._begun |= bool(final)
            del final[: self._n_gone]
            self._n_gone = 0
            self._has_gap = not lines[n_final - 1].strip(" \t>")
            self._tail = "\n".join(lines[n_final:])
        live = [*self._rows(self._tail)]
        n_gone = max(self._n_gone, len(live) - max(self._console.height - 2, 1))
        final += live[self._n_gone : n_gone]
        self._n_gone = n_gone
        self._live.start()
        with self._console:  # one write, so that the terminal does not flicker
            if final:
                self._console.print(Group(*final), soft_wrap=True)
            self._live.update(Group(*live[n_gone:]), refresh=True)
        now = self._clock()
        self._due = now + max(INTERVAL, (now - start) / SHARE)

    def _rows(self, source: str) -> Iterator[Text]:
        """Yield the rows of blocks, with a blank row between them if the text has a blank line there."""
        lines = source.split("\n")
        begun = self._begun
        for first, tokens in _split_blocks(source):
            blocks = _Blocks("", justify="default", style=self._style, hyperlinks=False)
            blocks.parsed = tokens
            rows = []
            for line in Segment.split_lines(self._console.render(blocks)):
                rows.append(Text.assemble(*((part.text, part.style or "") for part in line), no_wrap=True))
                rows[-1].rstrip()
            # rich puts blank rows around some blocks.
            filled = [number for number, row in enumerate(rows) if row]
            if filled and begun and (not lines[first - 1].strip(" \t>") if first else self._has_gap):
                yield Text()
            yield from rows[filled[0] : filled[-1] + 1] if filled else []
            begun = begun or bool(filled)
