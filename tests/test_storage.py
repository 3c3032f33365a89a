"""Where files of the user's are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from ngramspec.storage import cache_folder, config_folder, data_folder


def test_each_kind_has_a_folder_of_its_own_below_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    folders = [cache_folder("amx"), cache_folder("calibration"), data_folder("memory"), config_folder()]
    assert len(set(folders)) == 4
    assert all(folder.is_relative_to(tmp_path) for folder in folders)
    assert [folder.parts[-2:] for folder in folders[:3]] == [("ngramspec", f.name) for f in folders[:3]]
