"""Tests of the split of passes into batches: the rules, and llama.cpp's log."""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Literal

import llama_cpp.llama_cpp as llama
import pytest
from architectures.files import write_model
from support.pools import use_pooled_cache

from ngramspec.backend import Part
from ngramspec.llama import bindings
from ngramspec.llama.passes import equally, in_order
from ngramspec.llama.target import Target

KINDS = ("llama", "gemma3", "deepseek2", "mamba", "jamba", "qwen35", "deepseek4", "qwen4exp")


IN_STEP: list[tuple[dict[int, int], bool, int, list[int]]] = [
    ({0: 1, 1: 1, 2: 1}, True, 0, [3]),
    ({0: 1, 1: 5}, True, 0, [2, 4]),
    ({0: 1, 2: 1, 3: 1}, True, 0, [1, 2]),
    ({0: 1, 2: 1, 3: 1}, False, 0, [3]),
    ({3: 1, 1: 1, 2: 1}, True, 0, [3]),
    ({0: 3, 1: 1, 2: 3}, True, 0, [3, 2, 2]),
    ({0: 20}, True, 0, [8, 8, 4]),
    ({0: 7, 1: 7}, True, 0, [8, 6]),
    ({0: 1, 1: 5}, True, 5, [1, 5]),
    ({0: 1, 1: 6}, True, 5, [2, 5]),
    ({0: 5, 1: 1}, True, 5, [5, 1]),
    ({0: 10}, True, 5, [5, 5]),
]
"""(tokens of each sequence, True if only neighbours share a batch, tokens of the tail, sizes of the batches)."""


def test_batch_split_returns_expected_sizes() -> None:
    assert in_order(5, 8) == [5]
    assert in_order(20, 8) == [8, 8, 4]
    for lengths, neighbours, tail, sizes in IN_STEP:
        assert equally(lengths, 8, neighbours=neighbours, tail=tail) == sizes


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
    kind: str, exact: Literal["on", "off"], logged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pooled_cache(monkeypatch)
    rng = random.Random(1)
    compared = set()
    path = write_model(tmp_path / f"{kind}.gguf", kind)
    with Target(path, texts=5, ctx_size=250, threads=1, exact=exact, draft_max=6) as shared:
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
