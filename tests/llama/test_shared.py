"""Tests of sequences with a common pool or separate caches, of every kind of memory, and of the split of passes.

The tiny models have weights and caches in single precision here, so that errors exceed rounding.
"""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures.files import architecture
from architectures.reference import Reference
from support.cli_runner import DEMO
from support.machines import use_pooled_cache

from ngramspec.backend import Part
from ngramspec.cost import store
from ngramspec.cost.bits import ExactnessSelector, KernelClasses, probe
from ngramspec.cost.store import time_passes
from ngramspec.cost.times import PassTimes
from ngramspec.data import ModelError, TargetError
from ngramspec.llama import bindings, devices
from ngramspec.llama.passes import split
from ngramspec.llama.target import Target
from ngramspec.llama.weights import GRAIN


def opened(kind: str, sequences: int = 4, exact: Any = "off", **options: Any) -> Target:
    settings: dict[str, Any] = {"ctx_size": 160, "threads": 1, "flash_attn": "off", "draft_max": 6}
    settings |= {"cache_type_k": "f32", "cache_type_v": "f32"}
    return Target(architecture(kind, half=False), texts=sequences, exact=exact, **(settings | options))


@pytest.fixture
def shared() -> Iterator[Target]:
    with opened("llama") as target:
        yield target


@pytest.fixture(scope="module")
def demo() -> Iterator[Target]:
    with Target(DEMO, texts=3, ctx_size=480, threads=1, exact="on") as target:
        yield target


def some(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(10, 4000, n)]


def test_evaluate_together_with_separate_caches_keeps_exact_logits(demo: Target) -> None:
    if len(probe(demo.sequences[0]).classes) > 1:
        pytest.skip("sizes of batches do not agree on this machine")
    texts = [some(n, seed=n) for n in (30, 200, 140)]
    more = [some(6, seed=n) for n in (1, 2, 3)]
    with Target(DEMO, ctx_size=480, threads=1, exact="on") as target:
        alone = []
        for text, tail in zip(texts, more, strict=True):
            target.sequences[0].prefill(text, aligned=True)
            alone.append(np.concatenate([target.sequences[0].evaluate([token]).copy() for token in tail]))
    for sequence, text in zip(demo.sequences, texts, strict=True):
        sequence.prefill(text, aligned=True)
    # The first pass has one token of each sequence, the next one drafts of unequal lengths.
    for sequence, tail, rows in zip(demo.sequences, more, alone, strict=True):
        assert np.array_equal(sequence.evaluate(tail), rows)
        sequence.rollback(len(sequence.tokens) - len(tail))
    first = demo.evaluate_together(
        [Part(sequence, tail[:1], 1) for sequence, tail in zip(demo.sequences, more, strict=True)]
    )
    assert all(np.array_equal(rows, expected[:1]) for rows, expected in zip(first, alone, strict=True))
    parts = [Part(demo.sequences[i], more[i][1:end], end - 1) for i, end in ((2, 2), (0, 6), (1, 4))]
    for part, rows in zip(parts, demo.evaluate_together(parts), strict=True):
        assert np.array_equal(rows, alone[part.sequence.number][1 : 1 + part.rows])
        part.sequence.rollback(len(part.sequence.tokens) - part.rows + 1)
    # Copies of another sequence and saved states give the same bits too.
    demo.sequences[0].adopt(demo.sequences[1], len(demo.sequences[1].tokens))
    assert np.array_equal(demo.sequences[0].evaluate(more[1][2:]), alone[1][2:])
    state, held = demo.sequences[2].save_state(), list(demo.sequences[2].tokens)
    demo.sequences[1].restore(held, state)
    assert np.array_equal(demo.sequences[1].evaluate(more[2][2:]), alone[2][2:])


def test_sequence_aligned_prefill_reuses_adopted_and_restored_tokens(demo: Target) -> None:
    first, second, third = demo.sequences
    text = some(400)
    fresh = first.prefill(text, aligned=True).copy()
    second.adopt(first, 300)
    third.restore(text, first.save_state())
    for sequence, chunks in ((second, 144), (third, 16)):
        seen: list[tuple[int, int]] = []
        assert np.array_equal(sequence.prefill(text, aligned=True, progress=lambda *at, to=seen: to.append(at)), fresh)
        assert seen[0][0] == min(400, 400 - chunks + demo.n_batch)


def test_comparing_and_timing_of_sequence_keeps_tokens_of_others(
    demo: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SIZES", (1, 3, 40))
    sequence, other = demo.sequences[1], demo.sequences[0]
    other.prefill(some(40))
    sequence.prefill(some(20))
    kernels, times = KernelClasses.load(sequence, tmp_path), PassTimes()
    assert kernels.path is not None
    time_passes(sequence, some(80), times)
    assert times.level > 0
    assert sequence.tokens == some(20)
    assert kernels.ensure_exact(sequence)
    assert other.tokens == some(40)
    assert KernelClasses.load(other, tmp_path).exact_sizes == kernels.exact_sizes
    with Target(DEMO, texts=2, ctx_size=480, threads=1, exact="on") as fewer:
        assert fewer.sequences[0].fingerprint != sequence.fingerprint  # Passes of more sequences cost more.


def test_evaluate_together_first_evaluates_pending_tokens() -> None:
    with opened("mamba", ctx_size=600) as shared:
        reference = Reference(shared.weights.path, n_ctx=1024, n_batch=shared.n_batch, flash=0, threads=1, cache_type=0)
        texts = [some(n, seed=n) for n in (400, 150, 30, 90)]
        for sequence, text in zip(shared.sequences, texts, strict=True):
            sequence.prefill(text)
        for sequence, length in zip(shared.sequences, (350, 149, 30, 40), strict=True):
            sequence.rollback(length)
        assert [sequence.owed > shared.max_tokens // 3 for sequence in shared.sequences] == [True, False, False, False]
        parts = [Part(sequence, [5, 6, 7], 3) for sequence in shared.sequences]
        for part, rows in zip(parts, shared.evaluate_together(parts), strict=True):
            assert part.sequence.owed == 0
            assert np.abs(rows - reference.rows(part.sequence.tokens)[-3:]).max() < 1e-3
        reference.close()


def test_evaluate_together_and_adopt_reject_invalid_calls(shared: Target, demo: Target) -> None:
    one, two = shared.sequences[:2]
    one.prefill([1, 5, 6])
    wrong: list[tuple[list[Part], str]] = [
        ([], "one part"),
        ([Part(one, [5], 1), Part(one, [6], 1)], "one for each"),
        ([Part(one, [], 0)], "has tokens"),
        ([Part(one, [5], 2)], "for as many at most"),
        ([Part(one, [5] * (shared.max_tokens + 1), 1)], f"than the {shared.max_tokens}"),
        ([Part(one, [5] * 40, 40), Part(two, [5] * 40, 40)], f"and {shared.max_rows}"),
        ([Part(demo.sequences[0], [5], 1)], "of this model"),
    ]
    for parts, message in wrong:
        with pytest.raises(ValueError, match=message):
            shared.evaluate_together(parts)
    with pytest.raises(ValueError, match="has 3"):
        two.adopt(one, 4)
    for stranger in (demo.sequences[0], two):
        with pytest.raises(ValueError, match="the same context"):
            two.adopt(stranger, 0)
    assert (one.tokens, two.tokens) == ([1, 5, 6], [])


def test_sequence_restore_rejects_state_of_other_tokens(shared: Target) -> None:
    one, two = shared.sequences[:2]
    one.prefill(some(50))
    for tokens in (some(49), some(one.n_ctx + 65)):
        two.prefill([1, 2, 3])
        with pytest.raises(TargetError):
            two.restore(tokens, one.save_state())
        assert two.tokens == []
        assert np.isfinite(two.prefill([1, 2, 3])).all()
    two.clear()
    one.restore([], two.save_state())
    assert one.tokens == []


def test_target_with_sequences_divides_memory_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = 4 * 2 * (32 + 32) * 4  # 4 layers, 2 heads, keys and values of 32 numbers in single precision
    sizes = {}
    monkeypatch.setattr(devices, "cache_room", lambda *_, **__: 2**24)
    with pytest.raises(ModelError, match="8000 tokens, 4 of them needs"):
        opened("llama", ctx_size=8000)
    monkeypatch.setattr(devices, "cache_room", lambda *_: 2 * per_token * 6000)
    for sequences in (1, 4):
        with opened("llama", sequences=sequences, ctx_size=None) as shared:
            sizes[sequences] = shared.n_ctx
            assert sequences == 1 or any("4 times" in note for note in shared.weights.notes)
    assert sizes[1] == pytest.approx(4 * sizes[4], abs=4 * GRAIN)


def test_target_in_exact_mode_rejects_unsupported_architecture() -> None:
    with pytest.raises(ModelError, match="minimax-01"):
        opened("minimax-01", exact="on")
    with opened("minimax-01", sequences=3) as shared:
        shared.evaluate_together([Part(sequence, [5], 1) for sequence in shared.sequences])


def test_target_exact_auto_uses_exact_settings_only_if_available(monkeypatch: pytest.MonkeyPatch) -> None:
    def auto(kind: str, exact: str, flash: str) -> None:
        with opened(kind, sequences=3, exact="auto", flash_attn="auto") as shared:
            assert (shared.exact, shared.settings.flash_attn) == (exact, flash)
            shared.evaluate_together([Part(sequence, [5], 1) for sequence in shared.sequences])

    sizes = {"fast": (1,), "exact": (7, 7)}

    def agree(selector: ExactnessSelector, *_: object) -> None:
        selector.comparisons.sizes = sizes

    def refuse(shared: Target, n_ctx: int, setting: str) -> None:
        if setting == "exact":
            raise ModelError("no memory")
        open_context(shared, n_ctx, setting)

    auto("llama", "off", "auto")  # no sizes agree
    monkeypatch.setattr(ExactnessSelector, "compare", agree)
    auto("llama", "on", "off")
    auto("minimax-01", "off", "auto")
    sizes["fast"] = (7, 7)
    auto("llama", "on", "auto")
    del sizes["fast"]
    open_context = Target._open_context
    monkeypatch.setattr(Target, "_open_context", refuse)
    auto("llama", "off", "auto")


@pytest.mark.parametrize("returns_early", [False, True])
def test_sequence_prefill_synchronizes_chunks_if_decode_returns_early(
    returns_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(llama, "llama_synchronize", waits.append)
    with Target(DEMO, texts=2, ctx_size=256, threads=1, exact="off") as target:
        target.passes.returns_early = returns_early
        chunks = list(target.sequences[1].reading(range(1, 101), max_chunk=lambda: 20))
        assert len(chunks) == 5
        assert len(waits) == (5 if returns_early else 0)
        target.sequences[0].prefill(range(1, 51))  # not timed
        assert len(waits) == (5 if returns_early else 0)


KINDS = ("llama", "gemma3", "deepseek2", "mamba", "jamba", "qwen35", "deepseek4", "qwen4exp")


IN_STEP: list[tuple[dict[int, int], bool, int, list[int]]] = [
    ({0: 1, 1: 1, 2: 1}, True, 0, [3]),
    ({0: 1, 1: 5}, True, 0, [2, 4]),
    ({0: 1, 2: 1, 3: 1}, True, 0, [1, 2]),
    ({0: 1, 2: 1, 3: 1}, False, 0, [3]),
    ({3: 1, 1: 1, 2: 1}, True, 0, [3]),
    ({0: 3, 1: 1, 2: 3}, True, 0, [3, 2, 2]),
    ({0: 20}, True, 0, [8, 8, 4]),
    ({0: 5}, False, 0, [5]),
    ({0: 7, 1: 7}, True, 0, [8, 6]),
    ({0: 1, 1: 5}, True, 5, [1, 5]),
    ({0: 1, 1: 6}, True, 5, [2, 5]),
    ({0: 5, 1: 1}, True, 5, [5, 1]),
    ({0: 10}, True, 5, [5, 5]),
]
"""(tokens of each sequence, True if only neighbours share a batch, tokens of the tail, sizes of the batches)."""


def test_batch_split_returns_expected_sizes() -> None:
    for lengths, neighbours, tail, sizes in IN_STEP:
        assert split(lengths, 8, neighbours=neighbours, tail=tail) == sizes


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield llama.cpp's log of the batches in contexts that a test opens."""
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")
    lines: list[str] = []

    @llama.llama_log_callback  # type: ignore[untyped-decorator]
    def keep(_level: int, text: bytes, _data: object) -> None:
        lines.append(text.decode("utf-8", "replace"))

    bindings.init_backend()
    collect = llama.llama_log_set
    monkeypatch.setattr(bindings, "init_backend", lambda: collect(keep, ctypes.c_void_p(0)))
    yield lines
    monkeypatch.undo()
    bindings.init_backend()


def batches(lines: list[str]) -> list[int]:
    """Return the sizes of the batches in a log, without the first one, which is the whole pass."""
    return [int(found[1]) for line in lines if (found := re.search(r"ubatch_print:\s+n_tokens\s*=\s*(\d+)", line))][1:]


CASES = [("llama", "off"), ("gemma3", "on"), ("qwen35", "off"), ("mamba", "on")]
MORE = [case for case in product(KINDS, ("on", "off")) if case not in CASES]


@pytest.mark.parametrize(
    ("kind", "exact"), [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)]
)
def test_target_batches_match_log_of_llama_cpp(
    kind: str, exact: Literal["on", "off"], logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pooled_cache(monkeypatch)
    rng = random.Random(1)
    compared = set()
    with Target(architecture(kind), texts=5, ctx_size=250, threads=1, exact=exact, draft_max=6) as shared:
        for _ in range(30):
            sequences = rng.sample(list(shared.sequences), rng.randint(1, 5))
            lengths = [rng.choice((1, 1, 2, 3, 5, 8, 20)) for _ in sequences]
            for sequence in shared.sequences:
                if len(sequence.tokens) > 200:
                    sequence.clear()
            logged.clear()
            shared.evaluate_together(
                [Part(sequence, [5] * length, 1) for sequence, length in zip(sequences, lengths, strict=True)]
            )
            assert list(shared.batches(lengths, sequences)) == batches(logged)
            compared.add(len(batches(logged)))
    assert compared == {1} if exact == "off" and kind in ("llama", "gemma3", "deepseek2") else len(compared) > 2
