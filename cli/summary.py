"""The one line that says how a generation went."""

from __future__ import annotations

from ngramspec.decoding.step import Stats


def summary(stats: Stats) -> str:
    """Speed, tokens per pass, acceptance rate and the estimated gain over plain decoding, as far as known."""
    parts = [f"{stats.generated} tokens"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
        parts.append(f"{stats.tokens_per_pass:.2f} tokens per pass")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted accepted")
    elif stats.passes:
        parts.append("nothing drafted")
    if stats.drafted and stats.estimated_gain is not None:
        parts.append(f"about {stats.estimated_gain:.2f}x plain decoding")
    return ", ".join(parts)


def rounding(stats: Stats) -> str | None:
    """What to say where tokens were decided by less than batch sizes move logits; None where none was."""
    if not stats.close_calls:
        return None
    times = "once" if stats.close_calls == 1 else f"{stats.close_calls} times"
    return f"text may differ in rounding from undrafted decoding: {times} two tokens were that close (see --exact)"
