"""`Opened`: a model that is loaded for prompts, and the decoder on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llm

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.hybrid import HybridDrafter
from ngramspec.drafting.mixture.learnt import file_of
from ngramspec.exactness.choice import Exact
from ngramspec.llama.draft_model import asked_for
from ngramspec.llama.rpc import connect, workers
from ngramspec.llama.target import Target
from ngramspec.llama.weights import tuning_key
from ngramspec.memory import Memory, MemoryFileError, Store
from ngramspec.memory.names import memory_folder
from ngramspec.models.find import resolve
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling
from ngramspec.tuning.kept import path_of, recalled, wanted

_CACHE_TYPES = ("f16", "f16")  # `Target`'s defaults


@dataclass(frozen=True, slots=True)
class Loading:
    """What of a prompt's options a loaded model stands for; as in `ngramspec chat`."""

    ctx_size: int | None
    gpu_layers: int
    threads: int | None
    exact: Exact
    no_draft: bool
    no_memory: bool
    draft_model: str | None
    rpc: str | None


def loading(options: llm.Options) -> Loading:
    """The part of a prompt's options that loading depends on.

    Raises:
        ValueError: two of them contradict each other.
    """
    given: Any = options  # made of `prompt_options`
    if given.draft_model is not None and given.no_draft:
        raise ValueError("the option draft_model is for drafts; leave out no_draft")
    if given.rpc is not None and given.gpu_layers == 0:
        raise ValueError("gpu_layers 0 leaves no layer to the option rpc; leave out one of them")
    return Loading(
        given.ctx_size,
        -1 if given.gpu_layers is None else given.gpu_layers,
        given.threads,
        given.exact or "auto",
        bool(given.no_draft),
        bool(given.no_memory),
        given.draft_model,
        given.rpc,
    )


class Opened:
    """A model, loaded; with drafts from the conversation and from the user's memory, if there is one.

    Answers are not kept for later sessions; what drafts have learnt about tokens is.

    Args:
        name: as `resolve` takes it.
        loading: how.

    Raises:
        ModelError: there is no such model, it cannot be loaded, or the draft model cannot draft for it; the machines of
            `rpc` cannot be reached, or the process is connected to others.
        ValueError: `rpc` is no list of machines.
    """

    def __init__(self, name: str | None, loading: Loading) -> None:
        self.loading = loading
        connect(() if loading.rpc is None else workers(loading.rpc))
        path = resolve(name).path
        self.tuned = _tuned(path, loading)
        settings: dict[str, Any] = {"threads": loading.threads, **self.tuned}
        self.target = Target(
            path,
            n_ctx=loading.ctx_size,
            n_gpu_layers=loading.gpu_layers,
            exact=loading.exact,
            draft_max=1 if loading.no_draft else None,
            **settings,
        )
        drafts = self.target.can_rollback and not loading.no_draft
        self.memory = _memory(self.target) if drafts and not loading.no_memory else None
        self._small = self._load_small() if drafts and loading.draft_model is not None else None
        self.decoder = SpeculativeDecoder(
            self.target,
            vocabulary=_Shown(self.target),
            drafter=self._drafter() if drafts else None,
            exact=loading.exact,
        )

    def _load_small(self) -> Target:
        """The draft model, with the target's context, threads and share of the GPU."""
        target, loading = self.target, self.loading
        path = resolve(loading.draft_model).path
        layers = loading.gpu_layers
        return Target(path, n_ctx=target.n_ctx, n_gpu_layers=layers, threads=target.threads, exact="off")

    def _drafter(self) -> Drafter:
        kept = None if self.loading.no_memory else file_of(self.target.vocabulary_hash)
        if self._small is None:
            return make_drafter(DEFAULT, memory=self.memory, kept=kept)
        return HybridDrafter(asked_for(self.target, self._small), self.memory, kept)

    def close(self) -> None:
        """Free the models."""
        self.target.close()
        if self._small is not None:
            self._small.close()


def _tuned(path: Path, loading: Loading) -> Mapping[str, Any]:
    """The arguments of `Target` that `ngramspec tune --apply` keeps for a model, but for what the options say."""
    kept = recalled(path_of(tuning_key(path, loading.gpu_layers, _CACHE_TYPES)))
    changes = wanted(kept, () if loading.threads is None else ("threads", "threads_batch"))
    return {"extra_buffers" if name == "repack" else name: value for name, value in changes.items()}


def _memory(target: Target) -> Memory:
    """The user's memory for this tokenizer; an empty one where there is none, or none that can be read."""
    store = Store(memory_folder(), target.vocabulary_hash, target.n_vocab, target.path.name)
    try:
        return Memory(store.read())
    except MemoryFileError:
        return Memory()


class _Shown:
    """A vocabulary whose texts show control tokens, for `parser_for`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.n_vocab = target.n_vocab

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        return self._target.tokenize(text, special=special, add_bos=add_bos)

    def piece(self, token: int) -> bytes:
        return self._target.shown(token)

    def is_eog(self, token: int) -> bool:
        return self._target.is_eog(token)

    def sampler(self, sampling: Sampling) -> Sampler:
        return self._target.sampler(sampling)
