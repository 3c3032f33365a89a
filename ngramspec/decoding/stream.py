"""`TextStream`: the bytes of successive tokens as text, which ends before the first stop string."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from encodings import utf_8
from types import MappingProxyType

from ngramspec.tokens import partial_match_start


class TextStream:
    """Turns the byte pieces of successive tokens into text that ends before the first stop string.

    What comes out is final: no broken character is released and rolled back, no part of a stop string is shown.
    Bytes that can never become valid UTF-8 read U+FFFD. A character still incomplete when the text ends is dropped: it
    was cut off by the end (of the token budget, say), not wrong.

    Example (stop "END"):
        push(b"caf\\xc3") -> "caf"      half a character is held back
        push(b"\\xa9 E")  -> "é "       "E" could begin "END"
        push(b"NDE")     -> ""         the text ended before "END"; `stop_string` is "END"

    Control tokens have no text, but a stop string may name some. `pieces` contains the bytes to push for these by their
    ids; nothing of them is shown.

    Time of a push: O(piece * stop strings), plus O(longest stop string squared) for the held-back suffix.
    """

    def __init__(
        self, stop: Sequence[str] = (), min_tokens: int = 0, controls: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Start an empty text.

        Args:
            stop: Strings that end the text, which then stops right before them.
            min_tokens: Number of tokens at the start in which stop strings do not count.
            controls: Ids of the control tokens by their names.

        Raises:
            ValueError: a stop string is empty, or `stop` is itself a string.
        """
        if isinstance(stop, str):
            raise ValueError(f"stop must be a sequence of strings, not the string {stop!r}")
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        names = sorted((name for name in controls if any(name in text for text in stop)), key=len, reverse=True)
        # Halves of surrogate pairs, which no text contains, stand for control tokens.
        marks = {name: chr(0xD800 + i) for i, name in enumerate(names)}
        self.pieces = {controls[name]: b"\xff" + name.encode() for name in names}
        self._marks = {self.pieces[controls[name]]: mark for name, mark in marks.items()}
        self._hidden = dict.fromkeys(map(ord, marks.values()))
        pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._stops = {pattern.sub(lambda match: marks[match[0]], text): text for text in stop} | {s: s for s in stop}
        # Longest first, so that the first of equal positions is the longest.
        self.stop = tuple(sorted(self._stops, key=len, reverse=True))
        self.decoder = utf_8.IncrementalDecoder(errors="replace")
        self._suffix = ""
        self._min_tokens_left = min_tokens
        # The stop string that ended the text: the one that begins first. If several begin at the same place, it is the
        # longest one that is complete by then. Waiting for a longer one would cost passes and give the same text.
        self.stop_string: str | None = None

    def push(self, piece: bytes) -> str:
        """Return the text that a token's bytes release; empty after a stop string."""
        if self.stop_string is not None:
            return ""
        # Most pieces are whole characters after whole characters, for which the decoder is five times as slow.
        is_whole = piece.isascii() and not self.decoder.buffer
        text = self._suffix + (piece.decode() if is_whole else self._marks.get(piece) or self.decoder.decode(piece))
        if not self.stop or self._min_tokens_left > 0:
            self._min_tokens_left -= 1
            return text.translate(self._hidden)
        open_at = partial_match_start(text, self.stop)
        stop_at = self._find(text)
        # An unfinished stop string that begins before a finished one still wins if it completes: "abcd" over "bc" after
        # "abc". So the finished one counts only when nothing that began earlier is still open.
        if stop_at is not None and stop_at[0] <= open_at:
            return self._cut(text, *stop_at)
        self._suffix = text[open_at:]
        return text[:open_at].translate(self._hidden)

    def finish(self) -> str:
        """Return the text that was held back, when the text ends for another reason.

        A complete stop string may have waited for one that began earlier. It then ends the text here.
        """
        text, self._suffix = self._suffix, ""
        self.decoder.reset()
        stop_at = self._find(text)
        return text.translate(self._hidden) if stop_at is None else self._cut(text, *stop_at)

    def _cut(self, text: str, at: int, stop: str) -> str:
        self.stop_string = self._stops[stop]
        self._suffix = ""
        return text[:at].translate(self._hidden)

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return the position and the text of the earliest stop string, the longest of those."""
        matches = [(at, stop) for stop in self.stop if (at := text.find(stop)) >= 0]
        return min(matches, key=lambda match: match[0], default=None)
