"""Model that evaluates each text only once, so that one greedy text can be decoded in many ways.

    memory = Memory(Target("small.gguf"))
    model = MemoryModel(memory)            # one for each drafter, each with a separate cache

The memory stores the most likely token after each text and its probability. Nothing is approximated, and all ways of
drafting get the same answers for any batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ngramspec.backend import Logits, ModelBase
from ngramspec.cost.times import LARGEST
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.mixture.drafter import ROWS
from ngramspec.llama.target import Target
from ngramspec.tokens import common_prefix

Answer = tuple[int, float]
"""Most likely token after a text and its probability."""

UNUSED_ANSWER = (0, 0.5)
"""Placeholder for an answer that is not used."""

MAX_PROBABILITY = 1.0 - 1e-9
"""Maximum probability of an answer, because the other tokens must have a positive probability."""


class Memory:
    """Answers of a model, which evaluates only new texts."""

    def __init__(self, model: Target) -> None:
        self.model = model
        # A text is identified by the number of the text that it continues and its last token; 0 is the empty text.
        self._numbers: dict[tuple[int, int], int] = {}
        self._answers: dict[int, Answer] = {}

    def number(self, text: int, token: int) -> int:
        """Return the number of a text that is continued with a token."""
        return self._numbers.setdefault((text, token), len(self._numbers) + 1)

    def answers_after(self, tokens: Sequence[int], texts: Sequence[int], first: int) -> list[Answer]:
        """Return the answers after the first `first` tokens and after each further token.

        `texts` are the numbers of all prefixes of `tokens`, starting with the empty one.
        """
        unknown = [at for at in range(first, len(tokens) + 1) if texts[at] not in self._answers]
        if unknown:
            begin, end = unknown[0] - 1, unknown[-1]
            self.model.sequences[0].rollback(min(begin, common_prefix(self.model.sequences[0].tokens, tokens)))
            if end - len(self.model.sequences[0].tokens) > LARGEST:
                self.model.sequences[0].prefill(tokens[:begin])
            n_cached = len(self.model.sequences[0].tokens)
            for text, row in zip(
                texts[n_cached + 1 :], self.model.sequences[0].evaluate(tokens[n_cached:end]), strict=False
            ):
                best = int(row.argmax())
                self._answers.setdefault(text, (best, 1.0 / float(np.exp(row - row[best]).sum())))
        return [self._answers[text] for text in texts[first : len(tokens) + 1]]


class MemoryModel(ModelBase):
    """Model that answers from a memory.

    An answer is a row of logits in which the most likely token has its probability. The other tokens share the rest,
    because greedy decoding and greedy drafts use only the most likely token.
    """

    leaves = 8
    max_batch = LARGEST

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.n_ctx, self.n_vocab = memory.model.n_ctx, memory.model.vocabulary.n_vocab
        self.tokens: list[int] = []
        self._texts = [0]

    def prefill(self, tokens: Sequence[int], **_: Any) -> Logits:
        self.rollback(min(common_prefix(self.tokens, tokens), len(tokens) - 1))
        self._append(tokens[len(self.tokens) :])
        row: Logits = self._rows(self.memory.answers_after(self.tokens, self._texts, len(tokens)))[0]
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        start = len(self.tokens)
        self._append(tokens)
        return self._rows(self.memory.answers_after(self.tokens, self._texts, start + 1))

    def rollback(self, length: int) -> None:
        del self.tokens[length:], self._texts[length + 1 :]

    def clear(self) -> None:
        self.rollback(0)

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._texts.append(self.memory.number(self._texts[-1], token))

    def _rows(self, answers: Sequence[Answer]) -> Logits:
        rows = np.empty((len(answers), self.n_vocab), np.float32)
        for row, (best, p) in zip(rows, answers, strict=True):
            row.fill(math.log((1.0 / min(p, MAX_PROBABILITY) - 1.0) / (self.n_vocab - 1)))
            row[best] = 0.0
        return rows


class AnswerModel(MemoryModel):
    """Target that computes only the answers in use: after its own text and, if a drafter needs them, rejections."""

    def __init__(self, memory: Memory, drafter: Drafter | None) -> None:
        super().__init__(memory)
        self._drafter = drafter

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        needs_rows = self._drafter is not None and self._drafter.wants_logits
        return self._rows(self._answers(tokens, ROWS if needs_rows else 0))

    def ask(self, tokens: Sequence[int], branches: Sequence[tuple[int, tuple[int, ...]]]) -> Logits:
        start = len(self.tokens)
        rows, answers = self.evaluate(tokens), list[Answer]()
        for fork, path in branches:
            self.rollback(start + 1 + fork)
            answers.append(self._answers(path, 0)[-1])
        self.rollback(start)
        self._append(tokens)
        return np.concatenate([rows, self._rows(answers)])

    def _answers(self, tokens: Sequence[int], n_rejected: int) -> list[Answer]:
        """Return the answers after `tokens` up to the first rejected token, and `n_rejected` answers from there on."""
        start = len(self.tokens)
        self._append(tokens)
        end = start
        while end < len(self.tokens) and (not end or self._answers_after(end, end)[0][0] == self.tokens[end]):
            end += 1
        answers = self._answers_after(start + 1, min(end + n_rejected, len(self.tokens)))
        return answers + [UNUSED_ANSWER] * (len(tokens) - len(answers))

    def _answers_after(self, first: int, last: int) -> list[Answer]:
        return self.memory.answers_after(self.tokens[:last], self._texts, first)
