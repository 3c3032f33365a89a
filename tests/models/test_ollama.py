"""ollama:NAME: from a manifest to its blob."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.cli_runner import DEMO

from ngramspec.errors import ModelError
from ngramspec.models import ollama
from ngramspec.models.find import is_model_argument, resolve


def pull(folder: Path, name: str, model: bytes) -> Path:
    """Lay a model out as ollama does; returns its blob."""
    digest = hashlib.sha256(model).hexdigest()
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(model)
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:0"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def env(folder: Path) -> dict[str, str]:
    return {"OLLAMA_MODELS": str(folder)}


def test_a_name_is_a_model_with_or_without_its_tag(folder: Path, env: dict[str, str]) -> None:
    blob = pull(folder, "registry.ollama.ai/library/toy/latest", DEMO.read_bytes())
    small = pull(folder, "registry.ollama.ai/library/toy/0.5b", DEMO.read_bytes() + b"\0")
    for name in ("ollama:toy", "ollama:toy:latest"):
        assert is_model_argument(name)
        assert resolve(name, env).path == blob
    assert resolve("ollama:toy:0.5b", env).path == small
    assert resolve("ollama:toy", env).label == "ollama:toy"


def test_models_of_other_people_and_hosts(folder: Path, env: dict[str, str]) -> None:
    mine = pull(folder, "registry.ollama.ai/me/toy/latest", DEMO.read_bytes())
    hub = pull(folder, "hf.co/owner/repo-GGUF/Q4_K_M", DEMO.read_bytes() + b"\0")
    assert ollama.find("ollama:me/toy", env) == mine
    assert ollama.find("ollama:hf.co/owner/repo-GGUF:Q4_K_M", env) == hub
    names = [name for name, _ in ollama.listed(env)]
    assert names == ["ollama:hf.co/owner/repo-GGUF:Q4_K_M", "ollama:me/toy:latest"]
    assert all(ollama.find(name, env).is_file() for name in names)


def test_a_name_that_is_not_there(folder: Path, env: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="no models of ollama in"):
        ollama.find("ollama:toy", env)
    pull(folder, "registry.ollama.ai/library/qwen2.5/0.5b", DEMO.read_bytes())
    with pytest.raises(ModelError, match=r"ollama:qwen: ollama has not pulled it; it has qwen2\.5:0\.5b"):
        ollama.find("ollama:qwen", env)


def test_what_is_broken_is_no_model(folder: Path, env: dict[str, str]) -> None:
    pull(folder, "registry.ollama.ai/library/gone/latest", b"GGUF").unlink()
    for name, text in (("none", "[]"), ("half", '{"layers": ['), ("other", '{"layers": [{"mediaType": "x"}]}')):
        path = folder / "manifests" / "registry.ollama.ai" / "library" / name / "latest"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (folder / "manifests" / "stray").write_text("")
    assert [*ollama.listed(env)] == []
    shutil.rmtree(folder)
    assert [*ollama.listed(env)] == []


def test_a_layout_of_its_own_is_told(tmp_path: Path, folder: Path, env: dict[str, str]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_uint32("gemma3.vision.block_count", 27)
    writer.add_tensor("t", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pull(folder, "registry.ollama.ai/library/gemma3/4b", (tmp_path / "m.gguf").read_bytes())
    with pytest.raises(ModelError, match="ollama:gemma3:4b is in a layout of ollama's own"):
        resolve("ollama:gemma3:4b", env)
