"""`GrammarGuide`: drafts that follow a grammar, and drafts of the text that a grammar forces.

A draft ends before the first token that the grammar forbids. If the drafter has no further proposal, text that the
grammar forces is a draft that costs nothing, such as the keys and the punctuation of JSON. JSON grammars allow white
space nearly everywhere. The guess is then the white space that last followed the same character in this text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ngramspec import leaves
from ngramspec.data import GrammarError
from ngramspec.drafting.acceptance_estimator import DecayingRate
from ngramspec.drafting.draft import Draft
from ngramspec.tokens import Tokenizer, ending_tokens

_CHARACTERS = [bytes([code]) for code in (*b"\t\n", *range(0x20, 0x7F))]
_SPACE = b" \t\n\r"
_LONGEST = 64  # maximum number of bytes to look ahead


@dataclass(slots=True)
class _Layout:
    """The white space that follows each mark in this text."""

    habits: dict[bytes, bytes] = field(default_factory=dict)  # white space that last followed each mark
    mark: bytes = b""  # last character that is not white space
    space: bytes = b""  # white space after `mark`

    def read(self, text: bytes) -> None:
        for i in range(len(text)):
            character = text[i : i + 1]
            if character in _SPACE:
                self.space += character
            else:
                self.habits[self.mark] = self.space
                self.mark, self.space = character, b""

    @property
    def is_known(self) -> bool:
        """Whether white space that followed the last mark begins with the present one."""
        habit = self.habits.get(self.mark)
        return habit is not None and habit.startswith(self.space)

    def guess(self, characters: Collection[bytes]) -> bytes | None:
        """Return the next of the allowed characters if `is_known`; `None` if the white space does not determine one."""
        marks = [character for character in characters if character not in _SPACE]
        habit = self.habits[self.mark]
        if len(marks) == len(characters):
            return None
        if self.space == habit:
            return marks[0] if len(marks) == 1 else None
        return habit[len(self.space) : len(self.space) + 1]


@dataclass(slots=True)
class GrammarGuide:
    """Adapts the drafts of one generation to its grammar."""

    grammar: leaves.Grammar  # state at the end of the text, which the sampler advances
    # Acceptance rates of forced tokens. The last token has a separate rate, because the model may use a longer token
    # there, which extends into the following text.
    _inner: DecayingRate = field(default_factory=lambda: DecayingRate(3.6, 4.0, fade=1.0))
    _final: DecayingRate = field(default_factory=lambda: DecayingRate(2.0, 4.0, fade=1.0))
    _layout: _Layout = field(default_factory=_Layout)
    _forced_positions: range = range(0)
    _spellings: dict[bytes, list[int]] = field(default_factory=dict)  # keys and marks recur in a text
    _probes: _Probes = field(init=False)

    def __post_init__(self) -> None:
        self._probes = _find_probes(self.grammar.vocabulary)  # in the time of the prefill, because no draft causes it

    def shape(self, draft: Draft, limit: int, *, fixed_length: bool = False) -> Draft:
        """Return a draft of at most `limit` tokens that follows the grammar.

        With `fixed_length` it is not cut, because a drawn token must not decide if it stays in the draft.
        """
        legal = 0 if fixed_length else self.grammar.count_allowed(draft.tokens)
        self._forced_positions = range(0)
        forced_tokens = self._find_forced_tokens(draft.tokens[:legal])[: limit - legal] if legal < limit else []
        if not forced_tokens:
            return draft if fixed_length else draft.head(legal)
        self._forced_positions = range(legal, legal + len(forced_tokens))
        start = draft.head(legal) if legal else Draft()
        guesses = [self._inner.value] * (len(forced_tokens) - 1) + [self._final.value]
        fill = (0,) * len(forced_tokens)
        return Draft(
            (*start.tokens, *forced_tokens),
            (*start.q, *({token: 1.0} for token in forced_tokens)) if start.q or not legal else (),
            (*start.match_lengths, *fill) if start.match_lengths or not legal else (),
            (*start.context_counts, *fill) if start.context_counts or not legal else (),
            (*start.acceptance_probs, *guesses) if start.acceptance_probs or not legal else (),
            f"{start.source}+grammar" if legal else "grammar",
            repeats=start.repeats,
        )

    def legal(self, draft: Draft) -> int:
        """Return the number of draft tokens that the grammar allows."""
        return self.grammar.count_allowed(draft.tokens)

    def learn(self, n_sent: int, n_accepted: int, tokens: Sequence[int]) -> None:
        """Learn from a decode call that verified `n_sent` tokens of the last draft of `shape` and emitted `tokens`."""
        for i in self._forced_positions:
            if i < n_sent and i <= n_accepted:
                (self._final if i == self._forced_positions[-1] else self._inner).add(i < n_accepted)
        for token in tokens:
            self._layout.read(self.grammar.vocabulary.piece(token))

    def _find_forced_tokens(self, draft: Sequence[int]) -> Sequence[int]:
        """Return the tokens of the text that must follow a draft, including likely white space."""
        n_accepted, text = 0, b""
        try:
            ahead = replace(self._layout, habits=dict(self._layout.habits))
            for token in draft:
                self.grammar.accept(token)
                n_accepted += 1
                ahead.read(self.grammar.vocabulary.piece(token))
            while len(text) < _LONGEST:
                forced = self.grammar.find_forced_text()[:_LONGEST]
                piece = forced.decode(errors="ignore").encode() or self._habit(ahead)  # without a partial character
                tokens = self._tokens_of(piece) if piece else []
                if not tokens:
                    break
                for token in tokens:
                    self.grammar.accept(token)
                    n_accepted += 1
                text += piece
                ahead.read(piece)
        except GrammarError:
            return []  # the limit of the grammar matters only if the target emits this text
        finally:
            self.grammar.rollback(n_accepted)
        return self._tokens_of(text) if text else []

    def _tokens_of(self, text: bytes) -> list[int]:
        tokens = self._spellings.get(text)
        if tokens is None:
            tokens = self._spellings[text] = _spell(self.grammar.vocabulary, text)
        return tokens

    def _habit(self, ahead: _Layout) -> bytes:
        """Return the next character by earlier white space, if white space is allowed; empty if there is no guess."""
        if not ahead.is_known:
            return b""
        probes = self._probes
        allowed = self.grammar.mask_allowed(probes.ids)
        if allowed[len(probes.characters) :].any():  # the text may end
            return b""
        characters = {probes.characters[i] for i in np.flatnonzero(allowed)}
        guess = ahead.guess(characters)
        return guess if guess in characters else b""


class _Probes(NamedTuple):
    """A token for every printable ASCII character that is one, and all tokens that end a text."""

    ids: NDArray[np.int32]
    characters: list[bytes]  # of the first ids; the others end a text


_probe_cache: WeakKeyDictionary[Tokenizer, _Probes] = WeakKeyDictionary()


def _find_probes(vocabulary: Tokenizer) -> _Probes:
    probes = _probe_cache.get(vocabulary)
    if probes is None:
        spellings = {character: _spell(vocabulary, character) for character in _CHARACTERS}
        single = {character: tokens[0] for character, tokens in spellings.items() if len(tokens) == 1}
        ids = np.array([*single.values(), *ending_tokens(vocabulary)], np.int32)
        probes = _probe_cache[vocabulary] = _Probes(ids, list(single))
    return probes


def _spell(vocabulary: Tokenizer, raw: bytes) -> list[int]:
    """Return the tokens of a text in the middle of another one; empty if the vocabulary cannot spell it there."""
    # Some vocabularies put a space before the first word of a text, so a line break before it is tried too.
    for before in ("", "\n"):
        tokens = vocabulary.tokenize(before + raw.decode(), add_bos=False)
        for i in range(len(tokens)):
            if b"".join(map(vocabulary.piece, tokens[i:])) == raw:
                return tokens[i:]
    return []
