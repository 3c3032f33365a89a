"""`Llama`: llama-cpp-python's class of that name, with drafts.

    from ngramspec import Llama  # in place of: from llama_cpp import Llama

The parent's `generate` is left as it is: it evaluates a token, samples the next one, and yields it. Here `eval` takes a
draft along with the token and answers the calls that follow from what it evaluated ahead, as long as the parent's
sampler chooses the drafted tokens. So the sampler is asked for the same tokens in the same order, whatever it holds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Sequence
from typing import Any

from ngramspec.decoding.step import Stats
from ngramspec.dropin.look_ahead import LookAhead
from ngramspec.exactness.choice import EXACT, Exact
from ngramspec.llama.borrowed import DraftModel, LlamaCpp, asked_by, mend, obstacle, spread
from ngramspec.llama.target import Target


class Llama(LlamaCpp):  # type: ignore[misc]
    """`llama_cpp.Llama` that drafts: the same arguments, methods and answers.

    Args:
        model_path: a GGUF file.
        exact: "auto": batches of those sizes alone whose logits are bit for bit those of single tokens, if such sizes
            are enough for drafts under the settings given; else of all sizes, and rounding may then decide between two
            tokens. "on": never others. "off": all sizes, and nothing is measured.
        keep: take up and keep, from one process to the next, how drafts about single tokens fared.
        draft_model: a GGUF file of the same vocabulary that drafts too, where that pays; or a `Target`, which is then
            this object's alone. A `LlamaDraftModel` drafts in the parent's way, and nothing else does.
        rpc_servers: machines to spread the layers over, "HOST:PORT,...", where `ngramspec rpc-worker` runs; they serve
            this process, whatever it loads afterwards. `n_gpu_layers` is then -1 unless it is given.
        settings: what the parent takes.

    Attributes:
        exact, keep: as above.
        no_drafts: why nothing is drafted for this model under these settings; None where something is.

    Raises:
        ValueError: an unknown `exact`, a list of machines that is none, or no layer for them; and as the parent.
        TypeError: a `draft_model` that is a `Llama`.
        ModelError: the draft model cannot be used; this build has no RPC backend, or a machine cannot be reached.
        TargetError: a machine was lost; every later call raises it too.
    """

    _look: LookAhead | None = None

    def __init__(
        self,
        model_path: str,
        *,
        exact: Exact = "auto",
        keep: bool = True,
        draft_model: str | os.PathLike[str] | Target | DraftModel | None = None,
        rpc_servers: str | None = None,
        **settings: Any,
    ) -> None:
        if exact not in EXACT:
            raise ValueError(f"exact is {exact!r}, but must be one of: {', '.join(EXACT)}")
        if isinstance(draft_model, LlamaCpp):
            raise TypeError("draft_model is a Llama, whose context is its own; give the path of its file, or a Target")
        self.exact, self.keep = exact, keep
        self._small = draft_model if isinstance(draft_model, str | os.PathLike | Target) else None
        self._rpc_servers = rpc_servers
        if rpc_servers is not None:
            if settings.setdefault("n_gpu_layers", -1) == 0:
                raise ValueError("n_gpu_layers=0 leaves no layer to rpc_servers; leave out one of them")
            spread(rpc_servers)
        mend(settings.get("n_gpu_layers", 0))
        super().__init__(model_path, draft_model=draft_model if self._small is None else None, **settings)
        self.no_drafts = obstacle(self)
        self._asked = None
        if self._small is not None and self.no_drafts is None:
            self._asked = asked_by(self, self._small)
        if self.draft_model is not None:
            warnings.warn(
                "ngramspec.Llama drafts by itself, but leaves it to a draft_model that is given: drop that argument",
                stacklevel=2,
            )

    @property
    def draft_stats(self) -> Stats:
        """Counters over the passes of all generations: how much was drafted, and what it gained."""
        return self._look.stats if self._look is not None else Stats()

    # ------------------------------------------------------------------ generations

    def generate(
        self, tokens: Sequence[int], *args: Any, **settings: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """See `llama_cpp.Llama.generate`."""
        if self.draft_model is not None or self.no_drafts is not None:
            yield from super().generate(tokens, *args, **settings)
            return
        if self._look is None:
            self._look = LookAhead(self, self.exact, keep=self.keep, model=self._asked)
        look, grammar = self._look, settings.get("grammar")
        mine = look.begin(grammar._grammar if grammar is not None and grammar._root == "root" else None)
        try:
            yield from super().generate(tokens, *args, **settings)
        finally:
            look.end(mine)

    def eval(self, tokens: Sequence[int]) -> None:
        """See `llama_cpp.Llama.eval`."""
        look, length = self._look, self.n_tokens
        if look is not None and len(tokens):
            row = look.next(tokens[0], self._input_ids) if look.active and len(tokens) == 1 else None
            if row is not None:
                self.input_ids[length] = tokens[0]
                if self._logits_all:
                    self.scores[length] = row
                self.n_tokens += 1
                self._requires_eval = False
                return
            look.drop()
            look.lost()
        super().eval(tokens)

    def sample(self, *args: Any, idx: int | None = None, **settings: Any) -> int:
        """See `llama_cpp.Llama.sample`."""
        look = self._look
        if look is not None and look.behind:
            idx = (self.n_tokens - 1 if idx is None else idx) - look.behind
        token: int = super().sample(*args, idx=idx, **settings)
        if look is not None:
            look.sampled(token)
        return token

    # ------------------------------------------------------------------ the state

    def reset(self) -> None:
        """See `llama_cpp.Llama.reset`."""
        if self._look is not None:
            self._look.lost()
        super().reset()

    def save_state(self) -> Any:
        """See `llama_cpp.Llama.save_state`."""
        if self._look is not None:
            self._look.drop()
        return super().save_state()

    def load_state(self, state: Any) -> None:
        """See `llama_cpp.Llama.load_state`."""
        if self._look is not None:
            self._look.lost()
        super().load_state(state)

    def close(self) -> None:
        """See `llama_cpp.Llama.close`."""
        look, self._look, self._asked = self._look, None, None
        if look is not None:
            look.close()
        if hasattr(self, "_stack"):  # not where `__init__` refused its arguments
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "exact": self.exact, "keep": self.keep, "rpc_servers": self._rpc_servers}
        return state if self._small is None else state | {"draft_model": self._small}
