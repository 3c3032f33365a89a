"""Tests that the probe finds the kernel classes of a mock target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.mock_target import MockTarget

from ngramspec.cost.bits import (
    SIZES,
    KernelClasses,
    ProbeReport,
    choose_class,
    prefill_is_chunk_invariant,
    probe,
)

Kernels = Callable[[int, int], int]


def planted(kernels: Kernels, **options: Any) -> MockTarget:
    return MockTarget(30, **{"kernels": kernels, "n_ctx": 2048, **options})


@pytest.mark.parametrize(
    ("kernels", "classes"),
    [
        (lambda n, depth: 0, {SIZES}),
        (lambda n, depth: n, {(n,) for n in SIZES}),
        (lambda n, depth: int(n > 1), {(1,), SIZES[1:]}),
        (lambda n, depth: int(n > 3), {(1, 2, 3), (4, 5, 6, 8, 9, 12, 16)}),
        (lambda n, depth: n % 2, {(1, 3, 5, 9), (2, 4, 6, 8, 12, 16)}),
        (lambda n, depth: int(n > 1 and depth >= 512), {(1,), SIZES[1:]}),
        (lambda n, depth: n if depth < 256 else 0, {(n,) for n in SIZES}),
        (lambda n, depth: int(n > 3) if depth < 256 else 2 * (n > 5), {(1, 2, 3), (4, 5), (6, 8, 9, 12, 16)}),
    ],
)
def test_probe_finds_kernel_classes(kernels: Kernels, classes: set[tuple[int, ...]]) -> None:
    target = planted(kernels)
    report = probe(target)
    assert set(report.classes) == classes
    assert target.tokens == []
    assert report.sizes == SIZES
    assert (report.max_difference > 0) == (len(classes) > 1)
    for c in classes:
        assert all(report.class_of(n) == c for n in c)


def test_probe_with_given_depths_uses_them() -> None:
    def deep(n: int, depth: int) -> int:
        return int(n > 4 and depth >= 700)

    assert len(probe(planted(deep), [100]).classes) == 1
    report = probe(planted(deep), [800, 100, 800])
    assert report.depths == (100, 800)
    assert len(report.classes) == 2


@pytest.mark.parametrize("n_ctx", [20, 64, 200, 512])
def test_probe_of_small_context_keeps_depths_within_it(n_ctx: int) -> None:
    # The last tokens may be beyond n_ctx, in the space for padding; a full cache raises.
    target = planted(lambda n, depth: int(n > 2), n_ctx=n_ctx, n_batch=64)
    report = probe(target)
    assert set(report.classes) == {(1, 2), SIZES[2:]}
    assert max(report.depths) < n_ctx


def test_probe_reports_maximum_logit_difference() -> None:
    target = planted(lambda n, depth: int(n == 5), noise=0.5)
    seen = probe(target).max_difference
    assert 0.5 < seen < 8.0  # The maximum of several hundred differences of normal numbers with standard deviation 0.5.
    assert seen > 5 * probe(planted(lambda n, depth: int(n == 5), noise=0.05)).max_difference


def test_probe_evaluates_few_tokens_and_ignores_cache_content() -> None:
    target = planted(lambda n, depth: int(n > 3))
    report = probe(target)
    assert sum(target.batches) <= 2 * len(SIZES) * 24
    assert sum(target.prefill_sizes) <= 96 + 1200
    target.prefill([1, 2, 3])
    target.evaluate([4, 5])
    assert probe(target) == report


def test_reads_alike_compares_prefill_with_decoding() -> None:
    assert prefill_is_chunk_invariant(MockTarget(), (1, 2, 3))
    # The mock's prefill has separate kernels.
    assert not prefill_is_chunk_invariant(MockTarget(kernels=lambda n, depth: 0), (1, 2, 3))
    target = MockTarget(n_ctx=64)
    assert prefill_is_chunk_invariant(target, (4,))
    assert not target.tokens


def on_gpu(**options: Any) -> MockTarget:
    """Return a target with kernels for size 1, sizes up to 8, and larger ones."""
    return planted(lambda n, depth: 0 if n == 1 else 1 if n <= 8 else 2, **options)


def test_exact_sizes_are_chosen_by_bits_and_stay(tmp_path: Path) -> None:
    target = on_gpu()
    sizes = KernelClasses.load(target, tmp_path).ensure_exact(target)
    assert sizes == (2, 3, 4, 5, 6, 8)
    again, batches = on_gpu(), len(target.batches)
    assert KernelClasses.load(again, tmp_path).ensure_exact(again) == sizes
    assert batches
    assert not again.batches
    known = KernelClasses.load(again, tmp_path)
    known.forget()
    assert not list(tmp_path.iterdir())
    assert known.exact_sizes is None


@pytest.mark.parametrize(
    ("classes", "chosen"),
    [
        (((1,), (2, 3, 4)), (2, 3, 4)),
        (((1, 2), (3, 4, 5, 6)), (1, 2)),
        (((1, 3), (2, 4)), (1, 3)),
        (((1,), (2,), (3, 4)), (1,)),
    ],
)
def test_choose_class_takes_largest_that_begins_small(
    classes: tuple[tuple[int, ...], ...], chosen: tuple[int, ...]
) -> None:
    assert choose_class(ProbeReport((96,), classes, 0.0)) == chosen


def test_sizes_of_another_process_win(tmp_path: Path) -> None:
    target = on_gpu()
    late = KernelClasses.load(target, tmp_path)
    early = KernelClasses.load(target, tmp_path)
    early.ensure_exact(target)
    probed = len(target.batches)
    assert late.ensure_exact(target) == early.exact_sizes
    assert len(target.batches) == probed
    assert late.ensure_chunk_invariance(target) is False
    assert KernelClasses.load(target, tmp_path).is_chunk_invariant is False


@pytest.mark.parametrize("text", ["", "{}", '{"probe": 3, "exact_sizes": [1], "reads_alike": 0}', "[" * 9])
def test_damaged_files_are_ignored(tmp_path: Path, text: str) -> None:
    target = on_gpu()
    KernelClasses.load(target, tmp_path).ensure_exact(target)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert KernelClasses.load(target, tmp_path).exact_sizes is None
