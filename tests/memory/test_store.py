"""Tests of a store with several processes, damage and crashes: no data is lost, or there is a clear error."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
from support.memories import (
    VOCABULARY,
    answers,
    fork_process,
    make_document,
    make_filled_store,
    names,
    open_store,
    wait_for_exit,
)

from ngramspec.data import NGramSpecError
from ngramspec.memory import store as store_module
from ngramspec.memory.memory import Memory, saves_answers, write_save_answers
from ngramspec.memory.store import MemoryFileError, Store, total

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and limits")


def held(memory: Memory) -> list[list[int]]:
    return [list(index.tokens[: index.size]) for index in memory.indexes]


def index_of(store: Store) -> Path:
    return store.path.with_suffix(".index")


def test_store_update_and_append_round_trip_documents(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.update(lambda _: [])
    assert store.documents() == []
    assert [index.size for index in Memory(store.read()).indexes] == [0]
    wanted = [make_document("/a", [5, 6, 7]), make_document("/b\udcff\n", []), make_document("/c", [255])]
    store.update(lambda _: wanted)
    store.append([9, 8])
    found = store.documents()
    assert [(d.kind, d.name, d.size, d.mtime) for d in found[:3]] == [(d.kind, d.name, d.size, d.mtime) for d in wanted]
    assert [d.tokens.tolist() for d in found] == [[5, 6, 7], [], [255], [9, 8]]
    assert store.read().model == "bytes"
    assert held(Memory(store.read()))[:2] == [[5, 6, 7, -1, -1, 255, -1], [9, 8, -1]]


def test_store_index_file_equals_index_built_from_its_text(tmp_path: Path) -> None:
    store = make_filled_store(tmp_path)
    raw = index_of(store).read_bytes()
    memory = Memory(store.read())
    mapped, latest, live = memory.indexes
    assert (mapped.size, latest.size, live.size, memory.n_stored_tokens) == (3 * 701, 12, 0, 3 * 701 + 12)
    again = type(live).build(np.array(mapped.tokens, np.int32).data, len(mapped.heads))
    assert list(again.links) == list(mapped.links)
    assert list(again.heads) == list(mapped.heads)
    assert list(latest.tokens[:12]) == [7, 7, 7, 7, 1, -1, 8, 8, 8, 8, 2, -1]
    # Each process has a private mapping.
    mapped.tokens[0] = 77
    mapped.extend([1, 2, 3, 4])
    assert index_of(store).read_bytes() == raw


def test_store_index_of_large_text_uses_at_most_12_bytes_per_token() -> None:
    for size in (0, 1, 1000, 100_000, 2**20 - 1, 2**20, 10_000_000):
        chains = store_module._chains_for(size)
        assert chains & (chains - 1) == 0
        if size >= 100_000:
            assert size / 2 < chains <= size


def test_store_update_removes_deleted_text_but_keeps_open_readers(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    hidden = np.random.default_rng(0).integers(0, 255, 5000).tolist()
    store.update(lambda _: [make_document("/secret", hidden), make_document("/other")])
    raw = store.path.read_bytes()
    memory = Memory(store.read())
    store.update(lambda texts: texts[1:])
    assert held(memory)[0][:5000] == hidden
    assert names(store) == ["/other"]
    left = store.path.read_bytes()
    assert len(left) < len(raw)
    assert b"/secret" in raw
    assert b"/secret" not in left
    assert np.array(hidden[:50], np.int32).tobytes() not in index_of(store).read_bytes()


def test_store_append_of_many_answers_moves_them_into_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LONG_JOURNAL", 20)
    store = open_store(tmp_path)
    wanted = [[i, i, i, i, i, i] for i in range(10)]
    for answer in wanted:
        store.append(answer)
        assert total(store.read().answers) <= 20
    assert answers(store) == wanted
    assert store.read().index.size > 20


def test_store_append_over_limit_drops_oldest_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LONG_JOURNAL", 20)
    monkeypatch.setattr(store_module, "MAX_ANSWER_TOKENS", 30)
    store = make_filled_store(tmp_path)
    for number in range(20):
        store.append([number] * 5)
    kept = answers(store)
    assert kept[-1] == [19] * 5
    assert [a[0] for a in kept] == sorted(a[0] for a in kept)
    # The store has the answers that were kept and those added since.
    assert 30 <= sum(map(len, kept)) <= 30 + 25
    # Documents that a user added do not count as answers, however old and long they are.
    assert names(store) == ["file 0", "file 1", "file 2"]
    assert len(store.documents()[0].tokens) == 700


def test_store_clear_removes_only_files_of_its_tokenizer(tmp_path: Path) -> None:
    one = make_filled_store(tmp_path)
    for change in (lambda: one.update(lambda texts: texts), one.clear):
        (tmp_path / f".ngramspec-{one.path.stem}-left.tmp").touch()
        change()
        assert not list(tmp_path.glob("*.tmp"))
    one = make_filled_store(tmp_path)
    other = Store(tmp_path, bytes(16), "other")
    other.append([1, 2])
    assert {s.vocabulary for s in Store.all_in(tmp_path)} == {VOCABULARY, bytes(16)}
    other.clear()
    assert [s.vocabulary for s in Store.all_in(tmp_path)] == [VOCABULARY]
    assert len(names(one)) == 3
    one.path.write_bytes(b"nonsense")
    one.clear()
    assert list(tmp_path.iterdir()) == []
    one.clear()


@POSIX
def test_store_files_are_readable_only_by_user(tmp_path: Path) -> None:
    store = make_filled_store(tmp_path / "deep" / "er")
    for path in (store.path, index_of(store), store.path.parent):
        assert path.stat().st_mode & 0o077 == 0


def refused(store: Store, *words: str) -> None:
    """Check that the store is rejected with an error that names the file, and that no attempt to write changes it."""
    before = store.path.read_bytes()
    for attempt in (store.documents, lambda: store.update(lambda texts: texts)):
        with pytest.raises(MemoryFileError) as error:
            attempt()
        assert all(word in str(error.value) for word in (str(store.path), *words))
        assert "\n" not in str(error.value)
    assert store.path.read_bytes() == before


def test_store_rejects_damaged_file(tmp_path: Path) -> None:
    store = make_filled_store(tmp_path)
    whole = store.path.read_bytes()
    tokens = store.path.read_bytes().index(b"file 1") + 30  # inside the compressed text
    flipped = whole[:tokens] + b"!" + whole[tokens + 1 :]
    schema = whole.replace(b"TABLE documents", b"TABL\xb9 documents")
    for raw in (whole[:100], whole[: len(whole) // 2], b"nonsense" * 1000, flipped, schema):
        store.path.write_bytes(raw)
        refused(store, "is damaged", "memory clear")
    store.path.unlink()
    store.path.mkdir()
    with pytest.raises(MemoryFileError, match="cannot read"):
        store.read()


def test_store_with_damaged_or_missing_index_rebuilds_it(tmp_path: Path) -> None:
    store = make_filled_store(tmp_path)
    index, before = index_of(store), held(Memory(store.read()))
    whole = index.read_bytes()
    rng = np.random.default_rng(0)
    for offset in [0, 20, 60, 4096, len(whole) - 1, *rng.integers(4096, len(whole), 20).tolist()]:
        index.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :])
        assert held(Memory(store.read())) == before
        assert index.read_bytes() == whole
    for length in (0, 1, 4096, 4098, len(whole) - 4096):
        index.write_bytes(whole[:length])
        assert held(Memory(store.read())) == before
    index.unlink()
    assert held(Memory(store.read())) == before
    # An index of another generation is not used either.
    store.update(lambda texts: texts[:1])
    index.write_bytes(whole)
    assert len(held(Memory(store.read()))[0]) == 701


def test_store_rejects_newer_format_and_other_tokenizer(tmp_path: Path) -> None:
    store = make_filled_store(tmp_path)
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("UPDATE memory SET version = 2")
    refused(store, "format 2", "update ngramspec")
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("UPDATE memory SET version = 1")
    other = Store(tmp_path, bytes(16))
    store.path.rename(other.path)
    refused(other, "another tokenizer")
    with pytest.raises(MemoryFileError, match="another tokenizer"):
        other.append([1])


def test_store_in_unwritable_folder_raises_and_memory_keeps_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = open_store(tmp_path / "file" / "memory")
    with pytest.raises(MemoryFileError, match="cannot write"):
        store.append([1])
    # This process still remembers the answer.
    memory = Memory(store=store, saves_answers=True)
    memory.add_text([4, 5, 6])
    with pytest.raises(MemoryFileError):
        memory.save_answer([4, 5, 6])
    assert memory.indexes[-1].size == 4


@POSIX
def test_store_with_two_writers_and_a_reader_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LONG_JOURNAL", 60)
    make_filled_store(tmp_path)
    was_read = tmp_path / "was-read.lock"

    def write(me: int) -> None:
        store = open_store(tmp_path)
        for i in range(25):
            while i == 12 and not was_read.exists():
                time.sleep(0.01)
            store.append([me, i, i, i, i])
            if i % 5 == 0:
                store.update(lambda texts, i=i: [*texts, make_document(f"{me} {i}")])

    writers = [fork_process(write, me) for me in (100, 101)]
    store = open_store(tmp_path)
    seen = reads = 0
    while any(w.is_alive() for w in writers):
        contents = store.read()
        count = list(contents.index.tokens).count(-1) + len(contents.answers)
        # Contents are never lost, and the index matches the text.
        assert count >= seen
        seen, reads = count, reads + 1
        if reads > 5:
            was_read.touch()  # The writers wait for this file half-way.
    assert [wait_for_exit(w) for w in writers] == [0, 0]
    for me in (100, 101):
        assert [a for a in answers(store) if a[0] == me] == [[me, i, i, i, i] for i in range(25)]
        assert [n for n in names(store) if n.startswith(str(me))] == [f"{me} {i}" for i in range(0, 25, 5)]


def test_store_append_while_other_writer_is_stuck_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PATIENCE", 0.2)
    store = make_filled_store(tmp_path)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        with pytest.raises(MemoryFileError, match="another process"):
            store.append([1])
        assert len(answers(store)) == 2
    store.append([1])


@POSIX
def test_store_append_waiting_for_writer_ends_on_ctrl_c(tmp_path: Path) -> None:
    store = make_filled_store(tmp_path)
    began = time.monotonic()
    with closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        timer = Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            store.append([1])
        timer.join()
    assert time.monotonic() - began < store_module.PATIENCE / 2


@POSIX
@pytest.mark.parametrize("function", ["_insert", "_write_index"])
def test_store_update_killed_midway_keeps_consistent_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    store = make_filled_store(tmp_path)
    do = getattr(store_module, function)

    def die(*arguments: object) -> None:
        do(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(store_module, function, die)
        process = fork_process(lambda: store.update(lambda texts: [*texts[1:], make_document("more", [1] * 100_000)]))
        assert wait_for_exit(process) == -signal.SIGKILL
    done = function == "_write_index"
    assert names(store) == (["file 1", "file 2", "more"] if done else ["file 0", "file 1", "file 2"])
    assert len(answers(store)) == 2
    store.update(lambda texts: [*texts, make_document("later")])
    assert names(store)[-1] == "later"
    assert list(store.read().index.tokens[-6:]) == [1, 2, 3, 4, 5, -1]


@POSIX
@pytest.mark.parametrize("what", ["read", "append"])
def test_store_after_first_writer_is_killed_is_empty_and_usable(tmp_path: Path, what: str) -> None:
    store = open_store(tmp_path)

    def die() -> None:
        db = sqlite3.connect(store.path, isolation_level=None)
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN")
        db.execute("CREATE TABLE documents (tokens)")
        db.executemany("INSERT INTO documents VALUES (zeroblob(?))", [(10_000,)] * 20)
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for_exit(fork_process(die)) == -signal.SIGKILL
    assert store.path.stat().st_size
    if what == "read":
        assert (store.read(), store.documents(), store.generation()) == (store_module.NOTHING, [], "")
    store.append([1])
    assert answers(store) == [[1]]
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("PRAGMA auto_vacuum").fetchone() == (1,)


@POSIX
@pytest.mark.parametrize("what", ["append", "update"])
def test_store_write_without_disk_space_keeps_contents(tmp_path: Path, what: str) -> None:
    store = make_filled_store(tmp_path)
    before = store.path.read_bytes()
    noise = np.random.default_rng(0).integers(0, 255, 20_000).tolist()

    def write() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), len(before)))
        change = {
            "append": lambda: store.append(noise),
            "update": lambda: store.update(lambda texts: [*texts, make_document("more", noise)]),
        }
        with pytest.raises(MemoryFileError, match=r"cannot write .*; the memory is unchanged"):
            change[what]()

    assert wait_for_exit(fork_process(write)) == 0
    assert (len(answers(store)), len(names(store))) == (2, 3)
    assert store.path.read_bytes() == before


def test_memory_keep_saves_answers_only_if_enabled(tmp_path: Path) -> None:
    store = make_filled_store(tmp_path / "filled")
    memory = Memory(store.read())
    memory.add_text([4, 5, 6])
    memory.add_text([])
    memory.save_answer([1, 2])
    assert (memory.saves_answers, Memory(store=store).saves_answers) == (False, False)
    assert held(memory)[-1] == [4, 5, 6, -1]
    assert len(answers(store)) == 2
    store = open_store(tmp_path)
    memory = Memory(store.read(), store=store, saves_answers=True)
    assert (memory.saves_answers, len(memory.indexes), memory.n_stored_tokens) == (True, 1, 0)
    memory.add_text([4, 5, 6])
    memory.save_answer([4, 5, 6])
    memory.save_answer([])
    assert answers(store) == [[4, 5, 6]]
    assert held(memory)[-1] == [4, 5, 6, -1]
    memory.add_text([7])
    assert len(answers(store)) == 1
    assert held(Memory(store.read())) == [[4, 5, 6, -1], []]


def test_memory_refresh_loads_updates_of_other_processes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    memory = Memory(store.read(), store=store)
    indexes = memory.indexes
    memory.add_text([1, 2])
    memory.refresh()
    assert held(memory) == [[1, 2, -1]]
    store.update(lambda _: [make_document("a", [5, 5])])
    assert held(memory) == [[1, 2, -1]]
    memory.refresh()
    assert held(memory) == [[5, 5, -1], [1, 2, -1]]
    assert (memory.n_stored_tokens, memory.indexes) == (3, indexes)
    store.append([6])
    store.update(lambda texts: [*texts, make_document("b", [7])])
    memory.refresh()
    assert held(memory) == [[5, 5, -1, 6, -1, 7, -1], [1, 2, -1]]
    assert memory.indexes is indexes
    store.clear()
    memory.refresh()
    assert held(memory) == [[1, 2, -1]]


def test_memory_refresh_does_not_duplicate_own_answers(tmp_path: Path) -> None:
    store = make_filled_store(tmp_path)
    memory = Memory(store.read(), store=store, saves_answers=True)
    assert held(memory)[1:] == [[7, 7, 7, 7, 1, -1, 8, 8, 8, 8, 2, -1], []]
    memory.add_text([3, 3])
    memory.save_answer([3, 3])
    memory.refresh()
    assert held(memory)[2] == [3, 3, -1]
    store.update(lambda texts: texts)
    memory.refresh()
    snapshot, live = held(memory)
    assert (snapshot[-3:], live) == ([3, 3, -1], [])


def test_memory_refresh_with_damaged_file_keeps_old_contents(tmp_path: Path) -> None:
    store = make_filled_store(tmp_path)
    memory = Memory(store.read(), store=store)
    before = held(memory)
    store.update(lambda texts: texts[:1])
    store.path.write_bytes(b"damaged")
    memory.refresh()
    assert held(memory) == before
    store.clear()
    store.update(lambda _: [make_document("a", [5, 5])])
    memory.refresh()
    assert held(memory)[0] == [5, 5, -1]


@pytest.mark.parametrize("text", ['# mine\n  "save_answers"=false # so far\n', "# save_answers = true\n", "\n\n"])
def test_write_save_answers_keeps_comments_of_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    write_save_answers(True, path)
    assert saves_answers(path)
    assert all(part in path.read_text() for part in text.split("\n") if part.startswith("#"))
    assert path.read_text().count("# so far") == text.count("# so far")


def test_saves_answers_rejects_invalid_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for raw, words in (
        (b"save_answers = maybe\n", "not valid TOML"),
        (b"save_answers = 1\n", "true or false"),
        (b"save_answers = 'on'\n", "true or false"),
        (b"remembr = true\n", "'remembr'"),
        (b"\xff\xfe", "not UTF-8"),
    ):
        path.write_bytes(raw)
        for use in (lambda: saves_answers(path), lambda: write_save_answers(True, path)):
            with pytest.raises(NGramSpecError, match=words) as error:
                use()
            assert str(path) in str(error.value)
            assert "\n" not in str(error.value)
        assert path.read_bytes() == raw
    with pytest.raises(NGramSpecError, match="cannot"):
        write_save_answers(True, path / "config.toml")
