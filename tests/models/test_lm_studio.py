"""lmstudio:PUBLISHER/MODEL: from LM Studio's folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cli_runner import DEMO

from ngramspec.errors import ModelError
from ngramspec.models import lm_studio
from ngramspec.models.find import is_model_argument, resolve


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    return tmp_path


def fetch(folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to(DEMO)


def test_a_model_by_its_publisher_and_name(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    fetch(folder, "me/toy-GGUF/toy-Q4_K_M.gguf", "me/toy-GGUF/toy-Q8_0.gguf", "me/toy-GGUF/mmproj-F16.gguf")
    assert is_model_argument("lmstudio:me/toy-GGUF")
    for name, file in (
        ("lmstudio:me/toy-GGUF", "toy-Q4_K_M.gguf"),
        ("lmstudio:me/toy-GGUF:q8_0", "toy-Q8_0.gguf"),
        ("lmstudio:me/toy-GGUF:toy-Q8_0.gguf", "toy-Q8_0.gguf"),
    ):
        assert resolve(name, {}).path == folder / "me" / "toy-GGUF" / file
        assert resolve(name, {}).label == name


def test_folders_of_settings_and_of_older_versions(home: Path) -> None:
    fetch(home / ".cache" / "lm-studio" / "models", "me/old/old.gguf")
    fetch(home / "elsewhere", "me/new/new.gguf")
    (home / ".lmstudio").mkdir()
    settings = home / ".lmstudio" / "settings.json"
    settings.write_text(json.dumps({"downloadsFolder": str(home / "elsewhere")}))
    assert [name for name, _ in lm_studio.listed()] == ["lmstudio:me/new:new.gguf", "lmstudio:me/old:old.gguf"]
    assert all(resolve(name, {}).path.is_file() for name, _ in lm_studio.listed())
    for damaged in ("{", "[]", '{"downloadsFolder": 3}'):
        settings.write_text(damaged)
        assert [name for name, _ in lm_studio.listed()] == ["lmstudio:me/old:old.gguf"]


def test_a_name_that_is_not_there(home: Path) -> None:
    with pytest.raises(ModelError, match="lmstudio:me/toy: LM Studio has no model of that name; there is none in"):
        lm_studio.find("lmstudio:me/toy")
    fetch(home / ".lmstudio" / "models", "me/toy-GGUF/toy-Q8_0.gguf", "me/toy-GGUF/toy-F16.gguf")
    with pytest.raises(ModelError, match="it has me/toy-GGUF"):
        lm_studio.find("lmstudio:me/toy")
    with pytest.raises(ModelError, match="lmstudio:me/toy-GGUF:Q2_K: there is no Q2_K"):
        lm_studio.find("lmstudio:me/toy-GGUF:Q2_K")
