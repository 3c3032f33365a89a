"""What a recurrent memory can take back: no more than the last pass wrote, and once."""

from __future__ import annotations

from ngramspec.llama.snapshots import Snapshots


def right(snapshots: Snapshots) -> list[int]:
    return [depth for depth in range(1, 30) if snapshots.takes_back(depth)]


def test_the_last_pass_alone_counts() -> None:
    snapshots = Snapshots(16)
    assert right(snapshots) == []
    snapshots.decoded(5)
    assert right(snapshots) == [1, 2, 3, 4]
    snapshots.decoded(1)
    assert right(snapshots) == []
    snapshots.decoded(3)
    assert right(snapshots) == [1, 2]


def test_no_more_than_there_are() -> None:
    snapshots = Snapshots(4)
    snapshots.decoded(64)
    assert right(snapshots) == [1, 2, 3, 4]
    none = Snapshots(0)
    none.decoded(64)
    assert right(none) == []


def test_they_are_used_up_by_one() -> None:
    snapshots = Snapshots(16)
    snapshots.decoded(8)
    snapshots.used_up()
    assert right(snapshots) == []
    snapshots.decoded(2)
    assert right(snapshots) == [1]
