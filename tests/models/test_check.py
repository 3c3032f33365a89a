"""Tests of `check_model_file`, whose errors name the kind of file and a remedy, and of `read_header`."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli_runner import DEMO
from support.model_files import write_damaged_demo, write_gguf

from ngramspec.data import ModelError
from ngramspec.models.check import check_model_file, has_gguf_magic
from ngramspec.models.gguf import BLOCKS, read_header


def complaint(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_model_file(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_check_model_file_accepts_valid_models(tmp_path: Path) -> None:
    assert check_model_file(DEMO).metadata["general.name"] == "ngramspec demo"
    assert check_model_file(write_gguf(tmp_path / "m.gguf")).tensors == 1


def test_check_model_file_of_missing_file_suggests_similar_names(tmp_path: Path) -> None:
    assert complaint(tmp_path / "m.gguf") == f"no such model file: {tmp_path / 'm.gguf'}"
    write_gguf(tmp_path / "Model-Q4_K_M.gguf")
    write_gguf(tmp_path / "other.gguf")
    for name in ("model-q4_k_m.gguf", "Model-Q4_K_M", "Model-Q4_K_S.gguf"):
        message = complaint(tmp_path / name)
        assert message.endswith("(did you mean Model-Q4_K_M.gguf?)"), message
    assert "did you mean" not in complaint(tmp_path / "zzz.gguf")


def test_check_model_file_rejects_broken_link_repository_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "write hf:owner/repo-GGUF" in complaint(Path("owner/repo-GGUF"))
    assert "is a folder without .gguf files" in complaint(tmp_path)
    path = tmp_path / "m.gguf"
    path.symlink_to("blob")
    assert complaint(path) == f"{path} is a link to blob, which does not exist; download the model again"
    assert "did you mean" not in complaint(tmp_path / "m2.gguf")
    path.unlink()
    for name in "badce":
        (tmp_path / f"{name}.gguf").touch()
    assert complaint(tmp_path).endswith(": a.gguf, b.gguf, c.gguf and 2 more")


SAFETENSORS = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'

NOT_GGUF = {
    "looks like a text file": "Es war einmal … ein Modell.\n".encode() * 60,
    "looks like a text file\n": b'{"model": "llama"}',
    "safetensors": struct.pack("<Q", len(SAFETENSORS)) + SAFETENSORS + bytes(4),
    "pickled PyTorch": pickle.dumps({"a": 1}, protocol=2),
    "Python pickle": pickle.dumps({"a": 1}, protocol=4),
    "PyTorch checkpoint": b"PK\x03\x04" + bytes(30),
    "ggjt file from before GGUF": struct.pack("<I", 0x67676A74) + bytes(90),
    "ggml file from before GGUF": struct.pack("<I", 0x67676D6C) + bytes(90),
    "ggmf file from before GGUF": struct.pack("<I", 0x67676D66) + bytes(90),
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n",
    "web page": b"\n<!DOCTYPE html><html><body>404</body></html>",
    "begins with zeros": bytes(1000),
    "begins with zeros (": bytes(5),
    "gzip archive": b"\x1f\x8b\x08" + bytes(30),
    "binary data of another kind": bytes(range(1, 256)),
    "data of another kind": bytes(8) + bytes(range(1, 256)),
}


def test_check_model_file_names_kind_of_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for reason, data in NOT_GGUF.items():
        path.write_bytes(data)
        message = complaint(path)
        assert message.startswith(f"{path} is not a GGUF model: it ")
        assert reason.strip() in message


def test_check_model_file_rejects_empty_and_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    assert complaint(path) == f"{path} is empty; download it again"

    def refuse(*_args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert complaint(path) == f"cannot read {path}: Permission denied"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_check_model_file_rejects_pipe_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in complaint(tmp_path / "pipe")
    assert not has_gguf_magic(tmp_path / "pipe")


def test_check_model_file_rejects_truncated_file_and_missing_weights(tmp_path: Path) -> None:
    data = DEMO.read_bytes()
    needed = read_header(DEMO).required_bytes
    path = tmp_path / "cut.gguf"
    for size in (4, 8, 20, 100, 1000, 100_000, 1_000_000, needed // 2, needed - 1):
        path.write_bytes(data[:size])
        assert f"{path} is truncated: " in complaint(path)
    path.write_bytes(data[:needed])
    check_model_file(path)
    vocabulary = write_gguf(tmp_path / "vocabulary.gguf", tensors={})
    assert "only a vocabulary and no weights" in complaint(vocabulary)


@pytest.mark.parametrize(
    ("kind", "architecture", "reason"),
    [
        ("model", "bert", "is an encoder (bert)"),
        ("model", "nomic-bert-moe", "is an encoder"),
        ("model", "roberta", "is an encoder"),
        ("model", "t5encoder", "is an encoder"),
        ("model", "gemma-embedding", "is an encoder"),
        ("model", "t5", "encoder-decoder"),
        ("model", "llada", "diffusion"),
        ("model", "eagle3", "is a draft layer for another model (eagle3)"),
        ("model", "qwen3tts", "generates audio"),
        ("model", "clip", "mmproj"),
        ("model", "", "has no general.architecture"),
        ("mmproj", "llama", "mmproj"),
        ("adapter", "llama", "LoRA"),
        ("imatrix", "llama", "importance matrix"),
    ],
)
def test_check_model_file_rejects_models_that_cannot_generate_text(
    tmp_path: Path, kind: str, architecture: str, reason: str
) -> None:
    assert reason in complaint(write_gguf(tmp_path / "m.gguf", architecture=architecture, kind=kind))


def write_parts(folder: Path, parts: int = 3) -> list[Path]:
    """Write a split model whose first part has no tensors, as with gguf-split --no-tensor-first-split."""
    return [
        write_gguf(
            folder / f"m-{part + 1:05d}-of-{parts:05d}.gguf",
            split=(part, parts),
            tensors={f"t{part}": 8} if part else {},
        )
        for part in range(parts)
    ]


def test_check_model_file_of_split_model_requires_all_parts(tmp_path: Path) -> None:
    first, second, third = write_parts(tmp_path)
    check_model_file(first)
    assert complaint(second).endswith("is part 2 of 3; pass the first one, m-00001-of-00003.gguf")
    for part in (third, second):
        part.write_bytes(part.read_bytes()[:-60])
        assert complaint(first).startswith(f"{part} is truncated")
        part.unlink()
        assert f"{part.name} is missing" in complaint(first)
    assert "was renamed" in complaint(first.rename(tmp_path / "model.gguf"))


def test_has_gguf_magic_checks_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("GGUX")
    assert has_gguf_magic(DEMO)
    assert not any(has_gguf_magic(tmp_path / name) for name in ("text", "none", ".", "a\0b", "x" * 5000))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("block_count", 0, "block_count is 0, but must be 1 to 512"),
        ("block_count", 513, "block_count is 513, but must be 1 to 512"),
        ("attention.layer_norm_rms_epsilon", -1e-5, "but must be a number of at least 0"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "epsilon is nan, but must be a number of at least 0"),
        ("attention.layer_norm_rms_epsilon", float("inf"), "epsilon is inf, but must be a number of at least 0"),
        ("rope.dimension_count", 31, "rope.dimension_count is 31, but must be even"),
    ],
)
def test_check_model_file_rejects_values_that_crash_llama_cpp(
    key: str, value: float, reason: str, tmp_path: Path
) -> None:
    key = f"llama.{key}"
    path = write_damaged_demo(tmp_path / "m.gguf", key, value)
    message = complaint(path)
    assert message.startswith(f"{path} is damaged: {key} is ")
    assert reason in message


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
