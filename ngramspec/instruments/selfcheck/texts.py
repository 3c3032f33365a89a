"""Plain and drafted texts of the same prompt: are their tokens equal, and if not, does the batch size explain it?

The last bits of logits may depend on the batch size (see `ngramspec.cost.measure`). A difference counts as explained by
that only if two things are shown. Each of the two tokens is what the sampler takes, with the noise of that place, from
the logits of its own pass. And some logits within the probe's bound of plain decoding's make the sampler take the
drafted token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ngramspec.backend import Logits, Model
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.errors import GrammarError
from ngramspec.instruments.prompts import Case
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats
from ngramspec.tokens import common_prefix

GREEDY = "greedy"

GRAMMAR = r"""
root   ::= record{8,}
record ::= "{\"name\": \"" [a-z]{1,12} "\", \"size\": " [0-9]{1,6} "}\n"
"""
"""The grammar forces half of such a text."""


Setting = tuple[str, Sampling, str | None]
"""A way of choosing tokens under which drafts must not change the text: its name, and how drafts are verified."""


def settings(seed: int) -> tuple[Setting, ...]:
    """Greedy decoding, and ways of sampling with a seed."""
    warm = partial(Sampling, temperature=0.8, seed=seed)
    return (
        (GREEDY, Sampling(), None),
        ("coupled", warm(), None),
        ("match", warm(), "match"),
        ("penalties", warm(repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2), None),
        ("grammar", warm(grammar=GRAMMAR), None),
    )


Draw = Callable[[Logits], int]
"""The token that is taken from logits of shape (n_vocab,), at one place of a text."""

_BISECTIONS = 12


@dataclass(frozen=True, slots=True)
class TextDifference:
    """The first difference of two texts."""

    position: int  # how many tokens were equal before
    plain: int | None  # the token id there; None where that text had ended
    drafted: int | None
    plain_text: str  # what it stands for
    drafted_text: str
    plain_logit: float | None  # its logit in plain decoding
    drafted_logit: float | None
    bound: float  # how far batch sizes move a logit here, by the probe; 0 in exact mode
    # How far any of these logits must move at most for the drafted token to be taken; in greedy decoding half the gap
    # between the two. None if `bound` is not enough, or if a token is not what the sampler takes.
    needed: float | None


def movement(
    draw: Draw, plain_row: Logits, drafted_row: Logits, plain: int, drafted: int, bound: float
) -> float | None:
    """How far logits must move for `draw` to take the drafted token: `TextDifference.needed`.

    A row within the distance returned does make the sampler take the drafted token. That no closer row does is certain
    only without filters. `bound`: the largest movement that counts; 0: none counts.
    """
    if bound <= 0 or draw(plain_row) != plain or draw(drafted_row) != drafted:
        return None

    def taken(distance: float) -> bool:
        step = np.float32(distance)
        # Without filters nothing within the distance favours a token more than this; filters look at other tokens too.
        favoured = plain_row - step
        favoured[drafted] = plain_row[drafted] + step
        # These are the drafted pass's logits, moved no further than the distance from the plain ones.
        clipped = np.clip(drafted_row, plain_row - step, plain_row + step)
        return draw(favoured) == drafted or draw(clipped) == drafted

    if not taken(bound):
        return None
    low, high = 0.0, bound
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if taken(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class TextPair:
    """The plain and the drafted text of one prompt under one setting."""

    category: str
    prompt: str
    setting: str
    prompt_tokens: int  # how much of the prompt was read
    tokens: int  # how many were compared
    # drafted, accepted: draft tokens sent, and emitted.
    drafted: int
    accepted: int
    cut: bool  # whether it was kept short for want of time
    difference: TextDifference | None  # the first one, if there is any


class LogitsKeeper:
    """A model that holds on to the logits it returned last, which are valid until it returns others."""

    def __init__(self, target: Model) -> None:
        self._target = target
        self.rows: Logits = np.empty((0, target.n_vocab), np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def prefill(self, tokens: Sequence[int], **options: Any) -> Logits:
        row = self._target.prefill(tokens, **options)
        self.rows = row[np.newaxis]
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        self.rows = self._target.evaluate(tokens)
        return self.rows

    def submit(self, tokens: Sequence[int]) -> None:
        self._target.submit(tokens)

    def fetch(self) -> Logits:
        self.rows = self._target.fetch()
        return self.rows


@dataclass(slots=True)
class TextComparison:
    """Makes and compares texts."""

    target: LogitsKeeper  # what both decoders run on
    # plain, drafted: in the same mode.
    plain: SpeculativeDecoder
    drafted: SpeculativeDecoder
    # Tells how far batch sizes move a logit; asked when a text differs, and may use the target.
    bound: Callable[[], float]

    def compare(self, case: Case, setting: Setting, most: int, *, cut: bool) -> TextPair:
        """Make both texts of a prompt, of up to `most` tokens; the drafted one ends where it differs.

        Raises:
            GrammarError: the setting's grammar and this vocabulary do not go together.
        """
        plain, _, _ = self._generate(self.plain, case.tokens, setting, most)
        try:
            text, stats, row = self._generate(self.drafted, case.tokens, setting, len(plain), plain)
        except GrammarError as error:
            raise RuntimeError(f"a grammar that works in plain decoding fails with drafts: {error}") from error
        common, difference = common_prefix(plain, text), None
        if row is not None or len(text) < len(plain):
            difference = self._explain(case.tokens, setting, plain, text, row)
        counts = len(case.tokens), common, stats.drafted, stats.accepted
        return TextPair(case.category, case.id, setting[0], *counts, cut, difference)

    def _generate(
        self,
        decoder: SpeculativeDecoder,
        prompt: Sequence[int],
        setting: Setting,
        most: int,
        expected: Sequence[int] | None = None,
    ) -> tuple[list[int], Stats, Logits | None]:
        """A text's tokens, its counters, and the logits of its last token if that differs from the expected one."""
        tokens: list[int] = []
        stats, row = Stats(), None
        _, sampling, acceptance = setting
        # Short texts repeat little. What is to come, slightly wrong, has drafts accepted and refused in any text.
        foretold: list[int] = []
        if expected is not None and decoder.drafter is not None and decoder.drafter.prediction is not None:
            foretold = [(token + (i % 8 == 7)) % self.target.n_vocab for i, token in enumerate(expected)]
        generation = decoder.generate(
            prompt, max_tokens=most, sampling=sampling, acceptance=acceptance, prediction=foretold
        )
        for step in generation:
            stats.add(step)
            for token, logits in zip(step.tokens, self.target.rows, strict=False):
                tokens.append(token)
                if expected is not None and token != expected[len(tokens) - 1]:
                    row = logits.copy()
                    break
            if row is not None:
                generation.close()
                break
        return tokens, stats, row

    def _explain(
        self, prompt: Sequence[int], setting: Setting, plain: list[int], drafted: list[int], drafted_row: Logits | None
    ) -> TextDifference:
        """Look into the first difference of two texts, which is where the second one ends."""
        common = common_prefix(plain, drafted)
        bound, target, (_, sampling, _) = self.bound(), self.target, setting
        vocabulary = self.plain.vocabulary
        read(target, prompt, exact=self.plain.exact == "on")  # the probe may have emptied the cache
        self._generate(self.plain, prompt, setting, common + 1)
        row = target.rows[0]
        a, b, needed = plain[common], None, None
        if drafted_row is not None:
            b = drafted[common]
            sampler = vocabulary.sampler(sampling)
            sampler.begin(prompt)
            for token in plain[:common]:
                sampler.accept(token)
            draw = partial(sampler.draw, position=len(prompt) + common)
            needed = movement(draw, row, drafted_row, a, b, bound)
        texts = ["" if t is None else vocabulary.piece(t).decode("utf-8", "replace") for t in (a, b)]
        logit = None if b is None else float(row[b])
        return TextDifference(common, a, b, texts[0], texts[1], float(row[a]), logit, bound, needed)


def read(target: Model, prompt: Sequence[int], *, exact: bool) -> None:
    """Read a prompt into an empty cache, so that a generation finds it there."""
    target.clear()
    target.prefill(prompt, aligned=exact)
