"""The chat page at `/`, made of the files in `web/`, and its Markdown as elements, so that text is never markup.

An element is [tag, attributes, *children], and text is a string. Only the tags and attributes in this module occur,
whatever the text contains. HTML and character references remain text, line breaks are kept, and formulas keep every
character.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from itertools import groupby
from typing import Annotated, Any

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.tree import SyntaxTreeNode
from pydantic import PlainValidator
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String, _TokenType
from pygments.util import ClassNotFound
from starlette.responses import HTMLResponse, Response

from ngramspec.data import GrammarError
from ngramspec.grammars.gbnf import worker
from ngramspec.server.body import Body, FieldError, describe_value
from ngramspec.server.json_text import ApiError, JsonResponse
from ngramspec.server.limits import MAX_HIGHLIGHTED, MAX_MARKDOWN
from ngramspec.server.state import Call


@cache
def make_page() -> tuple[str, dict[str, str]]:
    web = files("ngramspec.server").joinpath("web")
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline_file(match: re.Match[str]) -> str:
        text = web.joinpath(match["file"]).read_text("utf-8")
        tag = "style" if match["file"].endswith(".css") else "script"
        hashes[tag].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{tag}>{text}</{tag}>"

    html = web.joinpath("page.html").read_text("utf-8")
    html = re.sub(
        r'<(?:link rel="stylesheet" href|script src)="(?P<file>\w+\.(?:css|js))">(?:</script>)?', inline_file, html
    )
    policy = (
        "default-src 'none'",
        f"script-src {' '.join(hashes['script'])}",
        f"style-src {' '.join(hashes['style'])}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # With these two lines the browser reports an error if any script turns text into markup.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return html, {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(html.encode()).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


async def page(call: Call[Body]) -> Response:
    """Return the page, or status 304 if the browser has it in its cache."""
    if not call.server.has_page:
        raise ApiError(404, "File Not Found")
    html, headers = make_page()
    if call.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(html, headers=headers)


Span = tuple[int, int]


def _read_spans(value: Any) -> tuple[Span, ...]:
    if not isinstance(value, list) or not all(
        isinstance(span, list) and len(span) == 2 and all(isinstance(end, int) for end in span) for span in value
    ):
        raise FieldError(f"must be a list of pairs of numbers, got {describe_value(value)}")
    return tuple((start, end) for start, end in value)


class MarkdownBody(Body):
    text: str
    drafted: Annotated[tuple[Span, ...], PlainValidator(_read_spans)] = ()


async def markdown(call: Call[MarkdownBody]) -> Response:
    """Return the Markdown in `text` as elements; the spans in `drafted` are marked."""
    blocks, last = await asyncio.to_thread(render, call.body.text, sorted(call.body.drafted))
    return JsonResponse({"blocks": blocks, "last": last})


Node = str | list[Any]

_ESCAPABLE = frozenset("*_`~#|.+-$")
_FORMULA = re.compile(
    r"\$\$.{1,2000}?\$\$|\\\(.{1,2000}?\\\)|\\\[.{1,2000}?\\\]|\$(?![\s$])[^$`\n]{0,2000}?(?<![\s\\])\$(?!\d)",
    re.DOTALL,
)
_NEWLINE = re.compile(r"\r\n?|\n")
_BREAK = re.compile(r"<br\s*/?>")
_LINK = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)


def render(source: str, draft_spans: Sequence[Span] = ()) -> tuple[list[Node], int]:
    """Return the blocks of a text in Markdown, and the index of the last block, the only one that can change.

    `draft_spans` are the drafted spans as [start, end), in order; their elements have the class "drafted".
    """
    if len(source) > MAX_MARKDOWN:
        return [["div", {"class": "plain"}, source]], 0
    starts = [0, *(newline.end() for newline in _NEWLINE.finditer(source)), len(source)]
    elements, last = _Elements(source, draft_spans), 0
    blocks: list[Node] = []
    for block in SyntaxTreeNode(_PARSER.parse(source)).children:
        first, end = block.map or (0, len(starts) - 1)
        last = starts[first]
        elements.at, elements.end = last, starts[min(end, len(starts) - 1)]
        blocks += elements.convert(block)
    return blocks, last


def _escape(state: StateInline, silent: bool) -> bool:
    """Parse a backslash before a character that has a meaning in Markdown, but rarely after a backslash in LaTeX."""
    at = state.pos
    if state.src[at] != "\\" or at + 1 >= state.posMax or state.src[at + 1] not in _ESCAPABLE:
        return False
    if not silent:
        state.push("text_special", "", 0).content = state.src[at + 1]
    state.pos += 2
    return True


def _formula(state: StateInline, silent: bool) -> bool:
    r"""Parse $x$, $$x$$, \(x\) or \[x\] inside text; a dollar sign before a digit is a price and ends no formula."""
    if state.src[state.pos] not in "$\\" or not (match := _FORMULA.match(state.src, state.pos, state.posMax)):
        return False
    if not silent:
        state.push("formula", "span", 0).content = match[0]
    state.pos = match.end()
    return True


def _formula_block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    r"""Parse a block from $$ or \[ at the start of a line to the first line end with the closing mark."""
    first = state.bMarks[start] + state.tShift[start]
    closing = {"$$": "$$", "\\[": "\\]"}.get(state.src[first : first + 2])
    if closing is None or state.is_code_block(start):
        return False
    for line in range(start, min(end, start + 100)):  # a longer formula is text
        text = state.src[first + 2 if line == start else state.bMarks[line] : state.eMarks[line]].rstrip()
        if line > start and text and state.sCount[line] < state.blkIndent:
            return False
        if text.endswith(closing):
            if not silent:
                token = state.push("formula", "div", 0)
                token.content = state.getLines(start, line + 1, state.blkIndent, False)
                token.map = [start, line + 1]
                state.line = line + 1
            return True
    return False


def _parser() -> MarkdownIt:
    # Setext headings and references are disabled, because with them a later line could change a block above it.
    off = ["lheading", "reference", "html_block", "html_inline", "entity", "text_join"]
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(off)
    parser.inline.ruler.at("escape", _escape)
    parser.inline.ruler.before("escape", "formula", _formula)
    parser.block.ruler.before("fence", "formula", _formula_block, {"alt": ["paragraph", "blockquote", "list"]})
    return parser


_PARSER = _parser()


class _Elements:
    """A converter of parsed Markdown to elements; it searches their texts in the source, in order, to mark drafts."""

    def __init__(self, source: str, draft_spans: Sequence[Span]) -> None:
        self._source, self._draft_spans = source, draft_spans
        self._ends = [end for _, end in draft_spans]
        self.at = self.end = 0  # range of the current block in the source
        self._highlights = True

    def convert(self, node: SyntaxTreeNode) -> list[Node]:
        """Return the elements of a node: one, or the children of a node that is only a group."""
        if node.type in ("text", "text_special"):
            return self._text(node.content)
        if node.type in ("link", "image"):
            return self._link(node)
        if node.type == "inline" or (node.type == "paragraph" and node.hidden):
            return self._children(node)
        tag, attributes, inner = node.tag, dict[str, Any](), self._children
        match node.type:
            case "softbreak" | "hardbreak":
                tag = "br"
            case "formula":
                attributes, inner = {"class": "formula"}, self._content
            case "code_inline":
                inner = self._content
            case "fence" | "code_block":
                tag, attributes, inner = "pre", {"language": find_language(node.info)}, self._code
            case "heading":  # below the headings of the page
                tag = f"h{min(int(tag[1]) + 2, 6)}"
            case "ordered_list":
                attributes = {"start": int(node.attrs.get("start", 1))}
            case "th" | "td" if side := str(node.attrs.get("style", "")).removeprefix("text-align:"):
                attributes = {"class": side}
        return [[tag, attributes, *inner(node)]]

    def _children(self, node: SyntaxTreeNode) -> list[Node]:
        return [element for child in node.children for element in self.convert(child)]

    def _link(self, node: SyntaxTreeNode) -> list[Node]:
        """Return a link to the web or to an image, because the page fetches nothing; other links become text."""
        target = str(node.attrs.get("href") or node.attrs.get("src") or "")
        children = self._children(node) or [target]
        return [["a", {"href": target}, *children]] if _LINK.match(target) else children

    def _content(self, node: SyntaxTreeNode) -> list[Node]:
        return self._text(node.content)

    def _text(self, text: str) -> list[Node]:
        nodes: list[Node] = []
        for i, part in enumerate(_BREAK.split(text)):  # <br> is the only line break in tables
            if i:
                nodes.append(["br", {}])
            for line in part.splitlines(keepends=True):
                nodes += self._line([("", line)])
        return nodes

    def _code(self, node: SyntaxTreeNode) -> list[Node]:
        pieces = self._highlight(node.content, find_language(node.info).lower())
        return [element for line in _lines(pieces) for element in self._line(line)]

    def _highlight(self, code: str, language: str) -> list[tuple[str, str]]:
        if language and self._highlights and len(code) <= MAX_HIGHLIGHTED:
            try:
                return worker.call(highlight, code, language)
            except GrammarError:  # it took too long
                self._highlights = False
        return [("", code)]

    def _line(self, pieces: Sequence[tuple[str, str]]) -> list[Node]:
        """Return the elements of a line, given as pieces with a class and a text, split at the ends of drafts."""
        text = "".join(piece for _, piece in pieces)
        classes = [name for name, piece in pieces for _ in piece]
        for start, end in self._find_drafts(text):
            classes[start:end] = [f"{name} drafted".strip() for name in classes[start:end]]
        nodes: list[Node] = []
        at = 0
        for name, group in groupby(classes):
            end = at + len(list(group))
            nodes.append(["span", {"class": name}, text[at:end]] if name else text[at:end])
            at = end
        return nodes

    def _find_drafts(self, text: str) -> Iterator[Span]:
        """Yield the drafted spans of a text, which is searched in the source after the previous one."""
        start = self._source.find(text, self.at, self.end)
        if start < 0:
            return
        self.at = end = start + len(text)
        for first, last in self._draft_spans[bisect_right(self._ends, start) :]:
            if first >= end:
                return
            yield max(first - start, 0), min(last, end) - start


def find_language(info: str) -> str:
    """Return the language in the info string of a fence."""
    return info.split(maxsplit=1)[0] if info.strip() else ""


def _lines(pieces: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield the lines of code, as pieces with a class and a text."""
    line: list[tuple[str, str]] = []
    for name, text in pieces:
        for piece in text.splitlines(keepends=True):
            line.append((name, piece))
            if piece.endswith("\n"):
                yield line
                line = []
    if line:
        yield line


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
    """Return code as pieces with a class and a text; the class is "" if the language is unknown.

    The lexers of some languages take minutes for some texts, so this runs in the worker's process.
    """
    try:
        # PHP code in answers usually lacks its opening tag.
        lexer = _find_lexer(language, startinline=True)
    except ClassNotFound:
        return [("", code)]
    return [(_class(kind), text) for _, kind, text in lexer.get_tokens_unprocessed(code)]


_find_lexer = lru_cache(maxsize=16)(get_lexer_by_name)


@lru_cache(maxsize=512)
def _class(kind: _TokenType) -> str:
    """Return the class of a kind of token, or of the next wider kind that has one."""
    return next((_CLASSES[wider] for wider in reversed(kind.split()) if wider in _CLASSES), "")
