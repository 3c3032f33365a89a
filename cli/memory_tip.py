"""Suggestion to save answers, shown after an answer that earlier answers would have helped to draft."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.memory.memory import settings_path
from ngramspec.storage import state_folder

from .console import note

RUN = 16  # tokens of a repeated run: phrases of this length hardly recur by chance
SHARE = 0.25  # share of the answer that must be in repeated runs


class MemoryTip:
    """Suggestion to save answers, shown once per machine to a user whose answers repeat each other.

    An answer counts if a quarter of its tokens are in runs of 16 or more tokens that an earlier answer of the session
    contains. Within the session they were drafted anyway; the next one can only draft them if answers are saved. A user
    who has decided on saving them sees no tip.
    """

    def __init__(self) -> None:
        self._runs: set[tuple[int, ...]] = set()  # runs of tokens in earlier answers

    def show_after(self, answer: Sequence[int], *, is_retry: bool = False) -> None:
        """Remember the tokens of an answer, and show the tip if the answer repeats earlier ones.

        With `is_retry`, the answer replaces the last one, which it naturally repeats.
        """
        starts = range(len(answer) - RUN + 1)
        runs = [tuple(answer[start : start + RUN]) for start in starts]
        repeats = {i for start in starts if runs[start] in self._runs for i in range(start, start + RUN)}
        self._runs.update(runs)
        if not is_retry and repeats and len(repeats) >= SHARE * len(answer) and _is_first():
            note(
                f"tip: {len(repeats) / len(answer):.0%} of this answer repeats earlier ones;"
                " 'ngramspec memory save-answers on' saves answers to speed up later chats"
            )


def _is_first() -> bool:
    """Return True once per machine, and never after the user has decided on saving answers."""
    if settings_path().exists():
        return False
    marker = state_folder() / "memory-tip-shown"
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch(exist_ok=False)
    except OSError:
        # Already shown, or the marker file cannot be written: skip the tip rather than repeat it in every chat.
        return False
    return True
