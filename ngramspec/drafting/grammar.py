"""`GrammarGuide`: what a grammar knows of the next tokens.

A draft is trimmed at the first token that the grammar forbids. Where the drafter has no more to say, the text that the
grammar forces, character by character, is a draft that costs nothing: the keys and the punctuation of JSON. Grammars of
JSON leave white space open nearly everywhere; the guess is what followed the same mark before in this text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.chances import FadingRate
from ngramspec.drafting.draft import Draft
from ngramspec.sampling.sampler import GrammarState
from ngramspec.tokens import Tokenizer, ending_tokens

_CHARACTERS = ["\t", "\n", *map(chr, range(0x20, 0x7F))]
_SPACE = b" \t\n\r"
_LONGEST = 64  # characters looked ahead: each takes some 20 microseconds


@dataclass(slots=True)
class _Layout:
    """The white space that follows each mark in this text."""

    habits: dict[bytes, bytes] = field(default_factory=dict)  # mark -> the white space that followed it last
    mark: bytes = b""  # the last character that is not white space
    space: bytes = b""  # the white space since

    def copy(self) -> _Layout:
        return _Layout(dict(self.habits), self.mark, self.space)

    def read(self, text: bytes) -> None:
        """Go on by some text."""
        for i in range(len(text)):
            character = text[i : i + 1]
            if character in _SPACE:
                self.space += character
            else:
                self.habits[self.mark] = self.space
                self.mark, self.space = character, b""

    def guess(self, allowed: Collection[bytes]) -> bytes | None:
        """The next character by habit, where white space is allowed; None where habit does not tell."""
        marks = [character for character in allowed if character not in _SPACE]
        habit = self.habits.get(self.mark)
        if habit is None or len(marks) == len(allowed):
            return None
        if self.space == habit:
            return marks[0] if len(marks) == 1 else None
        return habit[len(self.space) : len(self.space) + 1] if habit.startswith(self.space) else None


@dataclass(slots=True)
class GrammarGuide:
    """Shapes the drafts of one generation. `grammar`: its state at the end of the text; the sampler moves it on."""

    grammar: GrammarState
    # The last token of a forced text may be longer in the model's own spelling, and run into what follows.
    _inner: FadingRate = field(default_factory=lambda: FadingRate(3.6, 4.0, fade=1.0))
    _final: FadingRate = field(default_factory=lambda: FadingRate(2.0, 4.0, fade=1.0))
    _layout: _Layout = field(default_factory=_Layout)
    _forced: range = range(0)

    def shape(self, draft: Draft, limit: int, *, fixed_length: bool = False) -> Draft:
        """A draft as the grammar would have it, at most `limit` tokens.

        A blind draft is left alone, unless it can be replaced whole: whether a drawn token is in the draft must
        not depend on the token. `legal` then tells where to cut it for the batch.
        """
        here = self.grammar.copy()
        legal = 0
        if not fixed_length:
            legal = _walk(here, draft.tokens)
        self._forced = range(0)
        forced = self._forced_tokens(here)[: limit - legal] if legal < limit else []
        if not forced:
            return draft if fixed_length else draft.head(legal)
        self._forced = range(legal, legal + len(forced))
        kept = draft.head(legal) if legal else Draft()
        guesses = [self._inner.value] * (len(forced) - 1) + [self._final.value]
        fill = (0,) * len(forced)
        return Draft(
            (*kept.tokens, *forced),
            (*kept.q, *({token: 1.0} for token in forced)) if kept.q or not legal else (),
            (*kept.match_lengths, *fill) if kept.match_lengths or not legal else (),
            (*kept.context_counts, *fill) if kept.context_counts or not legal else (),
            (*kept.acceptance_probs, *guesses) if kept.acceptance_probs or not legal else (),
            f"{kept.source}+grammar" if legal else "grammar",
        )

    def legal(self, draft: Draft) -> int:
        """How many tokens of a draft the grammar allows."""
        return _walk(self.grammar.copy(), draft.tokens)

    def learn(self, sent: int, accepted: int, tokens: Sequence[int]) -> None:
        """What came of the draft shaped last: `sent` of its tokens were sent, and the pass emitted `tokens`."""
        for i in self._forced:
            if i < sent and i <= accepted:
                (self._final if i == self._forced[-1] else self._inner).add(i < accepted)
        for token in tokens:
            self._layout.read(self.grammar.vocabulary.piece(token))

    def _forced_tokens(self, here: GrammarState) -> Sequence[int]:
        vocabulary = self.grammar.vocabulary
        probes = _probes(vocabulary)
        ahead = self._layout.copy()
        text = b""
        while len(text) < _LONGEST:
            allowed = probes[here.allowed(probes)].tolist()
            characters = {} if any(map(vocabulary.is_eog, allowed)) else {vocabulary.piece(t): t for t in allowed}
            if len(characters) > 1:
                guess = ahead.guess(characters)
                characters = {guess: characters[guess]} if guess in characters else {}
            if not characters:
                break
            ((character, token),) = characters.items()
            text += character
            ahead.read(character)
            here.accept(token)
        return _spell(vocabulary, text.decode()) if text else []


_known_probes: WeakKeyDictionary[Tokenizer, NDArray[np.int32]] = WeakKeyDictionary()


def _probes(vocabulary: Tokenizer) -> NDArray[np.int32]:
    """A token for every printable ASCII character, and all that end a text."""
    known = _known_probes.get(vocabulary)
    if known is None:
        spelled = (_spell(vocabulary, character) for character in _CHARACTERS)
        known = np.array([*(tokens[0] for tokens in spelled if len(tokens) == 1), *ending_tokens(vocabulary)], np.int32)
        _known_probes[vocabulary] = known
    return known


def _spell(vocabulary: Tokenizer, text: str) -> list[int]:
    """The tokens that spell a text in the middle of another; none where the vocabulary cannot spell it there."""
    # Some vocabularies put a space before a text's first word.
    for before in ("", "\n"):
        tokens = vocabulary.tokenize(before + text, add_bos=False)
        for i in range(len(tokens)):
            if b"".join(map(vocabulary.piece, tokens[i:])) == text.encode():
                return tokens[i:]
    return []


def _walk(here: GrammarState, tokens: Sequence[int]) -> int:
    """How many of the tokens the grammar allows one after the other; moves it past them."""
    for i, token in enumerate(tokens):
        if not here.allows(token):
            return i
        here.accept(token)
    return len(tokens)
