"""Tests of reports as Markdown, SVG and HTML: they parse, contain the data of the report, and run no code."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from support.browser import chromium
from support.pages import Page, markdown_table, read_svg_words

from ngramspec.instruments.reports.render import html, markdown, svg
from ngramspec.instruments.reports.report import Bar, Bars, Lines, Passage, Report, Section, Table

HOSTILE = (
    "</pre></text><script>fetch('http://evil.test')</script><img src=x onerror=alert(1)>|`*[x](http://evil.test)\\ &"
)
CONTROLS = "a\0b\x1b[31mc\x85d\ufffee\ud800f\x7f"
SHOWN = "a␀b␛[31mc\ufffdd\ufffde?f␡"


def report(name: str = "json", text: str = "x", bars: Bars | None = None) -> Report:
    table = Table(["kind", "t/s", "gain"], [[name, "10.00", "1.20x"], ["overall", "9.00", "1.10x"]], totals=1)
    chart = bars or Bars(f"about {name}", [Bar(name, 1.2, 0.9, 1.4, "1.20x"), Bar("low", 0.5, None, None, "0.50x")])
    lines = Lines(name, name, name, {name: [(1, 0.5), (2, 0.25)], "other": [(0.0, 0.0), (2.0, 1.0)]})
    passage = Passage(name, [(text, ""), (text, "kept"), (f"{text}\n", "refused"), (text, "corrected")])
    section = Section(name, name, [chart, table, lines, passage])
    origin = f"ngramspec bench {name}", f"made on {name}"
    return Report(f"title {name}", *origin, table, chart, [section], [f"note {name}"], f"headline {name}")


def test_markdown_report_contains_aligned_table_and_command() -> None:
    text = markdown(report())
    assert markdown_table(text) == [["kind", "t/s", "gain"], ["json", "10.00", "1.20x"], ["overall", "9.00", "1.10x"]]
    assert text.splitlines()[:2] == ["**headline json**", ""]
    assert text.splitlines()[3] == "| ------- | ----: | ----: |"
    assert text.splitlines()[7:] == ["note json", "", "made on json; `ngramspec bench json`"]


def test_html_report_starts_with_headline_and_ends_with_origin() -> None:
    lines = list(filter(None, Page(html(report())).words.splitlines()))
    assert lines[1:4] == ["title json", "headline json", "note json"]
    assert lines[-1] == "made on json; ngramspec bench json"
    row = '<tr{}><td class="text">{}</td><td>{}</td><td>{}</td></tr>'
    for cells in (("", "json", "10.00", "1.20x"), (' class="total"', "overall", "9.00", "1.10x")):
        assert row.format(*cells) in html(report())


@pytest.mark.parametrize("hostile", [HOSTILE, CONTROLS, "two\nlines", "``", "ü漢字🌍", ""])
def test_report_with_hostile_text_escapes_it(hostile: str) -> None:
    made = report(hostile, hostile)
    row = markdown_table(markdown(made))[1]
    assert (len(row), row[1]) == (3, "10.00")
    assert "<" not in "".join(markdown(made).split("\n\n")[:2])
    assert any("1.20x" in words for words in read_svg_words(svg(made)))
    page = Page(html(made))
    assert not {"script", "img", "a", "link", "iframe"} & set(page.tags)
    legend, marked = page.spans[:3], page.spans[3:]
    assert [kind for kind, _ in legend] == [kind for kind, _ in marked] == ["kept", "refused", "ins"]
    if hostile == HOSTILE:
        assert [text.rstrip("⏎") for _, text in marked] == [HOSTILE] * 3
        assert row[0] == HOSTILE
    if hostile == CONTROLS:
        assert marked[0][1] == row[0] == SHOWN


@pytest.mark.exhaustive
def test_html_report_in_browser_runs_no_hostile_code(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(html(report(HOSTILE, HOSTILE)).replace("</main>", f"{HOSTILE}</main>"), "utf-8")
    requests: list[str] = []
    with chromium() as browser:
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        assert page.locator("svg.chart").count() == 2
    assert requests[0].startswith("file:")
    assert not [address for address in requests if "evil" in address]


def test_svg_report_keeps_elements_within_its_edges() -> None:
    bars = [Bar("a name of a category that is far too long to be shown", 9.0, 1.0, 12.0, "9.00x (1.00-12.00)")]
    text = svg(report(bars=Bars("about", [*bars, *(Bar(str(n), n / 10, None, None, "-") for n in range(40))])))
    root = ET.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root.iter():
        for name, most in (("x", width), ("x1", width), ("x2", width), ("y", height), ("y1", height), ("y2", height)):
            assert 0 <= float(one.attrib.get(name, 0)) <= most
        if one.tag.endswith("rect") and "x" in one.attrib:
            assert float(one.attrib["x"]) + float(one.attrib["width"]) <= width


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 0.0), (1.0, 0.0)], [(1, 1e-9), (64, 1e9)]])
def test_html_report_draws_any_points(points: list[tuple[float, float]]) -> None:
    lines = Lines("about", "across", "up", {"one": points})
    page = html(Report("t", "c", sections=[Section("h", "a", [lines, Bars("none", [])])]))
    assert Page(page).words.count("about")
    assert "nan" not in page


def test_charts_of_ratios_begin_at_one() -> None:
    bars = [
        Bar("gain", 1.5, 1.25, 2.0, "1.50x"),
        Bar("loss", 0.75, None, None, "0.75x"),
        Bar("none", 1.0, 1.0, 1.0, "-"),
    ]
    lines = Lines("costs", "n", "T(n)", {"one": [(1, 1.0), (4, 3.0)]}, base=1.0)
    made = report(bars=Bars("about", bars))
    gains = ET.fromstring(svg(made))
    even = next(float(one.attrib["x1"]) for one in gains.iter() if one.attrib.get("class") == "even")
    rects = [one.attrib for one in gains.iter() if one.attrib.get("class") in ("gain", "loss")]
    assert [one["class"] for one in rects] == ["gain", "loss", "gain"]
    starts, widths = ([float(one[name]) for one in rects] for name in ("x", "width"))
    assert starts[0] == starts[2] == even
    assert starts[1] + widths[1] == pytest.approx(even)
    assert widths == [pytest.approx(2 * widths[1], abs=0.2), widths[1], 0]
    page = html(Report("t", "c", sections=[Section("h", "a", [lines])]))
    assert page.split('text-anchor="end">')[1].startswith("1<")
