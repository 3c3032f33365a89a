"""Line after an answer with its speed and the gain from drafts, and the notes below it."""

from __future__ import annotations

from ngramspec.cost.times import PassTimes
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
    ) -> None:
        """Report on an answer; `ending` is its stop reason or one of `INTERRUPTIONS`."""
        speed = format_speed(stats)
        gain = None if decoder.drafter is None else format_gain(stats, decoder.times)
        parts = [ending if ending in INTERRUPTIONS else "", speed if gain is None else f"{speed}, {gain}"]
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
        used = governor.state.other_cores if governor is not None and is_fixed else None
        if used is not None and used > CpuLoad.QUIET and self._is_new("threads"):
            note("note: decoding would be faster without -t or with --exact off: other programs use the same cores")

    def _is_new(self, name: str) -> bool:
        """Return True at the first call for this name."""
        is_new = name not in self._shown
        self._shown.add(name)
        return is_new


def format_speed(stats: Stats) -> str:
    """Return the number of tokens and their rate."""
    text = pluralize(stats.generated, "token")
    return text if stats.tokens_per_second is None else f"{text} at {stats.tokens_per_second:.1f} tokens/s"


def format_gain(stats: Stats, times: PassTimes | None = None) -> str | None:
    """Return the gain from drafts, or the reason for its absence; `None` if the answer is too short."""
    if stats.passes < SHORT:
        return None
    if stats.is_disturbed:
        return "gain unknown: passes took different times" if stats.drafted else "no drafts"
    cost = f": 4 tokens at once cost {times.ratio(4):.1f} times one token" if times is not None and times.pairs else ""
    if not stats.drafted:
        return f"no drafts{cost}"
    gain = stats.estimated_gain
    if gain is not None and round(gain, 2) > 1:
        return f"about {gain:.2f} times as fast as without drafts"
    if 2 * stats.accepted > stats.drafted:
        return f"no gain{cost}"
    return f"no gain: {stats.accepted} of {stats.drafted} draft tokens accepted"
