"""`Recording`: a recorded answer, and the model, vocabulary and verifier that stand in for real ones in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ngramspec.acceptance.rules import Row, Rows, Verdict
from ngramspec.backend import LEAVES, Logits, ModelBase, Path, Progress
from ngramspec.cost.given import LARGEST, GivenCurve
from ngramspec.drafting.draft import Chooser, Draft
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling

ENDLESS = 1 << 30
"""Room for an answer: the loop must not know where the record ends."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded answer as token ids.

    Attributes:
        category, id: whose it is.
        prompt: all that the model saw before it answered.
        response: what it answered, end of turn included; at least 2 tokens.
    """

    category: str
    id: str
    prompt: Sequence[int]
    response: Sequence[int]


class RecordedTarget(ModelBase):
    """A model without weights: it counts tokens, and its clock runs by a cost curve.

    Attributes:
        seconds: modelled time so far, in units of T(1).
    """

    n_ctx = ENDLESS
    n_vocab = 0
    max_batch = LARGEST
    leaves = LEAVES

    def __init__(self, curve: GivenCurve) -> None:
        self.tokens: list[int] = []
        self.seconds = 0.0
        self._curve = curve
        self._last = 1
        # Rows without columns: what a verifier that knows the answer needs to see of logits.
        self._rows = np.empty((LARGEST, 0), np.float32)

    def clock(self) -> float:
        """Modelled time."""
        return self.seconds

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        self.tokens = list(tokens)
        row: Logits = self._rows[0]
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        size = len(tokens)
        self.seconds += self._curve.ratio(size)
        if size != self._last:
            self.seconds += self._curve.switch
            self._last = size
        self.tokens += tokens
        return self._rows[:size]

    def ask(self, tokens: Sequence[int], questions: Sequence[Path]) -> Logits:
        rows = self.evaluate([*tokens, *[0] * len(questions)])
        del self.tokens[len(self.tokens) - len(questions) :]
        return rows

    def rollback(self, length: int) -> None:
        del self.tokens[length:]

    def clear(self) -> None:
        self.tokens.clear()


class UnendingVocabulary:
    """A vocabulary whose tokens say nothing and end nothing: the record ends where it ends; `Replay` sees to that."""

    n_vocab = 0

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        raise NotImplementedError("a record is tokens already")

    def piece(self, token: int) -> bytes:
        return b""

    def is_eog(self, token: int) -> bool:
        return False

    def sampler(self, sampling: Sampling) -> Sampler:
        raise NotImplementedError("a record is verified by RecordedVerifier")


class RecordedVerifier:
    """Keeps a draft while it equals the record, and gives the record's next token after it.

    Args:
        recording: what the target is taken to answer.
    """

    blind = False

    def __init__(self, recording: Recording) -> None:
        self._start = len(recording.prompt)
        self._response = tuple(recording.response)

    def choose(self, position: int) -> Chooser | None:
        return None

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        offset = position - self._start
        truth = self._response[offset : offset + 1 + len(draft)]
        right = 0
        for guess, token in zip(draft.tokens, truth, strict=False):
            if guess != token:
                break
            right += 1
        return Verdict(truth[: right + 1], right)

    def answer(self, row: Row, position: int) -> int | None:
        offset = position - self._start
        return self._response[offset] if offset < len(self._response) else None
