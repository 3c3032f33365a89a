"""GGUF files for tests, written by gguf-py, an independent implementation of the format.

Some have only metadata or a vocabulary, and some are copies of the demo model with changes. llama.cpp really runs the
models of about 100 kB with random weights, one of each kind of memory: a KV cache (llama), a KV cache with a sliding
window (gemma2), and a recurrent state that cannot be cut back (mamba). `architectures` has all other architectures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from support.cli_runner import DEMO

KINDS, TYPES = gguf.TokenType, gguf.GGUFValueType

_FOLDER = TemporaryDirectory(prefix="ngramspec-models-")  # deleted when the process ends


@cache
def written(write: Callable[..., Path], name: str, **options: Any) -> Path:
    """Return the file that a function such as `write_model` writes, once per process."""
    return write(Path(_FOLDER.name) / f"{name}-{written.cache_info().misses}.gguf", name, **options)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file whose fields and tensors were added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,  # path of the file
    *,
    architecture: str = "llama",  # value of `general.architecture`
    kind: str = "model",  # value of `general.type`
    tensors: Mapping[str, int] | None = None,  # ggml types of tensors of two blocks; `None` means one of F32
    split: tuple[int, int] | None = None,  # (split.no counted from 0, split.count)
    alignment: int | None = None,  # alignment of the data in bytes; `None` means the default
    big_endian: bool = False,  # write the file in big-endian order
) -> Path:
    """Write a file with the given metadata and weights of zeros."""
    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    writer.add_string("general.type", kind)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "漢"])
    writer.add_array("tokenizer.ggml.token_type", [1] * 3)
    writer.add_array("tokenizer.ggml.scores", [0.5] * 3)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
    for name, tensor_type in ({"output.weight": 0} if tensors is None else tensors).items():
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor_type)][1]
        data = np.zeros((1, 2 * size), dtype=np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(tensor_type))
    finish(writer)
    return path


# --------------------------------------------------------------------------- copies of the demo model


@cache
def demo_fields() -> Mapping[str, tuple[Any, Sequence[Any]]]:
    """Return the value and the types of each key of the demo model except its architecture."""
    fields = gguf.GGUFReader(DEMO).fields.items()
    return {
        name: (field.contents(), field.types)
        for name, field in fields
        if not name.startswith("GGUF.") and name != "general.architecture"
    }


def add_demo_fields(writer: gguf.GGUFWriter, prefix: str, changes: Mapping[str, Any]) -> None:
    """Add the keys of the demo model that begin with `prefix`, with other or further values; `None` removes a key."""
    known = {name: field for name, field in demo_fields().items() if name.startswith(prefix)}
    for name, value in ({name: value for name, (value, _) in known.items()} | dict(changes)).items():
        new_type = TYPES.UINT32 if type(value) is int else value is not None and TYPES.get_type(value)
        kind, *inner = known[name][1] if name in known else [new_type]
        if value is not None:
            writer.add_key_value(name, value, kind, sub_type=inner[-1] if inner else None)


def write_changed_demo(path: Path, changes: Mapping[str, Any], tensors: bool = True) -> Path:
    """Write a copy of the demo model, with its weights if `tensors`, and with changes as in `add_demo_fields`."""
    reader = gguf.GGUFReader(DEMO)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    add_demo_fields(writer, "", changes)
    for tensor in reader.tensors if tensors else ():
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return path


def write_damaged_demo(path: Path, key: str, value: object) -> Path:
    """Write a copy of the demo model with another value of a key; in a list, only the last item changes."""
    path.write_bytes(DEMO.read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    reader.fields[key].parts[-1][:] = value
    reader.data.flush()
    return path


def demo_tokens(added: Mapping[str, gguf.TokenType]) -> dict[str, list[Any]]:
    """Return the keys of the demo model's tokens, with those of `added` that it lacks after its 4,096 tokens."""
    tokens, types = (list(demo_fields()[f"tokenizer.ggml.{key}"][0]) for key in ("tokens", "token_type"))
    new = {name: int(kind) for name, kind in added.items() if name not in tokens}
    return {"tokenizer.ggml.tokens": [*tokens, *new], "tokenizer.ggml.token_type": [*types, *new.values()]}


def write_vocabulary(
    path: Path,  # path of the copy
    *,
    template: bool = True,  # copy its chat template
    chatml: bool = True,  # keep the ChatML tokens; otherwise they get other names, so that ChatML is ordinary text
    controls: Sequence[str] = (),  # further control tokens
    kind: gguf.TokenType = KINDS.CONTROL,  # type of these tokens
    fill_in: bool = True,  # keep the infill tokens; otherwise they get other names
    ids: Mapping[str, int] | None = None,  # further keys with token ids
) -> Path:
    """Write the demo model's vocabulary without weights."""
    changes: dict[str, Any] = demo_tokens(dict.fromkeys(controls, kind)) | dict(ids or {})
    renamed = [name for name, stays in (("<|im_", chatml), ("<|fim_", fill_in)) if not stays]
    for name in renamed:
        tokens = changes["tokenizer.ggml.tokens"]
        changes["tokenizer.ggml.tokens"] = [token.replace(name, f"<|xx{name[2:]}") for token in tokens]
    return write_changed_demo(path, changes if template else changes | {"tokenizer.chat_template": None}, False)


# --------------------------------------------------------------------------- SentencePiece vocabularies

END = 2
"""Id of the end-of-generation token."""

FIRST_WORD = 259
WORDS = ("a", "b", "c", "ab", "bc", " a", "\u00e9", '{"', '":', "true", "tr", "}", "1", "12")


def add_tokens(writer: gguf.GGUFWriter, more: Sequence[tuple[str, gguf.TokenType]]) -> int:
    """Add a vocabulary with a token for each byte, and these from `FIRST_WORD` on; return its size."""
    tokens = [("<unk>", KINDS.UNKNOWN), ("<s>", KINDS.CONTROL), ("</s>", KINDS.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", KINDS.BYTE) for byte in range(256)]
    assert len(tokens) == FIRST_WORD
    tokens += more
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_vocab_size(len(tokens))
    return len(tokens)


def write_words(
    path: Path,  # path of the file
    words: Sequence[str],  # words of the vocabulary
    *,
    kind: gguf.TokenType = KINDS.NORMAL,  # type of the words' tokens
    padding: int = 0,  # number of unused tokens after the words
    controls: Mapping[str, gguf.TokenType] | None = None,  # further tokens after those, with their types
    space_prefix: bool = True,  # whether a text starts with a space that it does not contain
) -> Path:
    """Write a vocabulary with these words."""
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [(word.replace(" ", "\u2581"), kind) for word in words]
    tokens += [(f"[PAD{i}]", KINDS.UNUSED) for i in range(padding)]
    add_tokens(writer, [*tokens, *(controls or {}).items()])
    writer.add_add_space_prefix(space_prefix)
    finish(writer)
    return path


# --------------------------------------------------------------------------- models with random weights

WINDOW = 24
"""Sliding window of the gemma2 model, in tokens."""

WIDTH, LAYERS, HEADS, HIDDEN = 32, 2, 2, 64


def add_vocabulary(writer: gguf.GGUFWriter, controls: Sequence[str] = ()) -> int:
    """Add the bytes, a few letters, a control token for the end of a turn, and others; return the vocabulary's size."""
    letters = [(letter, KINDS.NORMAL) for letter in "\u2581abcdefgh"]
    return add_tokens(writer, [*letters, *((name, KINDS.CONTROL) for name in ("<|im_end|>", *controls))])


def write_model(
    path: Path,
    architecture: str,
    *,
    chat_template: str | None = None,
    pooling: int | None = None,
    causal: bool = True,
    vocabulary: Callable[[gguf.GGUFWriter], int] = add_vocabulary,
) -> Path:
    """Write a model: "llama", "gemma2" or "mamba"; the same architecture and vocabulary always get the same weights.

    `pooling` and `causal` are the file's entries on embeddings and attention. `vocabulary` adds the vocabulary and
    returns its size.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    if not causal:
        writer.add_causal_attention(False)
    vocab = vocabulary(writer)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    shapes = {"token_embd.weight": (vocab, WIDTH), "output_norm.weight": (WIDTH,)}
    if architecture != "gemma2":  # gemma2 uses its embedding matrix as output matrix.
        shapes["output.weight"] = (vocab, WIDTH)
    block = _mamba(writer) if architecture == "mamba" else _transformer(writer, architecture)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            data = np.ones(shape)
        elif name.endswith("ssm_a"):
            data = -np.exp(rng.standard_normal(shape))
        else:
            data = rng.standard_normal(shape) * (1.5 if name.startswith("token") else shape[-1] ** -0.5)
        writer.add_tensor(name, data.astype(np.float32))
    finish(writer)
    return path


tiny = partial(written, write_model)
"""Return the file of a model of `write_model` by its architecture, written once per process."""


def _transformer(writer: gguf.GGUFWriter, architecture: str) -> dict[str, tuple[int, ...]]:
    head = WIDTH // HEADS
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (WIDTH, WIDTH),
        "attn_k.weight": (head, WIDTH),
        "attn_v.weight": (head, WIDTH),
        "attn_output.weight": (WIDTH, WIDTH),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (HIDDEN, WIDTH),
        "ffn_up.weight": (HIDDEN, WIDTH),
        "ffn_down.weight": (WIDTH, HIDDEN),
    }
    if architecture == "gemma2":
        writer.add_sliding_window(WINDOW)
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
        shapes |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    return shapes


def _mamba(writer: gguf.GGUFWriter) -> dict[str, tuple[int, ...]]:
    inner, state, rank, kernel = 2 * WIDTH, 8, 2, 4
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    return {
        "attn_norm.weight": (WIDTH,),
        "ssm_in.weight": (2 * inner, WIDTH),
        "ssm_conv1d.weight": (inner, kernel),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (rank + 2 * state, inner),
        "ssm_dt.weight": (inner, rank),
        "ssm_dt.bias": (inner,),
        "ssm_a": (inner, state),
        "ssm_d": (inner,),
        "ssm_out.weight": (WIDTH, inner),
    }


_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|\[@BOS@\]")  # converters' rule
_SPECIAL = re.compile(
    r"\[[/A-Z_]+\]|</?s>|<seed:(bos|eos|pad)>|\]~!?b[\][]|\[e~\[|<(start|end)_of_turn>|<\|?turn\|?>|<sep>"
)
"""Tokens that tokenizer settings mark as special, although their names do not look like it."""
_ALWAYS_VISIBLE = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"}
_ALWAYS_VISIBLE |= {'<|"|>'}
"""Tokens of Gemma 4 that the converter makes visible."""


def token_type(name: str) -> gguf.TokenType:
    """Return the type of an added token in a real file, by the rules of llama.cpp's converters."""
    is_control = name not in _ALWAYS_VISIBLE and (_LOOKS_SPECIAL.fullmatch(name) or _SPECIAL.fullmatch(name))
    return KINDS.CONTROL if is_control else KINDS.USER_DEFINED


def write_family_model(path: Path, template: str, marks: Sequence[str], end: str) -> Path:
    """Write a model with the demo model's vocabulary and the marks of a model family; `end` ends an answer."""

    def add_vocabulary(writer: gguf.GGUFWriter) -> int:
        changes: dict[str, Any] = demo_tokens({mark: token_type(mark) for mark in (*marks, end)})
        tokens = changes["tokenizer.ggml.tokens"]
        changes |= {f"tokenizer.ggml.{kind}_token_id": tokens.index(end) for kind in ("eos", "eot")}
        add_demo_fields(writer, "tokenizer.", changes | {"tokenizer.chat_template": None})
        writer.add_vocab_size(len(tokens))
        return len(tokens)

    return write_model(path, "llama", chat_template=template, vocabulary=add_vocabulary)


# --------------------------------------------------------------------------- LoRA adapters


def write_adapter(
    path: Path,
    model: Path,
    names: Sequence[str],
    *,
    rank: int = 4,
    alpha: Any = 6.0,
    seed: int = 0,
    architecture: str | None = None,
    kind: str = "lora",
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    letters: str = "ab",
    dtype: Any = np.float32,
    switched_on_by: Sequence[int] = (),
) -> Path:
    """Write an adapter with random matrices for the tensors of a model whose names contain given parts.

    The arguments after `seed` make damaged adapters: `letters` one of the two matrices, or other `shapes`.
    """
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, architecture or reader.fields["general.architecture"].contents())
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", kind)
    writer.add_key_value("adapter.lora.alpha", alpha, {float: TYPES.FLOAT32, int: TYPES.UINT32}[type(alpha)])
    if switched_on_by:
        writer.add_key_value("adapter.alora.invocation_tokens", list(switched_on_by), TYPES.ARRAY, TYPES.UINT32)
    rng = np.random.default_rng(seed)
    for tensor in reader.tensors:
        if not any(name in tensor.name for name in names):
            continue
        n_in, n_out = map(int, tensor.shape[:2])
        pair = ((n_out, rank), (n_in, rank)) if tensor.name.startswith("token_embd") else ((rank, n_in), (n_out, rank))
        for letter, shape in zip("ab", shapes or pair, strict=True):
            if letter in letters:
                writer.add_tensor(f"{tensor.name}.lora_{letter}", rng.normal(0, 0.2, shape).astype(dtype))
    finish(writer)
    return path


def merge(path: Path, model: Path, lora: Sequence[tuple[Path, float]]) -> Path:
    """Write a copy of a model of 32-bit floats with adapters in its weights: W + scale * alpha / rank * B A."""
    path.write_bytes(model.read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    weights = {tensor.name: tensor.data for tensor in reader.tensors}
    for file, scale in lora:
        adapter = gguf.GGUFReader(file)
        alpha = adapter.fields["adapter.lora.alpha"].contents()
        parts = {tensor.name: tensor.data for tensor in adapter.tensors}
        for name in {part.rpartition(".")[0] for part in parts}:
            a, b = (parts[f"{name}.lora_{letter}"] for letter in "ab")
            product = a @ b.T if name.startswith("token_embd") else b @ a
            assert weights[name].dtype == np.float32
            weights[name] += scale * alpha / min(a.shape) * product
    reader.data.flush()
    return path
