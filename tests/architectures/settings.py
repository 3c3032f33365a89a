"""Sessions of requests on one target for every architecture, each with a different way to draft.

A request names its prompt by its difference to the session's prompt. Requests reuse the cache of earlier ones, so the
order matters. Two cases are hardest for a recurrent state: a request that ends after few passes, followed by one that
rolls back slightly more; and measurements after a user's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

KEPT = 3
"""Number of tokens of an answer that the next prompt contains."""


class Ask(NamedTuple):
    """A request: prompt (see `Prompts`), number of tokens, and number after which the consumer stops; 0 means never."""

    prompt: str
    tokens: int
    leaves: int = 0


AGAIN = (Ask("same", 40), Ask("same", 1), Ask("same", 2), Ask("same", 9), Ask("same", 17), Ask("same", 30))
ELSEWHERE = (Ask("shorter", 12), Ask("longer", 20), Ask("last", 20), Ask("same", 3), Ask("tail", 20))
TAILS = (Ask("a", 1), Ask("b", 20), Ask("a", 4), Ask("b", 20))
CUT = (Ask("same", 40, 9), Ask("answer", 9), Ask("same", 40, 12), Ask("answer", 20))
"""Requests that keep the first tokens of an answer and continue differently."""

LEAVING = (Ask("same", 40, 1), Ask("same", 40, 7), Ask("last", 40, 2), Ask("same", 40, 3), Ask("same", 40))
ALL = (*AGAIN, *ELSEWHERE, *TAILS, *LEAVING, *CUT)


@dataclass(frozen=True, slots=True)
class Setting:
    """A session, and the settings of its decoder."""

    name: str
    asks: tuple[tuple[Ask, ...], ...] = (ALL,)  # requests in order; each tuple gets a new decoder, as in a new process
    drafter: Literal["oracle", "mixture", "plain"] = "oracle"
    policy: str = "fixed"
    draft_max: int | None = None
    measured: bool = False  # True if the decoder measures the cost of passes; otherwise all sizes cost the same
    temperature: float = 0.0  # above 0, tokens are sampled with a seed
    length: int = 50  # of the prompt in tokens

    @property
    def most(self) -> int:
        """Maximum number of tokens in a request."""
        return max(ask.tokens for asks in self.asks for ask in asks)


QUICK = (
    Setting("cost", ((*AGAIN[:3], *ELSEWHERE), TAILS), policy="cost", measured=True),
    Setting("fixed 4", ((*AGAIN, *TAILS),), draft_max=4),
    Setting("plain", ((*AGAIN, *TAILS),), drafter="plain"),
    Setting("sampled, fixed 15", ((*LEAVING, *CUT),), draft_max=15, temperature=0.8),
    Setting("fixed 15", ((Ask("shorter", 12), Ask("longer", 30), Ask("same", 9)),), draft_max=15, length=300),
)
"""Settings for tests of every architecture, which take a few minutes."""

_SHORT = (Ask("same", 12), Ask("same", 20, 9), Ask("answer", 20, 12), Ask("a", 1), Ask("b", 12), Ask("shorter", 5))
BRIEF = (
    Setting("fixed 15, measured", (_SHORT,), draft_max=15, measured=True),
    Setting("sampled, fixed 4", ((Ask("same", 1), Ask("tail", 20), Ask("same", 9)),), draft_max=4, temperature=0.8),
)
"""Settings for tests of one model per kind of memory, which take less than a second."""


class Prompts:
    """Random prompts with repetitions, by name; `length` is that of the prompt "same" in tokens."""

    def __init__(self, n_vocab: int, length: int) -> None:
        rng = np.random.default_rng(length)
        block = [int(t) for t in rng.integers(10, n_vocab, -(-length // 3))]
        other = [int(t) for t in rng.integers(10, n_vocab, length)]
        same = [*block, *block[: len(block) // 2], *other[: len(block) // 2], *block][:length]
        same += other[: length - len(same)]
        kept = length * 3 // 5
        self._named: dict[str, Sequence[int]] = {
            "same": same,
            "shorter": same[:kept],
            "longer": [*same, *other[:37]],
            "last": [*same[:-1], (same[-1] + 1 - 10) % (n_vocab - 10) + 10],
            "tail": [*same[:kept], *other[: length - kept]],
            "a": [*same, *other[:5]],
            "b": [*same, *other[10:15]],
            "answer": [*same, *other[20:22]],
        }

    def get(self, name: str, answer: Sequence[int]) -> list[int]:
        """Return a prompt; the one named "answer" contains the beginning of the answer to "same"."""
        prompt = list(self._named[name])
        return [*prompt[:-2], *answer[:KEPT], *prompt[-2:]] if name == "answer" else prompt

    def __getitem__(self, name: str) -> list[int]:
        return self.get(name, ())
