"""Sliding windows beside a recurrent state: which models have them, and why exact mode does not draft for these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from architectures.files import write_model

from ngramspec.llama.target import Target

WINDOWS = {"llama": 0, "gemma3": 64, "qwen35": 0, "lfm2-swa": 64, "deepseek4": 64}
BEHIND = 900
"""Tokens in front: the window has long left the first cells."""


@pytest.mark.parametrize(
    "name",
    [*list(WINDOWS)[1:4], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama", "deepseek4"))],
)
def test_windows_are_known_and_exact_mode_goes_by_them(name: str, tmp_path: Path) -> None:
    with Target(write_model(tmp_path / f"{name}.gguf", name), n_ctx=256, threads=1, exact="on") as target:
        assert target.window == WINDOWS[name]
        assert target.exact_rollback == (name not in ("lfm2-swa", "deepseek4"))


@pytest.mark.parametrize("name", ["lfm2-swa", pytest.param("deepseek4", marks=pytest.mark.exhaustive)])
def test_after_a_checkpoint_a_window_is_whole_but_in_another_order(name: str, tmp_path: Path) -> None:
    with Target(write_model(tmp_path / f"{name}.gguf", name), n_ctx=2048, threads=1, exact="on") as target:
        rng = np.random.default_rng(1)
        prompt, after = (rng.integers(10, target.n_vocab, n).tolist() for n in (BEHIND, 60))

        def rows(restored: int) -> np.ndarray:
            target.clear()
            target.prefill(prompt, aligned=True)
            found = []
            for i, token in enumerate(after):
                if i == restored:
                    target.checkpoint()
                    target.evaluate(after[:40])
                    target.rollback(BEHIND + i)
                found.append(target.evaluate([token])[0].copy())
            return np.array(found)

        gaps = np.abs(rows(5) - rows(-1)).max(axis=1)
        # Nothing of what the window shows is missing: else the very next token would tell.
        assert not gaps[:6].any()
        # What comes then lies in other cells than it would have, and sums come out differently in the last digits.
        assert 0 < gaps.max() < 0.1
