"""What a judge has learnt, from one process to the next."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.uncompiled import plain_modules

from ngramspec.drafting.mixture import drafter as mixture
from ngramspec.drafting.mixture import learnt
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.drafting.mixture.guesser import Guesser

BOTH = pytest.mark.parametrize("module", [mixture, plain_modules()["drafter"]], ids=["installed", "plain"])
TEXT = random.Random(7).sample(range(30), 20) * 20
FREE, TOKENS = 1 << 12, 1 << 17


def practised(drafter: Any, text: list[int] = TEXT) -> Any:
    """After some drafts that were right."""
    drafter.begin(text[:100])
    for token in text[100:160]:
        drafter.propose(4)
        drafter.accept([token])
    return drafter


def arrays(drafter: Any) -> dict[str, Any]:
    return {name: np.array(array, np.float32) for name, array in drafter._guesser.about_tokens().items()}


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@BOTH
def test_every_text_starts_from_what_the_package_ships(module: Any) -> None:
    drafter = module.MixtureDrafter()
    guesser = drafter._guesser
    shipped = learnt.read(learnt.START)
    for _ in range(2):
        assert same({name: np.array(array, np.float32) for name, array in guesser.shared().items()}, shipped)
        practised(drafter)
        for name in ("rate", "first_weights", "last_weights", "blend", "bias", "correction_height"):
            assert not np.array_equal(guesser.shared()[name], shipped[name]), name
        drafter.begin([])
    # A first request knows what to make of a copy: 20 tokens that stood there before are likely to go on.
    first = module.MixtureDrafter()
    first.begin([*range(100, 160), 7, *range(100, 120)])
    draft = first.propose(8)
    assert draft.tokens == tuple(range(120, 128))
    assert min(draft.chances) > 0.7
    first.begin([1, 2, 3, 4, 1])
    assert first.propose(1).chances[0] < 0.5


@BOTH
def test_a_new_process_goes_on_where_the_last_one_ended(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "made" / "judge.npz"
    last = practised(module.MixtureDrafter(kept=path))
    last.keep()
    assert path.stat().st_mode & 0o077 == 0
    following, stranger = module.MixtureDrafter(kept=path), module.MixtureDrafter()
    assert same(arrays(following), arrays(last))
    for drafter in (following, stranger):
        drafter.begin(TEXT[:100])
    ours, theirs = following.propose(4), stranger.propose(4)
    assert ours.tokens == theirs.tokens
    assert all(p > q for p, q in zip(ours.chances, theirs.chances, strict=True))
    assert path.stat().st_size < 100_000


def test_a_damaged_file_counts_as_none_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "judge.npz"
    learner = practised(MixtureDrafter(kept=path))
    learner.keep()
    whole, fresh = path.read_bytes(), arrays(MixtureDrafter())
    rng = random.Random(1)
    broken = [whole[:n] for n in (0, 1, 30, len(whole) // 2, len(whole) - 1)]
    for at in [*range(0, 200, 3), *rng.sample(range(len(whole)), 150), *range(len(whole) - 200, len(whole), 3)]:
        broken.append(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
    ignored = 0
    for raw in broken:
        path.write_bytes(raw)
        found = arrays(MixtureDrafter(kept=path))
        assert same(found, fresh) or same(found, arrays(learner))  # dates and the like do not matter
        ignored += same(found, fresh)
    assert ignored > len(broken) // 2
    learner.keep()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    [
        {"layout": np.int32(learnt.LAYOUT + 1)},
        {"layout": None},
        {"layout": np.array(["x"])},
        {"bias": np.zeros(TOKENS - 1, np.float32)},
        {"bias": np.zeros((TOKENS, 1), np.float32)},
        {"bias": np.full(TOKENS, np.nan, np.float32)},
        {"bias": np.full(TOKENS, "x")},
        {"slope": None},
        {"more": np.zeros(3)},
    ],
)
def test_another_layout_counts_as_none(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "judge.npz"
    held = {"layout": np.int32(learnt.LAYOUT), **arrays(practised(MixtureDrafter()))}
    np.savez(path, **held)
    assert not same(arrays(MixtureDrafter(kept=path)), arrays(MixtureDrafter()))
    np.savez(path, **{name: array for name, array in (held | change).items() if array is not None})
    assert same(arrays(MixtureDrafter(kept=path)), arrays(MixtureDrafter()))


def test_of_two_writers_the_last_counts_and_a_reader_sees_one_of_them_whole(tmp_path: Path) -> None:
    path = tmp_path / "judge.npz"
    writers = [practised(MixtureDrafter(kept=path)), practised(MixtureDrafter(kept=path), [5, 6, 7, 8] * 100)]
    writers[0].keep()

    def write(writer: MixtureDrafter) -> None:
        for _ in range(10):
            writer.keep()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = arrays(MixtureDrafter(kept=path))
        assert any(same(found, arrays(writer)) for writer in writers)
    writers[1].keep()
    assert same(arrays(MixtureDrafter(kept=path)), arrays(writers[1]))
    assert [file.name for file in tmp_path.iterdir()] == ["judge.npz"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    drafter = practised(MixtureDrafter(kept=tmp_path / "file" / "judge.npz"))
    drafter.keep()
    assert (tmp_path / "file").read_bytes() == b""


def test_nothing_that_hashes_two_tokens_is_kept() -> None:
    # Of n tokens there are n facts of a kind, of their pairs n times as many: those must be beyond what is kept.
    n = 24
    kept, beyond = set(), set()
    for a in range(n):
        for b in range(n):
            guesser = Guesser()
            guesser.begin([1000, a, b, 1000, a])
            assert guesser.look(0) == 0
            facts = [fact for fact in list(guesser.odds.facts)[: len(guesser.odds.facts) // 640] if fact >= FREE]
            kept |= {fact for fact in facts if fact < FREE + TOKENS}
            beyond |= {fact for fact in facts if fact >= FREE + TOKENS}
    assert n < len(kept) < 8 * n
    assert len(beyond) > n * n / 2
    about = Guesser().about_tokens()
    assert {name: len(array) for name, array in about.items()} == {
        "weights": 1024 * 9,
        "bias": TOKENS,
        "slope": TOKENS,
        "correction_height": ((1 << 13) - 512) * 9,
        "correction_slope": ((1 << 13) - 512) * 9,
    }


@BOTH
def test_what_is_shared_by_all_is_told_from_what_is_about_a_token(module: Any) -> None:
    drafter = module.MixtureDrafter()
    guesser = drafter._guesser
    drafter.begin([])
    known = {name: np.array(array) for name, array in guesser.about_tokens().items()}
    practised(drafter)
    for name, array in guesser.about_tokens().items():
        assert not np.array_equal(array, known[name]), name
    parts = {id(guesser.odds): guesser.odds, id(guesser.correction): guesser.correction}
    for part in parts.values():
        for name in part.shared().keys() & part.about_tokens().keys():
            shared, about = (np.asarray(held[name]) for held in (part.shared(), part.about_tokens()))
            assert not np.shares_memory(shared, about), name


@BOTH
def test_a_text_beside_another_starts_as_one_alone_and_leaves_the_other_what_it_has(module: Any) -> None:
    one = module.MixtureDrafter()
    other, stranger = one.beside(), module.MixtureDrafter()
    practised(one)
    learnt_by_then = {name: np.array(array) for name, array in one._guesser.shared().items()}
    for drafter in (other, stranger):
        drafter.begin(TEXT[:50])
    assert same(dict(other._guesser.shared()), dict(stranger._guesser.shared()))
    assert same(arrays(other), arrays(one))
    practised(other)
    assert all(np.array_equal(array, learnt_by_then[name]) for name, array in one._guesser.shared().items())
