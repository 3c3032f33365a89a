"""Readers of reports: tables in Markdown and HTML, drawings, and scripts or links that a page would run or fetch."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"


def cells(line: str) -> list[str]:
    """Return the cells of a Markdown row, without escapes."""
    parts = re.split(r"(?<!\\)\|", line.strip())[1:-1]
    return [re.sub(r"\\(.)", r"\1", part.strip()).replace("&lt;", "<") for part in parts]


def markdown_table(text: str) -> list[list[str]]:
    """Return the rows of the first table, starting with its headings."""
    lines = next(part for part in text.split("\n\n") if part.startswith("|")).splitlines()
    heading, rule, *rows = lines
    assert len({len(line) for line in lines}) == 1, "it does not line up"
    assert set(rule) <= set("|-: ")
    return [cells(heading), *map(cells, rows)]


def read_svg_words(text: str) -> list[str]:
    """Return the words of an SVG file, in order."""
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert not list(root.iter(f"{SVG}script"))
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


class Page(HTMLParser):
    """A parsed HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[list[list[str]]] = []  # rows of each table, including headings
        self.spans: list[tuple[str, str]] = []  # (tag and class, text) of the spans of texts
        self.words = ""  # all visible text
        self.tags: list[str] = []
        self._open: list[str] = []
        assert "default-src 'none'" in text
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("span", "del", "ins"):
            self.spans.append((dict(attrs).get("class") or tag, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} {name}"
            assert name not in ("src", "href", "srcset", "action"), f"{tag} {name}"
            assert "url(" not in (value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "style":
            assert "@import" not in data
            assert "url(" not in data
            return
        self.words += data
        if inside in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif inside in ("span", "del", "ins"):
            kind, text = self.spans[-1]
            self.spans[-1] = kind, text + data


def report_files(folder: Path) -> tuple[list[str], dict[str, Path]]:
    """Return options that write one file of each format, and the files."""
    named = {kind: folder / f"out.{kind}" for kind in ("svg", "html", "json")}
    return [word for kind, path in named.items() for word in (f"--{kind}", str(path))], named
