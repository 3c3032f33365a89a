"""GGUF files with a vocabulary and no weights, made from the demo model's."""

from __future__ import annotations

from pathlib import Path

import gguf
from cli_runner import DEMO


def write_vocabulary(path: Path, *, template: bool = True, chatml: bool = True) -> Path:
    """Copy the demo model's vocabulary.

    Args:
        template: with its chat template.
        chatml: with the tokens of ChatML; else they are ordinary text.
    """
    reader = gguf.GGUFReader(DEMO)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if name == "tokenizer.chat_template" and not template:
            continue
        value = field.contents()
        if name == "tokenizer.ggml.tokens" and not chatml:
            value = [token.replace("<|im_", "<|xx_") for token in value]
        kind = field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
