"""`AnswerStore`: answers by request, so that a repeated request is drafted from its earlier answer.

The same prompt with the same sampling settings nearly always gets the same answer: decoding is deterministic, and only
rounding in batches of other sizes, or rules that are not sampling settings, can change it. A match in any other text is
weaker evidence, because it does not imply that the whole answer is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from ngramspec.drafting.acceptance_estimator import DecayingRate
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

REQUESTS = 1024  # maximum number of stored requests, the latest ones
ANSWERS = 4  # maximum number of stored answers to each request, the latest ones
LONGEST = 4096  # maximum number of stored tokens of an answer

CERTAIN = 0.9
"""Minimum probability at which the tokens of an earlier answer are drafted before any other guess."""

CLASSES = 7  # number of classes of agreeing tokens: 0, 1, 2 to 3, 4 to 7, and so on
HITS, TRIES = 8.0, 8.02
FADE = 0.99


class AnswerStore:
    """The latest answers to the latest requests, and how reliably an answer was repeated."""

    def __init__(self) -> None:
        self._answers: dict[int, list[array[int]]] = {}  # answers by the hash of prompt and sampling
        # Acceptance rate of the next token by the class of the number of tokens that agree.
        self._rates = [DecayingRate(HITS, TRIES, fade=FADE) for _ in range(CLASSES)]

    def begin(self, prompt: Sequence[int], sampling: Sampling) -> CurrentAnswer:
        """Start the answer to a request, which is stored as it grows."""
        if sampling.greedy:
            sampling = replace(sampling, seed=0)  # the seed has no effect
        key = hash((tuple(prompt), sampling))
        # A dict keeps the order of insertion, so the first request is the least recently repeated one.
        earlier = self._answers.pop(key, [])
        tokens = array("i")
        self._answers[key] = [*earlier[1 - ANSWERS :], tokens]
        if len(self._answers) > REQUESTS:
            del self._answers[next(iter(self._answers))]
        return CurrentAnswer(tokens, [answer for answer in reversed(earlier) if answer], self._rates)


class CurrentAnswer:
    """An answer as it grows, and the earlier answers to the same request that agree with it.

    Attributes:
        earlier: Earlier answers that agree with this one so far, and continue; the latest first.
    """

    def __init__(self, tokens: array[int], earlier: list[array[int]], rates: Sequence[DecayingRate]) -> None:
        self.earlier = earlier
        self._tokens, self._rates = tokens, rates
        self._length = 0  # number of tokens so far, including those beyond `LONGEST`, which are not stored

    def continuation(self, limit: int) -> tuple[list[int], tuple[float, ...]]:
        """Return the next tokens of an earlier answer, and the probability of each if those before it are right.

        The tokens end before the first one whose probability is below `CERTAIN`.
        """
        if not self.earlier:
            return [], ()
        start = self._length
        chances: list[float] = []
        tokens = self.earlier[0][start : start + limit]
        for n_agreeing in range(start, start + len(tokens)):
            chance = self._rates[_length_class(n_agreeing)].value
            if chance < CERTAIN:
                break
            chances.append(chance)
        return tokens[: len(chances)].tolist(), tuple(chances)

    def accept(self, tokens: Sequence[int]) -> None:
        """Add emitted tokens, and learn from them if the earlier answer was repeated."""
        start, end = self._length, self._length + len(tokens)
        if self.earlier:
            predictions = self.earlier[0][start:end]
            n_right = common_prefix(predictions, tokens)
            for n_agreeing in range(start, start + n_right):
                self._rates[_length_class(n_agreeing)].add(True)
            if n_right < len(predictions):
                self._rates[_length_class(start + n_right)].add(False)
            new_tokens = array("i", tokens)
            self.earlier = [answer for answer in self.earlier if len(answer) > end and answer[start:end] == new_tokens]
        self._length = end
        if end <= LONGEST:
            self._tokens.extend(tokens)


def _length_class(n_agreeing: int) -> int:
    return min(n_agreeing.bit_length(), CLASSES - 1)
