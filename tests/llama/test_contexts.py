"""Tests of the contexts on a model's weights: embeddings, LoRA adapters in all of them, and the timing of settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from architectures.files import architecture
from support.cli_runner import DEMO
from support.grid import grid
from support.model_files import merge, tiny, write_adapter, write_model

from ngramspec.backend import Part
from ngramspec.data import ModelError, TargetError
from ngramspec.instruments.tuning.search import candidates
from ngramspec.llama import trial
from ngramspec.llama.embedder import POOLINGS, Embedder
from ngramspec.llama.target import Target
from ngramspec.llama.trial import DEEP, DRAFTS, LONG_READING, READING, SINGLE, SettingsTimer, TrialContext
from ngramspec.llama.weights import Weights
from ngramspec.model_settings import ModelSettings

MODELS = ("llama", "gemma3", "qwen35", "mamba2")
LONG = "had a bad cab face abed fed a dab hag gaff egg head beef cafe deaf bead gab fade " * 4


def embed(embedder: Embedder, tokens: Sequence[int]) -> Any:
    """Return the embeddings of a text without pauses."""
    reader = embedder.reading(tokens, lambda: 512)
    while True:
        try:
            next(reader)
        except StopIteration as end:
            return end.value


def of_llama_cpp(model: Path, pooling: str, text: str) -> Any:
    """Return llama-cpp-python's embedding of a text in one batch, pooled by llama.cpp."""
    llama = llama_cpp.Llama(
        str(model), embedding=True, pooling_type=POOLINGS.index(pooling), n_ctx=512, n_threads=1, verbose=False
    )
    try:
        return np.atleast_2d(np.array(llama.embed(text), np.float32))
    finally:
        llama.close()


def cosines(one: Any, other: Any) -> Any:
    assert one.shape == other.shape
    return (one * other).sum(axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


@grid(name=MODELS, pooling=POOLINGS)
def test_embedder_returns_embeddings_of_llama_cpp(name: str, pooling: Any) -> None:
    with Target(architecture(name), ctx_size=512, threads=1, exact="off") as target:
        tokens = target.vocabulary.tokenize(LONG, special=True)
        assert len(tokens) > 128  # more than one pass
        embedder = Embedder(target, pooling, 512)
        # An earlier text has no influence.
        embed(embedder, tokens[::-1])
        found = embed(embedder, tokens)
    assert cosines(found, of_llama_cpp(architecture(name), pooling, LONG)).min() > 0.99999


def test_embedder_keeps_logits_of_target() -> None:
    with Target(architecture("llama"), ctx_size=512, threads=1, exact="on") as target:
        tokens = target.vocabulary.tokenize(LONG)[:40]
        plain = [target.sequences[0].prefill(tokens).copy(), target.sequences[0].evaluate([5, 6])[-1].copy()]
        target.sequences[0].clear()
        embedder = Embedder(target, "mean", 512)
        steps = embedder.reading(tokens * 5, lambda: 7)
        rows = [target.sequences[0].prefill(tokens).copy()]
        next(steps)
        next(steps)
        rows.append(target.sequences[0].evaluate([5, 6])[-1].copy())
        assert np.array_equal(plain, rows)
        # Neither the sizes of the passes nor an abandoned text have an influence.
        assert cosines(embed(embedder, tokens * 5), embed(embedder, tokens * 5)).min() > 0.99999


def test_embedder_rejects_empty_and_too_long_texts() -> None:
    with Target(architecture("llama"), ctx_size=64, threads=1, exact="off") as target:
        embedder = Embedder(target, "last", 64)
        for tokens in ([], [5] * 65):
            with pytest.raises(ValueError, match="1 to 64 tokens"):
                embed(embedder, tokens)
        assert embed(embedder, [5] * 64).shape == (1, embedder.width)


def test_embedder_uses_pooling_of_file_and_rejects_unsupported_models() -> None:
    def opened(**values: Any) -> Target:
        return Target(tiny("llama", **values), ctx_size=64, threads=1, exact="off")

    with Target(DEMO, ctx_size=64, threads=1, exact="off") as target:
        assert Embedder(target, None, 64).pooling == "none"
    with opened(pooling=3) as target:
        assert Embedder(target, None, 64).pooling == "last"
        assert Embedder(target, "mean", 64).pooling == "mean"
    with opened(pooling=4) as target, pytest.raises(ModelError, match="is a ranking model"):
        Embedder(target, None, 64)
    with opened(causal=False) as target, pytest.raises(ModelError, match="uses bidirectional attention"):
        Embedder(target, "mean", 64)


TEXT = list(range(20, 50))
CLOSE = 1e-3
SMALL: dict[str, Any] = {"ctx_size": 256, "threads": 1, "exact": "off"}
LAYERS = ("attn_q.weight", "ffn_down.weight")

Lora = Sequence[tuple[Path, float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", "llama")


@pytest.fixture(scope="module")
def lora(model: Path) -> Lora:
    """Return two adapters that share tensors; one of them also changes the embeddings."""
    one = write_adapter(model.with_name("one.gguf"), model, LAYERS)
    other = write_adapter(
        model.with_name("other.gguf"), model, ("attn_q.weight", "token_embd", "output.weight"), seed=1
    )
    return [(one, 0.7), (other, -0.3)]


def said(model: Path, **settings: Any) -> list[Any]:
    """Return logits of all contexts on a model's weights, except its head."""
    with Target(model, texts=2, **SMALL, **settings) as target:
        found = [target.sequences[0].prefill(TEXT).copy(), target.sequences[1].prefill(TEXT[::-1]).copy()]
        parts = [Part(target.sequences[0], [5, 6], 2), Part(target.sequences[1], [7], 1)]
        found += [rows.copy() for rows in target.evaluate_together(parts)]
        found.append(embed(Embedder(target, "mean", 128), TEXT))
        for trial in (target.trials.trial("fast"), target.trials.open(target.settings, 256)):
            with trial:
                # Trials start from the state of a second context.
                trial.start(128)
                found.append(trial.evaluate(TEXT, 8))
    return found


def test_target_with_lora_returns_logits_of_merged_weights(model: Path, lora: Lora, tmp_path: Path) -> None:
    base, adapted = said(model), said(model, lora=lora)
    for plain, found, wanted in zip(base, adapted, said(merge(tmp_path / "m.gguf", model, lora)), strict=True):
        assert found == pytest.approx(wanted, abs=CLOSE)
        assert np.abs(found - plain).max() > 100 * CLOSE


def test_head_with_lora_returns_logits_of_merged_weights(tmp_path: Path) -> None:
    model = architecture("qwen35", head=True, half=False)
    lora = [(write_adapter(tmp_path / "lora.gguf", model, ("blk.6.attn_q.weight", "blk.6.ffn_up")), 1.0)]
    rows = []
    for path, adapters in ((model, ()), (model, lora), (merge(tmp_path / "merged.gguf", model, lora), ())):
        with Target(path, mtp=True, lora=adapters, **SMALL) as target:
            assert target.head is not None
            target.feeds_head = True
            target.sequences[0].prefill(TEXT[:-1])
            rows.append(target.head.prefill(TEXT).copy())
    plain, found, wanted = rows
    assert found == pytest.approx(wanted, abs=CLOSE)
    assert np.abs(found - plain).max() > 10 * CLOSE


@pytest.fixture(scope="module")
def demo_lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an adapter for the quantised demo model."""
    return write_adapter(tmp_path_factory.mktemp("demo") / "demo.gguf", DEMO, LAYERS, rank=2)


def row(**settings: Any) -> Any:
    with Target(DEMO, flash_attn="off", **SMALL, **settings) as target:
        return target.sequences[0].prefill(TEXT).copy()


def test_lora_scale_matches_llama_cpp_and_zero_changes_nothing(demo_lora: Path) -> None:
    base = row()  # Ours comes first, since it disables AMX kernels that would crash the process.
    assert np.array_equal(row(lora=[(demo_lora, 0.0)]), base)
    theirs = llama_cpp.Llama(
        str(DEMO), lora_path=str(demo_lora), lora_scale=0.4, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False
    )
    theirs.eval(TEXT)
    wanted = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(theirs.ctx, -1), (theirs.n_vocab(),)).copy()
    theirs.close()
    assert row(lora=[(demo_lora, 0.4)]) == pytest.approx(wanted, abs=0.05)
    assert np.abs(wanted - base).max() > 1


def test_target_keys_with_other_adapter_or_scale_differ(model: Path, lora: Lora, tmp_path: Path) -> None:
    (file, _), _ = lora
    like_it = write_adapter(tmp_path / file.name, model, LAYERS, seed=5)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(file.read_bytes())
    keys = []
    for adapters in ([], [(file, 1)], [(file, 0.5)], [(like_it, 1)], [(file, 1), (file, 1)], [(renamed, 1)]):
        with Target(model, lora=adapters, **SMALL) as target:
            keys.append((target.sequences[0].fingerprint, target.trials.identity))
    assert len({key for pair in keys[:-1] for key in pair}) == 10
    assert keys[-1] == keys[1]


Q = "blk.0.attn_q.weight"
WRONG: dict[str, dict[str, Any]] = {
    r"is not a LoRA adapter for model.gguf: its general.architecture is 'gemma2', not 'llama'": {
        "architecture": "gemma2"
    },
    r"is not a LoRA adapter for model.gguf: its adapter.type is 'ia3', not 'lora'": {"kind": "ia3"},
    r"has no adapter.lora.alpha": {"alpha": 8},
    r"has tensors of a type that llama.cpp cannot multiply with \(26\)": {"dtype": np.int32},
    rf"is not for model.gguf: it changes {Q}, which has another shape in the model": {"shapes": ((4, 48), (32, 4))},
    rf"it changes {Q}, which has another shape": {"shapes": ((2, 4, 32), (2, 32, 4))},
    rf"changes {Q}, which has another shape": {"shapes": ((3, 32), (32, 4))},
    rf"is damaged: it contains only one of the two matrices for {Q}": {"letters": "a"},
    r"is not a LoRA adapter: it changes no weights": {"letters": ""},
    r"is an activated adapter \(aLoRA\), which is not supported": {"switched_on_by": [5, 6]},
}


@pytest.mark.parametrize("words", WRONG)
def test_target_rejects_adapter_that_llama_cpp_cannot_apply(words: str, model: Path, tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "lora.gguf", model, [Q], **WRONG[words])
    with pytest.raises(ModelError, match=words) as raised:
        Target(model, lora=[(file, 1.0)], **SMALL)
    assert "\n" not in str(raised.value)


def test_target_rejects_files_that_are_not_adapters_for_the_model(model: Path, lora: Lora, tmp_path: Path) -> None:
    def refusal(file: Path, base: Path = model) -> str:
        with pytest.raises(ModelError) as raised:
            Target(base, lora=[(file, 1.0)], **SMALL)
        return str(raised.value)

    (file, _), _ = lora
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-64])
    assert "cut.gguf is truncated" in refusal(cut)
    assert "no such adapter file: nowhere.gguf" in refusal(Path("nowhere.gguf"))
    assert "its general.type is None, not 'adapter'" in refusal(model)
    cut.write_bytes(b"PK\x03\x04" * 9)
    assert "is not a GGUF adapter: it looks like a PyTorch checkpoint" in refusal(cut)
    elsewhere = write_adapter(tmp_path / "elsewhere.gguf", DEMO, ["blk.5.attn_q.weight"])
    assert "is not for model.gguf: it changes blk.5.attn_q.weight, which the model does not have" in refusal(elsewhere)
    # The demo model uses its embeddings as output matrix: llama.cpp ends the process on an adapter for these.
    embeddings = write_adapter(tmp_path / "embeddings.gguf", DEMO, ["token_embd"])
    assert "token_embd.weight, which is also the output matrix of demo.gguf" in refusal(embeddings, DEMO)


SCOPE = {"physical": 1, "logical": 2, "on_cpu": True, "flash_free": True, "quantised_cache": True}


@pytest.fixture(scope="module", params=["llama", pytest.param("mamba", marks=pytest.mark.exhaustive)])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with Target(tiny(request.param), ctx_size=64, threads=1, exact="off") as target:
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


def test_target_limits_micro_batch_in_exact_mode_and_rejects_invalid() -> None:
    """A small micro-batch fits the passes of trials, and exact settings keep it small; invalid values are rejected."""

    def opened(**settings: Any) -> Target:
        return Target(tiny("llama"), ctx_size=64, threads=1, **settings)

    with opened(threads_batch=2, ubatch_size=64) as target:
        assert (target.n_batch, target.settings.threads_batch) == (64, 2)
        with target.trials.trial("fast") as context:
            assert context.largest_agreeing(1024) >= 1
    for more, size in (({"exact": "on"}, 128), ({}, 1024), ({"flash_attn": "off"}, 1024)):
        with opened(ubatch_size=1024, **more) as target:
            assert target.n_batch == size
    for name, value in (("ubatch_size", 63), ("ubatch_size", 5000), ("threads_batch", 0)):
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            opened(**{name: value})
