"""`replay_report`: a replay as a `Report`, out of the document that `--json` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ngramspec.cost.given import SWITCH
from ngramspec.instruments.replay.comparison import Figures
from ngramspec.instruments.reports.report import (
    MACRO,
    OVERALL,
    Bar,
    Bars,
    Passage,
    Report,
    Section,
    Table,
    acceptance,
    calibration,
    costs,
    figure,
)
from ngramspec.version import __version__


def replay_report(
    document: Figures, vocabulary: str, command: str, passages: Sequence[Passage] | None = None
) -> Report:
    """The report on a replay.

    Args:
        document: of `CurveComparison.document`, and what the replay was asked for ("settings").
        vocabulary: whose tokens, for people.
        command: what was typed.
        passages: texts that the page shows.
    """
    settings = document["settings"]
    rows = {name: document["results"][f"{settings['drafter']}@{name}"] for name in document["curves"]}
    origin = (
        f"{document['transcripts']} recorded conversations, {document['decode_tokens']} tokens to decode;"
        f" tokens of {vocabulary}; drafter {settings['drafter']}, policy {settings['policy']}, memory"
        f" {settings['memory']}; ngramspec {__version__}"
    )
    sections = [section for name in rows for section in _sections(name, rows[name], document)]
    if passages is not None:
        about = f"The first answer of each kind of text, on the curve {next(iter(rows))}."
        sections.append(Section("How it was drafted", about, passages))
    notes = ["gain: modelled by what a pass costs, over plain decoding"]
    if not document["complete"]:
        notes.append("INCOMPLETE: interrupted before the last conversation")
    return Report(
        title="What drafting would have gained on recorded conversations",
        table=_gains(rows, document["oracle"]),
        bars=_bars(rows),
        origin=origin,
        command=command,
        sections=sections,
        notes=notes,
    )


def _gains(results: Mapping[str, Mapping[str, Figures]], oracle: Mapping[str, Figures] | None) -> Table:
    headings = ["curve", "kind of text", "tokens", "tokens per pass", "accepted", "no draft"]
    headings += ["gain", *(["copy-oracle"] if oracle else [])]
    cells = []
    for name, rows in results.items():
        for category, row in rows.items():
            line = [
                name,
                category,
                "" if category == MACRO else f"{row['tokens']:.0f}",
                f"{row['tokens_per_pass']:.2f}",
            ]
            line += [figure(row["acceptance"], ".0%"), f"{row['no_draft_share']:.0%}"]
            line.append(f"{row['speedup'][name]:.3f}x")
            if oracle:
                limit = oracle.get(category, {}).get(name)
                line.append("-" if limit is None else f"{limit['oracle_copy1']:.3f}x")
            cells.append(line)
    return Table(headings, cells, text=2)


def _bars(results: Mapping[str, Mapping[str, Figures]]) -> Bars:
    """The gain by kind of text; of several curves, the mean of the kinds on each, from the least to the greatest."""
    if len(results) == 1:
        ((name, rows),) = results.items()
        gains = {category: row["speedup"][name] for category, row in rows.items()}
        bars = [Bar(category, gain, None, None, f"{gain:.3f}x") for category, gain in gains.items()]
        return Bars(f"Tokens per second, drafted / plain, on the curve {name}", bars, even=(1.0, "plain decoding"))
    bars = []
    for name, rows in results.items():
        if not rows:
            continue
        gains = {category: row["speedup"][name] for category, row in rows.items()}
        kinds = [gain for category, gain in gains.items() if category not in (OVERALL, MACRO)]
        bars.append(Bar(name, gains[MACRO], min(kinds), max(kinds), f"{gains[MACRO]:.3f}x"))
    about = "Tokens per second, drafted / plain, by cost curve: mean over kinds of text, least and most"
    return Bars(about, bars, even=(1.0, "plain decoding"))


def _sections(name: str, rows: Mapping[str, Figures], document: Figures) -> Iterator[Section]:
    one = {name: rows}
    about = f"On the cost curve {name}. A gain of 1.20x is 1.2 times as many tokens per second."
    if document["oracle"]:
        about += " The copy-oracle is the most that copying one span of the context per pass could gain."
    yield Section(f"What is gained: {name}", about, [_bars(one), _gains(one, document["oracle"])])
    if not rows:
        return
    if rows[OVERALL]["max_draft"]:
        rates = {category: row["accept_by_position"] for category, row in rows.items() if category != MACRO}
        yield acceptance(rates, "Of the drafts that reach that position.", totals=1)
    seconds = document["curves"][name]
    yield costs({name: {int(size): value for size, value in seconds.items() if size != SWITCH}})
    if (error := rows[OVERALL]["calibration_error"]) is not None:
        about = f"Of all positions of all proposals, sent or not; expected calibration error {error:.4f}."
        yield calibration(rows[OVERALL]["reliability"], about)
