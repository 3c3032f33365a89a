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
    kind: gguf.TokenType = gguf.TokenType.CONTROL,
    fill_in: bool = True,
    ids: Mapping[str, int] | None = None,
) -> Path:
    """Copy the demo model's vocabulary.

    Args:
        path: Path of the copy.
        template: Copy its chat template.
        chatml: Keep the ChatML tokens; otherwise they get other names, so that ChatML is ordinary text.
        controls: Further control tokens after the model's 4,096 tokens, except those that it has.
        kind: Type of these tokens.
        fill_in: Keep the infill tokens; otherwise they get other names.
        ids: Further keys with token ids.
    """
    reader = gguf.GGUFReader(DEMO)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    known = {*reader.fields["tokenizer.ggml.tokens"].contents()}
    controls = [control for control in controls if control not in known]
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
            value = [*value, *([kind] * len(controls))]
        field_type = field.types[0]
        item_type = field.types[-1] if field_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field_type, item_type)
    for name, token in (ids or {}).items():
        writer.add_uint32(name, token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_words(
    path: Path,
    words: Sequence[str],
    *,
    kind: gguf.TokenType = gguf.TokenType.NORMAL,
    padding: int = 0,
    controls: Mapping[str, gguf.TokenType] | None = None,
    space_prefix: bool = True,
) -> Path:
    """Write a SentencePiece vocabulary: a token for each byte, and these words from `FIRST_WORD` on.

    Args:
        path: Path of the file.
        words: Words of the vocabulary.
        kind: Type of the words' tokens.
        padding: Number of unused tokens after the words.
        controls: Further tokens after those, with their types.
        space_prefix: Whether a text starts with a space that it does not contain.
    """
    kinds = gguf.TokenType
    tokens = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    assert len(tokens) == FIRST_WORD
    tokens += [(word.replace(" ", "\u2581"), kind) for word in words]
    tokens += [(f"[PAD{i}]", kinds.UNUSED) for i in range(padding)]
    tokens += (controls or {}).items()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([token_type for _, token_type in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_add_space_prefix(space_prefix)
    writer.add_vocab_size(len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
