"""Tests of Markdown as elements for the page: their form, and that no text creates other elements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http import ask

from ngramspec.server.limits import MAX_MARKDOWN
from ngramspec.server.page import render

TAGS = {"a", "blockquote", "br", "code", "div", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s", "span"}
TAGS |= {"strong", "table", "tbody", "td", "th", "thead", "tr", "ul"}


def shown(source: str, drafted: list[tuple[int, int]] | None = None) -> str:
    """Return the elements of a text in a short form: tag.class[other attributes]{content}."""
    return "".join(map(short, render(source, drafted or [])[0]))


def short(node: Any) -> str:
    if isinstance(node, str):
        return node.replace("\n", "↵")
    tag, attributes, *children = node
    names = "".join(f".{name}" for name in attributes.get("class", "").split())
    more = "".join(f"[{value}]" for name, value in attributes.items() if name != "class" and value not in ("", 1))
    return f"{tag}{names}{more}{{{''.join(map(short, children))}}}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("# A *b*\n\ntwo\nlines", "h3{A em{b}}p{twobr{}lines}"),
        ("####### no\n\n###### yes", "p{####### no}h6{yes}"),
        ("**a** ~~b~~ `c*d*` \\* \\{", "p{strong{a} s{b} code{c*d*} * \\{}"),
        ("3. a\n   - b\n4. c", "ol[3]{li{aul{li{b}}}li{c}}"),
        ("- a\n\n- b", "ul{li{p{a}}li{p{b}}}"),
        ("> a\n> b\n\n---", "blockquote{p{abr{}b}}hr{}"),
        ("a\n---\nb", "p{a}hr{}p{b}"),
        (
            "|a|b|c|\n|-|-:|:-:|\n|1<br>2|`x`|",
            "table{thead{tr{th{a}th.right{b}th.center{c}}}tbody{tr{td{1br{}2}td.right{code{x}}td.center{}}}}",
        ),
        ("```py\nx = 1 # y\n```", "pre[py]{x = span.number{1} span.comment{# y}↵}"),
        ("```py\nx = '''\n1'''", "pre[py]{x = span.string{'''↵}span.string{1'''}}"),
        ("```nolang x\n<b>\n```", "pre[nolang]{<b>↵}"),
        ("````\n```\n````\n    code", "pre{```↵}pre{code↵}"),
        # Formulas are not changed.
        ("$a_1 * b_2$ *c*", "p{span.formula{$a_1 * b_2$} em{c}}"),
        (r"\(a_1^*\) \[x*y*\]", r"p{span.formula{\(a_1^*\)} span.formula{\[x*y*\]}}"),
        ("$$\na *b*\n- c\n$$\nend", "div.formula{$$↵a *b*↵- c↵$$}p{end}"),
        ("so\n\\[\na\n\\]", "p{so}div.formula{\\[↵a↵\\]}"),
        ("- x\n  $$\n  a\n  $$", "ul{li{xdiv.formula{$$↵a↵$$}}}"),
        ("costs $5, *not* $10", "p{costs $5, em{not} $10}"),
        ("`$HOME` and `$PATH`, $x `y$`", "p{code{$HOME} and code{$PATH}, $x code{y$}}"),
        ("$$ never closed\n\n*a*", "p{$$ never closed}p{em{a}}"),
        ("\\$a *b* $", "p{$a em{b} $}"),
        # HTML is text, and only links to the web are links.
        ("<script>hit()</script>", "p{<script>hit()</script>}"),
        ("a <img src=x onerror=hit()> &lt;b&gt;", "p{a <img src=x onerror=hit()> &lt;b&gt;}"),
        ("<div>\n*a*\n</div>", "p{<div>br{}em{a}br{}</div>}"),
        ("<!-- a -->", "p{<!-- a -->}"),
        ("[a](https://b.c 'd')", "p{a[https://b.c]{a}}"),
        ("<https://b.c>", "p{a[https://b.c]{https://b.c}}"),
        ("![a](https://b.c/d.png)", "p{a[https://b.c/d.png]{a}}"),
        ("![](https://b.c)", "p{a[https://b.c]{https://b.c}}"),
        ("[a](javascript:hit())", "p{[a](javascript:hit())}"),
        ("[a](JaVaScRiPt:hit())", "p{[a](JaVaScRiPt:hit())}"),
        ("[a](&#106;avascript:hit())", "p{[a](&#106;avascript:hit())}"),
        ("[a](java%73cript:hit())", "p{a}"),
        ("[a](data:text/html,<script>hit()</script>)", "p{[a](data:text/html,<script>hit()</script>)}"),
        ("<javascript:hit()>", "p{<javascript:hit()>}"),
        ("[a](/props) [b](//c.d) [c](file:///etc/passwd)", "p{a b [c](file:///etc/passwd)}"),
        ('[a](https://b.c/"onclick="hit())', "p{a[https://b.c/%22onclick=%22hit()]{a}}"),
        ('```"><script>\nhit()\n```', 'pre["><script>]{hit()↵}'),
    ],
)
def test_markdown_render_returns_expected_elements(source: str, expected: str) -> None:
    assert shown(source) == expected


def elements(nodes: list[Any]) -> Iterator[list[Any]]:
    for node in nodes:
        if not isinstance(node, str):
            yield node
            yield from elements(node[2:])


def text(nodes: list[Any]) -> str:
    return "".join(node if isinstance(node, str) else text(node[2:]) for node in nodes)


MARKUP = "*_`~#|-+>[]()<>!\\$:1. \n\t\r&;=\"'/ab"
SPANS = st.lists(st.tuples(st.integers(-5, 80), st.integers(-5, 80)), max_size=5).map(sorted)


@given(st.text(MARKUP, max_size=60) | st.text(max_size=60), SPANS)
def test_markdown_render_of_any_text_returns_only_safe_elements(source: str, drafted: list[tuple[int, int]]) -> None:
    blocks, last = render(source, drafted)
    assert 0 <= last <= len(source)
    for tag, attributes, *_ in elements(blocks):
        assert tag in TAGS
        assert set(attributes) <= {"class", "href", "language", "start"}
        assert attributes.get("href", "https://").lower().startswith(("http://", "https://", "mailto:"))
    assert text(blocks) == text(render(source)[0]), "drafts are only marked"


@given(st.lists(st.sampled_from(["a *b*", "- c", "  - d", "", "1. e", "> f", "```py", "x = 1", "# g"]), max_size=8))
def test_markdown_render_keeps_finished_blocks_when_text_grows(lines: list[str]) -> None:
    source = "\n".join(lines)
    whole = render(source)[0]
    for end in range(1, len(source)):
        blocks, last = render(re.sub(r"\n\s*\d+$", "", source[:end]))  # like the page
        assert blocks[:-1] + render(source[last:])[0] == whole


@pytest.mark.parametrize(
    ("source", "start", "end", "expected"),
    [
        ("one two three", 4, 7, "p{one span.drafted{two} three}"),
        ("a **b c** d", 3, 7, "p{a strong{span.drafted{b c}} d}"),
        ("## a b", 0, 4, "h4{span.drafted{a} b}"),
        ("a\r\nb\r\nc", 3, 4, "p{abr{}span.drafted{b}br{}c}"),
        (
            "```py\nx = 'a b'\n```\nend",
            8,
            13,
            "pre[py]{x span.drafted{= }span.string.drafted{'a }span.string{b'}↵}p{end}",
        ),
        ("> ```\n> a\n> b\n> ```", 8, 14, "blockquote{pre{span.drafted{a↵}span.drafted{b↵}}}"),
        ("a\n\na", 3, 4, "p{a}p{span.drafted{a}}"),
        ("[b](https://b.b) b", 17, 18, "p{a[https://b.b]{b} span.drafted{b}}"),
        ("🙂🙂 \\* 🙂", 1, 6, "p{🙂span.drafted{🙂 }span.drafted{*}span.drafted{ }🙂}"),
    ],
)
def test_markdown_render_marks_drafted_characters(source: str, start: int, end: int, expected: str) -> None:
    assert shown(source, [(start, end)]) == expected


def test_markdown_render_of_very_long_text_returns_plain_text() -> None:
    source = "*a* " * (MAX_MARKDOWN // 4 + 1)
    assert render(source)[0] == [["div", {"class": "plain"}, source]]


def test_markdown_endpoint_returns_blocks() -> None:
    assert ask("/markdown", {"text": "a\n\n*b*", "drafted": [[4, 5]]})[0] == {
        "blocks": [["p", {}, "a"], ["p", {}, ["em", {}, ["span", {"class": "drafted"}, "b"]]]],
        "last": 3,
    }


def test_markdown_render_of_slow_code_skips_highlighting() -> None:
    quick = "```perl\nmy $x;\n```\n\n"
    assert "span" in shown(quick)
    slow = "s{" * 24_000  # pygments needs time quadratic in the length
    assert shown(f"```perl\n{slow}\n```\n\n{quick}") == f"pre[perl]{{{slow}↵}}pre[perl]{{my $x;↵}}"
