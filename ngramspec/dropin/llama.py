"""llama-cpp-python's class `Llama` with drafts.

The parent's `generate` is not changed: it evaluates a token, samples the next one, and yields it. The method `eval` of
this class evaluates a draft together with the token (`SpeculativeEvaluator`). It answers the following calls from the
draft, as long as the parent's sampler chooses the draft tokens. So the sampler draws the same tokens in the same order,
with any state. Draft tokens are rolled back when another token comes, and by `drop`, after which the cache contains
only the parent's tokens.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngramspec.acceptance.rules import Row
from ngramspec.cost.bits import Exact, ExactnessSelector
from ngramspec.cost.store import StoredTimes
from ngramspec.data import GrammarError, TargetError
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import DraftedText, Drafts
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.draft import Ask, Drafter, MarginalCost
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.drafting.mixture.weight_files import file_of
from ngramspec.llama import bindings
from ngramspec.llama.llama_class import BorrowedSequence, DraftModel, LlamaCpp, check_adapter, obstacle, prepare
from ngramspec.llama.passes import UsedAtOnceError
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading.load import find_file, make_model_drafter, open_target
from ngramspec.loading.settings import LoadSettings
from ngramspec.model_settings import LoadSettingsError
from ngramspec.policies import make_policy
from ngramspec.steps import Stats, Step
from ngramspec.tokens import TokenTable


class Llama(LlamaCpp):  # type: ignore[misc]
    """`llama_cpp.Llama` with drafts and the same arguments, methods and answers.

    Args:
        model_path: GGUF file.
        exact: Batch sizes of drafts. "on" allows only sizes whose logits are bit for bit those of single tokens. "auto"
            does the same if these sizes are enough for drafts with the given settings. Otherwise it allows all sizes,
            and rounding may then decide between two tokens. "off" allows all sizes and measures nothing.
        persist_stats: Load and save statistics on drafts after single tokens, for later processes.
        draft_model: GGUF file with the same vocabulary, or a name for `ngramspec`. It drafts if that saves time, on the
            GPU unless `n_gpu_layers` is 0. Or a `Target`, which must not be used elsewhere. A `LlamaDraftModel` is used
            by the parent, and replaces all other drafts.
        rpc_servers: Machines for the layers, "HOST:PORT,...", on which `ngramspec rpc-worker` runs. All models that
            this process loads later use them too. The default of `n_gpu_layers` is then -1.
        prediction: Text that answers probably copy, such as a file that they change. Drafts come from it first, and a
            wrong one does not change the output.
        settings: Arguments of the parent.

    Attributes:
        prediction: The argument, which may be set again before each call.
        drafting_disabled_reason: Reason why there are no drafts for this model and these settings; `None` if there are.

    Raises:
        ValueError: `exact` is unknown, `rpc_servers` is not a list of machines, there is no layer for them, or an
            argument of the parent is invalid.
        TypeError: `draft_model` is a `Llama`.
        ModelError: The draft model or the adapter cannot be used, this build has no RPC backend, or a machine cannot be
            reached.
        RuntimeError: A method was called while another thread evaluates or samples with this object.
    """

    _evaluator: SpeculativeEvaluator | None = None

    def __init__(
        self,
        model_path: str,
        *,
        exact: Exact = "auto",
        persist_stats: bool = True,
        draft_model: str | os.PathLike[str] | Target | DraftModel | None = None,
        rpc_servers: str | None = None,
        prediction: str = "",
        **settings: Any,
    ) -> None:
        if isinstance(draft_model, LlamaCpp):
            raise TypeError("draft_model must be the path of a file or a Target, not a Llama")
        self.exact, self.persist_stats, self.prediction = exact, persist_stats, prediction
        self._lock = threading.RLock()
        self._small = small = draft_model if isinstance(draft_model, str | os.PathLike | Target) else None
        self._rpc_servers = rpc_servers
        layers = settings.get("n_gpu_layers", 0 if rpc_servers is None else -1)
        try:
            load = LoadSettings(exact=exact, rpc=rpc_servers, gpu_layers=-1 if layers else 0)
        except LoadSettingsError as error:
            raise ValueError(error.message({"gpu_layers": "n_gpu_layers", "rpc": "rpc_servers"})) from None
        if rpc_servers is not None:
            settings["n_gpu_layers"] = layers
        check_adapter(model_path, settings.get("lora_path"), settings.get("lora_scale", 1.0))
        prepare(layers, rpc_servers)
        super().__init__(model_path, draft_model=draft_model if small is None else None, **settings)
        # Flash attention splits the context between the threads, so their number changes the last bits of logits.
        may_adapt = exact == "off" or not settings.get("flash_attn")
        single, batch = (settings.get(name) is None for name in ("n_threads", "n_threads_batch"))
        self._adapts = may_adapt and single, may_adapt and batch
        self.drafting_disabled_reason = obstacle(self)
        self._small_model = self._draft_target = None
        if small is not None and self.drafting_disabled_reason is None:
            with bindings.log_given_back():
                if not isinstance(small, Target):
                    own = load.of_draft_model(self.n_ctx(), self.n_threads)
                    small = open_target(find_file(os.fspath(small), own).path, own)
                self._draft_target = small  # its sequence, which the draft model uses, does not keep it open
                self._small_model = make_model_drafter(Vocabulary(self.model_path, self.model), small)
        if self.draft_model is not None:
            warnings.warn(
                "ngramspec.Llama does not draft if a LlamaDraftModel is passed as draft_model; remove that argument",
                stacklevel=2,
            )

    @property
    def draft_stats(self) -> Stats:
        """Counters over the passes of all generations."""
        return self._evaluator.stats if self._evaluator is not None else Stats()

    @contextmanager
    def _lock_use(self, prepare: Callable[[SpeculativeEvaluator], object] = lambda _: None) -> Iterator[None]:
        """Keep other threads from using this object, after `prepare` with its evaluator if there is one."""
        if not self._lock.acquire(False):
            raise UsedAtOnceError
        try:
            if self._evaluator is not None:
                prepare(self._evaluator)
            yield
        finally:
            self._lock.release()

    def generate(
        self, tokens: Sequence[int], *args: Any, **settings: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        with self._lock_use():
            handle = self._begin(settings.get("grammar"))
        try:
            with closing(super().generate(tokens, *args, **settings)) as generation:
                value: Sequence[int] | None = None
                while True:
                    with self._lock_use():
                        token = generation.send(value)
                    value = yield token
        except StopIteration:
            return
        finally:
            # If another thread is using the object, its generation rolls the draft back.
            with suppress(UsedAtOnceError), self._lock_use(lambda evaluator: evaluator.end(handle)):
                pass

    def _begin(self, grammar: Any) -> object:
        if self.draft_model is not None or self.drafting_disabled_reason is not None:
            return None
        if self._evaluator is None:
            self._evaluator = SpeculativeEvaluator(self, self._small_model, self._adapts)
        prediction = self.tokenize(self.prediction.encode(), add_bos=False) if self.prediction else ()
        rules = grammar._grammar if grammar is not None and grammar._root == "root" else None
        return self._evaluator.begin(rules, prediction)

    def eval(self, tokens: Sequence[int]) -> None:
        with self._lock_use():
            evaluator, length, row = self._evaluator, self.n_tokens, None
            if evaluator is not None and evaluator.active and len(tokens) == 1:
                row = evaluator.evaluate_next(tokens[0], self._input_ids)
            if row is None:
                if evaluator is not None and len(tokens):
                    evaluator.drop()
                    evaluator.forget_pass()
                    evaluator.set_threads(len(tokens))
                super().eval(tokens)
                return
            self.input_ids[length] = tokens[0]
            if self._logits_all:
                self.scores[length] = row
            self.n_tokens += 1
            self._requires_eval = False

    def sample(self, *args: Any, idx: int | None = None, **settings: Any) -> int:
        evaluator = self._evaluator
        with self._lock_use():
            if evaluator is not None and evaluator.behind:
                idx = (self.n_tokens - 1 if idx is None else idx) - evaluator.behind
            # Without this check, llama.cpp ends the process if there are no logits.
            if not self._ctx.get_logits_ith(-1 if idx is None else idx - self.n_tokens):
                raise RuntimeError("no logits to sample from: another generation was started on this model")
            token: int = super().sample(*args, idx=idx, **settings)
            if evaluator is not None:
                evaluator.record_token(token)
        return token

    def embed(self, *args: Any, **settings: Any) -> Any:
        with self._lock_use():
            return super().embed(*args, **settings)

    def reset(self) -> None:
        with self._lock_use(SpeculativeEvaluator.forget_pass):
            super().reset()

    def save_state(self) -> Any:
        with self._lock_use(SpeculativeEvaluator.drop):
            return super().save_state()

    def load_state(self, state: Any) -> None:
        with self._lock_use(SpeculativeEvaluator.forget_pass):
            super().load_state(state)

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()
        self._evaluator = self._small_model = self._draft_target = None
        if hasattr(self, "_stack"):  # it is missing if `__init__` rejected its arguments
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state |= {"exact": self.exact, "persist_stats": self.persist_stats, "rpc_servers": self._rpc_servers}
        return state if self._small is None else state | {"draft_model": self._small}


class LlamaDraftModel(DraftModel):  # type: ignore[misc]
    """A drafter for `llama_cpp.Llama(path, draft_model=LlamaDraftModel())`, if `ngramspec.Llama` cannot replace it.

    It has three disadvantages. The cost of a batch is not measured, so drafts can make decoding slower. If the KV cache
    cannot roll back a rejected draft (recurrent and hybrid models), the text changes without an error. And the logits
    of all tokens are computed. Texts above n_batch tokens require `logits_all=True`: n_ctx x n_vocab x 4 bytes.

    Args:
        num_pred_tokens: Maximum number of tokens in a draft.
        min_probability: Minimum estimated probability that the whole draft is accepted; a draft ends below it.
    """

    def __init__(self, num_pred_tokens: int = 10, min_probability: float = 0.3) -> None:
        self._max_tokens = num_pred_tokens
        self._price = MarginalCost(1.0, [min_probability] * (num_pred_tokens + 1))
        self._drafter = make_drafter(DEFAULT)
        self._text: list[int] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """Return a draft of the tokens after `input_ids`, shape (n,); it is empty if no token is likely enough."""
        before, self._text = self._text, input_ids.tolist()
        n_known = len(before)
        if 0 < n_known < len(self._text) and self._text[:n_known] == before:
            self._drafter.accept(self._text[n_known:])
        else:
            self._drafter.begin(self._text)
        return np.array(self._drafter.propose(Ask(self._max_tokens, price=self._price)).tokens, np.intc)


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
    """Evaluates a token of a `Llama` without an `obstacle` to drafts together with a draft of the next ones.

    The owner asks for one token after another, and gets the logits that plain evaluation would return. `adapts` states
    whether the numbers of threads for single tokens and for batches may be adapted.
    """

    active = False  # whether passes may contain drafts; true only during a generation
    _guide: GrammarGuide | None = None
    _next_token: int | None = None  # token that the owner has chosen but not evaluated

    def __init__(self, owner: Llama, model: ModelDrafter | None, adapts: tuple[bool, bool]) -> None:
        self._sequence = sequence = BorrowedSequence(owner, adapts)
        self.set_threads = sequence.set_threads
        self._vocabulary = Vocabulary(owner.model_path, owner.model)
        path = file_of(self._vocabulary.vocabulary_hash) if owner.persist_stats else None
        drafter = make_drafter(DEFAULT, state_path=path) if model is None else HybridDrafter(model, state_path=path)
        self._drafter: Drafter = drafter
        super().__init__(Drafts(drafter), sequence)
        self._loop = DecodingLoop(make_policy("cost", None))
        self._stored = StoredTimes(sequence)
        self._sizes = _find_sizes(sequence, owner.exact)
        self._can_draft = len(self._sizes) > 1
        self._is_checked = False
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
        _save(self._stored, self._drafter, self.stats)

    def record_token(self, token: int) -> None:
        self._next_token = token
        if self.active and self._guide is not None:
            try:
                self._guide.grammar.accept(token)
            except GrammarError:  # the owner's grammar allows control tokens inside texts, and ours has limits
                self._guide = self.drafts.guide = None

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
        self._sequence.release()
        self._vocabulary.close()
        self._save_at_end()


def _save(stored: StoredTimes, drafter: Drafter, stats: Stats) -> None:
    if stats.passes:
        stored.save()
        drafter.save_state()
