"""Tests of `SettingsTimer` on a small model: it times all settings in real contexts and leaves the model unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")

from support.tiny_models import write_model

from ngramspec.data import TargetError
from ngramspec.instruments.tuning.search import candidates
from ngramspec.llama import trial
from ngramspec.llama.target import Target
from ngramspec.llama.trial import SettingsTimer, TrialContext
from ngramspec.llama.weights import Weights
from ngramspec.machine import DEEP, DRAFTS, LONG_READING, READING, SINGLE
from ngramspec.model_settings import ModelSettings

SCOPE = {"physical": 1, "logical": 2, "on_cpu": True, "flash_free": True, "quantised_cache": True}


@pytest.fixture(scope="module", params=["llama", pytest.param("mamba", marks=pytest.mark.exhaustive)])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = write_model(tmp_path_factory.mktemp("models") / "m.gguf", request.param)
    with Target(path, ctx_size=64, threads=1, exact="off") as target:
        target.sequences[0].prefill([1, 2, 3])
        yield target


def test_settings_timer_times_every_candidate_and_keeps_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Weights] = []

    def load(path: Path, settings: ModelSettings) -> Weights:
        loaded.append(Weights(path, settings))
        return loaded[-1]

    monkeypatch.setattr(trial, "Weights", load)
    timer, present = SettingsTimer(target.weights, 256), target.settings
    assert (present.threads, present.threads_batch) == (1, 1)
    for candidate in candidates(present, **SCOPE).values():
        # Blocks of 32 require heads of at least this width.
        with suppress(TargetError) if candidate.parameter == "cache_types" else nullcontext():
            times = [timer.seconds(replace(present, **candidate.change), measure) for measure in candidate.measures]
            assert all(0 < seconds < 60 for seconds in times)
    assert all(timer.seconds(present, m) > 0 for m in (SINGLE, *DRAFTS, READING, LONG_READING, *DEEP))
    assert target.sequences[0].tokens == [1, 2, 3]
    # The weights were loaded once for each set of load options.
    assert [(w.settings.no_mmap, w.settings.no_repack) for w in loaded] == [(True, False), (False, True)]
    monkeypatch.setattr(TrialContext, "seconds", lambda _, size: float(size))
    assert [timer.seconds(present, measure) for measure in (READING, DRAFTS[0])] == [1, 4]  # a prefill by its tokens
    timer.close()
    assert [w.handle for w in loaded] == [None, None]
    assert len(target.sequences[0].evaluate([4])) == 1
    target.sequences[0].rollback(3)


def test_settings_timer_with_low_memory_does_not_reload_weights(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SPARE", 2**60)
    other = replace(target.settings, no_mmap=True, no_repack=True)
    with pytest.raises(TargetError, match="not enough memory to load the weights"):
        SettingsTimer(target.weights, 256).seconds(other, SINGLE)


def test_target_limits_micro_batch_in_exact_mode_and_rejects_invalid(tmp_path: Path) -> None:
    """A small micro-batch fits the passes of trials, and exact settings keep it small; invalid values are rejected."""
    path = write_model(tmp_path / "m.gguf", "llama")
    with Target(path, ctx_size=64, threads=1, threads_batch=2, ubatch_size=64) as target:
        assert (target.n_batch, target.settings.threads_batch) == (64, 2)
        with target.trials.trial("fast") as context:
            assert context.largest_agreeing(1024) >= 1
    with Target(path, ctx_size=64, threads=1, ubatch_size=1024, exact="on") as target:
        assert target.n_batch == 128
    with Target(path, ctx_size=64, threads=1, ubatch_size=1024) as target:
        assert target.n_batch == 1024
    with Target(path, ctx_size=64, threads=1, ubatch_size=1024, flash_attn="off") as target:
        assert target.n_batch == 1024
    for name, value in (("ubatch_size", 63), ("ubatch_size", 5000), ("threads_batch", 0)):
        options: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            Target(path, ctx_size=64, **options)
