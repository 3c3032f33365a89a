"""The memory file: what is written comes back, and no damage to it leads anywhere but to a clear refusal."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from support.memories import N_VOCAB, VOCABULARY, a_text, answers, filled, names, new_store

from ngramspec.memory import Memory, MemoryFileError, Store
from ngramspec.memory import snapshot as snapshot_module
from ngramspec.memory.snapshot import BLOCK, Snapshot, chains_for, read_header, read_table, write_snapshot
from ngramspec.memory.store import record


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return filled(tmp_path)


def refused(store: Store, *words: str) -> None:
    """It is refused with one line that names the file, and stays as it is when someone wants to write."""
    before = store.path().read_bytes()
    for attempt in (store.read, lambda: store.update(lambda texts: texts)):
        with pytest.raises(MemoryFileError) as error:
            attempt()
        assert all(word in str(error.value) for word in (str(store.path()), *words))
        assert "\n" not in str(error.value)
    assert store.path().read_bytes() == before


def poke(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw)


# ---------------------------------------------------------------------- round trip


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.update(lambda _: [])
    assert store.read().documents() == []
    assert [index.size for index in Memory(store.read()).indexes] == [0]
    wanted = [a_text("/a", [5, 6, 7]), a_text("/b\udcff\n", []), a_text("/c", [255])]
    store.update(lambda _: wanted)
    store.append([9, 8])
    contents = store.read()
    found = contents.documents()
    assert [(d.kind, d.name, d.size, d.mtime) for d in found[:3]] == [(d.kind, d.name, d.size, d.mtime) for d in wanted]
    assert [d.tokens.tolist() for d in found] == [[5, 6, 7], [], [255], [9, 8]]
    assert contents.model == "bytes"
    assert contents.snapshot.tokens.tolist() == [5, 6, 7, -1, -1, 255, -1]


def test_the_index_in_the_file_is_that_of_its_text(store: Store) -> None:
    memory = Memory(store.read())
    mapped, journal, live = memory.indexes
    assert (mapped.size, journal.size, live.size, memory.stored) == (3 * 701, 12, 0, 3 * 701 + 12)
    again = type(live).build(np.array(mapped.tokens, np.int32).data, len(mapped.heads))
    assert list(again.links) == list(mapped.links)
    assert list(again.heads) == list(mapped.heads)
    assert list(journal.tokens[:12]) == [7, 7, 7, 7, 1, -1, 8, 8, 8, 8, 2, -1]


def test_a_token_takes_12_bytes_at_most() -> None:
    for size in (0, 1, 1000, 100_000, 2**20 - 1, 2**20, 10_000_000):
        documents = size // 50
        chains = chains_for(size, documents)
        assert chains & (chains - 1) == 0
        if size >= 100_000:
            header = snapshot_module.FileHeader(N_VOCAB, size, chains, documents, VOCABULARY)
            assert header.sections()[-1] <= 12 * size
            assert 8 * chains >= size


def test_the_mapping_is_the_process_own(store: Store) -> None:
    before = store.path().read_bytes()
    index = Memory(store.read()).indexes[0]
    index.tokens[0] = 77
    index.extend([1, 2, 3, 4])
    assert store.path().read_bytes() == before


# ---------------------------------------------------------------------- damage


def test_every_byte_of_the_header_and_every_section_counts(store: Store) -> None:
    path = store.path()
    whole = path.read_bytes()
    rng = np.random.default_rng(0)

    def damaged(offset: int, bit: int, *words: str) -> None:
        poke(path, offset, bytes([whole[offset] ^ bit]))
        refused(store, *words)
        poke(path, offset, whole[offset : offset + 1])

    for offset in [*range(snapshot_module._HEADER.size), 200, BLOCK - 1]:
        damaged(offset, 0x10)
    with path.open("rb") as file:
        *starts, end = read_header(file, VOCABULARY).sections()
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        for offset in [start, stop - 1, *rng.integers(start, stop, 20).tolist()]:
            damaged(offset, 1 << int(rng.integers(8)), "is damaged", "memory clear")
    assert len(names(store)) == 3


def test_a_file_that_ends_early(store: Store) -> None:
    path = store.path()
    whole = path.read_bytes()
    for keep in (0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 20_000):
        path.write_bytes(whole[:keep])
        refused(store, "is truncated")
        with pytest.raises(MemoryFileError, match="is truncated"):
            store.append([1])
        assert path.stat().st_size == keep


def test_something_else_under_its_name(store: Store) -> None:
    path = store.path()
    whole = path.read_bytes()
    for offset, raw, words in (
        (0, b"GGUF", ["not a memory file"]),
        (8, struct.pack("=I", 2), ["format 2", "update ngramspec"]),
        (12, struct.pack(">I" if struct.pack("=I", 1)[0] else "<I", 0x01020304), ["byte order"]),
    ):
        poke(path, offset, raw)
        refused(store, *words)
        path.write_bytes(whole)
    other = Store(store.folder, bytes(16), N_VOCAB)
    path.rename(store.folder / f"{bytes(16).hex()}-000001.memory")
    refused(other, "another tokenizer")
    with pytest.raises(MemoryFileError, match="another tokenizer"):
        other.append([1])
    path.mkdir()
    with pytest.raises(MemoryFileError, match="cannot read"):
        store.read()


LIES = {
    "a token of no vocabulary": ("tokens", 100, N_VOCAB),
    "a token below the seam": ("tokens", 100, -2),
    "a link to itself": ("links", 100, 100),
    "a link forward": ("links", 100, 2**31 - 1),
    "a link without a context": ("links", 100, 2),
    "a link below the end": ("links", 100, -(2**31)),
    "a head beyond the text": ("heads", 5, 3 * 701),
    "a head without a context": ("heads", 5, 0),
    "a head below the end": ("heads", 5, -2),
}


@pytest.mark.parametrize(("section", "at", "value"), LIES.values(), ids=LIES)
def test_numbers_that_lead_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, at: int, value: int
) -> None:
    # With the right checksum, as a forger or a defect would make it.
    build = snapshot_module.TokenIndex.build

    class Liar:
        @staticmethod
        def build(tokens: memoryview, chains: int) -> object:
            index = build(tokens, chains)
            getattr(index, section)[at] = value
            return index

    monkeypatch.setattr(snapshot_module, "TokenIndex", Liar)
    texts = [a_text(f"file {i}", [i] * 700) for i in range(3)]
    path = tmp_path / "lie"
    with path.open("wb") as file:
        write_snapshot(file, VOCABULARY, N_VOCAB, "m", texts)
    monkeypatch.undo()
    with path.open("rb") as file, pytest.raises(MemoryFileError, match="impossible numbers"):
        Snapshot(file, VOCABULARY)


def test_a_table_that_does_not_fit() -> None:
    for table in (
        b"",
        b"[]",
        b'{"model":"m"}',
        b'{"model":1,"documents":[]}',
        b'{"model":"m","documents":[{"kind":"file","name":"x","tokens":-1},{"kind":"file","name":"x","tokens":700}]}',
        b'{"model":"m","documents":[{"kind":"idea","name":"x","tokens":700}]}',
        b'{"model":"m","documents":[{"kind":"file","name":"x","tokens":7e2}]}',
        b"[" * 100_000,
    ):
        with pytest.raises(MemoryFileError, match="list of documents"):
            read_table("name", table, np.zeros(701, np.int32))
    other = b'{"model":"m","documents":[{"kind":"file","name":"x","tokens":700}]}'
    with pytest.raises(MemoryFileError, match="list of documents"):
        read_table("name", other, np.zeros(702, np.int32))


# ---------------------------------------------------------------------- journal


def test_an_incomplete_record_is_left_out_and_written_over(store: Store) -> None:
    path = store.path()
    whole = path.read_bytes()
    torn = record([1, 2, 3], 1.0)
    for cut in range(len(torn)):
        path.write_bytes(whole + torn[:cut])
        assert answers(store) == [[7, 7, 7, 7, 1], [8, 8, 8, 8, 2]]
        store.append([3])
        assert answers(store)[2:] == [[3]]
        assert path.stat().st_size == len(whole) + len(record([3], 1.0))


def test_every_byte_of_the_journal_counts(store: Store) -> None:
    path = store.path()
    whole = path.read_bytes()
    length = len(record([7, 7, 7, 7, 1], 1.0))
    for offset in range(len(whole) - 2 * length, len(whole)):
        poke(path, offset, bytes([whole[offset] ^ 0x04]))
        left = answers(store)
        assert len(left) < 2
        assert all(answer in ([7, 7, 7, 7, 1], [8, 8, 8, 8, 2]) for answer in left)
        assert len(names(store)) == 3
        poke(path, offset, whole[offset : offset + 1])
    # A damaged answer costs no other.
    poke(path, len(whole) - length - 1, b"\xff")
    assert answers(store) == [[8, 8, 8, 8, 2]]
    assert store.read().damaged == 1


def test_an_answer_of_no_vocabulary_is_left_out(store: Store) -> None:
    with store.path().open("ab") as file:
        file.write(record([1, N_VOCAB], 1.0) + record([-1, 2], 1.0) + record([4], float("nan")) + record([5], 1.0))
    assert answers(store)[2:] == [[5]]
    assert store.read().damaged == 3
