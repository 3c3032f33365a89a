"""The picture in README.md: what is gained, by machine, drawn of the table that stands there.

python tools/picture.py > cli/guide/gains.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from ngramspec.instruments.reports.report import Bar, Bars, Report, Table
from ngramspec.instruments.reports.svg import svg

README = Path(__file__).parents[1] / "README.md"
HEADINGS = ["cost curve", "plain", "best other", "ngramspec"]


def picture(readme: str) -> str:
    """The table's gains as bars, ours above the best of others."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.splitlines() if line.startswith("|")]
    first = next(number for number, row in enumerate(cells) if row[:4] == HEADINGS) + 2
    rows = [row for row in cells[first : first + 7] if row[1] == "1"]
    bars = []
    for machine, _, other, ours, _ in rows:
        name = machine.replace("what a token costs", "one token")
        bars.append(Bar(name, float(ours), None, None, f"{ours}x ngramspec"))
        bars.append(Bar("", float(other), None, None, f"{other}x best other", other=True))
    about = "Tokens per second against plain decoding, without a draft model; mean of 11 kinds of text"
    origin = "Modelled on 1,047 recorded conversations by what a batch costs there"
    others = "best other: of 62 settings of llama.cpp's, vLLM's, Arctic's, SAM's and other drafters."
    shown = Bars(about, bars, even=(1.0, "plain decoding"))
    return svg(Report("What drafting gains", Table([], []), shown, origin, "ngramspec replay", notes=[others]))


if __name__ == "__main__":
    sys.stdout.write(picture(README.read_text("utf-8")))
