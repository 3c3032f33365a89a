"""`SpeculativeEvaluator`: evaluates a token together with a draft of the next ones.

The owner asks for one token after another, and gets the logits that plain evaluation would return. Draft tokens are
rolled back when another token comes, and by `drop`, after which the cache contains only the owner's tokens.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ngramspec.acceptance.rules import Row
from ngramspec.cost.bits import Exact, ExactnessSelector
from ngramspec.cost.store import StoredTimes
from ngramspec.data import GrammarError, TargetError
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import DraftedText, Drafts
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.drafting.mixture.weight_files import file_of
from ngramspec.llama.llama_class import BorrowedSequence, LlamaCpp
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.policies import make_policy
from ngramspec.steps import Stats, Step
from ngramspec.tokens import TokenTable

SAVE_AFTER = 1.0  # seconds of passes after which learned data is saved; after every short answer is wasteful


def _find_sizes(sequence: BorrowedSequence, exact: Exact) -> Sequence[int]:
    """Return the sizes of passes that drafts may use; compare them if their bits are not known."""
    sizes = range(1, sequence.max_batch + 1)
    if exact == "off" or not sequence.exact_rollback:
        return sizes if exact != "on" else (1,)
    selector = ExactnessSelector(sequence)
    selector.compare()
    exactness = selector.exactness("fast")
    agreeing = exactness.sizes or (exactness.agreeing if exact == "on" else sizes)
    return tuple(size for size in agreeing if size <= sequence.max_batch)


class SpeculativeEvaluator(DraftedText):
    """A drafting evaluator for the texts of a `Llama` without an `obstacle` to drafts, one at a time.

    `model` drafts if its drafts save time. `adapts`: whether the numbers of threads for single tokens and for
    batches may be adapted.
    """

    active = False  # whether passes may contain drafts; true only during a generation
    _guide: GrammarGuide | None = None
    _next_token: int | None = None  # token that the owner has chosen but not evaluated

    def __init__(
        self,
        owner: LlamaCpp,
        exact: Exact,
        *,
        persist_stats: bool,
        model: ModelDrafter | None = None,
        adapts: tuple[bool, bool] = (False, False),
    ) -> None:
        self._sequence = sequence = BorrowedSequence(owner, adapts)
        self.set_threads = sequence.set_threads
        self._vocabulary = Vocabulary.from_handle(owner.model_path, owner.model)
        path = file_of(self._vocabulary.vocabulary_hash) if persist_stats else None
        drafter = make_drafter(DEFAULT, state_path=path) if model is None else HybridDrafter(model, state_path=path)
        self._drafter: Drafter = drafter
        super().__init__(Drafts(drafter), sequence)
        self._loop = DecodingLoop(make_policy("cost", None))
        self._stored = StoredTimes(sequence)
        self._sizes = _find_sizes(sequence, exact)
        self._can_draft = len(self._sizes) > 1
        self._is_checked, self._unsaved = False, 0.0
        self.stats = Stats()  # counters over all passes for single tokens
        self._save_at_end = weakref.finalize(self, _save, self._stored, drafter, self.stats)
        self._generation: object = None
        self.forget_pass()

    def forget_pass(self) -> None:
        """Forget the last pass, because the owner has evaluated tokens itself or the cache contains another text."""
        self._last_pass: Pass | None = None  # last pass, whose draft may still be used
        self._at = self._base = 0  # index of the last used token in that pass, and length of the text before the pass
        self._batch: list[int] = []
        self._rows: Sequence[Row] = ()
        self.behind = 0  # number of rows of logits after that of the last token in llama.cpp's buffer

    # ------------------------------------------------------------------ a generation

    def begin(self, grammar: str | None, prediction: Sequence[int] = ()) -> object:
        """Begin a generation, with its grammar in GBNF if it has one; return its handle for `end`."""
        self.drop()
        self._drafter.prediction = prediction
        self.active = self._can_draft
        self._next_token = self._guide = None
        if grammar is not None and self.active:
            with suppress(GrammarError):  # the owner's parser may accept the grammar, but then it cannot help drafts
                self._guide = GrammarGuide(self._vocabulary.grammar(grammar))
        self._generation = object()
        return self._generation

    def end(self, generation: object) -> None:
        """End a generation, unless another one has begun since."""
        # If a stream is still open when the interpreter ends, this method is called too late to do anything.
        if generation is not self._generation or sys.is_finalizing():
            return
        self.active, self._guide = False, None
        self.drop()
        if self._unsaved > SAVE_AFTER:
            _save(self._stored, self._drafter, self.stats)
            self._unsaved = 0.0

    def record_token(self, token: int) -> None:
        """Record the next token, which the owner has chosen."""
        self._next_token = token
        if self.active and self._guide is not None:
            try:
                self._guide.grammar.accept(token)
            except GrammarError:  # the owner's grammar allows control tokens inside texts, and ours has limits
                self._guide = self.drafts.guide = None

    # ------------------------------------------------------------------ a token

    def evaluate_next(self, token: int, text: NDArray[np.intc]) -> Row | None:
        """Return the logits after one more token of a text, shape (n_vocab,), valid until the next call.

        `None` means that the owner must evaluate the token itself.
        """
        length = len(text)
        self._next_token = None
        if self._last_pass is None or self._base + self._at + 1 != length:
            return self._start_text(token, text)
        at = self._at + 1
        if at < len(self._batch) and self._batch[at] == token:
            self._at = at
            self.behind -= 1
            return self._rows[at]
        began = time.perf_counter()
        self._sequence.rollback(length)
        self._learn(self._last_pass, token, time.perf_counter() - began)
        return self._run_pass(token)

    def _start_text(self, token: int, text: NDArray[np.intc]) -> Row | None:
        """Start with a new text, and do `evaluate_next`."""
        self.drop()
        self.active = False
        sequence, tokens = self._sequence, text.tolist()
        # Parts of a text that are not tokens, such as images, have invalid ids, which the drafter must not see.
        if not tokens or not 0 <= min(tokens) <= max(tokens) < sequence.n_vocab or sequence.n_ctx - len(tokens) < 2:
            return None
        sequence.follow(tokens)
        try:
            with suppress(TargetError):
                self._can_draft = self._is_checked or sequence.goes_back()
                self._is_checked = True
                if self._can_draft:
                    self._loop.prepare(self._stored.times.for_plain(self._sizes[0]), self._sizes)
                    self.active = True
        finally:
            sequence.rollback(len(tokens))
            if not self.active:
                sequence.settle()
        if not self.active:
            return None
        self._loop.policy.begin()
        self.drafts.begin(tokens, guide=self._guide, ends=TokenTable(self._vocabulary.is_eog))
        self.drafts.first(token)
        return self._run_pass(token)

    def _run_pass(self, token: int) -> Row | None:
        """Evaluate a token with a draft of the next ones."""
        sequence = self._sequence
        length, room = len(sequence.tokens), sequence.n_ctx - len(sequence.tokens)
        if room <= sequence.max_batch:
            fitting = tuple(n for n in self._sizes if n <= room)
            if not fitting:
                self._stop_drafting()
                return None
            self._loop.prepare(self._stored.times.for_plain(fitting[0]), fitting)
        self.last, self.tokens_left = token, room
        try:
            self._last_pass = current = self._loop.submit((self,))
            if not current.rows:
                self._loop.wait(current)
        except TargetError:
            self._stop_drafting()
            return None
        self._rows = list(current.rows[0])
        self._batch = current.plans[0].batch(token)
        self._at, self._base = 0, length
        self.behind = len(self._batch) - 1
        return self._rows[0]

    def _stop_drafting(self) -> None:
        """Stop drafting for the rest of this generation; the owner evaluates its tokens."""
        self.active = False
        self.forget_pass()
        self._sequence.settle()

    def _learn(self, current: Pass, token: int, overhead: float = 0.0) -> None:
        """Learn from a pass, the token after its accepted draft tokens, and the seconds of the rollback."""
        draft = current.plans[0].draft
        done = Step(
            (*self._batch[1 : self._at + 1], token),
            drafted=draft.tokens,
            accepted=min(self._at, len(draft)),
            source=draft.source,
        )
        current.planning_seconds += overhead
        self._loop.finish(current, done)
        self._unsaved += done.seconds
        self.stats.add(done)

    def drop(self) -> None:
        """Roll back the draft; the cache then contains only the owner's tokens, and their last logits are available."""
        if self._last_pass is None:
            return
        if self._next_token is not None:
            self._learn(self._last_pass, self._next_token)
        self._sequence.rollback(self._base + self._at + 1)
        self._last_pass = None
        if self._sequence.owed:
            self._sequence.settle()
            self.behind = 0

    def close(self) -> None:
        """Release everything that belongs to the owner, and save the learned data."""
        self.active = self._can_draft = False
        self._guide = None
        self.forget_pass()
        self._sequence.release()
        self._vocabulary.close()
        self._save_at_end()


def _save(stored: StoredTimes, drafter: Drafter, stats: Stats) -> None:
    """Write the learned data to disk, if there were any passes."""
    if stats.passes:
        stored.save()
        drafter.save_state()
