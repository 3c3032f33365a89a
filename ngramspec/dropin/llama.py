"""llama-cpp-python's class `Llama` with drafts.

The parent's `generate` is not changed: it evaluates a token, samples the next one, and yields it. The method `eval` of
this class evaluates a draft together with the token. It answers the following calls from the draft, as long as the
parent's sampler chooses the draft tokens. So the sampler draws the same tokens in the same order, with any state.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.bits import Exact
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.draft import Ask, MarginalCost
from ngramspec.dropin.speculative_eval import SpeculativeEvaluator
from ngramspec.llama import bindings
from ngramspec.llama.llama_class import DraftModel, LlamaCpp, check_adapter, obstacle, prepare
from ngramspec.llama.passes import UsedAtOnceError
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading.load import find_file, make_model_drafter, open_target
from ngramspec.loading.settings import LoadSettings
from ngramspec.model_settings import LoadSettingsError
from ngramspec.steps import Stats


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
                self._small_model = make_model_drafter(Vocabulary.from_handle(self.model_path, self.model), small)
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
    def _lock_use(self) -> Iterator[None]:
        if not self._lock.acquire(False):
            raise UsedAtOnceError
        try:
            yield
        finally:
            self._lock.release()

    # ------------------------------------------------------------------ generations

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
            if self._evaluator is not None:
                # If another thread is using the object, its generation rolls the draft back.
                with suppress(UsedAtOnceError), self._lock_use():
                    self._evaluator.end(handle)

    def _begin(self, grammar: Any) -> object:
        if self.draft_model is not None or self.drafting_disabled_reason is not None:
            return None
        if self._evaluator is None:
            self._evaluator = SpeculativeEvaluator(
                self, self.exact, persist_stats=self.persist_stats, model=self._small_model, adapts=self._adapts
            )
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

    # ------------------------------------------------------------------ the state

    def reset(self) -> None:
        with self._lock_use():
            if self._evaluator is not None:
                self._evaluator.forget_pass()
            super().reset()

    def save_state(self) -> Any:
        with self._lock_use():
            if self._evaluator is not None:
                self._evaluator.drop()
            return super().save_state()

    def load_state(self, state: Any) -> None:
        with self._lock_use():
            if self._evaluator is not None:
                self._evaluator.forget_pass()
            super().load_state(state)

    def close(self) -> None:
        evaluator, self._evaluator = self._evaluator, None
        self._small_model = self._draft_target = None
        if evaluator is not None:
            evaluator.close()
        if hasattr(self, "_stack"):  # it is missing if `__init__` rejected its arguments
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        state = {"exact": self.exact, "persist_stats": self.persist_stats, "rpc_servers": self._rpc_servers}
        own = state if self._small is None else state | {"draft_model": self._small}
        return {**super().__getstate__(), **own}


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
