"""Sliding windows beside a recurrent state: which models have them, and why exact mode does not draft for these."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures.files import write_model

from ngramspec.llama.target import Target

WINDOWS = {"llama": 0, "gemma3": 64, "qwen35": 0, "lfm2-swa": 64, "deepseek4": 64}


@pytest.mark.parametrize(
    "name",
    [*list(WINDOWS)[1:4], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama", "deepseek4"))],
)
def test_windows_are_known_and_exact_mode_goes_by_them(name: str, tmp_path: Path) -> None:
    with Target(write_model(tmp_path / f"{name}.gguf", name), n_ctx=256, threads=1, exact="on") as target:
        assert target.window == WINDOWS[name]
        assert target.exact_rollback == (name not in ("lfm2-swa", "deepseek4"))
