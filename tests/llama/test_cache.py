"""`Cache` on an llama.cpp that answers as the real one does: yes to rollbacks that leave a wrong state behind."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

from ngramspec.llama import cache
from ngramspec.llama.cache import KEPT, Cache

WRONG = (-1,)
"""The state where a rollback was granted and no snapshot was right."""


class FakeLlama:
    """A memory of one sequence whose state is the tokens that made it.

    Args:
        snapshots: that a recurrent memory keeps; None: keys and values alone.
        window: of a cache that keeps no more than that; 0: all.
        refuses: whether states can be handed back.
    """

    def __init__(self, snapshots: int | None, window: int = 0, *, refuses: bool = False) -> None:
        self.snapshots, self.window, self.refuses = snapshots, window, refuses
        self.cells: tuple[int, ...] = ()
        self.state: tuple[int, ...] = ()
        self.oldest = 0
        self._planes: list[tuple[int, ...]] = []
        self._pending = False
        self.copies: list[tuple[int, ...]] = []

    def decode(self, tokens: list[int]) -> None:
        states = [self.state]
        for token in tokens:
            states.append((*states[-1], token))
        # Snapshot d: the state d tokens before the end of this pass; the others are left from passes before.
        written = states[:0:-1][: (self.snapshots or 0) + 1]
        self._planes[: len(written)] = written
        self.state, self._pending = states[-1], False
        self.cells += tuple(tokens)
        self.oldest = max(self.oldest, len(self.cells) - 2 * self.window) if self.window else 0

    def llama_get_memory(self, _context: object) -> str:
        return "memory"

    def llama_n_rs_seq(self, _context: object) -> int:
        return self.snapshots or 0

    def llama_memory_clear(self, _memory: object, _data: bool) -> None:
        self.cells = self.state = ()
        self._pending, self.oldest = False, 0

    def llama_memory_seq_rm(self, _memory: object, _sequence: int, start: int, _end: int) -> bool:
        depth = len(self.state) - start
        if self.snapshots is not None and depth > 0:
            if self._pending or depth > self.snapshots or not start:
                return False
            self._pending = True
            plane = self._planes[depth] if depth < len(self._planes) else WRONG
            self.state = plane if len(plane) == start else WRONG * start
        elif self.snapshots is None:
            self.state = self.state[:start]
        self.cells = self.cells[:start]
        return True

    def llama_memory_seq_pos_min(self, _memory: object, _sequence: int) -> int:
        return self.oldest

    def llama_memory_seq_pos_max(self, _memory: object, _sequence: int) -> int:
        return len(self.state) - 1

    def llama_state_seq_get_size_ext(self, _context: object, _sequence: int, flags: int) -> int:
        assert flags == 1
        return 4

    def llama_state_seq_get_data_ext(self, _context: object, buffer: Any, _size: int, _s: int, _flags: int) -> int:
        self.copies.append(self.state)
        ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint32))[0] = len(self.copies) - 1
        return 4

    def llama_state_seq_set_data_ext(self, _context: object, buffer: Any, _size: int, _s: int, _flags: int) -> int:
        if self.refuses:
            return 0
        self.state = self.copies[ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint32))[0]]
        self._pending = False
        return 4


@pytest.fixture(autouse=True)
def _real_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "llama", None)


def make(snapshots: int | None, window: int = 0, **more: bool) -> tuple[FakeLlama, Cache]:
    llama = cache.llama = FakeLlama(snapshots, window, **more)  # type: ignore[attr-defined]
    return llama, Cache("context", recurrent=snapshots is not None, window=window)


def fill(llama: FakeLlama, cache: Cache, tokens: list[int]) -> None:
    llama.decode(tokens)
    cache.decoded(len(tokens))


@pytest.mark.parametrize(("snapshots", "window"), [(None, 0), (None, 6), (0, 0), (1, 0), (4, 0), (16, 0)], ids=str)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 20))])
def test_whatever_is_done_the_state_is_that_of_the_tokens(snapshots: int | None, window: int, seed: int) -> None:
    rng = random.Random(seed)
    llama, cache = make(snapshots, window)
    tokens: list[int] = []
    lost = 0
    for _ in range(300):
        what = rng.random()
        if what < 0.45:
            new = [rng.randrange(100) for _ in range(rng.choice((1, 1, 2, 5, 17)))]
            fill(llama, cache, new)
            tokens += new
        elif what < 0.75 and tokens:
            kept = max(0, len(tokens) - rng.choice((1, 1, 2, 3, 5, 16, 40)))
            cache.cut(kept)
            lost += cache.length < kept
            assert cache.length <= kept
            del tokens[cache.length :]
        elif what < 0.8 and tokens:
            # A pass that failed on its way, after some of its tokens.
            llama.decode([7] * rng.randrange(1, 4))
            cache.recover(len(tokens))
            del tokens[cache.length :]
        elif what < 0.95:
            cache.save(keep=rng.random() < 0.3)
        if rng.random() < 0.01:
            cache.clear()
            tokens.clear()
        assert cache.length == len(tokens)
        assert llama.state == tuple(tokens)
        assert llama.cells == tuple(tokens)
        if window:
            assert llama.oldest <= max(0, len(tokens) - window)
    assert (lost == 0) == (snapshots is None and not window)


def test_snapshots_are_gone_back_to_without_a_copy() -> None:
    llama, cache = make(16)
    fill(llama, cache, [1, 2, 3])
    fill(llama, cache, [4, 5, 6, 7])
    cache.cut(4)
    assert (cache.length, llama.copies) == (4, [])
    # Nor is anything copied where everything can be cut.
    llama, cache = make(None)
    fill(llama, cache, [1, 2])
    cache.save(keep=True)
    assert (llama.copies, cache.saved) == ([], 0)


def test_a_checkpoint_is_made_once_and_serves_often() -> None:
    llama, cache = make(0)
    fill(llama, cache, [1, 2, 3])
    for _ in range(5):
        cache.save()
        fill(llama, cache, [4, 5])
        cache.cut(3)
        assert cache.length == 3
    assert llama.copies == [(1, 2, 3)]


def test_the_last_prompts_are_kept_and_one_mark() -> None:
    llama, cache = make(0)
    for token in range(KEPT + 3):
        fill(llama, cache, [token])
        cache.save(keep=True)
    fill(llama, cache, [98])
    cache.save()
    fill(llama, cache, [99])
    cache.save()
    assert cache.saved == KEPT + 5
    cache.cut(KEPT + 4)
    assert cache.length == KEPT + 3  # the mark after 98 gave way to the one after 99
    cache.cut(4)
    assert cache.length == 4
    cache.cut(3)
    assert cache.length == 0
    assert cache.saved == 0


def test_what_cannot_be_restored_or_is_not_there_is_forgotten() -> None:
    llama, cache = make(0, refuses=True)
    fill(llama, cache, [1, 2])
    cache.save()
    fill(llama, cache, [3])
    cache.cut(2)
    assert (cache.length, llama.state) == (0, ())
    # A window of which nothing is left is not believed.
    llama, cache = make(None, 6)
    fill(llama, cache, list(range(40)))
    llama.llama_memory_seq_pos_min = lambda _memory, _sequence: -1  # type: ignore[method-assign]
    cache.cut(5)
    assert (cache.length, llama.cells) == (0, ())


@pytest.mark.parametrize("snapshots", [None, 4])
def test_what_other_sequences_do_uses_snapshots_up(snapshots: int | None) -> None:
    llama, cache = make(snapshots)
    for alone, moved in ((False, False), (True, True)):
        cache.clear()
        fill(llama, cache, [1, 2, 3])
        cache.save()
        llama.decode([4, 5])
        cache.decoded(2, alone=alone)
        if moved:
            cache.decoded(0, alone=False)
        cache.cut(4)
        assert cache.length == (4 if snapshots is None else 3)
        assert llama.state == tuple(range(1, cache.length + 1))


def test_after_a_failed_pass_of_others_a_recurrent_state_is_restored() -> None:
    llama, cache = make(4)
    fill(llama, cache, [1, 2, 3])
    cache.save()
    fill(llama, cache, [4])
    llama.state = WRONG
    cache.disturbed()
    assert (cache.length, llama.state) == (3, (1, 2, 3))
    llama, cache = make(None)
    fill(llama, cache, [1, 2, 3])
    cache.disturbed()
    assert (cache.length, llama.cells) == (3, (1, 2, 3))
