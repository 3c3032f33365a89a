"""Tiny GGUF files for tests, written by gguf-py, an independent implementation of the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from support.cli_runner import DEMO


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    kind: str = "model",
    tensors: Mapping[str, int] | None = None,
    split: tuple[int, int] | None = None,
    tokens: Sequence[str] = ("a", "bc", "漢"),
    alignment: int | None = None,
    big_endian: bool = False,
) -> Path:
    """Write a file with the given metadata and weights of zeros.

    Args:
        path: Path of the file.
        architecture: Value of `general.architecture`.
        kind: Value of `general.type`.
        tensors: ggml type by tensor name; each tensor has two blocks of zeros. `None` means one F32 tensor.
        split: (split.no counted from 0, split.count).
        tokens: Tokens of the vocabulary.
        alignment: Alignment of the data in bytes; `None` means the default.
        big_endian: Write the file in big-endian order.
    """
    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    writer.add_string("general.type", kind)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_array("tokenizer.ggml.tokens", list(tokens))
    writer.add_array("tokenizer.ggml.token_type", [1] * len(tokens))
    writer.add_array("tokenizer.ggml.scores", [0.5] * len(tokens))
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
    for name, tensor_type in ({"output.weight": 0} if tensors is None else tensors).items():
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor_type)][1]
        data = np.zeros((1, 2 * size), dtype=np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_damaged_demo(path: Path, key: str, value: object) -> Path:
    """Write a copy of the demo model with another value of a key; in a list, only the last item changes."""
    path.write_bytes(DEMO.read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    reader.fields[key].parts[-1][:] = value
    reader.data.flush()
    return path


def write_changed_demo(path: Path, changes: Mapping[str, object], tensors: bool = True) -> Path:
    """Write a copy of the demo model with other values of keys, of any length.

    Args:
        path: Path of the copy.
        changes: New values by key, of the types that gguf-py derives from them; `None` removes the key.
        tensors: Write the weights too.
    """
    reader = gguf.GGUFReader(DEMO)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in changes:
            kind, *inner = field.types
            writer.add_key_value(key, field.contents(), kind, sub_type=inner[-1] if inner else None)
    for key, value in changes.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors if tensors else ():
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
