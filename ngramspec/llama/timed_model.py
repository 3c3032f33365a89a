"""`TimedModel`: a model file without a vocabulary whose passes are timed, for `ngramspec.quants`."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp.llama_cpp as llama

from ngramspec.data import TargetError
from ngramspec.llama import bindings, devices
from ngramspec.llama.contexts import make_small_params
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.trial import TrialContext
from ngramspec.llama.weights import make_model_params
from ngramspec.model_settings import ModelSettings


class TimedModel:
    """A model that is loaded as `Weights` does, with a context in which `depth` tokens precede each pass.

    A negative number of GPU layers means all, and `prompt` is the number of tokens in the longest pass. The constructor
    raises TargetError if llama.cpp cannot load the model.
    """

    def __init__(self, path: Path, settings: ModelSettings, *, n_gpu_layers: int, depth: int, prompt: int) -> None:
        bindings.init_backend()
        params, _ = make_model_params(settings, all_on_gpu=devices.offloads_all(n_gpu_layers))
        params.n_gpu_layers = n_gpu_layers
        bindings.log_tail.clear()
        self._model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise TargetError(f"llama.cpp cannot load a model of this shape ({bindings.last_complaint()})")
        try:
            params = make_small_params(settings, depth + prompt + 2 * MAX_EVALUATE, prompt)
            self.trial = TrialContext(self._model, params, ())
        except TargetError:
            llama.llama_model_free(self._model)
            raise
        self.trial.begin(depth)

    def close(self) -> None:
        self.trial.close()
        llama.llama_model_free(self._model)
