"""Reports as Markdown, in the style of llama-bench, and as one HTML file without scripts and requests.

Texts of models and files are escaped. In addition, the page's Content-Security-Policy forbids scripts and requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from ngramspec.instruments.reports.report import Mark, Passage, Report, Section, Table, escape_controls
from ngramspec.instruments.reports.svg import STYLE, chart

_SPECIAL = {ord(character): f"\\{character}" for character in "\\`*[]|"} | {ord("<"): "&lt;", ord("\n"): " "}


def markdown(report: Report) -> str:
    """Return the headline, the table, which is aligned as plain text, the notes, and how to get the figures again."""
    origin = f"{_cell(report.origin)}; {_code(report.command)}"
    headline = [f"**{_cell(report.headline)}**", ""] if report.headline else []
    below = (f"{line}\n" for line in (*map(_cell, report.notes), origin))
    return "\n".join([*headline, *_lines(report.table), "", *below])


def _lines(table: Table) -> list[str]:
    cells = [[_cell(cell) for cell in row] for row in (table.headings, *table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.headings))]
    rule = ["-" * w if i < table.text else f"{'-' * (w - 1)}:" for i, w in enumerate(widths)]
    padded_rows = [
        [c.ljust(w) if i < table.text else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in cells
    ]
    return [f"| {' | '.join(row)} |" for row in (padded_rows[0], rule, *padded_rows[1:])]


def _code(text: str) -> str:
    """Return a text as inline code, inside a fence that is longer than any run of backticks in the text."""
    text = " ".join(escape_controls(text).split("\n"))
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _cell(text: str) -> str:
    return escape_controls(text).translate(_SPECIAL)


# ----------------------------------------------------------------------------------------- HTML

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_PAGE = """\
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1f2328; --dim: #59636e; --rule: #d1d9e0;
  --kept: #d2f0d8; --refused: #ffd9d3; --corrected: #d6e8ff }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --ink: #f0f6fc; --dim: #9198a1; --rule: #3d444d;
  --kept: #1d4429; --refused: #5a2622; --corrected: #1b3a63 } }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.25rem 4rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem }
p { max-width: 46rem } .dim { color: var(--dim) } .headline { font-size: 1.2rem; font-weight: 600 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0 }
th, td { padding: .25rem .55rem; font-size: .92rem; text-align: right;
  border-bottom: 1px solid var(--rule); white-space: nowrap }
th.text, td.text { text-align: left } tr.total td { font-weight: 600 }
svg { width: 100%; height: auto; max-width: 47.5rem }
pre { padding: 1rem; border: 1px solid var(--rule); border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.6 ui-monospace, monospace }
.kept { background: var(--kept) } .refused { background: var(--refused) }
ins { background: var(--corrected); text-decoration: none }"""

_LEGEND = (
    '<p class="dim"><span class="kept">accepted draft</span> · <del class="refused">rejected draft</del> ·'
    " <ins>the model's own token after a rejected one</ins> · unmarked: not drafted</p>"
)


def html(report: Report) -> str:
    """Return the whole page: the headline first, how to get the figures again last."""
    body = [part for section in report.sections for part in _section(section)]
    headline = [f'<p class="headline">{_escape(report.headline)}</p>'] if report.headline else []
    title = _escape(report.title)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>\n{_PAGE}\n{STYLE}\n</style>\n</head>\n<body>\n<main>",
            f"<h1>{title}</h1>",
            *headline,
            *(f'<p class="dim">{_escape(line)}</p>' for line in report.notes),
            *body,
            f'<p class="dim">{_escape(report.origin)}; <code>{_escape(report.command)}</code></p>',
            "</main>\n</body>\n</html>\n",
        ]
    )


def _section(section: Section) -> Iterator[str]:
    yield f"<section>\n<h2>{_escape(section.heading)}</h2>\n<p>{_escape(section.about)}</p>"
    if any(isinstance(figure, Passage) for figure in section.figures):
        yield _LEGEND
    for figure in section.figures:
        if isinstance(figure, Table):
            yield _table(figure)
        elif isinstance(figure, Passage):
            text = "".join(_mark_span(*span) for span in figure.spans)
            yield f"<h3>{_escape(figure.name)}</h3>\n<pre>{text}</pre>"
        else:
            yield f"<figure>\n<figcaption>{_escape(figure.about)}</figcaption>\n{chart(figure)}\n</figure>"
    yield "</section>"


def _table(table: Table) -> str:
    def row(cells: list[str], kind: str, total: bool) -> str:
        start_tags = [f'<{kind} class="text">' if i < table.text else f"<{kind}>" for i in range(len(cells))]
        content = "".join(f"{before}{cell}</{kind}>" for before, cell in zip(start_tags, cells, strict=True))
        return f'<tr class="total">{content}</tr>' if total else f"<tr>{content}</tr>"

    below = len(table.rows) - table.totals
    return "\n".join(
        [
            '<div class="wide"><table>',
            f"<thead>{row([*map(_escape, table.headings)], 'th', False)}</thead>",
            "<tbody>",
            *(row([*map(_escape, cells)], "td", n >= below) for n, cells in enumerate(table.rows)),
            "</tbody>\n</table></div>",
        ]
    )


_TAGS: dict[Mark, tuple[str, str]] = {
    "": ("", ""),
    "kept": ('<span class="kept">', "</span>"),
    "refused": ('<del class="refused">', "</del>"),
    "corrected": ("<ins>", "</ins>"),
}


def _mark_span(text: str, mark: Mark) -> str:
    # A line break in a rejected token is shown as a symbol, because the text does not contain the break.
    before, after = _TAGS[mark]
    return f"{before}{_escape(text.replace(chr(10), '⏎') if mark == 'refused' else text)}{after}"


def _escape(text: str) -> str:
    return escape(escape_controls(text))
