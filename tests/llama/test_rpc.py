"""Tests of RPC workers: their names, their part in the keys of measurements, and guards of calls that may wait."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import pytest
from architectures.files import write_model
from support.cli_runner import DEMO

from ngramspec.data import ModelError
from ngramspec.llama import rpc
from ngramspec.llama.target import Target
from ngramspec.llama.weights import tuning_key

LOCAL = {
    "llama_backend_init", "llama_log_set", "llama_get_memory", "llama_memory_seq_rm", "llama_memory_seq_pos_max",
    "llama_memory_seq_pos_min", "llama_n_rs_seq", "llama_print_system_info", "llama_set_n_threads", "llama_tokenize",
    "llama_get_model", "llama_token_to_piece", "llama_adapter_get_alora_n_invocation_tokens",
    # The head of a model does not run on workers.
    "llama_set_embeddings_nextn", "llama_get_embeddings_nextn", "llama_get_embeddings_nextn_ith",
    # These calls of llama-cpp-python's class read results that a pass has fetched, or prepare the next pass.
    "llama_get_logits", "llama_get_embeddings", "llama_get_embeddings_ith", "llama_get_embeddings_seq",
    "llama_memory_seq_add", "llama_memory_seq_keep", "llama_set_adapters_lora", "llama_n_ctx", "llama_numa_init",
    "llama_max_parallel_sequences", "llama_perf_context_print", "llama_perf_context_reset", "llama_pooling_type",
    "llama_set_embeddings", "llama_token", "llama_sampler", "llama_max_devices",
}  # fmt: skip
"""Functions that only use data of this process, in addition to `LOCAL_FAMILIES`."""

LOCAL_FAMILIES = (
    "llama_batch_",
    "llama_chat_",
    "llama_sampler_",
    "llama_vocab_",
    "llama_model_",
    "llama_token_data",
    "llama_log",
)


def test_rpc_workers_returns_host_and_port_of_each_worker() -> None:
    assert rpc.workers("10.0.0.2:50052") == ("10.0.0.2:50052",)
    assert rpc.workers("a.example:1, b:65535") == ("a.example:1", "b:65535")
    assert rpc.workers("a:050052") == ("a:50052",)


def test_rpc_workers_rejects_invalid_lists() -> None:
    wrong = {
        "is not HOST:PORT": ("", "host", ":50052", "host:", "host:-1", "host:²"),
        "1 to 65535": ("host:0", "host:65536", "host:" + "9" * 5000),
        "'' is not HOST:PORT": ("a:1,,b:2",),
        "a:1 is listed twice": ("a:1,a:01",),
        "only IPv4": ("[::1]:50052", "::1:50052"),
    }
    for reason, texts in wrong.items():
        for text in texts:
            with pytest.raises(ValueError, match=reason):
                rpc.workers(text)


def test_tuning_key_with_offloaded_layers_changes_with_rpc_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    here = tuning_key(DEMO, -1, ("f16", "f16"))
    none_offloaded = tuning_key(DEMO, 0, ("f16", "f16"))
    monkeypatch.setattr(rpc, "_connection", SimpleNamespace(names=("a:1", "b:2"), watchdog=None))
    there = tuning_key(DEMO, -1, ("f16", "f16"))
    monkeypatch.setattr(rpc, "_connection", SimpleNamespace(names=("b:2", "a:1"), watchdog=None))
    assert len({here, there, tuning_key(DEMO, -1, ("f16", "f16"))}) == 3
    assert tuning_key(DEMO, 0, ("f16", "f16")) == none_offloaded


def test_target_with_rpc_workers_does_not_use_nextn_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = write_model(tmp_path / "head.gguf", "glm4moe", head=True)
    monkeypatch.setattr(rpc, "_connection", SimpleNamespace(names=("a:1",), watchdog=None))
    target = Target(model, n_ctx=64, n_gpu_layers=0, threads=1, head=True)
    assert target.head is None
    assert "--mtp is not used: it is not supported with --rpc" in target.weights.notes


def test_rpc_connect_with_unusable_worker_registers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise models that are loaded later without workers would also run on the registered ones."""
    registered = []

    def reach(_backend: int, name: str) -> int:
        if name == "b:2":
            raise ModelError("b:2 offers no device")
        return 1

    monkeypatch.setattr(rpc, "_connection", SimpleNamespace(names=(), watchdog=None))
    monkeypatch.setattr(rpc, "registry", lambda: 1)
    monkeypatch.setattr(rpc, "_reach", lambda name: (name, 1))
    monkeypatch.setattr(rpc, "_ggml", lambda *_: lambda *_: None)
    monkeypatch.setattr(rpc, "_reach_devices", reach)
    monkeypatch.setattr(rpc, "_register", registered.append)
    with pytest.raises(ModelError, match="b:2 offers no device"):
        rpc.connect(["a:1", "b:2"])
    assert (registered, rpc.list_workers()) == ([], ())


def test_lost_worker_is_named_when_its_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reach(name: str, seconds: float) -> None:
        asked.append(name)
        if name == "b:2" and asked.count(name) > 3:
            raise ModelError("connection refused")

    monkeypatch.setattr(rpc, "_reach", reach)
    monkeypatch.setattr(rpc, "time", SimpleNamespace(sleep=lambda _: None))
    assert rpc._loss(("a:1", "b:2"), "recv failed", 300.0).startswith("no RPC worker is listening at b:2;")
    asked.clear()
    assert rpc._loss(("a:1", "b:2"), None, 300.0).startswith("one of the RPC workers a:1, b:2 did not respond")
    assert asked == ["a:1", "b:2"]


def test_rpc_guard_covers_every_call_that_may_reach_a_worker() -> None:
    """This covers the calls of `ngramspec.llama` and `Llama`; an unguarded one would wait forever for a lost worker."""
    called = set()
    theirs = Path(llama_cpp.llama.__file__)
    for path in (*Path(rpc.__file__).parent.glob("*.py"), theirs, theirs.with_name("_internals.py")):
        if path.stem in ("crash_check", "amx"):  # These modules run child processes without workers.
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called.add(node.func.attr)
    called = {name for name in called if name.startswith("llama_")}
    guarded = {*rpc.CALLS, *rpc.FREES}
    assert guarded <= called
    unknown = {n for n in called - guarded - LOCAL if not n.startswith(LOCAL_FAMILIES) and not n.endswith("_params")}
    assert unknown == set()


def test_rpc_model_load_reports_progress_to_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def load(path: bytes, params: Any) -> int:
        assert params.progress_callback(0.5, None)
        return len(path)

    monkeypatch.setattr(rpc, "alive", lambda: heard.append("alive"))
    monkeypatch.setattr(rpc.llama, "llama_model_load_from_file", load)
    rpc._load_noisily()
    assert rpc.llama.llama_model_load_from_file(b"model", rpc.llama.llama_model_default_params()) == 5
    assert heard == ["alive"]
    own = rpc.llama.llama_model_default_params()
    own.progress_callback = rpc.llama.llama_progress_callback(lambda *_: bool(heard.append("own") or 1))
    rpc.llama.llama_model_load_from_file(b"", own)
    assert heard == ["alive", "own"]
