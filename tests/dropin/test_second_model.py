"""Tests of `ngramspec.Llama` with a second GGUF file as draft model and with workers, and of `LlamaDraftModel`."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaDraftModel as DraftModel
from support.cli_runner import DEMO
from support.tiny_models import write_model
from support.twins import FREE

import ngramspec
from ngramspec import Target
from ngramspec.cost import store
from ngramspec.dropin import speculative_eval
from ngramspec.errors import ModelError
from ngramspec.llama import bindings, rpc
from ngramspec.llama.llama_class import prepare
from ngramspec.policies.policy import FixedPolicy

PROMPT = "def value_0(self):\n    return self._value_0\n\n\ndef value_1("
SMALL: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
OURS: dict[str, Any] = {**SMALL, "exact": "off", "keep": False}


def text(llama: Any, **settings: Any) -> str:
    return llama.create_completion(PROMPT, max_tokens=40, **settings)["choices"][0]["text"]


def test_llama_with_open_draft_model_drafts_and_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass drafts four tokens, whatever they cost. `test_front_ends` tests the name of a file."""
    monkeypatch.setattr(speculative_eval, "make_policy", lambda *_: FixedPolicy(4))
    monkeypatch.setattr(store, "_read", lambda _: FREE.copy())
    with Target(DEMO, n_ctx=512, threads=1) as small:
        ours, parent = ngramspec.Llama(str(DEMO), draft_model=small, **OURS), llama_cpp.Llama(str(DEMO), **SMALL)
        for _ in range(2):  # The second run starts with both caches of the first.
            assert text(ours, temperature=0.0) == text(parent, temperature=0.0)
        stats = ours.draft_stats
        assert stats.accepted > 0.7 * stats.drafted > 35
        for made in (ours, parent):
            made.close()
        assert small.vocabulary.tokenize("still open")


def test_llama_with_draft_model_file_pickles_its_path() -> None:
    ours = ngramspec.Llama(str(DEMO), draft_model=str(DEMO), **OURS)
    twin = pickle.loads(pickle.dumps(ours))
    assert twin._small_model is not None
    for made in (ours, twin):
        made.close()


def test_llama_rejects_unusable_draft_model(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", "llama")
    with pytest.raises(ModelError, match="their vocabularies differ at token"):
        ngramspec.Llama(str(DEMO), draft_model=other, **OURS)
    with pytest.raises(ModelError, match=r"gone\.gguf"):
        ngramspec.Llama(str(DEMO), draft_model=str(tmp_path / "gone.gguf"), **OURS)
    ours = ngramspec.Llama(str(DEMO), **OURS)
    with pytest.raises(TypeError, match="must be the path of a file"):
        ngramspec.Llama(str(DEMO), draft_model=ours, **OURS)
    ours.close()


def test_llama_with_draft_model_leaves_llama_cpp_log_intact(capfd: pytest.CaptureFixture[str]) -> None:
    ours = ngramspec.Llama(str(DEMO), draft_model=str(DEMO), **{**OURS, "verbose": True})
    ours.close()
    capfd.readouterr()
    llama_cpp.Llama(str(DEMO), **{**SMALL, "verbose": True}).close()
    assert "llama_model_loader" in capfd.readouterr().err


def test_llama_rejects_unusable_rpc_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'host' is not HOST:PORT"):
        ngramspec.Llama(str(DEMO), rpc_servers="host", **OURS)
    with pytest.raises(ValueError, match="n_gpu_layers 0 cannot be combined"):
        ngramspec.Llama(str(DEMO), rpc_servers="127.0.0.1:1", n_gpu_layers=0, **OURS)

    def none() -> int:
        raise ModelError(f"built without; {rpc.BUILD}")

    monkeypatch.setattr(rpc, "registry", none)
    with pytest.raises(ModelError, match="DGGML_RPC=on"):
        ngramspec.Llama(str(DEMO), rpc_servers="127.0.0.1:1", **OURS)


def test_llama_with_rpc_servers_connects_before_load(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []

    def connect(names: Any) -> None:
        bindings.init_backend()
        joined.append(names)

    monkeypatch.setattr(rpc, "connect", connect)
    ours = ngramspec.Llama(str(DEMO), rpc_servers="a:1, b:2", **OURS)
    assert joined == [("a:1", "b:2")]
    assert ours.model_params.n_gpu_layers > 1000
    assert ours.__getstate__()["rpc_servers"] == "a:1, b:2"
    ours.close()


def test_llama_draft_model_drafts_only_repetitions() -> None:
    drafts = ngramspec.LlamaDraftModel(num_pred_tokens=4)
    assert isinstance(drafts, DraftModel)
    text = [*range(50, 80), *range(50, 60)]
    first = drafts(np.array(text, np.intc))
    assert first.tolist() == [60, 61, 62, 63]
    assert first.dtype == np.intc
    assert drafts(np.array([*text, 60, 61], np.intc)).tolist() == [62, 63, 64, 65]
    assert drafts(np.array([1, 2, 3], np.intc)).size == 0
    assert drafts(np.array(text, np.intc)).tolist() == [60, 61, 62, 63]


def test_llama_draft_model_keeps_text_of_parent() -> None:
    prepare(0)
    plain = llama_cpp.Llama(str(DEMO), logits_all=True, **SMALL)
    drafted = llama_cpp.Llama(str(DEMO), logits_all=True, draft_model=ngramspec.LlamaDraftModel(), **SMALL)
    prompt = plain.tokenize(b"one two three four five six seven eight nine ten " * 6)
    assert list(islice(drafted.generate(prompt, temp=0.0), 80)) == list(islice(plain.generate(prompt, temp=0.0), 80))
    plain.close()
    drafted.close()
