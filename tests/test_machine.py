"""What a machine is: cores, of which some have two hyper-threads, as far as this process may run on them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ngramspec import machine


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a system where every process may run on all cores")
@pytest.mark.parametrize(
    ("allowed", "cores"), [({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 1}, 2), ({3}, 1), ({0, 1, 2, 3, 4, 5}, 3)]
)
def test_hyper_threads_of_a_core_count_once(
    allowed: set[int], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for core, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3"), (4, "4-5"), (5, "4-5")):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(machine, "_CORES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    assert machine.physical_cores() == cores
    assert machine.logical_cores() == len(allowed)


def test_where_the_system_does_not_tell_there_is_one_core_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CORES", tmp_path)
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: None)
    assert machine.physical_cores() >= 1
