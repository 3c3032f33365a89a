"""GGUF files with a vocabulary and no weights, made from the demo model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
from support.cli_runner import DEMO

END = 2
"""Id of the end-of-generation token in the files of `write_words`."""

FIRST_WORD = 259
WORDS = ("a", "b", "c", "ab", "bc", " a", "\u00e9", '{"', '":', "true", "tr", "}", "1", "12")


def write_vocabulary(
    path: Path,
    *,
    template: bool = True,
    chatml: bool = True,
    controls: Sequence[str] = (),
    fill_in: bool = True,
    ids: Mapping[str, int] | None = None,
) -> Path:
    """Copy the demo model's vocabulary.

    Args:
        path: Path of the copy.
        template: Copy its chat template.
        chatml: Keep the ChatML tokens; otherwise they get other names, so that ChatML is ordinary text.
        controls: Further control tokens after the model's 4,096 tokens.
        fill_in: Keep the infill tokens; otherwise they get other names.
        ids: Further keys with token ids.
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
        if name == "tokenizer.ggml.tokens":
            value = [*(token if fill_in else token.replace("<|fim_", "<|xx_fim_") for token in value), *controls]
        if name == "tokenizer.ggml.token_type":
            value = [*value, *([gguf.TokenType.CONTROL] * len(controls))]
        kind = field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for name, token in (ids or {}).items():
        writer.add_uint32(name, token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_words(
    path: Path, words: Sequence[str], *, kind: gguf.TokenType = gguf.TokenType.NORMAL, padding: int = 0
) -> Path:
    """Write a SentencePiece vocabulary: a token for each byte, and these words from `FIRST_WORD` on.

    Args:
        path: Path of the file.
        words: Words of the vocabulary.
        kind: Type of the words' tokens.
        padding: Number of unused tokens after the words.
    """
    kinds = gguf.TokenType
    tokens = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    assert len(tokens) == FIRST_WORD
    tokens += [(word.replace(" ", "\u2581"), kind) for word in words]
    tokens += [(f"[PAD{i}]", kinds.UNUSED) for i in range(padding)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([token_type for _, token_type in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_vocab_size(len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
