"""Tests of `ngramspec.Llama` on models whose memory cannot simply be cut: recurrent, hybrid, with sliding windows."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import llama_cpp.llama_cpp as llama
import pytest
from architectures.files import write_model
from support.twins import Twins, count_cached_tokens, generate_states

from ngramspec.llama import devices

NAMES = ("mamba", "qwen35", "gemma3")
"""Models with a recurrent state, a recurrent state with snapshots, and sliding windows."""

MORE = ("jamba", "lfm2")

SETTINGS: tuple[dict[str, Any], ...] = ({"temp": 0.0}, {"temp": 1.0, "repeat_penalty": 1.1})


def tiny(name: str, folder: Path, **settings: Any) -> Twins:
    """Return twins in single precision, in which another batch only changes the last bits of repeated tokens."""
    return Twins(write_model(folder / f"{name}.gguf", name, half=False), **settings)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_llama_on_special_memory_equals_parent(name: str, tmp_path: Path) -> None:
    pair = tiny(name, tmp_path)
    assert pair.ours.drafting_disabled_reason is None

    def run(llama: Any, settings: dict[str, Any]) -> Any:
        prompt = llama.tokenize(b"A text that is longer than the sliding window. " * 9)
        text = generate_states(llama, prompt, 40, **settings)
        held = llama._input_ids.tolist()
        between = count_cached_tokens(llama), llama._requires_eval
        again = generate_states(llama, held, 7, **settings)
        stream = llama.generate([*held, *held[5:19]], **settings)
        longer = list(islice(stream, 15))
        state = llama.save_state()
        longer += islice(stream, 9)
        stream.close()
        llama.load_state(state)
        held = llama._input_ids.tolist()
        return (
            text,
            between,
            again,
            longer,
            generate_states(llama, [*held, *held[3:9]], 9, **settings),
            count_cached_tokens(llama),
        )

    for settings in SETTINGS:
        pair.compare(lambda llama, settings=settings: run(llama, settings))
    assert pair.drafted
    pair.close()


def test_checkpoints_of_a_recurrent_state_stay_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = devices.Device("CUDA0", "RTX 3090", True, 2**33, 2**34, backend="CUDA")
    monkeypatch.setattr(devices, "devices", lambda: [card])
    pair = tiny("mamba", tmp_path, n_gpu_layers=-1)
    restore = llama.llama_state_seq_set_data_ext
    with mock.patch.object(llama, "llama_state_seq_set_data_ext", wraps=restore) as restored:
        pair.compare(lambda llama: generate_states(llama, llama.tokenize(b"A text. " * 20), 20, temp=0.0))
    assert pair.drafted
    assert {call.args[-1] for call in restored.mock_calls} == {3}
    pair.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma3", "swa_full"), pytest.param("deepseek4", "a sliding window", marks=pytest.mark.exhaustive)],
)
def test_llama_with_sliding_window_cache_disables_drafting(name: str, reason: str, tmp_path: Path) -> None:
    pair = tiny(name, tmp_path, swa_full=False)
    assert reason in (pair.ours.drafting_disabled_reason or "")
    pair.compare(lambda llama: generate_states(llama, llama.tokenize(b"A text. " * 20), 20, temp=0.0))
    assert not pair.ours.draft_stats.passes
    pair.close()
