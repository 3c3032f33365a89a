"""Draw the chart in README.md, the speed-up by machine, from the table in that file.

python tools/picture.py > cli/guide/gains.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from ngramspec.instruments.reports.render import svg
from ngramspec.instruments.reports.report import Bar, Bars, Report

README = Path(__file__).parents[1] / "README.md"
HEADINGS = ["cost curve", "plain", "best other", "ngramspec"]


def draw_chart(readme: str) -> str:
    """Return an SVG chart of the table: a bar for ngramspec above one for the best other drafter."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.splitlines() if line.startswith("|")]
    first = next(number for number, row in enumerate(cells) if row[:4] == HEADINGS) + 2
    rows = [row for row in cells[first : first + 7] if row[1] == "1"]
    bars = []
    for machine, _, rival, ours, _ in rows:
        name = machine.replace("a batch costs what a token costs", "batches are free")
        bars.append(Bar(name, float(ours), None, None, f"{ours}x ngramspec"))
        bars.append(Bar("", float(rival), None, None, f"{rival}x best other", other=True))
    about = "Tokens per second relative to plain decoding, without a draft model; mean of 11 categories"
    origin = "Simulated on 1,047 recorded conversations with the batch costs of each machine"
    note = "best other: of 62 configurations of llama.cpp's, vLLM's, Arctic's, SAM's and other drafters."
    return svg(Report("Speed-up from drafting", "ngramspec replay", origin, bars=Bars(about, bars), notes=[note]))


if __name__ == "__main__":
    sys.stdout.write(draw_chart(README.read_text("utf-8")))
