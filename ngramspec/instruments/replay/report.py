"""`replay_report`: a replay as a `Report`, for the terminal too, out of the document that `--json` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ngramspec.cost.given import CURVES, SWITCH
from ngramspec.instruments.replay.comparison import Figures
from ngramspec.instruments.replay.transcripts import MAX_RESPONSE, MAX_TOTAL
from ngramspec.instruments.reports import report as reports
from ngramspec.instruments.reports.report import MACRO, OVERALL, Bars, Report, Section, Table, figure
from ngramspec.version import __version__

MEASURED = "measured"
"""Name of the curve that was measured on a model before the replay."""


def replay_report(document: Figures, total: int, vocabulary: str, command: str, more: Sequence[Section] = ()) -> Report:
    """The report on a replay.

    Args:
        document: of `CurveComparison.document`, and what the replay was asked for ("settings").
        total: the conversations that were to be replayed.
        vocabulary: whose tokens, for people.
        command: what was typed.
        more: sections to end with.
    """
    settings = document["settings"]
    rows = {name: document["results"][f"{settings['drafter']}@{name}"] for name in document["curves"]}
    origin = (
        f"{document['transcripts']} recorded conversations, {document['decode_tokens']} tokens to decode,"
        f" {document['prompt_tokens']} tokens of prompts; tokens of {vocabulary}; drafter {settings['drafter']}, policy"
        f" {settings['policy']}, memory {settings['memory']}; ngramspec {__version__}"
    )
    sections = [*(section for name in rows for section in _sections(name, rows[name], document)), *more]
    notes = [
        "gain: modelled by what a pass costs, over plain decoding; one drafter for all conversations, in order",
        f"a response's first token is the prefill's; responses are cut at {MAX_RESPONSE} tokens, prompts at the front"
        f" so that both have {MAX_TOTAL}",
    ]
    if not document["complete"]:
        notes.append(f"INCOMPLETE: stopped after {document['transcripts']} of {total} conversations")
    title = "What drafting would have gained on recorded conversations"
    return Report(title, _table(rows, document["oracle"]), _bars(rows), origin, command, sections, notes)


def _table(results: Mapping[str, Mapping[str, Figures]], oracle: Mapping[str, Figures] | None) -> Table:
    """A row per curve and kind of text."""
    headings = ["curve", "kind of text", "tokens", "per\npass", "accepted", "no\ndraft", "gain"]
    headings += ["copy-oracle"] if oracle else []
    cells = []
    for name, rows in results.items():
        for category, row in rows.items():
            # A mean of counts tells nothing that their sum does not.
            count = "" if category == MACRO else f"{row['tokens']:.0f}"
            line = [name, category, count, f"{row['tokens_per_pass']:.2f}"]
            line += [figure(row["acceptance"], ".0%"), f"{row['no_draft_share']:.0%}"]
            line.append(f"{row['speedup'][name]:.3f}x")
            if oracle:
                limit = oracle.get(category, {}).get(name, {})
                line.append(figure(limit.get("oracle_copy1"), ".3f", "x"))
            line += [f"{row['cpu_us_per_pass']:.1f}", f"{row['start_us_per_prompt_token']:.2f}"]
            cells.append(line)
    return Table([*headings, "us per\npass", "us per\nprompt\ntoken"], cells, text=2)


def _bars(results: Mapping[str, Mapping[str, Figures]]) -> Bars:
    """The gain by kind of text; of several curves, the mean of the kinds on each, from the least to the greatest."""
    by_curve = {
        name: {category: row["speedup"][name] for category, row in rows.items()} for name, rows in results.items()
    }
    if len(by_curve) == 1:
        ((name, found),) = by_curve.items()
        about = f"Tokens per second, drafted / plain, on the curve {name}"
        return reports.gains(about, {category: (gain, None, None) for category, gain in found.items()}, ".3f")
    spread = {}
    for name, found in by_curve.items():
        if kinds := [gain for category, gain in found.items() if category not in (OVERALL, MACRO)]:
            spread[name] = found[MACRO], min(kinds), max(kinds)
    about = "Tokens per second, drafted / plain, by cost curve: mean over kinds of text, least and most"
    return reports.gains(about, spread, ".3f")


def _sections(name: str, rows: Mapping[str, Figures], document: Figures) -> Iterator[Section]:
    seconds = document["curves"][name]
    source = CURVES[name][1] if name in CURVES else "from a file"
    if name == MEASURED:
        source = "passes of the model, measured here before the replay"
    about = f"{source}. A gain of 1.20x is 1.2 times as many tokens per second."
    if document["oracle"]:
        about += " The copy-oracle is the most that copying one span of the context per pass could gain."
    table = _table({name: rows}, document["oracle"])
    without_curve = Table(table.headings[1:], [row[1:] for row in table.rows], totals=2)
    yield Section(f"What is gained on the curve {name}", about, [_bars({name: rows}), without_curve])
    points = {name: {int(size): value for size, value in seconds.items() if size != SWITCH}}
    yield reports.costs(points, seconds.get(SWITCH))
    if not rows:
        return
    if rows[OVERALL]["max_draft"]:
        rates = {category: row["accept_by_position"] for category, row in rows.items() if category != MACRO}
        yield reports.acceptance(rates, "Of the drafts that reach that position.", totals=1)
    if (error := rows[OVERALL]["calibration_error"]) is not None:
        about = f"Of all positions of all proposals, sent or not; expected calibration error {error:.4f}."
        yield reports.calibration(rows[OVERALL]["reliability"], about)
