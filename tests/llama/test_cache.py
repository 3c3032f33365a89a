"""Tests of checkpoints and snapshots of `Cache`: the number of state copies, and the states that are kept.

`test_model_contract.py` tests the logits after rollbacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures.files import architecture
from support.machines import CARD

from ngramspec.backend import Part
from ngramspec.data import TargetError
from ngramspec.llama import devices
from ngramspec.llama.cache import MAX_CHECKPOINTS
from ngramspec.llama.sequence import APART, TAIL
from ngramspec.llama.target import Target

IN_RAM, ON_DEVICE = 1, 3
"""Flags of copies of a recurrent state."""


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with Target(architecture(request.param), ctx_size=1024, threads=1, exact="off", draft_max=6, texts=2) as opened:
        yield opened


def on(kind: str) -> pytest.MarkDecorator:
    """Run the test with a tiny model of this architecture."""
    return pytest.mark.parametrize("target", [kind], indirect=True)


def watched(name: str, **options: Any) -> Any:
    """Count the calls of a function of llama.cpp, or replace it."""
    return mock.patch.object(llama, name, **(options or {"wraps": getattr(llama, name)}))


@on("qwen35")
def test_cache_rollback_to_snapshot_copies_no_state(target: Target) -> None:
    with watched("llama_state_seq_get_data_ext") as copies:
        target.sequences[0].prefill([1, 2, 3])
        target.sequences[0].evaluate([4, 5, 6, 7])
        target.sequences[0].rollback(4)
    assert (target.sequences[0].owed, copies.call_count) == (0, 0)


@on("qwen35")
def test_cache_after_decode_with_other_sequence_has_no_snapshots(target: Target) -> None:
    one, other = target.sequences
    for sequence in target.sequences:
        sequence.prefill([1, 2, 3])
    target.evaluate_together([Part(one, [4, 5, 6], 0), Part(other, [4], 0)])
    one.rollback(5)
    assert one.owed == 5
    one.evaluate([6, 7])
    other.evaluate([5])
    one.rollback(6)
    assert one.owed == 6


@on("qwen35")
def test_cache_after_failed_batch_of_other_sequence_restores_checkpoint(target: Target) -> None:
    one, other = target.sequences
    for sequence in target.sequences:
        sequence.prefill([1, 2, 3])
    one.checkpoint()
    one.evaluate([4])
    with watched("llama_decode", return_value=-3), pytest.raises(TargetError):
        other.evaluate([5])
    assert one.owed == 1


@on("llama")
def test_cache_checkpoint_of_truncatable_cache_copies_no_state(target: Target) -> None:
    with watched("llama_state_seq_get_data_ext") as copies:
        target.sequences[0].prefill([1, 2] * 100)
        target.sequences[0].checkpoint()
    assert copies.call_count == 0


@on("mamba")
def test_cache_checkpoint_is_copied_once_for_many_rollbacks(target: Target) -> None:
    target.sequences[0].prefill([1, 2, 3])
    with watched("llama_state_seq_get_data_ext") as copies:
        for _ in range(5):
            target.sequences[0].checkpoint()
            target.sequences[0].evaluate([4, 5])
            target.sequences[0].rollback(3)
            assert target.sequences[0].owed == 0
    assert copies.call_count == 1


@on("mamba")
def test_cache_keeps_latest_prompts_and_one_checkpoint(target: Target) -> None:
    ends = [(APART + TAIL) * (i + 1) for i in range(MAX_CHECKPOINTS + 2)]
    for end in ends:
        target.sequences[0].prefill([7] * end)
    for tokens in ([1], [2]):
        target.sequences[0].evaluate(tokens)
        target.sequences[0].checkpoint()
    # The checkpoint after 2 replaced the one after 1, and newer prompts replaced the oldest ones.
    for length, kept in (
        (ends[-1] + 2, ends[-1] + 2),
        (ends[-1] + 1, ends[-1] - TAIL),
        (ends[2], ends[2] - TAIL),
        (ends[1], 0),
    ):
        target.sequences[0].rollback(length)
        assert length - target.sequences[0].owed == kept


@on("mamba")
def test_cache_rollback_with_failed_restore_evaluates_tokens_again(target: Target) -> None:
    target.sequences[0].prefill([1, 2])
    target.sequences[0].checkpoint()
    target.sequences[0].evaluate([3])
    with watched("llama_state_seq_set_data_ext", return_value=0):
        target.sequences[0].rollback(2)
    assert target.sequences[0].owed == 2


@on("gemma3")
def test_cache_rollback_with_empty_sliding_window_evaluates_tokens_again(target: Target) -> None:
    target.sequences[0].prefill([3] * 40)
    with watched("llama_memory_seq_pos_min", return_value=-1):
        target.sequences[0].rollback(5)
    assert target.sequences[0].owed == 5


# With a made-up GPU, a target uses llama.cpp's copies on devices, which a CPU build makes in RAM.


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Add a GPU to the devices; return its free memory in bytes, which the test can change."""
    free = [2**33]
    monkeypatch.setattr(devices, "devices", lambda: [replace(CARD, free=free[0])])
    return free


def refuse_a_draft(target: Target) -> tuple[list[int], list[int]]:
    """Save a checkpoint, roll back tokens after it, and return the flags of the saved and of the restored copies."""
    with watched("llama_state_seq_get_data_ext") as saved, watched("llama_state_seq_set_data_ext") as restored:
        target.sequences[0].checkpoint()
        target.sequences[0].evaluate([4, 5, 6])
        target.sequences[0].rollback(len(target.sequences[0].tokens) - 3)
        assert target.sequences[0].owed == 0
    return [call.args[-1] for call in saved.mock_calls], [call.args[-1] for call in restored.mock_calls]


@pytest.mark.parametrize("target", ["mamba", "jamba", "falcon-h1"], indirect=True)
def test_cache_checkpoint_before_draft_on_gpu_stays_on_device(gpu: list[int], target: Target) -> None:
    target.sequences[0].prefill([1, 2, 3])
    rows = [target.sequences[0].evaluate([token]).copy() for token in (7, 8, 9)]
    target.sequences[0].clear()
    target.sequences[0].prefill([1, 2, 3])
    for token, row in zip((7, 8, 9), rows, strict=True):
        assert refuse_a_draft(target) == ([ON_DEVICE], [ON_DEVICE])
        assert (target.sequences[0].evaluate([token]) == row).all()


@on("mamba")
def test_cache_checkpoint_on_cpu_stays_in_ram(target: Target) -> None:
    target.sequences[0].prefill([1, 2, 3])
    assert refuse_a_draft(target) == ([IN_RAM], [IN_RAM])


@on("qwen35")
def test_cache_checkpoint_of_model_with_snapshots_stays_in_ram(gpu: list[int], target: Target) -> None:
    target.sequences[0].prefill([1, 2, 3])
    target.sequences[0].checkpoint()
    with watched("llama_state_seq_get_data_ext") as saved:
        target.sequences[0].evaluate([4])
        target.sequences[0].checkpoint()
    assert saved.call_args.args[-1] == IN_RAM


@on("mamba")
def test_cache_copy_that_gpu_fails_to_restore_moves_to_ram(gpu: list[int], target: Target) -> None:
    other = target.sequences[1]
    other.prefill([1, 2, 3])
    row = other.evaluate([7]).copy()
    other.prefill([1, 2, 3])
    real = llama.llama_state_seq_set_data_ext

    def pretend(context: Any, state: Any, size: int, sequence: int, flags: int) -> int:
        return size if flags == ON_DEVICE else int(real(context, state, size, sequence, flags))

    with mock.patch.object(llama, "llama_state_seq_set_data_ext", pretend):
        other.checkpoint()
        other.evaluate([4, 5])
        other.rollback(3)
        assert other.owed == 0
        assert (other.evaluate([7]) == row).all()
        other.rollback(3)
    with watched("llama_state_seq_get_data_ext") as saved:
        other.evaluate([4])
        other.checkpoint()
    assert [call.args[-1] for call in saved.mock_calls] == [IN_RAM]


@on("mamba")
def test_cache_copy_with_low_gpu_memory_stays_in_ram(gpu: list[int], target: Target) -> None:
    other = target.sequences[1]
    other.prefill([1, 2, 3])
    gpu[0] = 1000
    with watched("llama_state_seq_get_data_ext") as saved:
        other.checkpoint()
        other.evaluate([4])
        other.checkpoint()
    assert {call.args[-1] for call in saved.mock_calls} == {IN_RAM}


@on("mamba")
def test_cache_prompt_checkpoints_stay_in_ram_and_are_saved_with_sequence(gpu: list[int], target: Target) -> None:
    one, other = target.sequences
    text = [7] * (APART + TAIL)
    one.prefill(text)
    one.evaluate([1])
    one.checkpoint()
    one.evaluate([2])
    row = np.array(one.evaluate([3]))
    tokens = list(one.tokens)
    other.restore(tokens, one.save_state())
    other.rollback(len(text))
    assert other.owed == TAIL
    other.evaluate([1, 2])
    np.testing.assert_allclose(other.evaluate([3]), row, atol=1e-3)
