"""`LineLimits`: where an editor's suggestion ends before the model ends it. Lines are what it is cut into.

    t_max_predict_ms   once so much time has passed since the first token, the text ends with the next line end
    n_indent           the text ends before a line, other than its first, that is indented by fewer spaces and tabs

A blank line is indented by none, so it ends a text under `n_indent`: what these fields do in llama-server, for which
editors set them. What a line's indentation is shows with its first other character: until then it is held back, so
that the text depends on no token's or draft's length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_MARGIN = " \t"


@dataclass(frozen=True, slots=True)
class LineRules:
    """When a text ends early.

    Attributes:
        seconds: from the first token on, after which the text ends with a line; None: never.
        indent: spaces and tabs that each line but the first begins with at least; 0: any line may come.
    """

    seconds: float | None = None
    indent: int = 0


class LineLimits:
    """`LineRules` at work on one text.

    Args:
        rules: the rules.
        clock: seconds from some moment on.

    Attributes:
        ended: whether the text has ended by the rules. What comes afterwards is no part of it.
    """

    def __init__(self, rules: LineRules, clock: Callable[[], float] = time.monotonic) -> None:
        self.ended = False
        self._rules, self._clock = rules, clock
        self._began: float | None = None
        self._at_margin = False
        self._held = ""

    def push(self, text: str) -> str:
        """What can be shown, now that `text` was generated; call it for tokens without text as well."""
        if self.ended:
            return ""
        now = self._clock()
        if self._began is None:
            self._began = now
        line_end = text.find("\n")
        if self._rules.seconds is not None and now - self._began > self._rules.seconds and line_end >= 0:
            self.ended = True
            text = text[: line_end + 1]
        return self._indented(text) if self._rules.indent else text

    def finish(self) -> str:
        """What was held back of a text that has ended in another way."""
        rest, self._held = self._held, ""
        return "" if self.ended else rest

    def _indented(self, text: str) -> str:
        text, self._held = self._held + text, ""
        line = 0
        while True:
            if self._at_margin:
                margin = len(text) - line - len(text[line:].lstrip(_MARGIN))
                if line + margin == len(text):
                    self._held = text[line:]
                    return text[:line]
                if margin < self._rules.indent:
                    self.ended = True
                    return text[:line]
            line_end = text.find("\n", line)
            self._at_margin = line_end >= 0
            if not self._at_margin:
                return text
            line = line_end + 1
