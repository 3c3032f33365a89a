"""Comparison of plain and drafted texts of the same prompt; differences are explained by the batch size if possible.

The last bits of logits may depend on the batch size (see `ngramspec.cost.bits`). They explain a difference only if
two conditions are true. First, the sampler draws each of the two tokens from the logits of that token's pass, with the
noise of that position. Second, there are logits within the probe's bound of those of plain decoding from which the
sampler draws the drafted token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ngramspec.backend import ExactnessMode, Logits, Model
from ngramspec.data import GrammarError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.instruments.prompts import Case
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats
from ngramspec.tokens import common_prefix

GREEDY = "greedy"

GRAMMAR = r"""
root   ::= record{8,}
record ::= "{\"name\": \"" [a-z]{1,12} "\", \"size\": " [0-9]{1,6} "}\n"
"""
"""Grammar that forces about half of the tokens of a text."""


Setting = tuple[str, Sampling, str | None]
"""Settings under which drafts must not change the text: name, sampling, and method of verification."""


def settings(seed: int) -> tuple[Setting, ...]:
    """Return the settings to check: greedy decoding, and several ways of sampling with a seed."""
    warm = partial(Sampling, temperature=0.8, seed=seed)
    return (
        (GREEDY, Sampling(), None),
        ("coupled", warm(), None),
        ("match", warm(), "match"),
        ("penalties", warm(repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2), None),
        ("grammar", warm(grammar=GRAMMAR), None),
    )


Draw = Callable[[Logits], int]
"""Function that returns the token drawn from logits of shape (n_vocab,), at one position of a text."""


@dataclass(frozen=True, slots=True)
class TextDifference:
    position: int  # number of equal tokens before the difference
    plain: int | None  # token id of the plain text; `None` if that text had ended
    drafted: int | None  # token id of the drafted text; `None` if that text had ended
    plain_text: str  # text of the plain token
    drafted_text: str  # text of the drafted token
    plain_logit: float | None  # logit of the plain token in plain decoding
    drafted_logit: float | None  # logit of the drafted token in plain decoding
    bound: float  # maximum movement of a logit by the batch size, measured by the probe; 0 in exact mode
    # Upper bound of the movement of logits with which the sampler draws the drafted token. In greedy decoding this is
    # half the distance between the two logits. `None` if `bound` is not enough, or the sampler draws other tokens.
    needed: float | None


def movement(
    draw: Draw, plain_row: Logits, drafted_row: Logits, plain_token: int, drafted_token: int, bound: float
) -> float | None:
    """Return how far logits must move for `draw` to return the drafted token (`TextDifference.needed`).

    Only without filters is it certain that no closer row has this effect.
    """
    if bound <= 0 or draw(plain_row) != plain_token or draw(drafted_row) != drafted_token:
        return None

    def is_drawn(distance: float) -> bool:
        step = np.float32(distance)
        # Without filters this row favours the token most of all rows within the distance. Filters also depend on the
        # other tokens.
        favouring_row = plain_row - step
        favouring_row[drafted_token] = plain_row[drafted_token] + step
        # These are the logits of the drafted pass, limited to the distance from the plain ones.
        clipped_row = np.clip(drafted_row, plain_row - step, plain_row + step)
        return draw(favouring_row) == drafted_token or draw(clipped_row) == drafted_token

    if not is_drawn(bound):
        return None
    low, high = 0.0, bound
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if is_drawn(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class TextPair:
    """The plain and the drafted text of one prompt under one setting."""

    category: str
    prompt: str
    setting: str
    prompt_tokens: int  # number of tokens of the prompt that were read
    tokens: int  # number of compared tokens
    drafted: int  # number of draft tokens sent to the target
    accepted: int  # number of draft tokens emitted
    cut: bool  # whether the texts are shorter because there was too little time
    difference: TextDifference | None  # first difference, if there is one


class LogitsRecorder:
    """A model that stores its last logits, which are valid until it returns others."""

    exactness = ExactnessMode()
    feeds_head = False

    def __init__(self, target: Model) -> None:
        self._target = target
        self.rows: Logits = np.empty((0, target.n_vocab), np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def sequences(self) -> Sequence[LogitsRecorder]:
        return (self,)

    def prefill(self, tokens: Sequence[int], **options: Any) -> Logits:
        row = self._target.prefill(tokens, **options)
        self.rows = row[np.newaxis]
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        self.rows = self._target.evaluate(tokens)
        return self.rows

    def fetch(self) -> Logits:
        self.rows = self._target.fetch()
        return self.rows


@dataclass(slots=True)
class TextComparison:
    target: LogitsRecorder  # target of both decoders
    # Both decoders run in the same mode.
    plain: SpeculativeDecoder
    drafted: SpeculativeDecoder
    # Function that returns how far batch sizes move a logit. It is called when a text differs, and may use the target.
    bound: Callable[[], float]

    def compare(self, case: Case, setting: Setting, max_tokens: int, *, cut: bool) -> TextPair:
        """Generate both texts of a prompt and compare them; the drafted one ends at the first difference."""
        plain, _, _ = self._generate(self.plain, case.tokens, setting, max_tokens)
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
        max_tokens: int,
        plain_tokens: Sequence[int] | None = None,
    ) -> tuple[list[int], Stats, Logits | None]:
        """Generate a text; return its tokens, its counters, and the logits of its last token if it is not expected."""
        tokens: list[int] = []
        stats, row = Stats(), None
        _, sampling, acceptance = setting
        # Short texts repeat little. A prediction with some errors leads to accepted and rejected drafts in any text.
        prediction: list[int] = []
        if plain_tokens is not None and decoder.drafter is not None and decoder.drafter.prediction is not None:
            prediction = [(token + (i % 8 == 7)) % self.target.n_vocab for i, token in enumerate(plain_tokens)]
        generation = decoder.generate(
            prompt, max_tokens=max_tokens, sampling=sampling, acceptance=acceptance, prediction=prediction
        )
        for step in generation:
            stats.add(step)
            for token, logits in zip(step.tokens, self.target.rows, strict=False):
                tokens.append(token)
                if plain_tokens is not None and token != plain_tokens[len(tokens) - 1]:
                    row = logits.copy()
                    break
            if row is not None:
                generation.close()
                break
        return tokens, stats, row

    def _explain(
        self,
        prompt: Sequence[int],
        setting: Setting,
        plain_tokens: list[int],
        drafted_tokens: list[int],
        drafted_row: Logits | None,
    ) -> TextDifference:
        """Return the details of the first difference of two texts, which is at the end of the second one."""
        common = common_prefix(plain_tokens, drafted_tokens)
        bound, target, (_, sampling, _) = self.bound(), self.target, setting
        vocabulary = self.plain.vocabulary
        read(target, prompt, exact=self.plain.exact == "on")  # the probe may have emptied the cache
        self._generate(self.plain, prompt, setting, common + 1)
        row = target.rows[0]
        a, b, shift = plain_tokens[common], None, None
        if drafted_row is not None:
            b = drafted_tokens[common]
            sampler = vocabulary.sampler(sampling)
            sampler.begin(prompt)
            for token in plain_tokens[:common]:
                sampler.accept(token)
            draw = partial(sampler.draw, position=len(prompt) + common)
            shift = movement(draw, row, drafted_row, a, b, bound)
        texts = ["" if t is None else vocabulary.piece(t).decode("utf-8", "replace") for t in (a, b)]
        logit = None if b is None else float(row[b])
        return TextDifference(common, a, b, texts[0], texts[1], float(row[a]), logit, bound, shift)


def read(target: Model, prompt: Sequence[int], *, exact: bool) -> None:
    """Read a prompt into an empty cache, so that a generation can reuse it."""
    target.clear()
    target.prefill(prompt, aligned=exact)
