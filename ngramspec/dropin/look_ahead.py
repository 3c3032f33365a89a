"""`LookAhead`: evaluates tokens that may come next together with one that has come.

    row = look.next(token, text)    # the logits after `token`: of a new pass, or of an earlier one that guessed right

The owner asks for one token after the other and gets what evaluating them one by one would give. What was evaluated in
vain is taken back when another token comes, and by `drop`, after which the cache holds what was asked for and no more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.acceptance.rules import Row
from ngramspec.cost.calibration import Calibration
from ngramspec.decoding.speculation import NO_PLAN, Speculation
from ngramspec.decoding.step import Stats
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.asked_model import AskedModel
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.drafting.hybrid import HybridDrafter
from ngramspec.drafting.mixture.learnt import file_of
from ngramspec.errors import GrammarError, TargetError
from ngramspec.exactness.auto import ExactAuto
from ngramspec.exactness.choice import Exact
from ngramspec.llama.borrowed import BorrowedLane, BorrowedVocabulary, LlamaCpp
from ngramspec.policies import make_policy
from ngramspec.policies.policy import Pass

SAVING = 0.01
"""Part of the time of passes that writing to disk what was learnt may take: short answers are not each worth it."""


def _sizes(lane: BorrowedLane, exact: Exact) -> Sequence[int]:
    """The sizes of passes that drafts may use; measures which agree, if that is not known."""
    sizes = range(1, lane.max_batch + 1)
    if exact == "off" or not lane.exact_rollback:
        return sizes if exact != "on" else (1,)
    auto = ExactAuto(lane, ways=("fast",))
    auto.measure(math.inf if exact == "on" else None)
    footing = auto.footing
    agreeing = footing.sizes or (footing.harmless if exact == "on" else sizes)
    return tuple(size for size in agreeing if size <= lane.max_batch)


class LookAhead:
    """Drafts for the texts of a `Llama`, one after the other.

    Args:
        owner: it has no `obstacle`.
        exact, keep: see `ngramspec.dropin.llama.Llama`.
        model: is asked where that pays; None: n-grams alone.

    Attributes:
        stats: counters over all passes that were asked for one by one.
        active: whether passes are to hold drafts; only within a generation.
        behind: how many rows of logits stand behind the last token's in llama.cpp's buffer.
    """

    def __init__(self, owner: LlamaCpp, exact: Exact, *, keep: bool, model: AskedModel | None = None) -> None:
        self._lane = lane = BorrowedLane(owner)
        self._vocabulary = BorrowedVocabulary(owner)
        kept = file_of(self._vocabulary.vocabulary_hash) if keep else None
        drafter = make_drafter(DEFAULT, kept=kept) if model is None else HybridDrafter(model, kept=kept)
        self._speculation = Speculation(drafter, make_policy("cost", None))
        self._calibration = Calibration.load(lane)
        self._sizes = _sizes(lane, exact)
        self._able = len(self._sizes) > 1
        self._tried = False
        self._unsaved = self._saving = 0.0
        self.stats = Stats()
        self._generation: object = None
        self._guide: GrammarGuide | None = None
        self._sampled: int | None = None
        self.active = False
        self.lost()

    def lost(self) -> None:
        """The owner has evaluated something by itself, or the cache holds another text: nothing is ahead."""
        self._plan, self._at = NO_PLAN, 0
        self._batch: list[int] = []
        self._rows: Sequence[Row] = ()
        self._base = -1
        self.behind = 0

    # ------------------------------------------------------------------ a generation

    def begin(self, grammar: str | None) -> object:
        """A generation begins, under a grammar in GBNF perhaps; returns what `end` is to be told."""
        self.drop()
        self.active = self._able
        self._sampled = self._guide = None
        if grammar is not None and self.active:
            try:
                self._guide = GrammarGuide(self._vocabulary.grammar(grammar))
            except GrammarError:  # the owner reads it more leniently: then it tells nothing about drafts
                self._guide = None
        self._generation = object()
        return self._generation

    def end(self, generation: object) -> None:
        """A generation has ended, wherever it was; if another has begun since, that one goes on."""
        if generation is not self._generation:
            return
        self.active, self._guide = False, None
        self.drop()
        if self._unsaved * SAVING > self._saving:
            began = time.perf_counter()
            self._calibration.save()
            if self._speculation.drafter is not None:
                self._speculation.drafter.keep()
            self._unsaved, self._saving = 0.0, time.perf_counter() - began

    def sampled(self, token: int) -> None:
        """The owner has chosen the next token."""
        self._sampled = token
        if self.active and self._guide is not None:
            self._guide.grammar.accept(token)

    # ------------------------------------------------------------------ a token

    def next(self, token: int, text: NDArray[np.intc]) -> Row | None:
        """The logits after one more token, shape (n_vocab,), valid until the next call; None: evaluate it yourself.

        Args:
            token: that follows `text`.
            text: all that the owner has evaluated, and knows of.
        """
        length = len(text)
        self._sampled = None
        if self._base < 0 or self._base + self._at + 1 != length:
            return self._first(token, text)
        at = self._at + 1
        if at < len(self._batch) and self._batch[at] == token:
            self._at = at
            self.behind -= 1
            return self._rows[at]
        began = time.perf_counter()
        self._lane.rollback(length)
        self._learn(token, time.perf_counter() - began)
        return self._pass(token)

    def _first(self, token: int, text: NDArray[np.intc]) -> Row | None:
        """Follow a text from here on."""
        self.drop()
        lane, speculation = self._lane, self._speculation
        held = text.tolist()
        # Parts of a text that were no tokens, such as images, are not to be looked up.
        if not held or not 0 <= min(held) <= max(held) < lane.n_vocab or lane.n_ctx - len(held) < 2:
            self.active = False
            return None
        lane.follow(held)
        try:
            self._able = self._tried or lane.goes_back()
            self._tried = True
            self.active = self._able
            if self.active:
                curve = self._calibration.ensure_curve(lane)
                speculation.prepare(curve, self._sizes, self._calibration.replay)
        except TargetError:
            self.active = False
        except BaseException:
            lane.rollback(len(held))
            lane.settle()
            raise
        lane.rollback(len(held))
        if not self.active:
            lane.settle()
            return None
        speculation.begin(held, guide=self._guide, is_eog=self._vocabulary.is_eog)
        speculation.first(token)
        return self._pass(token)

    def _pass(self, token: int) -> Row | None:
        """Evaluate a token, and what may follow it."""
        lane, speculation = self._lane, self._speculation
        length, room = len(lane.tokens), lane.n_ctx - len(lane.tokens)
        if room <= lane.max_batch:
            fitting = tuple(n for n in self._sizes if n <= room)
            if not fitting:
                self._give_up()
                return None
            speculation.prepare(self._calibration.curve, fitting, self._calibration.replay)
        began = time.perf_counter()
        plan = speculation.plan(room, owed=lane.owed)
        if lane.replays and plan.sent.tokens and not lane.owed:
            lane.checkpoint()
        asked = time.perf_counter()
        owed = lane.owed
        batch = [token, *plan.sent.tokens, *[token] * (plan.size - 1 - len(plan.sent))]
        try:
            self._rows = list(lane.evaluate(batch))
        except TargetError:
            self._give_up()
            return None
        self._seconds = time.perf_counter() - asked
        self._overhead = asked - began
        self._plan, self._batch, self._at, self._owed = plan, batch, 0, owed
        self._base = length
        self.behind = len(batch) - 1
        return self._rows[0]

    def _give_up(self) -> None:
        """Leave the rest of this generation to the owner."""
        self.active = False
        self.lost()
        self._lane.settle()

    def _learn(self, token: int, overhead: float = 0.0) -> None:
        """Learn from the last pass, which led to `token`."""
        sent = self._plan.sent
        done = Pass(
            (*self._batch[1 : self._at + 1], token),
            drafted=sent.tokens,
            accepted=min(self._at, len(sent)),
            batch=self._owed + len(self._batch),
            seconds=self._seconds,
            source=sent.source,
        )
        self._speculation.learn(done, self._overhead + overhead)
        self._unsaved += done.seconds
        self.stats.add(done)

    def drop(self) -> None:
        """Take back what is ahead; the cache then holds what the owner asked for, and its logits are at hand."""
        if self._base < 0:
            return
        length = self._base + self._at + 1
        if self._sampled is not None:
            self._learn(self._sampled)
        self._lane.rollback(length)
        self._base = -1
        if self._lane.owed:
            self._lane.settle()
            self.behind = 0

    def close(self) -> None:
        """Use nothing of the owner's from now on."""
        self.active = self._able = False
        self._guide = None
        self.lost()
        self._lane.release()
        self._vocabulary.close()
