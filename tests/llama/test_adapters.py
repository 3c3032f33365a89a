"""Tests of LoRA adapters: each context gives the logits of merged weights, and invalid adapters are rejected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from architectures.files import write_model as write_with_head
from support.cli_runner import DEMO
from support.embedding import embed
from support.tiny_adapters import merge, write_adapter
from support.tiny_models import write_model

from ngramspec.backend import Part
from ngramspec.data import ModelError
from ngramspec.llama.embedder import Embedder
from ngramspec.llama.target import Target

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
    model = write_with_head(tmp_path / "model.gguf", "qwen35", head=True, half=False)
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


# --------------------------------------------------------------------------- what is refused

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
