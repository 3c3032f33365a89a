"""Tests of `ngramspec.load` and its settings: rejected arguments, opened models, and the same in all front ends."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.cli_runner import DEMO, run
from support.model_files import write_model

import ngramspec
from ngramspec.data import ModelError, NGramSpecError
from ngramspec.llama.placement import DRAFT_MARGIN, MARGIN
from ngramspec.loading import load
from ngramspec.loading.load import model_tuning_path
from ngramspec.loading.settings import LoadSettings, Tuned, save_tuned
from ngramspec.memory.memory import memory_folder
from ngramspec.memory.store import Store
from ngramspec.model_settings import LoadSettingsError

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
SMALL: dict[str, Any] = {"ctx_size": 256, "threads": 1, "exact": "off"}


@pytest.fixture(autouse=True)
def _home(env: dict[str, str], tmp_path: Path) -> Any:
    """Give each test a separate home folder; measurements of the machine are shared."""
    with mock.patch.dict(os.environ, env | {"XDG_DATA_HOME": str(tmp_path)}, clear=True):
        yield


def test_load_example_of_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S) if "load(" in block)
    names: dict[str, Any] = {}
    exec(block.replace("model.gguf", str(DEMO)).replace("max_tokens=200", "max_tokens=8"), names)
    assert capsys.readouterr().out
    assert not names["model"].target.weights.handle


def test_load_uses_same_settings_as_complete(env: dict[str, str]) -> None:
    told: list[str] = []
    save_tuned(model_tuning_path(DEMO, LoadSettings()), Tuned({"no_mmap": True}, 0.8, "2026-11-22"))
    with ngramspec.load(DEMO, on_note=told.append, draft_model=str(DEMO), **SMALL) as model:
        store = Store(memory_folder(), model.target.vocabulary.vocabulary_hash, "demo")
        assert (model.tuning, model.settings.no_mmap) == ({"no_mmap": True}, True)
        assert model.decoder.drafter is not None
        assert model.decoder.drafter.name == "hybrid"
        prompt = model.target.vocabulary.tokenize("def add(a, b):\n    return")
        text = "".join(step.text for step in model.decoder.generate(prompt, max_tokens=12))
    assert model.draft_model is not None
    assert not model.draft_model.weights.handle
    assert [line.partition(" (")[0] for line in told if line not in model.target.weights.notes] == ["tuned: --no-mmap"]
    line = ["complete", DEMO, "-c", "256", "-t", "1", "--exact", "off", "-md", DEMO, "-n", "12"]
    assert run(env, *line, stdin=b"def add(a, b):\n    return").out == text
    store.append([5, 6, 7])
    with ngramspec.load(DEMO, ignore_tuned=True, **SMALL) as model:
        assert model.memory is not None
        assert model.memory.n_stored_tokens == 4
    with ngramspec.load(DEMO, ignore_tuned=True, no_memory=True, **SMALL) as model:
        assert model.memory is None


def test_load_with_failed_draft_model_or_memory_closes_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    target = load.Target

    def noting(*args: Any, **more: Any) -> Any:
        opened.append(target(*args, **more))
        return opened[-1]

    monkeypatch.setattr(load, "Target", noting)
    other = write_model(tmp_path / "other.gguf", "llama")
    with pytest.raises(ModelError, match="their vocabularies differ at token"):
        ngramspec.load(DEMO, draft_model=str(other), **SMALL)
    with pytest.raises(NGramSpecError, match="memory 'work' has no files"):
        ngramspec.load(DEMO, memory="work", **SMALL)
    assert [one.weights.handle for one in opened] == [None] * 3


def test_a_draft_model_has_memory_on_the_gpu_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    target = load.Target

    def noting(*args: Any, **more: Any) -> Any:
        asked.append((more.get("reserved", 0), more.get("margin", MARGIN)))
        return target(*args, **more)

    monkeypatch.setattr(load, "Target", noting)
    for settings, reserves in (({}, True), ({"gpu_layers": 0}, False), ({"device_draft": "none"}, False)):
        with ngramspec.load(DEMO, draft_model=str(DEMO), **settings, **SMALL):
            (reserved, margin), (its_own, smaller) = asked
        assert reserved == (DRAFT_MARGIN + DEMO.stat().st_size * 5 // 4 if reserves else 0)
        assert (its_own, smaller, margin) == (0, DRAFT_MARGIN, MARGIN)
        asked.clear()


def test_load_offline_does_not_use_the_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # would give another message
    with pytest.raises(ModelError, match="--offline or HF_HUB_OFFLINE is set"):
        ngramspec.load(hf_repo="owner/repo", offline=True)


def test_load_settings_reject_invalid_values_by_option_name() -> None:
    for given, words in (
        ({"ctx_size": 3}, "ctx_size must be 0 or from 16 to 16777216, got 3"),
        ({"exact": "yes"}, "exact must be one of: auto, on, off, got 'yes'"),
        ({"draft_model": "a", "no_draft": True}, "draft_model cannot be combined with no_draft"),
        ({"policy": "lucky"}, "unknown policy 'lucky'"),
        ({"lora": "a.gguf"}, "lora must be file names with a scale each, got 'a.gguf'"),
    ):
        with pytest.raises(LoadSettingsError, match=re.escape(words)):
            LoadSettings(**given)
    with pytest.raises(LoadSettingsError) as raised:
        LoadSettings(draft_model="a", mtp=True)
    assert raised.value.message({"draft_model": "-md"}) == "-md cannot be combined with mtp"
    with pytest.raises(LoadSettingsError, match="two models were given: a and hf_repo b/c"):
        ngramspec.load("a", hf_repo="b/c")


def test_settings_of_target_keep_adapters() -> None:
    settings = LoadSettings(lora=(("a.gguf", 1.0),), lora_scaled=(("b.gguf", 0.5),)).of_target
    assert settings.adapters == (("a.gguf", 1.0), ("b.gguf", 0.5))


def test_tuned_threads_may_follow_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def note(*_: Any, tuned_threads: bool, **more: Any) -> None:
        asked.append(tuned_threads)
        raise ModelError("noted")

    monkeypatch.setattr(load, "Target", note)
    save_tuned(model_tuning_path(DEMO, LoadSettings()), Tuned({"threads": 1, "threads_batch": 1}, 0.8, "2026-11-22"))
    for threads in (None, 1):
        with pytest.raises(ModelError, match="noted"):
            ngramspec.load(DEMO, threads=threads)
    assert asked == [True, False]
