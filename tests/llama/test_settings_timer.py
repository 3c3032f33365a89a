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
from ngramspec.llama import settings_timer
from ngramspec.llama.settings_timer import SettingsTimer
from ngramspec.llama.target import Target
from ngramspec.machine import DEEP, DRAFTS, LONG_READING, READING, SINGLE, Settings

SCOPE = {"physical": 1, "logical": 2, "on_cpu": True, "flash_free": True, "quantised_cache": True}


class LoadedModel:
    """A target, a bench on it, and the further targets that the bench loaded."""

    def __init__(self, path: Path) -> None:
        self.target = Target(path, n_ctx=64, threads=1, exact="off")
        self.target.sequences[0].prefill([1, 2, 3])
        self.again: list[Target] = []
        self.bench = SettingsTimer(self.target, self.load, 256)

    def load(self, settings: Settings) -> Target:
        options = {"mmap": settings.mmap, "repack": settings.repack}
        target = Target(self.target.weights.path, n_ctx=64, threads=1, exact="off", **options)
        self.again.append(target)
        return target


@pytest.fixture(scope="module", params=["llama", pytest.param("mamba", marks=pytest.mark.exhaustive)])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    found = LoadedModel(write_model(tmp_path_factory.mktemp("models") / "m.gguf", request.param))
    yield found
    # The bench closes the models that it loaded, but not its target.
    found.bench.close()
    for again in found.again:
        with pytest.raises(ValueError, match="closed"):
            again.sequences[0].evaluate([1])
    assert len(found.target.sequences[0].evaluate([4])) == 1
    found.target.close()


def test_settings_timer_times_every_candidate_and_keeps_target(loaded: LoadedModel) -> None:
    present = loaded.target.weights.present
    assert present == Settings(1, 1)
    for candidate in candidates(present, **SCOPE).values():
        # Blocks of 32 require heads of at least this width.
        with suppress(TargetError) if candidate.parameter == "cache_types" else nullcontext():
            times = [
                loaded.bench.seconds(replace(present, **candidate.change), measure) for measure in candidate.measures
            ]
            assert all(0 < seconds < 60 for seconds in times)
    assert all(loaded.bench.seconds(present, m) > 0 for m in (SINGLE, *DRAFTS, READING, LONG_READING, *DEEP))
    assert loaded.target.sequences[0].tokens == [1, 2, 3]
    # The bench loaded the weights once for each set of load options.
    assert [t.weights.present.mmap for t in loaded.again] == [False, True]
    assert [t.weights.present.repack for t in loaded.again] == [True, False]


def test_settings_timer_with_low_memory_does_not_reload_weights(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_timer, "SPARE", 2**60)
    other = replace(loaded.target.weights.present, mmap=False, repack=False)
    with pytest.raises(TargetError, match="not enough memory to load the weights"):
        loaded.bench.seconds(other, SINGLE)


def test_target_limits_micro_batch_in_exact_mode_and_rejects_invalid(tmp_path: Path) -> None:
    """A small micro-batch fits the passes of trials, and exact settings keep it small; invalid values are rejected."""
    path = write_model(tmp_path / "m.gguf", "llama")
    with Target(path, n_ctx=64, threads=1, threads_batch=2, micro_batch=64) as target:
        assert (target.n_batch, target.weights.present.threads_batch) == (64, 2)
        with target.trials.trial("fast") as trial:
            assert trial.largest_agreeing(1024) >= 1
    with Target(path, n_ctx=64, threads=1, micro_batch=1024, exact="on") as target:
        assert target.n_batch == 128
    with Target(path, n_ctx=64, threads=1, micro_batch=1024) as target:
        assert target.n_batch == 1024
    with Target(path, n_ctx=64, threads=1, micro_batch=1024, flash_attn="off") as target:
        assert target.n_batch == 1024
    for name, value in (("micro_batch", 63), ("micro_batch", 5000), ("threads_batch", 0)):
        options: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            Target(path, n_ctx=64, **options)
