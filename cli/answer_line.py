"""Line after an answer with its speed and the gain from drafts, and the notes below it."""

from __future__ import annotations

from ngramspec.cost.times import STEEP, PassTimes
from ngramspec.cpu.cores import CpuLoad
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.steps import SHORT, Stats

from .console import note, pluralize
from .view import slow_core

LIMITS = {"length": "stopped at the token limit (-n/--predict)", "context": "stopped because the context is full"}
"""Notes for answers that a limit ended, by the stop reason."""

INTERRUPTIONS = ("stopped", "interrupted", "failed")
"""Words for answers that ended early."""

RARE = 0.1  # share of passes up to which drafts are too rare for a gain


class AnswerReport:
    """Report after each answer: a line with its speed, and notes for the user that are each shown once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(
        self,
        stats: Stats,
        decoder: SpeculativeDecoder,
        governor: ThreadGovernor | None,
        ending: str,
        *,
        seed: int | None = None,
        intro: str = "",
    ) -> None:
        """Report on an answer.

        Args:
            stats: Counters of the answer.
            decoder: Decoder that generated it.
            governor: Threads of the model; `None` means that the load is unknown.
            ending: Stop reason of the answer, or one of `INTERRUPTIONS`.
            seed: Seed to show, if it is a new one.
            intro: Start of the line.
        """
        busy_cores = governor.state.other_cores if governor is not None else None
        is_busy = busy_cores is not None and busy_cores > CpuLoad.QUIET
        gain = None if decoder.drafter is None else format_gain(stats, decoder.times, is_busy=is_busy)
        figures = ", ".join(filter(None, (format_speed(stats), gain)))
        parts = [intro, ending if ending in INTERRUPTIONS else "", figures]
        if seed is not None and self._is_new(f"seed {seed}"):
            parts.append(f"seed {seed}")
        note("; ".join(filter(None, parts)))
        if ending in LIMITS:
            note(LIMITS[ending])
        if decoder.drafter is not None and (slow := slow_core()) is not None and self._is_new("core"):
            note(slow)
        if stats.close_calls and self._is_new("rounding"):
            calls = pluralize(stats.close_calls, "token")
            note(f"note: rounding could have changed {calls}; --exact on prevents this")
        # Without -t, decoding leaves busy cores to other programs, with --exact off even if that changes bits.
        is_fixed = governor is not None and not governor.adapts and governor.threads > 1
        if is_fixed and is_busy and self._is_new("threads"):
            note("note: decoding would be faster without -t or with --exact off: other programs use the same cores")

    def _is_new(self, name: str) -> bool:
        """Return True at the first call for this name."""
        is_new = name not in self._shown
        self._shown.add(name)
        return is_new


def format_speed(stats: Stats) -> str:
    """Return the number of tokens and their rate."""
    text, speed = pluralize(stats.generated, "token"), stats.tokens_per_second
    return text if speed is None else f"{text} at {speed:,.{1 if speed < 1000 else 0}f} tokens/s"


def format_gain(stats: Stats, times: PassTimes | None = None, *, is_busy: bool = False) -> str | None:
    """Return the gain from drafts, or the one reason for its absence; `None` if the answer is too short.

    Args:
        stats: Counters of the answer.
        times: Costs of passes; `None` means that they are unknown.
        is_busy: True if other programs use the cores.
    """
    if stats.passes < SHORT:
        return None
    gain = stats.estimated_gain
    if gain is not None and round(gain, 2) > 1:
        return f"{gain:.2f} times as fast with drafts"
    drafts = stats.passes - stats.passes_without_draft
    if drafts + stats.missed <= RARE * stats.passes:
        return "no gain: nothing repeated"
    # Even of disturbed passes it is known that so few tokens saved nothing. Wrong drafts are not the reason if they
    # were fewer than the correct guesses that were not sent.
    if drafts > stats.missed and 2 * stats.accepted <= (RARE * stats.passes if stats.is_disturbed else stats.drafted):
        return "no gain: drafts were wrong"
    if stats.is_disturbed:
        return "gain unknown: other programs ran" if is_busy else "gain unknown: times varied"
    # With the fewer threads that other programs leave, a batch costs more in plain passes.
    reason = "no gain: other programs ran" if is_busy else "no gain: batches are expensive here"
    is_expensive = times is not None and times.pairs and times.ratio(4) >= STEEP
    return reason if is_expensive else "no gain: little repeated"
