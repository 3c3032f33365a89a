"""Tests of `read_header` against gguf-py's reader and constants, and with broken headers."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli_runner import DEMO
from support.model_files import write_gguf

from ngramspec.data import ModelError
from ngramspec.models.gguf import BLOCKS, read_header


def needed_by_gguf_py(path: Path) -> int:
    return max(int(tensor.data_offset + tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)


def test_block_sizes_equal_those_of_gguf_py() -> None:
    theirs = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: theirs[kind] for kind in BLOCKS if kind in theirs} == {
        kind: size for kind, size in BLOCKS.items() if kind in theirs
    }
    # A newer gguf-py may have more types, but these must not be missing.
    assert {kind for kind in theirs if kind <= 41} <= set(BLOCKS)


def test_read_header_required_bytes_equal_gguf_py_for_every_type(tmp_path: Path) -> None:
    for kind in set(BLOCKS) & {int(k) for k in gguf.GGML_QUANT_SIZES}:
        path = write_gguf(tmp_path / "m.gguf", tensors={"a": 0, "b": kind})
        assert read_header(path).required_bytes == needed_by_gguf_py(path)
    for alignment in (8, 64, 1024):
        path = write_gguf(tmp_path / "m.gguf", alignment=alignment, tensors={"a": 8, "b": 8})
        assert read_header(path).required_bytes == needed_by_gguf_py(path)
    path = write_gguf(tmp_path / "m.gguf", tensors={})
    header = read_header(path)
    assert header.tensors == 0
    assert 0 <= path.stat().st_size - header.required_bytes < 32  # The rest is padding.
    assert read_header(DEMO).required_bytes == needed_by_gguf_py(DEMO)
    assert read_header(DEMO).tensors == len(gguf.GGUFReader(DEMO).tensors)


def test_read_header_metadata_omits_arrays(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf", split=(0, 2)))
    assert header.tensors == 1
    assert header.metadata == {
        "general.architecture": "llama",
        "general.type": "model",
        "tokenizer.ggml.add_bos_token": True,
        "llama.rope.freq_base": 10000.0,
        "split.no": 0,
        "split.count": 2,
    }


def test_read_header_vocabulary_hash_depends_only_on_tokens(tmp_path: Path) -> None:
    def name(tokens: list[bytes], architecture: str = "llama") -> bytes:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
        writer.add_token_list(tokens)
        writer.add_token_merges(["a b"] if architecture == "llama" else [])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return read_header(tmp_path / "m.gguf").vocabulary

    same = name([b"a", b"bc", b"d"])
    assert len(same) == 16
    assert name([b"a", b"bc", b"d"], "qwen2") == same
    # Another split or order of the letters, a further token and a longer token each give another vocabulary.
    others = [[b"ab", b"c", b"d"], [b"bc", b"a", b"d"], [b"a", b"bc", b"d", b""], [b"a", b"bc", b"d\0"], []]
    assert len({same, *map(name, others)}) == 1 + len(others)


def test_read_header_required_bytes_exclude_tensor_of_unknown_type(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors={"first": 0, "last": 8})
    data = path.read_bytes()
    known = read_header(path).required_bytes
    # name, dimension count, two dimensions, type, offset
    at = data.index(b"last") + len(b"last") + 4 + 2 * 8
    assert data[at : at + 4] == struct.pack("<I", 8)
    path.write_bytes(data[:at] + struct.pack("<I", 99) + data[at + 4 :])
    assert read_header(path).required_bytes < known


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(entries: bytes, *, count: int = 1, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + entries


BROKEN = {
    "GGUF version 1,": header(b"", count=0, version=1),
    "GGUF version 4;": header(b"", count=0, version=4),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "'k' has the unknown type 77": header(string("k") + struct.pack("<I", 77)),
    "'k' is an array of type 9": header(string("k") + struct.pack("<IIQ", 9, 9, 1)),
    "alignment 3;": header(string("general.alignment") + struct.pack("<II", 4, 3)),
    "alignment 0;": header(string("general.alignment") + struct.pack("<II", 4, 0)),
    "tensor 't' has 5 dimensions": header(string("t") + struct.pack("<I", 5), count=0, tensors=1),
    "ends inside its header, after 4 bytes": b"GGUF",
    "inside its header, after 24 bytes": header(b"", count=2**63),
    "inside its header, after 32 bytes": header(struct.pack("<Q", 2**63)),
    "inside its header, after 49 bytes": header(string("k") + struct.pack("<IIQ", 9, 10, 2**61)),
    "inside its header, after 57 bytes": header(string("k") + struct.pack("<IIQQ", 9, 8, 2, 2**64 - 8)),
    "inside its header, after 65 bytes": header(string("k") + struct.pack("<IIQQ", 9, 8, 1, 9) + b"8 bytes."),
    "inside its header, after 60 bytes": header(string("k") + struct.pack("<IIQ", 9, 8, 2) + string("abc")),
}


def test_read_header_rejects_broken_headers(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    for reason, data in {
        **BROKEN,
        "is a big-endian GGUF file;": write_gguf(path, big_endian=True).read_bytes(),
    }.items():
        path.write_bytes(data)
        with pytest.raises(ModelError, match=reason) as caught:
            read_header(path)
        assert str(caught.value).startswith(str(path))


@given(st.integers(4, 10_000), st.binary(max_size=12), st.integers(0, 10_000))
def test_read_header_of_damaged_file_raises_only_model_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, damage: bytes, end: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    data = write_gguf(path).read_bytes()
    place = 4 + place % (len(data) - 4)
    data = data[:place] + damage + data[place + len(damage) :]
    path.write_bytes(data[: max(4, end % (2 * len(data)))])
    with contextlib.suppress(ModelError):
        assert read_header(path).required_bytes >= 24
