"""`Grammar`: the tokens that may come next according to llguidance, and the position in one sequence."""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from ngramspec.data import GrammarError
from ngramspec.grammars.gbnf import compile_grammar, gbnf_to_lark, worker
from ngramspec.grammars.lark import MAX_SIZE, Lark, compile_lark, reason
from ngramspec.tokens import ending_tokens

_MAX_CHARACTERS = MAX_SIZE  # in all unused grammars that stay compiled; each character takes 100 to 200 bytes

Bools = NDArray[np.bool_]


class Grammar:
    """A grammar at one position of a sequence, shared by the sampler, the verifier and the drafter.

    Only `accept` and `rollback` change the position; a call that raises an error leaves it as it was.
    """

    def __init__(self, vocabulary: Any, start: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self._ends = frozenset(ending_tokens(vocabulary))
        self._has_end = False  # whether the matcher ever got an ending token, which the grammar names
        self._start, self._matcher = start, start.deep_copy()
        self._tokens: list[int] = []
        self._n_ends = 0  # number of tokens accepted since the text ended, which the matcher does not get
        self._bits = np.zeros((vocabulary.grammars.tokenizer.vocab_size + 31) // 32, np.int32)
        self._mask: Bools | None = None  # mask of the tokens that may come next; None until it is computed

    @property
    def is_complete(self) -> bool:
        """True if the text may end here."""
        return self._matcher.is_accepting() or self._matcher.stop_reason() == "NoExtension"

    def allows(self, token: int) -> bool:
        count = self._count((token,))
        self._check()
        # llguidance counts no ending token that the grammar names.
        return count == 1 or (token in self._ends and bool(self.mask()[token]))

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may come one after the other; 0 if a limit of llguidance is exceeded."""
        count = self._count(tokens)
        if self._matcher.is_error():
            self._restore()
            return 0
        return count

    def _count(self, tokens: Sequence[int]) -> int:
        vocabulary = self.vocabulary
        if not tokens or not 0 <= tokens[0] < vocabulary.n_vocab:
            return 0
        if self._n_ends or self._matcher.is_stopped():
            return int(vocabulary.is_eog(tokens[0]) and self.is_complete)
        n_known = next((i for i, token in enumerate(tokens) if not 0 <= token < vocabulary.n_vocab), len(tokens))
        return self._matcher.validate_tokens(list(tokens[:n_known]))

    def mask_allowed(self, ids: NDArray[np.integer]) -> Bools:
        """Return which of these tokens, shape (n,), may come next; see `mask` for errors."""
        mask: Bools = self.mask()[ids]
        return mask

    def mask(self) -> Bools:
        """Return which tokens may come next, by their ids; raise a GrammarError over a limit of llguidance."""
        if self._mask is None:
            if self._n_ends:
                self._mask = np.zeros(self.vocabulary.n_vocab, np.bool_)
                self._mask[list(ending_tokens(self.vocabulary))] = True
            else:
                self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
                self._check()
                self._mask = np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(np.bool_)
        return self._mask

    def accept(self, token: int) -> None:
        """Advance by a token; raise a GrammarError if it is not allowed, or over a limit of llguidance."""
        self._mask = None
        if self._n_ends or (self.vocabulary.is_eog(token) and self.is_complete):
            self._n_ends += 1
            return
        self._matcher.consume_token(token)
        self._check()
        self._tokens.append(token)
        self._has_end |= token in self._ends

    def rollback(self, count: int) -> None:
        if not count:
            return
        self._mask = None
        n_ends = min(count, self._n_ends)
        self._n_ends -= n_ends
        count -= n_ends
        if count:
            del self._tokens[-count:]
            # llguidance miscounts the bytes of an ending token, also when it rolls back later ones.
            if self._has_end or not self._matcher.rollback(count):
                self._restore()

    def find_forced_text(self) -> bytes:
        """Return the text that must come next, as far as there is only one, without control tokens."""
        if self._n_ends or self._matcher.is_stopped():
            return b""
        text = self._matcher.compute_ff_bytes()
        if self._matcher.is_error():
            self._restore()
            return b""
        if text:
            # llguidance has read this text already, and would miscompute masks and rollbacks from there.
            if self._tokens:
                last = self._tokens[-1]
                self.rollback(1)
                self.accept(last)
            else:
                self._restore()
        return text.partition(b"\xff")[0]

    def _restore(self) -> None:
        """Read the accepted tokens again from the start, after an error, which llguidance never leaves."""
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._tokens)

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        problem = reason(self._matcher.get_error())
        self._restore()
        if "NoExtensionBias" in problem or "no tokens allowed" in problem:
            raise GrammarError("the grammar comes to a dead end: it allows none of the model's tokens here")
        raise GrammarError(f"the grammar exceeds a limit: {problem}")


class Grammars:
    """The compiled grammars of one vocabulary: the last used and all held ones; any thread may call the methods."""

    def __init__(self, vocabulary: Any) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._hold_counts: Counter[str] = Counter()

    @property
    def tokenizer(self) -> LLTokenizer:
        """Vocabulary for llguidance, created for the first grammar in up to a few seconds."""
        with self._lock:
            if self._tokenizer is None:
                ends = list(ending_tokens(self._vocabulary))
                self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(self._vocabulary)), eos_token=ends or None)
            return self._tokenizer

    def begin(self, text: str) -> Grammar:
        """Return a grammar in GBNF or `Lark` at its start; raise a GrammarError if it is invalid or too large."""
        return Grammar(self._vocabulary, self.compile(text))

    def hold(self, text: str) -> None:
        """Compile a grammar within the worker's limits, and keep it until `release`; see `begin` for errors."""
        key = _key(text)
        with self._lock:
            self._hold_counts[key] += 1
        try:
            if key not in self._matchers:
                names = set[str]() if isinstance(text, Lark) else {*re.findall(r"<[^>\[\r\n][^>\r\n]*>", text)}
                token_ids = {name: token for name in names if (token := self._find_token(name)) is not None}
                self._add(text, worker.call(compile_grammar, text, token_ids, self._vocabulary.n_vocab))
        except BaseException:
            self.release(text)
            raise

    def release(self, text: str) -> None:
        with self._lock:
            self._hold_counts.subtract([_key(text)])
            self._hold_counts = +self._hold_counts  # without those that are not held
            self._evict()

    def compile(self, text: str) -> LLMatcher:
        """Return the compiled grammar; see `begin` for errors."""
        key = _key(text)
        with self._lock:
            if (matcher := self._matchers.get(key)) is not None:
                self._matchers.move_to_end(key)
                return matcher
        return self._add(text, text if isinstance(text, Lark) else gbnf_to_lark(text, self._find_token))

    def _add(self, text: str, grammar: Lark) -> LLMatcher:
        """Compile `grammar`, which is `text` converted to `Lark`."""
        matcher = compile_lark(grammar, self.tokenizer)
        with self._lock:
            self._matchers[_key(text)] = matcher
            self._evict()
        return matcher

    def _evict(self) -> None:
        """Drop unused grammars, the least recently used first, until the others are within the limits."""
        keys = [key for key in self._matchers if key not in self._hold_counts]
        while len(keys) > 8 or sum(map(len, keys)) > _MAX_CHARACTERS:
            del self._matchers[keys.pop(0)]

    def _find_token(self, name: str) -> int | None:
        tokens = self._vocabulary.tokenize(name, special=True, add_bos=False)
        return tokens[0] if len(tokens) == 1 else None


def _key(text: str) -> str:
    """Return the key of a grammar, with its type because GBNF and `Lark` may have the same text."""
    return f"{type(text).__name__} {text}"


class _Tokens:
    """The tokenizer that llguidance requires; it is never called, because no grammar here forces a tokenization."""

    def __init__(self, vocabulary: Any) -> None:
        ids = range(vocabulary.n_vocab)
        ends = list(ending_tokens(vocabulary))
        self.special_token_ids = [token for token in ids if not vocabulary.piece(token) or vocabulary.is_eog(token)]
        self.eos_token_id = ends[0] if ends else None
        self.bos_token_id = None
        self.tokens = [vocabulary.piece(token) for token in ids]
        for token in self.special_token_ids:
            self.tokens[token] = b"\xff" + (vocabulary.display_piece(token) or b"[%d]" % token)

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError
