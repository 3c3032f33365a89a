"""Figures of a replay, under the names in the results of other drafters, and the `Report` on them.

`CurveComparison` runs the recordings through several replays, one per cost curve, because the policy drafts by the same
curve with which the result is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ngramspec.cost.fixed_curves import CURVES, SWITCH, to_json
from ngramspec.cost.times import PassTimes
from ngramspec.data import __version__
from ngramspec.instruments.replay.replay import BINS, Recording, Replay, ReplayCounts
from ngramspec.instruments.replay.transcripts import MAX_RESPONSE, MAX_TOTAL
from ngramspec.instruments.reports import report as reports
from ngramspec.instruments.reports.report import OVERALL, Bar, Bars, Report, Section, Table, figure
from ngramspec.steps import Step

Figures = dict[str, Any]


def figures(tally: ReplayCounts, curves: Mapping[str, PassTimes]) -> Figures:
    """Return the figures of a replay as JSON; microseconds are CPU time, and padding does not count as drafted."""
    # `calibration_error` is the mean of |predicted - observed| over bins, weighted by their counts (Naeini, Cooper,
    # Hauskrecht 2015, "Obtaining well calibrated probabilities using Bayesian binning").
    stats = tally.stats
    bins: list[list[float]] = tally.reliability.T.tolist()
    n_seen = sum(count for count, _, _ in bins)
    passes, prompt = max(1, stats.passes), max(1, tally.prompt_tokens)
    by_position = zip(stats.accepted_at, stats.drafted_at, strict=True)
    return {
        "transcripts": tally.transcripts,
        "prompt_tokens": tally.prompt_tokens,
        "tokens": stats.tokens,
        "passes": stats.passes,
        "tokens_per_pass": stats.tokens_per_pass,
        "drafted_per_pass": stats.drafted / passes,
        "acceptance": stats.acceptance_rate,
        "no_draft_share": stats.passes_without_draft / passes,
        "max_draft": len(stats.drafted_at),
        "batches": {str(size): count for size, count in sorted(tally.batches.items())},
        "accept_by_position": [round(n_accepted / n_drafted, 4) for n_accepted, n_drafted in by_position],
        "drafts_reaching_position": list(stats.drafted_at),
        "cpu_us_per_pass": 1e6 * tally.work_seconds / passes,
        "start_us_per_prompt_token": 1e6 * tally.begin_seconds / prompt,
        "reliability": [
            {
                "from": i / BINS,
                "to": (i + 1) / BINS,
                "count": int(count),
                "predicted": predicted / count if count else None,
                "observed": right / count if count else None,
            }
            for i, (count, predicted, right) in enumerate(bins)
        ],
        "calibration_error": sum(abs(p - right) for _, p, right in bins) / n_seen if n_seen else None,
        "speedup": {name: tally.speedup(curve) for name, curve in curves.items()},
    }


def by_category(tallies: Mapping[str, ReplayCounts], curves: Mapping[str, PassTimes]) -> dict[str, Figures]:
    """Return the figures of each category, then those of all tokens together."""
    if not tallies:
        return {}
    total = ReplayCounts()
    for tally in tallies.values():
        total.merge(tally)
    return {category: figures(tally, curves) for category, tally in [*tallies.items(), (OVERALL, total)]}


class CurveComparison:
    """The replay of recordings, grouped by category, with one replay per cost curve."""

    def __init__(self, recordings: Sequence[Recording], drafter: str, replays: Mapping[str, Replay]) -> None:
        self._recordings, self._drafter, self._replays = recordings, drafter, replays
        self._curves = {name: replay.curve for name, replay in replays.items()}
        # Id of the first answer of each category, and its steps in the first replay.
        self.texts: dict[str, tuple[str, list[Step]]] = {}
        self._counts: dict[str, dict[str, ReplayCounts]] = {name: {} for name in replays}
        self.done = 0  # number of recordings that all replays have finished

    def run(self) -> Iterator[Recording]:
        """Replay the recordings, one per `next`; if the caller stops early, the finished ones remain."""
        for recording in self._recordings:
            counts: dict[str, ReplayCounts] = {}
            for name, replay in self._replays.items():
                steps: list[Step] = []
                counts[name] = replay.run(recording, steps.append)
                self.texts.setdefault(recording.category, (recording.id, steps))
            for name, replay_counts in counts.items():
                self._counts[name].setdefault(recording.category, ReplayCounts()).merge(replay_counts)
            self.done += 1
            yield recording

    def document(self) -> Figures:
        """Return all counts as JSON, with the keys of the harness for other drafters; results are DRAFTER@CURVE."""
        finished_recordings = self._recordings[: self.done]
        return {
            "complete": self.done == len(self._recordings),
            "transcripts": self.done,
            "decode_tokens": sum(len(r.response) - 1 for r in finished_recordings),
            "prompt_tokens": sum(len(r.prompt) for r in finished_recordings),
            "categories": dict(Counter(r.category for r in finished_recordings)),
            "curves": {name: to_json(curve) for name, curve in self._curves.items()},
            "results": {f"{self._drafter}@{name}": by_category(t, self._curves) for name, t in self._counts.items()},
        }


MEASURED_CURVE = "measured"  # name of the curve with the costs of a model on this machine


def replay_report(
    document: Figures,
    total: int,
    vocabulary: str,
    sources: Mapping[str, str],
    warnings: Sequence[str] = (),
    texts: Section | None = None,
) -> Report:
    """Return the report on the `document` of `CurveComparison` with "settings" and "command" of `total` answers."""
    settings = document["settings"]
    rows = {name: document["results"][f"{settings['drafter']}@{name}"] for name in document["curves"]}
    origin = (
        f"recorded conversations: {document['transcripts']}, with {document['decode_tokens']} tokens to decode and"
        f" {document['prompt_tokens']} tokens of prompts; tokens of {vocabulary}; drafter {settings['drafter']}, policy"
        f" {settings['policy']}, memory {settings['memory']}; ngramspec {__version__}"
    )
    sections = [section for name in rows for section in _sections(name, rows[name], document, sources.get(name))]
    notes = [
        "gain: speed relative to plain decoding, simulated with the cost curve; one drafter for all conversations",
        f"the first token of a response belongs to the prefill; responses are cut to {MAX_RESPONSE} tokens, and the"
        f" start of prompts is cut so that both have at most {MAX_TOTAL}",
    ]
    if not document["complete"]:
        notes.append(f"INCOMPLETE: stopped after {document['transcripts']} of {total} conversations")
    headline = "; ".join(_headline(name, rows[name], sources.get(name)) for name in rows)
    return Report(
        "Estimated speed-up on recorded conversations",
        document["command"],
        origin,
        _table(rows),
        _bars(rows),
        [*sections, *([] if texts is None else [texts])],
        notes,
        headline,
        setup=[origin],
        details=[*warnings, headline],
    )


def _headline(curve: str, rows: Mapping[str, Figures], source: str | None) -> str:
    """Return the gain with the cost curve that it depends on."""
    if not rows:
        return "nothing was replayed"
    by = f"with the cost curve {curve}" + (f" ({source})" if source else "")
    if not rows[OVERALL]["max_draft"]:
        return f"nothing was drafted {by}"
    return f"{rows[OVERALL]['speedup'][curve]:.2f} times as fast with drafts as without, simulated {by}"


def _table(results: Mapping[str, Mapping[str, Figures]]) -> Table:
    cells = [
        [
            name,
            category,
            str(row["tokens"]),
            f"{row['tokens_per_pass']:.2f}",
            figure(row["acceptance"], ".0%"),
            f"{row['no_draft_share']:.0%}",
            f"{row['speedup'][name]:.3f}x",
        ]
        for name, rows in results.items()
        for category, row in rows.items()
    ]
    return Table(["curve", "category", "tokens", "per pass", "accepted", "no draft", "gain"], cells, text=2)


def _bars(results: Mapping[str, Mapping[str, Figures]]) -> Bars:
    """Return the chart of gains by category; for several curves, the gain of each."""
    gains = {
        (category if len(results) == 1 else name): row["speedup"][name]
        for name, rows in results.items()
        for category, row in rows.items()
    }
    where = f"on the curve {next(iter(results))}" if len(results) == 1 else "by cost curve"
    bars = [Bar(name, gain, None, None, f"{gain:.3f}x") for name, gain in gains.items()]
    return Bars(f"Tokens per second, drafted / plain, {where}", bars)


def _sections(name: str, rows: Mapping[str, Figures], document: Figures, source: str | None) -> Iterator[Section]:
    seconds = document["curves"][name]
    table = _table({name: rows})
    without_curve = Table(table.headings[1:], [row[1:] for row in table.rows], totals=1)
    yield Section(
        f"Speed-up on the curve {name}",
        f"{source or CURVES[name][1]}. A gain of 1.20x is 1.2 times as many tokens per second.",
        [_bars({name: rows}), without_curve],
    )
    points = {name: {int(size): value for size, value in seconds.items() if size != SWITCH}}
    yield reports.costs(points, seconds.get(SWITCH))
    if rows and rows[OVERALL]["max_draft"]:
        rates = {category: row["accept_by_position"] for category, row in rows.items()}
        yield reports.acceptance(rates, "Acceptance rate among the drafts that reach that position.", totals=1)
