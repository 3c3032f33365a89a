"""Write a checkpoint as GGUF: `llama` architecture, byte-level BPE, ChatML template, Q8_0."""

# mypy: disable-error-code="import-not-found,misc,no-untyped-call"

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from model import CONTEXT, RMS_EPS, ROPE_BASE, DemoModel
from train import load

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DESCRIPTION = (
    "A small model of Python source and scripted chat turns that ships with ngramspec for trying "
    "the tool and for tests. Not useful as an assistant; see MODEL_CARD.md."
)
QUANTIZATION = gguf.GGMLQuantizationType.Q8_0


def write_metadata(writer: gguf.GGUFWriter, model: DemoModel) -> None:
    shape = model.shape
    writer.add_name("ngramspec demo")
    writer.add_description(DESCRIPTION)
    writer.add_license("MIT")
    writer.add_tags(["python", "code", "demo"])
    writer.add_size_label(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_vocab_size(shape.vocab)


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Path) -> None:
    """Write the tokenizer with the token ids of `tokenizer` (a tok.json); added tokens become control tokens."""
    content = json.loads(tokenizer.read_text("utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    merges = content["model"]["merges"]
    special = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
    types = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types(types)
    # tokenizers writes a merge as a pair or, in older versions, as one string.
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    # Every training document starts with <|endoftext|>, so it is the BOS token as well.
    writer.add_bos_token_id(special["<|endoftext|>"])
    writer.add_eos_token_id(special["<|endoftext|>"])
    writer.add_eot_token_id(special["<|im_end|>"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def export(checkpoint: Path, tokenizer: Path, out: Path) -> None:
    """Write the GGUF file `out` with matrices in Q8_0 and norm weights in float32.

    Raises:
        ValueError: Tokenizer with another number of tokens than the model.
    """
    model, counts = load(checkpoint)
    tokens = len(json.loads(tokenizer.read_text("utf-8"))["model"]["vocab"])
    if tokens != model.shape.vocab:
        raise ValueError(f"{tokens} tokens in {tokenizer}, {model.shape.vocab} in the model")
    writer = gguf.GGUFWriter(str(out), "llama")
    write_metadata(writer, model)
    write_tokenizer(writer, tokenizer)
    for name, weight in model.gguf_tensors().items():
        values = weight.detach().numpy().astype(np.float32)
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, QUANTIZATION), raw_dtype=QUANTIZATION)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{out}: {out.stat().st_size:,} bytes, {model.shape}, {counts}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path, help="tok.json")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    export(arguments.checkpoint, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
