"""`GrammarGuide`: what a grammar knows of the next tokens, for the drafting side.

A draft is trimmed at the first token that the grammar forbids. Where the drafter has no more to say, and the grammar
leaves a single next character, and after it another, the text so forced is a draft that costs nothing: the keys and
the punctuation of JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ngramspec.draft import Draft
from ngramspec.grammar import Grammar

_CHARACTERS = ["\t", "\n", *map(chr, range(0x20, 0x7F))]
_LONGEST = 64  # characters looked ahead: each takes some 20 microseconds


@dataclass(slots=True)
class _Rate:
    """How often a kind of guess was right, after a few imagined ones."""

    right: float
    tries: float = 4.0

    def add(self, right: bool) -> None:
        self.right += right
        self.tries += 1

    @property
    def value(self) -> float:
        return self.right / self.tries


@dataclass(slots=True)
class GrammarGuide:
    """Shapes the drafts of one generation.

    Args:
        grammar: where the text is; the sampler moves it on.
    """

    grammar: Grammar
    # The last token of a forced text may be longer in the model's own spelling, and run into what follows.
    _inner: _Rate = field(default_factory=lambda: _Rate(3.6))
    _final: _Rate = field(default_factory=lambda: _Rate(2.0))
    _forced: range = range(0)
    _probes: NDArray[np.int32] | None = None

    def shape(self, draft: Draft, limit: int, *, blind: bool = False) -> Draft:
        """A draft as the grammar would have it; see `Speculation.plan`.

        A blind draft is left alone, unless it can be replaced whole: whether a drawn token is in the draft must
        not depend on the token. `legal` then tells where to cut it for the batch.
        """
        here = self.grammar.copy()
        legal = 0
        if not blind:
            legal = _walk(here, draft.tokens)
        self._forced = range(0)
        forced = self._forced_tokens(here)[: limit - legal] if legal < limit else []
        if not forced:
            return draft if blind else draft.head(legal)
        self._forced = range(legal, legal + len(forced))
        kept = draft.head(legal) if legal else Draft()
        guesses = [self._inner.value] * (len(forced) - 1) + [self._final.value]
        fill = (0,) * len(forced)
        return Draft(
            (*kept.tokens, *forced),
            (*kept.q, *({token: 1.0} for token in forced)),
            (*kept.match, *fill) if kept.match or not legal else (),
            (*kept.support, *fill) if kept.support or not legal else (),
            (*kept.acceptance, *guesses) if kept.acceptance or not legal else (),
            f"{kept.source}+grammar" if legal else "grammar",
        )

    def legal(self, draft: Draft) -> int:
        """How many tokens of a draft the grammar allows."""
        return _walk(self.grammar.copy(), draft.tokens)

    def learn(self, sent: int, accepted: int) -> None:
        """What came of the draft shaped last, of which `sent` tokens were sent."""
        for i in self._forced:
            if i < sent and i <= accepted:
                (self._final if i == self._forced[-1] else self._inner).add(i < accepted)

    def _forced_tokens(self, here: Grammar) -> Sequence[int]:
        if self._probes is None:
            self._probes = self._make_probes()
        probes, text = self._probes, b""
        while len(text) < _LONGEST:
            allowed = probes[here.allowed(probes)]
            if allowed.size != 1 or self.grammar.vocabulary.is_eog(int(allowed[0])):
                break
            text += self.grammar.vocabulary.piece(int(allowed[0]))
            here.accept(int(allowed[0]))
        return self._spell(text.decode()) if text else []

    def _make_probes(self) -> NDArray[np.int32]:
        """A token for every printable ASCII character, and all that end a text."""
        spelled = (self._spell(character) for character in _CHARACTERS)
        ends = [token for token in range(self.grammar.vocabulary.n_vocab) if self.grammar.vocabulary.is_eog(token)]
        return np.array([*(tokens[0] for tokens in spelled if len(tokens) == 1), *ends], np.int32)

    def _spell(self, text: str) -> list[int]:
        """The tokens of a text in the middle of another; none where the vocabulary cannot say it so."""
        tokens = self.grammar.vocabulary.tokenize(text, add_bos=False)
        if self._says(tokens, text):
            return tokens
        # Some vocabularies put a space before a text's first word.
        tokens = self.grammar.vocabulary.tokenize("\n" + text, add_bos=False)
        for i in range(1, len(tokens)):
            if self._says(tokens[i:], text):
                return tokens[i:]
        return []

    def _says(self, tokens: Sequence[int], text: str) -> bool:
        return b"".join(map(self.grammar.vocabulary.piece, tokens)) == text.encode()


def _walk(here: Grammar, tokens: Sequence[int]) -> int:
    """How many of the tokens the grammar allows one after the other; moves it past them."""
    for i, token in enumerate(tokens):
        if not here.allows(token):
            return i
        here.accept(token)
    return len(tokens)
