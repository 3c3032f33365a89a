"""One store, many processes, and ends that nobody planned: nothing is lost, and the old file stays whole."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from filelock import FileLock
from support.memories import VOCABULARY, a_text, answers, ended, filled, forked, names, new_store

from ngramspec.memory import Memory, MemoryFileError, Store
from ngramspec.memory import store as store_module
from ngramspec.memory.snapshot import BLOCK, total

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and limits")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# ---------------------------------------------------------------------- generations


def test_rewriting_leaves_one_file_and_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    store = filled(tmp_path)
    memory = Memory(store.read())
    before = list(memory.indexes[0].tokens)
    store.update(lambda texts: texts)
    assert files(tmp_path) == [f"{VOCABULARY.hex()}-000002.memory"]
    assert len(answers(store)) == 2
    store.update(lambda _: [])
    assert list(memory.indexes[0].tokens) == before
    assert names(store) == []


def test_a_long_journal_goes_into_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LONG_JOURNAL", 20)
    store = new_store(tmp_path)
    wanted = [[i, i, i, i, i, i] for i in range(10)]
    for answer in wanted:
        store.append(answer)
        assert total(store.read().answers) <= 20
    assert answers(store) == wanted
    assert store.read().snapshot.header.size > 20


def test_the_highest_generation_counts(tmp_path: Path) -> None:
    # As on Windows, where a mapped file cannot be deleted, or after a crash before it was.
    store = filled(tmp_path)
    old = store.path()
    raw = old.read_bytes()
    store.update(lambda texts: texts[:1])
    old.write_bytes(raw)
    assert names(store) == ["file 0"]
    store.update(lambda texts: texts)
    assert files(tmp_path) == [f"{VOCABULARY.hex()}-000003.memory"]


def test_each_tokenizer_has_its_own_file_and_clearing_takes_damaged_ones_too(tmp_path: Path) -> None:
    one = filled(tmp_path)
    other = Store(tmp_path, bytes(16), 9, "other")
    other.append([1, 2])
    assert {s.vocabulary for s in Store.all_in(tmp_path)} == {VOCABULARY, bytes(16)}
    other.clear()
    assert [s.vocabulary for s in Store.all_in(tmp_path)] == [VOCABULARY]
    assert len(names(one)) == 3
    one.path().write_bytes(b"nonsense")
    one.clear()
    assert files(tmp_path) == []
    one.clear()


@POSIX
def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = filled(tmp_path / "deep" / "er").path()
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = new_store(tmp_path / "file" / "memory")
    with pytest.raises(MemoryFileError, match="cannot write"):
        store.append([1])
    # In this process the answer is remembered all the same.
    memory = Memory(store=store, keeps=True)
    memory.hear([4, 5, 6])
    with pytest.raises(MemoryFileError):
        memory.keep([4, 5, 6])
    assert memory.indexes[-1].size == 4


# ---------------------------------------------------------------------- many processes


@POSIX
def test_two_writers_and_a_reader_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LONG_JOURNAL", 60)
    filled(tmp_path)
    was_read = tmp_path / "was-read.lock"

    def write(me: int) -> None:
        store = new_store(tmp_path)
        for i in range(25):
            while i == 12 and not was_read.exists():
                time.sleep(0.01)
            store.append([me, i, i, i, i])
            if i % 5 == 0:
                store.update(lambda texts, i=i: [*texts, a_text(f"{me} {i}")])

    writers = [forked(write, me) for me in (100, 101)]
    store = new_store(tmp_path)
    seen = reads = 0
    while any(w.is_alive() for w in writers):
        contents = store.read()
        count = len(contents.documents())
        # What was there once is there for good, and the index is that of the text.
        assert count >= seen
        assert contents.documents() is not None
        seen, reads = count, reads + 1
        if reads > 5:
            was_read.touch()  # the writers wait for it half-way
    assert [ended(w) for w in writers] == [0, 0]
    for me in (100, 101):
        assert [a for a in answers(store) if a[0] == me] == [[me, i, i, i, i] for i in range(25)]
        assert [n for n in names(store) if n.startswith(str(me))] == [f"{me} {i}" for i in range(0, 25, 5)]
    assert len(files(tmp_path)) == 1


def test_threads_lose_nothing(tmp_path: Path) -> None:
    def write(me: int) -> None:
        store = new_store(tmp_path)
        for i in range(20):
            store.append([me, i])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    assert sorted(answers(new_store(tmp_path))) == [[me, i] for me in range(3) for i in range(20)]


def test_a_writer_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PATIENCE", 0.2)
    store = filled(tmp_path)
    with FileLock(tmp_path / f"{VOCABULARY.hex()}.lock"), pytest.raises(MemoryFileError, match="another ngramspec"):
        store.append([1])
    assert len(answers(store)) == 2
    store.append([1])


# ---------------------------------------------------------------------- sudden ends


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dying:
    """A file whose process dies half-way through the write of this number."""

    def __init__(self, file: Any, count: int) -> None:
        self._file, self._count = file, count

    def write(self, raw: bytes) -> int:
        self._count -= 1
        if self._count < 0:
            self._file.write(raw[: len(raw) // 2])
            self._file.flush()
            die()
        return int(self._file.write(raw))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def dying(write: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A function that writes to a file, given a `Dying` one."""
    return lambda file, *rest: write(Dying(file, count), *rest)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Does work in a process that dies of what replaces a function of the store."""

    def do(work: Callable[[], None], name: str, replacement: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(store_module, name, replacement)
            process = forked(work)
        assert ended(process) == -signal.SIGKILL

    return do


@POSIX
@pytest.mark.parametrize("count", range(5))
def test_killed_in_the_middle_of_a_snapshot(tmp_path: Path, killed: Callable[..., None], count: int) -> None:
    store = filled(tmp_path)
    before = [path.read_bytes() for path in tmp_path.glob("*.memory")]
    write = dying(store_module.write_snapshot, count)
    killed(lambda: store.update(lambda texts: [*texts, a_text("more")]), "write_snapshot", write)
    assert [path.read_bytes() for path in tmp_path.glob("*.memory")] == before
    assert list(tmp_path.glob("*.tmp"))
    # The next writer is not held up, and cleans up.
    store.update(lambda texts: [*texts, a_text("later")])
    assert names(store) == ["file 0", "file 1", "file 2", "later"]
    assert not list(tmp_path.glob("*.tmp"))


@POSIX
def test_killed_between_two_generations_and_amid_an_answer(tmp_path: Path, killed: Callable[..., None]) -> None:
    store = filled(tmp_path)
    killed(lambda: store.update(lambda texts: [*texts, a_text("more")]), "_sync_folder", die)
    assert len(files(tmp_path)) == 2
    assert names(store) == ["file 0", "file 1", "file 2", "more"]
    assert len(answers(store)) == 2
    store.update(lambda texts: texts)
    assert len(files(tmp_path)) == 1
    killed(lambda: store.append([9, 9, 9, 9]), "append_record", dying(store_module.append_record, 0))
    assert len(answers(store)) == 2
    store.append([4, 4])
    assert answers(store)[2:] == [[4, 4]]


@POSIX
@pytest.mark.parametrize("what", ["append", "update"])
@pytest.mark.parametrize("room", [0, 1, 500, BLOCK + 10])
def test_no_space(tmp_path: Path, what: str, room: int) -> None:
    store = filled(tmp_path)
    path = store.path()
    before = path.read_bytes()
    limit = len(before) + room if what == "append" else room
    fits = what == "append" and room > 4 * 1000

    def write() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if what == "append":
            store.append([9] * 1000)
        else:
            store.update(lambda texts: [*texts, a_text("more", [1] * 20_000)])

    def refused() -> None:
        with pytest.raises(MemoryFileError, match=r"cannot write .*; the memory is as it was"):
            write()

    assert ended(forked(write if fits else refused)) == 0
    assert answers(store)[2:] == [[9] * 1000] * fits
    assert fits or path.read_bytes() == before
    assert len(files(tmp_path)) == 1


def test_an_interrupted_update(tmp_path: Path) -> None:
    store = filled(tmp_path)
    before = files(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.update(Mock(side_effect=KeyboardInterrupt))
    assert files(tmp_path) == before


# ---------------------------------------------------------------------- Memory


def held(memory: Memory) -> list[list[int]]:
    return [list(index.tokens[: index.size]) for index in memory.indexes]


def test_remembering_in_the_process_only_and_for_later_sessions(tmp_path: Path) -> None:
    store = filled(tmp_path / "filled")
    memory = Memory(store.read())
    memory.hear([4, 5, 6])
    memory.hear([])
    memory.keep([1, 2])
    assert (memory.keeps, Memory(store=store).keeps) == (False, False)
    assert held(memory)[-1] == [4, 5, 6, -1]
    assert len(answers(store)) == 2
    store = new_store(tmp_path)
    memory = Memory(store.read(), store=store, keeps=True)
    assert (memory.keeps, len(memory.indexes), memory.stored) == (True, 1, 0)
    memory.hear([4, 5, 6])
    memory.keep([4, 5, 6])
    memory.keep([])
    assert answers(store) == [[4, 5, 6]]
    assert held(memory)[-1] == [4, 5, 6, -1]
    memory.hear([7])
    assert len(answers(store)) == 1
    assert held(Memory(store.read())) == [[4, 5, 6, -1], []]


def test_the_oldest_answers_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LONG_JOURNAL", 20)
    monkeypatch.setattr(store_module, "MOST_ANSWERS", 30)
    store = filled(tmp_path)
    for number in range(20):
        store.append([number] * 5)
    kept = answers(store)
    assert kept[-1] == [19] * 5
    assert [a[0] for a in kept] == sorted(a[0] for a in kept)
    # Those that are kept, and what has gathered in the journal since.
    assert 30 <= sum(map(len, kept)) <= 30 + 25
    # What a user added is no answer, however old and long.
    assert names(store) == ["file 0", "file 1", "file 2"]
    assert len(store.read().documents()[0].tokens) == 700


# ---------------------------------------------------------------------- a store that others rewrite


def test_what_others_added_is_taken_up(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    memory = Memory(store.read(), store=store)
    indexes = memory.indexes
    memory.hear([1, 2])
    memory.refresh()
    assert held(memory) == [[1, 2, -1]]
    store.update(lambda _: [a_text("a", [5, 5])])
    assert held(memory) == [[1, 2, -1]]
    memory.refresh()
    assert held(memory) == [[5, 5, -1], [1, 2, -1]]
    assert (memory.stored, memory.indexes) == (3, indexes)
    store.append([6])
    store.update(lambda texts: [*texts, a_text("b", [7])])
    memory.refresh()
    assert held(memory) == [[5, 5, -1, 6, -1, 7, -1], [1, 2, -1]]
    assert memory.indexes is indexes
    store.clear()
    memory.refresh()
    assert held(memory) == [[1, 2, -1]]


def test_own_answers_are_not_taken_up_twice(tmp_path: Path) -> None:
    store = filled(tmp_path)
    memory = Memory(store.read(), store=store, keeps=True)
    assert held(memory)[1:] == [[7, 7, 7, 7, 1, -1, 8, 8, 8, 8, 2, -1], []]
    memory.hear([3, 3])
    memory.keep([3, 3])
    memory.refresh()
    assert held(memory)[2] == [3, 3, -1]
    store.update(lambda texts: texts)
    memory.refresh()
    snapshot, live = held(memory)
    assert (snapshot[-3:], live) == ([3, 3, -1], [])


def test_a_file_that_cannot_be_used_is_not_taken_up(tmp_path: Path) -> None:
    store = filled(tmp_path)
    memory = Memory(store.read(), store=store)
    before = held(memory)
    store.update(lambda texts: texts[:1])
    store.path().write_bytes(b"damaged")
    memory.refresh()
    assert held(memory) == before
    store.clear()
    store.update(lambda _: [a_text("a", [5, 5])])
    memory.refresh()
    assert held(memory)[0] == [5, 5, -1]
