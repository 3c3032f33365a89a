"""Tests of `Target` on real files: the demo model, and tiny models of every kind of memory."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures.files import architecture
from support.cli_runner import DEMO
from support.hold_pass import hold_one_pass
from support.machines import CARD
from support.model_files import HEADS, LAYERS, WIDTH, tiny

from ngramspec.backend import Part
from ngramspec.data import ModelError
from ngramspec.llama import bindings, crash_check, devices
from ngramspec.llama import target as target_module
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.target import Target
from ngramspec.llama.trial import random_tokens


def own_notes(target: Target) -> list[str]:
    """Return the notes about the model, without the one that a build with broken AMX kernels adds to every model."""
    return [note for note in target.weights.notes if note != crash_check.AMX_NOTE]


def opened(model: str | Path = "llama", **settings: Any) -> Target:
    """Return a target on a file, or on a tiny model; by default with one thread and a context of 64 tokens."""
    return Target(tiny(model) if isinstance(model, str) else model, **{"ctx_size": 64, "threads": 1} | settings)


@pytest.fixture(scope="module")
def demo() -> Iterator[Target]:
    with opened(DEMO, ctx_size=512) as target:
        yield target


def some(target: Target, count: int) -> list[int]:
    return random_tokens(target.vocabulary.n_vocab, 0, count)


def test_target_aligned_prefill_reports_chunks_and_reuses_whole_chunks() -> None:
    with opened(ctx_size=1000, flash_attn="off") as target:
        text = some(target, 600)
        seen: list[tuple[int, int]] = []
        target.sequences[0].prefill(text, aligned=True, progress=lambda *at: seen.append(at))
        assert seen == [(128 * i, 600) for i in range(1, 5)] + [(600, 600)]
        seen.clear()
        target.sequences[0].prefill([*text[:500], 7, 8], aligned=True, progress=lambda *at: seen.append(at))
        assert seen == [(502, 502)]  # one chunk of 128 from 384 on


def test_target_prefill_requests_only_logits_of_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[list[int]] = []
    decode = llama.llama_decode

    def counted(context: Any, batch: Any) -> int:
        requested.append([i for i in range(batch.n_tokens) if batch.logits[i]])
        return int(decode(context, batch))

    with opened(ctx_size=1000, ubatch_size=64) as target:
        monkeypatch.setattr(llama, "llama_decode", counted)
        target.sequences[0].prefill(some(target, 150))
    assert requested == [[], [], [150 - 2 * 64 - 1]]


def test_target_without_flash_attention_uses_large_chunks_only_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for found in ([], [CARD]):
        monkeypatch.setattr(devices, "devices", lambda found=found: found)
        with opened(ctx_size=1000, flash_attn="off", exact="off") as target:
            sizes.append(target.n_batch)
    assert sizes == [128, 512]


def test_target_evaluate_returns_view_valid_until_next_call(demo: Target) -> None:
    demo.sequences[0].prefill(some(demo, 20))
    rows = demo.sequences[0].evaluate([5, 6, 7])
    before = rows.copy()
    assert not rows.flags.owndata
    demo.sequences[0].rollback(20)
    assert np.array_equal(rows, before)
    again = demo.sequences[0].evaluate([8, 9, 10])
    assert again.ctypes.data == rows.ctypes.data
    assert not np.array_equal(rows, before)


def test_target_prefill_logits_keep_target_alive() -> None:
    expected = None
    for _ in range(3):
        target = opened()
        row = target.sequences[0].prefill([1, 5, 6])
        del target
        gc.collect()
        np.ones(200_000)  # Other data may use the memory.
        expected = row.copy() if expected is None else expected
        assert np.array_equal(row, expected)
        assert np.abs(row).max() < 100


def test_target_replays_tokens_only_on_recurrent_memory() -> None:
    for kind, again in ((DEMO, False), ("llama", False), ("gemma2", False), ("mamba", True)):
        with opened(kind) as target:
            assert target.sequences[0].can_rollback
            assert target.sequences[0].replays is again, kind
            assert target.sequences[0].tokens == []
            assert own_notes(target) == []


WINDOWS = {"llama": 0, "gemma3": 64, "qwen35": 0, "lfm2-swa": 64, "deepseek4": 64}


@pytest.mark.parametrize(
    "name",
    [*list(WINDOWS)[1:4], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama", "deepseek4"))],
)
def test_target_window_is_known_and_limits_exact_rollback(name: str) -> None:
    with opened(architecture(name), ctx_size=256, exact="on") as target:
        assert target.weights.window == WINDOWS[name]
        assert target.sequences[0].exact_rollback == (name not in ("lfm2-swa", "deepseek4"))


def test_target_context_is_limited_by_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(ctx_size=None) as target:
        assert (target.n_ctx, own_notes(target)) == (1024, [])
        assert (target.weights.name, target.weights.n_ctx_train) == ("tiny llama", 1024)
    per_token = LAYERS * 2 * (WIDTH // HEADS) * 2  # keys and values of one head in half precision
    monkeypatch.setattr(devices, "cache_room", lambda *_, **__: 2 * per_token * 800)
    with opened(ctx_size=None) as target:
        assert target.n_ctx == 768
        assert ["768" in note and "1024" in note and "-c" in note for note in own_notes(target)] == [True]
    monkeypatch.setattr(devices, "cache_room", lambda *_, **more: 2**40 if more else 0)
    with opened(ctx_size=None) as target:
        assert target.n_ctx == 512
    with opened(ctx_size=900) as target:
        assert (target.n_ctx, own_notes(target)) == (900, [])  # requested, so not limited
    with opened(ctx_size=1100) as target:
        assert ["1100" in note and "1024" in note for note in own_notes(target)] == [True]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"ctx_size": size} for size in (1, -5, 2**31, 2**40)),
        *({name: number} for name in ("texts", "n_seq") for number in (0, -1, MAX_EVALUATE + 1)),
        *({"threads": 0}, {"threads": -1}, {"flash_attn": "maybe"}, {"cache_type_k": "q3"}, {"exact": "yes"}),
        {"texts": 2, "n_seq": 2},
        {"texts": 2.0},
    ],
    ids=str,
)
def test_target_rejects_invalid_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=[*wrong][-1]):
        opened(**wrong)


@pytest.mark.filterwarnings("error")
def test_target_without_arguments_raises_without_cleanup_warnings() -> None:
    with pytest.raises(TypeError):
        Target()  # type: ignore[call-arg]
    gc.collect()


def test_target_rejects_files_that_are_not_models(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "junk.gguf").write_bytes(b"junk" * 1000)
    (tmp_path / "cut.gguf").write_bytes(tiny("llama").read_bytes()[:60_000])
    for path in (tmp_path, tmp_path / "missing.gguf", *tmp_path.iterdir()):
        with pytest.raises(ModelError, match="cannot load") as caught:
            opened(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "no reason given" not in str(caught.value)


def test_target_load_advises_huge_pages_and_raises_interrupt_if_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(devices, "anonymous_memory", lambda: "before")
    monkeypatch.setattr(devices, "advise_huge_pages", asked.append)
    with opened(DEMO):
        assert asked == ["before"]

    def cancelled(*_: Any) -> None:
        bindings.log_tail.append((1, "llama_model_load_from_file_impl: cancelled model load"))

    monkeypatch.setattr(target_module.llama, "llama_model_load_from_file", cancelled)
    with pytest.raises(KeyboardInterrupt):
        opened(DEMO)


def test_target_with_quantised_cache_requires_flash_attention() -> None:
    with opened(DEMO, ctx_size=256, exact="on", cache_type_k="q8_0", cache_type_v="q8_0") as target:
        assert np.isfinite(target.sequences[0].prefill([5, 6, 7])).all()
    with pytest.raises(ModelError, match="requires flash_attn"):  # the reason from llama.cpp
        opened(DEMO, flash_attn="off", cache_type_v="q8_0")


def test_target_loads_file_with_non_unicode_name(tmp_path: Path) -> None:
    path = tmp_path / b"m\xff\xe9.gguf".decode("utf-8", "surrogateescape")
    try:
        path.write_bytes(tiny("llama").read_bytes())
    except OSError:
        pytest.skip("this file system takes unicode names only")
    with opened(path) as target:
        assert np.isfinite(target.sequences[0].prefill([5])).all()


def test_target_reports_context_that_llama_cpp_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module.llama, "llama_init_from_model", lambda *_: None)
    with pytest.raises(ModelError, match=r"could not create a context of 900 tokens .*; try a smaller -c"):
        opened(ctx_size=900)


def test_target_with_low_memory_keeps_fewer_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    open_context = target_module.llama.llama_init_from_model

    def open_small(model: Any, params: Any) -> Any:
        return None if params.n_rs_seq > 4 else open_context(model, params)

    monkeypatch.setattr(target_module.llama, "llama_init_from_model", open_small)
    with opened(architecture("qwen35"), exact="off") as target:
        assert target.sequences[0].max_batch == 5
        assert "low memory: drafts are limited to 4 tokens" in target.weights.notes


def test_target_after_close_raises() -> None:
    """A failure would end the process."""
    target = opened(texts=2, exact="off")
    sequence = target.sequences[1]
    sequence.prefill([5, 6])
    target.close()
    target.close()
    for call in (
        lambda: sequence.evaluate([5]),
        lambda: sequence.prefill([5]),
        lambda: target.vocabulary.tokenize("a"),
        lambda: target.vocabulary.piece(200),
        lambda: sequence.rollback(1),
        lambda: target.evaluate_together([Part(sequence, [5], 1)]),
        sequence.clear,
        sequence.save_state,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_target_fingerprint_differs_by_settings_and_file_content(tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny("llama").read_bytes())
    changed = bytearray(copy.read_bytes())
    changed[-1] ^= 1
    (tmp_path / "changed.gguf").write_bytes(changed)

    def fingerprint(model: str | Path, **options: Any) -> str:
        with opened(model, **options) as target:
            return target.sequences[0].fingerprint

    same = fingerprint("llama")
    assert fingerprint(copy) == same
    others = [
        fingerprint(tmp_path / "changed.gguf"),
        fingerprint("gemma2"),
        fingerprint(copy, threads=2),
        fingerprint(copy, threads_batch=2),
        fingerprint(copy, ubatch_size=64),
        fingerprint(copy, no_mmap=True),
        fingerprint(copy, no_repack=True),
        fingerprint(copy, flash_attn="off"),
        fingerprint(copy, cache_type_k="f32"),
    ]
    assert len({same, *others}) == 10
    assert all(name.isalnum() for name in others)


def test_target_rejects_use_by_two_threads(demo: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    text = some(demo, 20)
    demo.sequences[0].clear()
    with hold_one_pass(monkeypatch) as (held, go_on), ThreadPoolExecutor(1) as other:
        first = other.submit(demo.sequences[0].prefill, text)
        assert held.wait(60)
        for call in (
            lambda: demo.sequences[0].prefill([1]),
            lambda: demo.sequences[0].evaluate([1]),
            lambda: demo.sequences[0].rollback(0),
            demo.sequences[0].clear,
        ):
            with pytest.raises(RuntimeError, match="two threads at once"):
                call()
        # The other thread may have begun between a check and the pass.
        with pytest.raises(RuntimeError, match="two threads at once"):
            demo.passes.decode([(demo.sequences[0].cache, [1], 1)])
        go_on.set()
        row = first.result().copy()
    assert demo.sequences[0].tokens == text
    demo.sequences[0].clear()
    assert np.array_equal(demo.sequences[0].prefill(text), row)


def test_target_rejects_copy_and_pickle(demo: Target) -> None:
    """Both would free the same memory."""
    for function in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a Target cannot be copied or pickled"):
            function(demo)
