"""`BorrowedSequence`: the context of a `Llama` of llama-cpp-python as a sequence of this package.

    sequence.follow(text)                           # tokens that the owner has evaluated
    rows = sequence.evaluate([token, *draft])       # as in any other sequence
    sequence.rollback(length); sequence.settle()    # before the owner continues without it

The owner keeps and frees the model and the context. The sequence must not be used after the owner has freed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llama_cpp.llama_cpp as llama
from llama_cpp import Llama as LlamaCpp
from llama_cpp.llama_speculative import LlamaDraftModel as DraftModel

from ngramspec import leaves
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.data import ModelError
from ngramspec.llama import bindings, crash_check, devices
from ngramspec.llama.cache import Cache, is_recurrent
from ngramspec.llama.passes import Passes
from ngramspec.llama.sequence import CacheSequence, append
from ngramspec.llama.trial import ROOM, TrialContext
from ngramspec.llama.weights import check_adapters, has_broken_amx, machine_key

__all__ = ["BorrowedSequence", "DraftModel", "LlamaCpp", "check_adapter", "obstacle", "prepare"]


def check_adapter(model_path: str, lora_path: str | None, lora_scale: float) -> str:
    """Check the adapter of a `Llama`, because llama-cpp-python ends the process on invalid files; return its key."""
    return check_adapters([(lora_path, lora_scale)], Path(model_path)) if lora_path else ""


def prepare(n_gpu_layers: int, rpc_servers: str | None = None) -> None:
    """Prepare this process before a `Llama` is created: connect RPC workers, and disable AMX if it is broken."""
    if rpc_servers is not None:
        names = leaves.workers(rpc_servers)
        with bindings.log_given_back():
            leaves.connect(names)
    if has_broken_amx(devices.offloads_all(n_gpu_layers)):
        crash_check.hide_amx()


def obstacle(owner: LlamaCpp) -> str | None:
    """Return the reason why the context of a `Llama` does not support drafts; `None` if it does."""
    model, params = owner.model, owner.context_params
    slides = llama.llama_model_n_swa(model) > 0
    # llama.cpp returns 0 for DeepSeek4, although its file specifies a sliding window.
    has_window = f"{owner.metadata.get('general.architecture')}.attention.sliding_window" in owner.metadata
    reasons = {
        "it was loaded for embeddings": params.embeddings,
        "the model has an encoder": llama.llama_model_has_encoder(model) or not llama.llama_model_has_decoder(model),
        "the model does not decode token by token": llama.llama_model_is_diffusion(model),
        "swa_full=False: a sliding window cannot go back": slides and not params.swa_full,
        "a recurrent state with a sliding window comes back in another order": (slides or has_window)
        and is_recurrent(model),
        "n_batch is below 2": owner.n_batch < 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class BorrowedSequence(CacheSequence):
    """The sequence of a `Llama` without an `obstacle`, whose settings `ExactnessSelector` can compare."""

    settings = ("fast",)

    def __init__(self, owner: LlamaCpp, adapts: tuple[bool, bool] = (False, False)) -> None:
        model, context = owner.model, owner.ctx
        self._model, self._context_params = model, owner.context_params
        self._adapters = [(owner._lora_adapter, owner.lora_scale)] if owner.lora_path else []
        layers, split = owner.model_params.n_gpu_layers, owner.model_params.split_mode
        on_gpu = layers != 0 and any(device.is_gpu for device in devices.devices())
        cache = Cache(
            context,
            recurrent=is_recurrent(model),
            window=llama.llama_model_n_swa(model),
            on_device=on_gpu and split != 3,  # LLAMA_SPLIT_MODE_TENSOR
        )
        # Rows of logits keep the given object alive, and the owner keeps rows. So pass the owner's context and not the
        # owner itself, which would be a reference cycle.
        governor = ThreadGovernor(owner.n_threads, owner.n_threads_batch, adapts=adapts) if any(adapts) else None
        passes = Passes(context, [cache], owner._ctx, n_batch=owner.n_batch, governor=governor, returns_early=on_gpu)
        # The owner's list of tokens may be shorter than the cache, whose size llama.cpp rounds up.
        super().__init__(passes, cache, n_ctx=min(owner.n_ctx(), len(owner.input_ids)))
        self.set_threads, self.release = passes.set_threads, passes.release
        self.max_batch = min(self.max_batch, owner.n_batch)
        self.identity = self.fingerprint = _key(owner)

    def follow(self, text: Sequence[int]) -> None:
        """Adopt a text that the owner has evaluated, and drop later tokens."""
        self.tokens[:] = text
        self.cache.take_over(len(self.tokens))

    def settle(self) -> None:
        """Evaluate all owed tokens, so that the owner finds the logits after the last token."""
        self._passes.check()
        while self.owed > self._passes.n_batch:
            self.pay()
        if self.owed:
            append(self._passes, [(self, (), 1)])

    def trial(self, setting: str) -> TrialContext:
        params = type(self._context_params).from_buffer_copy(self._context_params)
        params.n_ctx = ROOM
        return TrialContext(self._model, params, self._adapters)


def _key(owner: LlamaCpp) -> str:
    """Return a key for the costs of passes: file, build, machine and settings; "" if a file cannot be read."""
    model, context = owner.model_params, owner.context_params
    parts = [getattr(model, name) for name in ("n_gpu_layers", "split_mode", "main_gpu")]
    parts.append(owner.tensor_split)
    names = (
        *("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "flash_attn_type", "type_k", "type_v"),
        *("offload_kqv", "op_offload", "swa_full", "attention_type"),
    )
    parts += [getattr(context, name) for name in names]
    try:
        return machine_key(
            Path(owner.model_path), f"Llama {parts}{check_adapter(owner.model_path, owner.lora_path, owner.lora_scale)}"
        )
    except (OSError, ModelError):
        return ""
