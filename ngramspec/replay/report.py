"""Figures of a replay, under the names that other drafters' results go by.

`Comparison` runs the recordings through several replays, one per cost curve, since the policy drafts by the curve that
it is judged on. It can also run them through the copy-oracle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.given import GivenCurve
from ngramspec.decoding.marked import MarkedText, Piece
from ngramspec.decoding.step import Step
from ngramspec.decoding.text import TextStream
from ngramspec.replay.oracle import copy_lengths, least_cost
from ngramspec.replay.recording import Recording
from ngramspec.replay.replay import Replay, Tally
from ngramspec.reports.report import Passage

Figures = dict[str, Any]

AVERAGED = (
    "tokens",
    "passes",
    "tokens_per_pass",
    "drafted_per_pass",
    "acceptance",
    "no_draft_share",
    "cpu_us_per_pass",
    "start_us_per_prompt_token",
    "calibration_error",
)


def figures(tally: Tally, curves: Mapping[str, GivenCurve]) -> Figures:
    """What was counted, as JSON.

    `acceptance` is accepted / drafted. `accept_by_position` is the same for each position in the draft, among the
    drafts that reach so far (`drafts_reaching_position`). Places that only pad a batch are not drafts. Microseconds are
    CPU time.
    """
    stats = tally.stats
    passes, prompt = max(1, stats.passes), max(1, tally.prompt_tokens)
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
        "accept_by_position": [
            round(accepted / drafted, 4) for accepted, drafted in zip(stats.accepted_at, stats.drafted_at, strict=True)
        ],
        "drafts_reaching_position": list(stats.drafted_at),
        "cpu_us_per_pass": 1e6 * tally.work_seconds / passes,
        "start_us_per_prompt_token": 1e6 * tally.begin_seconds / prompt,
        "reliability": tally.reliability.to_json(),
        "calibration_error": tally.reliability.calibration_error,
        "speedup": {name: tally.speedup(curve) for name, curve in curves.items()},
    }


def by_category(tallies: Mapping[str, Tally], curves: Mapping[str, GivenCurve]) -> dict[str, Figures]:
    """Figures of each category, then "overall" (all tokens together) and "macro" (mean of the categories)."""
    if not tallies:
        return {}
    total = Tally()
    for tally in tallies.values():
        total.merge(tally)
    rows = {category: figures(tally, curves) for category, tally in tallies.items()}
    macro: Figures = {}
    for key in AVERAGED:
        known = [row[key] for row in rows.values() if row[key] is not None]
        macro[key] = sum(known) / len(known) if known else None
    macro["speedup"] = {name: sum(row["speedup"][name] for row in rows.values()) / len(rows) for name in curves}
    return {**rows, "overall": figures(total, curves), "macro": macro}


class Samples:
    """Watches replays, for how the first recorded answer of each category was drafted, in text.

    Args:
        piece: the bytes of a token; a record has tokens only.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._texts: dict[str, tuple[str, MarkedText]] = {}

    def watch(self, recording: Recording) -> Callable[[Step], None] | None:
        """What is told of a recording's steps, where there is none of its category yet."""
        if recording.category in self._texts:
            return None
        stream, text = TextStream(), MarkedText(self._piece)
        self._texts[recording.category] = recording.id, text

        def told(step: Step) -> None:
            text.add(replace(step, pieces=tuple(stream.push(self._piece(token)) for token in step.tokens)))

        return told

    @property
    def passages(self) -> list[Passage]:
        """What was seen so far."""
        return [Passage(f"{category}: {name}", text.spans) for category, (name, text) in self._texts.items()]


class Comparison:
    """The same recordings by several curves.

    Args:
        recordings: category by category.
        drafter: its name.
        replays: one per curve, by the curve's name.
        curves: of the replays, by name.
        oracle: also find what the copy-oracle reaches.
        samples: is shown the first of the replays.

    Attributes:
        done: how many recordings went through all of it.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        drafter: str,
        replays: Mapping[str, Replay],
        curves: Mapping[str, GivenCurve],
        *,
        oracle: bool = True,
        samples: Samples | None = None,
    ) -> None:
        self._samples = samples
        self._recordings = recordings
        self._drafter = drafter
        self._replays = replays
        self._curves = curves
        self._lengths: list[NDArray[np.int32]] | None = [] if oracle else None
        self._tallies: dict[str, dict[str, Tally]] = {name: {} for name in replays}
        self.done = 0

    def run(self) -> Iterator[Recording]:
        """Replay them, one per `next`; stopping early leaves those that are through."""
        for recording in self._recordings:
            tallies: dict[str, Tally] = {}
            for name, replay in self._replays.items():
                watch = self._samples.watch(recording) if self._samples is not None and not tallies else None
                tallies[name] = replay.run(recording, watch)
            lengths = None if self._lengths is None else copy_lengths(recording.prompt, recording.response)
            for name, tally in tallies.items():
                self._tallies[name].setdefault(recording.category, Tally()).merge(tally)
            if self._lengths is not None and lengths is not None:
                self._lengths.append(lengths)
            self.done += 1
            yield recording

    @property
    def complete(self) -> bool:
        """Whether `run` came to its end."""
        return self.done == len(self._recordings)

    def document(self) -> Figures:
        """Everything counted, as JSON, under the keys of the harness for other drafters.

        A result is named DRAFTER@CURVE after the curve that the policy drafted by, and has the speedups by all curves.
        """
        replayed = self._recordings[: self.done]
        return {
            "complete": self.complete,
            "transcripts": self.done,
            "decode_tokens": sum(len(r.response) - 1 for r in replayed),
            "prompt_tokens": sum(len(r.prompt) for r in replayed),
            "categories": dict(Counter(r.category for r in replayed)),
            "curves": {name: curve.stated() for name, curve in self._curves.items()},
            "results": {f"{self._drafter}@{name}": by_category(t, self._curves) for name, t in self._tallies.items()},
            "oracle": None if self._lengths is None else self._oracle(),
        }

    def _oracle(self) -> dict[str, dict[str, Figures]]:
        """The copy-oracle's speedups by category, and curve."""
        curves, tokens = list(self._curves.values()), Counter[str]()
        costs: dict[str, NDArray[np.float64]] = {}
        for recording, lengths in zip(self._recordings, self._lengths or (), strict=False):
            tokens[recording.category] += len(lengths) - 1
            costs[recording.category] = costs.get(recording.category, 0.0) + least_cost(lengths, curves)
        if not costs:
            return {}
        rows = {category: tokens[category] / cost for category, cost in costs.items()}
        macro = np.mean(list(rows.values()), axis=0)
        rows["overall"] = tokens.total() / np.sum(list(costs.values()), axis=0)
        rows["macro"] = macro
        return {
            category: {name: {"oracle_copy1": round(x, 4)} for name, x in zip(self._curves, row.tolist(), strict=True)}
            for category, row in rows.items()
        }
