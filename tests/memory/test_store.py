"""One store, many processes, and ends that nobody planned: nothing is lost, and the old file stays whole."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from filelock import FileLock
from support.memories import (
    N_VOCAB,
    PATIENCE,
    VOCABULARY,
    a_text,
    answers,
    filled,
    finish,
    names,
    new_store,
    script,
)

from ngramspec.memory import Memory, MemoryFileError, Store
from ngramspec.memory import store as store_module
from ngramspec.memory.snapshot import BLOCK

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and limits")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# ---------------------------------------------------------------------- generations


def test_rewriting_leaves_one_file(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.update(lambda texts: texts)
    assert files(tmp_path) == [f"{VOCABULARY.hex()}-000002.memory"]
    assert len(answers(store)) == 2


def test_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    store = filled(tmp_path)
    memory = Memory(store.read())
    before = list(memory.indexes[0].tokens)
    store.update(lambda _: [])
    assert list(memory.indexes[0].tokens) == before
    assert names(store) == []


def test_a_long_journal_goes_into_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LONG_JOURNAL", 20)
    store = new_store(tmp_path)
    wanted = [[i, i, i, i, i, i] for i in range(10)]
    for answer in wanted:
        store.append(answer)
        assert store.read().journal.tokens <= 20
    assert answers(store) == wanted
    snapshot = store.read().snapshot
    assert snapshot
    assert snapshot.header.size > 20


def test_the_highest_generation_counts(tmp_path: Path) -> None:
    # As on Windows, where a mapped file cannot be deleted, or after a crash before it was.
    store = filled(tmp_path)
    old = store.path()
    assert old
    raw = old.read_bytes()
    store.update(lambda texts: texts[:1])
    old.write_bytes(raw)
    assert names(store) == ["file 0"]
    store.update(lambda texts: texts)
    assert files(tmp_path) == [f"{VOCABULARY.hex()}-000003.memory"]


def test_each_tokenizer_has_its_own_file(tmp_path: Path) -> None:
    one = filled(tmp_path)
    other = Store(tmp_path, bytes(16), 9, "other")
    other.append([1, 2])
    assert {s.vocabulary for s in Store.all_in(tmp_path)} == {VOCABULARY, bytes(16)}
    other.clear()
    assert [s.vocabulary for s in Store.all_in(tmp_path)] == [VOCABULARY]
    assert len(names(one)) == 3


def test_clearing_takes_damaged_files_too(tmp_path: Path) -> None:
    store = filled(tmp_path)
    path = store.path()
    assert path
    path.write_bytes(b"nonsense")
    store.clear()
    assert files(tmp_path) == []
    store.clear()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    store = filled(tmp_path / "deep" / "er")
    path = store.path()
    assert path
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = new_store(tmp_path / "file" / "memory")
    with pytest.raises(MemoryFileError, match="cannot write"):
        store.append([1])


# ---------------------------------------------------------------------- many processes

WRITER = """
import time
from pathlib import Path
from support.memories import a_text, new_store
from ngramspec.memory import store as module
module.LONG_JOURNAL = 60
store = new_store(Path(sys.argv[1]))
me = int(sys.argv[2])
for i in range(25):
    while i == 12 and not Path(sys.argv[1], "was-read.lock").exists():
        time.sleep(0.01)
    store.append([me, i, i, i, i])
    if i % 5 == 0:
        store.update(lambda texts: [*texts, a_text(f"{me} {i}")])
"""


def test_two_writers_and_a_reader_lose_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    writers = [script(WRITER, tmp_path, str(me)) for me in (100, 101)]
    store = new_store(tmp_path)
    seen = reads = 0
    while any(w.poll() is None for w in writers):
        contents = store.read()
        count = len(contents.texts())
        # What was there once is there for good, and the index is that of the text.
        assert count >= seen
        assert contents.table is not None
        seen, reads = count, reads + 1
        if reads > 5:
            (tmp_path / "was-read.lock").touch()  # the writers wait for it half-way
    for writer in writers:
        finish(writer)
    for me in (100, 101):
        assert [a for a in answers(store) if a[0] == me] == [[me, i, i, i, i] for i in range(25)]
        assert [n for n in names(store) if n.startswith(str(me))] == [f"{me} {i}" for i in range(0, 25, 5)]
    assert len(files(tmp_path)) == 1


def test_two_threads_lose_nothing(tmp_path: Path) -> None:
    def write(me: int) -> None:
        store = new_store(tmp_path)
        for i in range(20):
            store.append([me, i])

    threads = [threading.Thread(target=write, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers(new_store(tmp_path))) == [[me, i] for me in range(3) for i in range(20)]


def test_a_writer_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PATIENCE", 0.2)
    store = filled(tmp_path)
    with FileLock(tmp_path / f"{VOCABULARY.hex()}.lock"), pytest.raises(MemoryFileError, match="another ngramspec"):
        store.append([1])
    assert len(answers(store)) == 2
    store.append([1])


# ---------------------------------------------------------------------- sudden ends

KILLED = """
import os, signal
from pathlib import Path
from support.memories import a_text, new_store
from ngramspec.memory import journal, snapshot, store as module

store, where, count = new_store(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])

class Dying:
    def __init__(self, file):
        self.file = file
    def write(self, raw):
        global count
        count -= 1
        if count < 0:
            self.file.write(raw[: len(raw) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(raw)
    def __getattr__(self, name):
        return getattr(self.file, name)

write_snapshot, append_records = module.write_snapshot, module.append_records
module.write_snapshot = lambda file, *rest: write_snapshot(Dying(file), *rest)
module.append_records = lambda file, *rest: append_records(Dying(file), *rest)
if where == "rename":
    module._sync_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
if where == "append":
    store.append([9, 9, 9, 9])
else:
    store.update(lambda texts: [*texts, a_text("more")])
"""


@POSIX
@pytest.mark.parametrize("count", range(5))
def test_killed_in_the_middle_of_a_snapshot(tmp_path: Path, count: int) -> None:
    store = filled(tmp_path)
    before = [path.read_bytes() for path in tmp_path.glob("*.memory")]
    process = script(KILLED, tmp_path, "update", str(count))
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    assert [path.read_bytes() for path in tmp_path.glob("*.memory")] == before
    assert list(tmp_path.glob("*.tmp"))
    # The next writer is not held up, and cleans up.
    store.update(lambda texts: [*texts, a_text("later")])
    assert names(store) == ["file 0", "file 1", "file 2", "later"]
    assert not list(tmp_path.glob("*.tmp"))


@POSIX
def test_killed_between_two_generations(tmp_path: Path) -> None:
    store = filled(tmp_path)
    process = script(KILLED, tmp_path, "rename", "1000")
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    assert len(files(tmp_path)) == 2
    assert names(store) == ["file 0", "file 1", "file 2", "more"]
    assert len(answers(store)) == 2
    store.update(lambda texts: texts)
    assert len(files(tmp_path)) == 1


@POSIX
def test_killed_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    store = filled(tmp_path)
    process = script(KILLED, tmp_path, "append", "0")
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    assert len(answers(store)) == 2
    store.append([4, 4])
    assert answers(store)[2:] == [[4, 4]]


FULL = """
import resource
from pathlib import Path
from support.memories import a_text, new_store
from ngramspec.memory import MemoryFileError

store, limit, what = new_store(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    if what == "append":
        store.append([9] * 1000)
    else:
        store.update(lambda texts: [*texts, a_text("more", [1] * 20_000)])
except MemoryFileError as error:
    print(error)
"""


@POSIX
@pytest.mark.parametrize("what", ["append", "update"])
@pytest.mark.parametrize("room", [0, 1, 500, BLOCK + 10])
def test_no_space(tmp_path: Path, what: str, room: int) -> None:
    store = filled(tmp_path)
    path = store.path()
    assert path
    before = path.read_bytes()
    limit = len(before) + room if what == "append" else room
    said = finish(script(FULL, tmp_path, str(limit), what))
    if room > 4 * 1000 and what == "append":
        assert answers(store)[2:] == [[9] * 1000]
        return
    assert "cannot write" in said
    assert "the memory is as it was" in said
    assert path.read_bytes() == before
    assert len(files(tmp_path)) == 1


def test_an_interrupted_update(tmp_path: Path) -> None:
    store = filled(tmp_path)
    before = files(tmp_path)

    def stop(_: object) -> list[object]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.update(stop)  # type: ignore[arg-type]
    assert files(tmp_path) == before
    store.append([1])


# ---------------------------------------------------------------------- Memory


def test_remembering_in_the_process_only(tmp_path: Path) -> None:
    store = filled(tmp_path)
    memory = Memory(store.read())
    memory.remember([4, 5, 6])
    memory.remember([])
    memory.keep([1, 2])
    assert not memory.keeps
    assert not Memory(store=store).keeps
    assert list(memory.indexes[-1].tokens[:4]) == [4, 5, 6, -1]
    assert memory.indexes[-1].size == 4
    assert len(answers(store)) == 2


def test_remembering_for_later_sessions(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    memory = Memory(store.read(), store=store, keeps=True)
    assert memory.keeps
    assert (len(memory.indexes), memory.stored) == (1, 0)
    memory.remember([4, 5, 6])
    assert answers(store) == [[4, 5, 6]]
    assert memory.indexes[-1].size == 4
    memory.hear([7])
    assert len(answers(store)) == 1
    again = Memory(store.read())
    assert [list(i.tokens[: i.size]) for i in again.indexes] == [[4, 5, 6, -1], []]


def test_an_answer_that_cannot_be_kept_is_remembered_here(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = Memory(store=Store(tmp_path / "file", VOCABULARY, N_VOCAB), keeps=True)
    with pytest.raises(MemoryFileError):
        memory.remember([4, 5, 6])
    assert memory.indexes[-1].size == 4


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
    assert len(store.read().texts()[0].tokens) == 700


# ---------------------------------------------------------------------- a store that others rewrite


def held(memory: Memory) -> list[list[int]]:
    return [list(index.tokens[: index.size]) for index in memory.indexes]


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
    memory.remember([3, 3])
    memory.refresh()
    assert held(memory)[2] == [3, 3, -1]
    store.update(lambda texts: texts)
    memory.refresh()
    (snapshot, live) = held(memory)
    assert snapshot[-3:] == [3, 3, -1]
    assert live == []


def test_a_file_that_cannot_be_used_is_not_taken_up(tmp_path: Path) -> None:
    store = filled(tmp_path)
    memory = Memory(store.read(), store=store)
    before = held(memory)
    store.update(lambda texts: texts[:1])
    path = store.path()
    assert path is not None
    path.write_bytes(b"damaged")
    memory.refresh()
    assert held(memory) == before
    store.clear()
    store.update(lambda _: [a_text("a", [5, 5])])
    memory.refresh()
    assert held(memory)[0] == [5, 5, -1]
