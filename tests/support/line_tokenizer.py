"""`LineTokenizer`: a mock vocabulary in which every third token ends a line, for drafters that read text."""

from __future__ import annotations

from support.mock_target import MockTarget


class LineTokenizer(MockTarget):
    """A mock target whose tokens 0, 3, 6, ... are line breaks."""

    def piece(self, token: int) -> bytes:
        return b"\n" if token % 3 == 0 else super().piece(token)
