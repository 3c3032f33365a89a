"""Checks of a local model file, because llama.cpp reports every wrong file as "failed to load model"."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from ngramspec.data import ModelError, get_reason
from ngramspec.models.gguf import MAGIC, GGUFHeader, read_header

# Names of the parts of a split model, counted from 1, by which llama.cpp finds the other parts.
SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")
_A, _B = ".lora_a", ".lora_b"
# ggml types of an adapter: F32, F16, BF16, and quantised types that every backend can multiply.
_MULTIPLIABLE = frozenset({0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30})


def has_gguf_magic(path: Path) -> bool:
    """Return True if `path` is a file that begins like a GGUF file; False if it cannot be read."""
    try:
        if not path.is_file():  # a pipe must never be opened, because that would block
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # ValueError means a NUL inside the name
        return False


def read_edges(path: Path, size: int) -> bytes:
    """Return the first and the last bytes of a file of that size, which identify it."""
    with path.open("rb") as file:
        first = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        return first + file.read(1 << 16)


def check_model_file(path: Path) -> GGUFHeader:
    """Check that `path` is a complete GGUF file of a model that can generate text, split or not; return its header."""
    header = check_complete(path)
    parts, architecture = header.metadata.get("split.count", 0), header.metadata.get("general.architecture")
    name = architecture if isinstance(architecture, str) else ""
    by_type = _read_wrong_files()["types"].get(str(header.metadata.get("general.type")))
    if reason := by_type or _read_wrong_files()["architectures"].get("bert" if "bert" in name else name):
        raise ModelError(f"{path} {reason.format(name)}")
    if isinstance(parts, int) and parts > 1:
        _check_parts(path, parts)
    elif header.tensors == 0:
        raise ModelError(f"{path} contains only a vocabulary and no weights; it cannot generate text")
    check_values(path, header)
    return header


def check_values(path: Path, header: GGUFHeader) -> None:
    """Raise ModelError for hyperparameters with which llama.cpp would crash or hang during computations."""
    for key, value in header.metadata.items():
        if isinstance(value, str | bool) or key.partition(".")[0] != header.metadata.get("general.architecture"):
            continue
        name = key.partition(".")[2]
        if name == "block_count" and not 1 <= value <= 512:  # LLAMA_MAX_LAYERS of llama.cpp's src/llama-hparams.h
            requirement = "but must be 1 to 512"
        elif name.endswith("epsilon") and not 0 <= value < math.inf:
            requirement = "but must be a number of at least 0"
        elif name.startswith("rope.dimension_count") and value % 2:
            requirement = "but must be even"
        else:
            continue
        raise ModelError(f"{path} is damaged: {key} is {value}, {requirement}; download it again")


def check_adapter_file(path: Path, model: Path) -> None:
    """Check that `path` is a complete LoRA adapter for the model in the file `model`; llama.cpp may crash otherwise."""
    header = check_complete(path, "adapter")
    base = [check_complete(part) for part in parts_of(model)]
    architecture = base[0].metadata.get("general.architecture")
    required = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": architecture}
    for key, wanted in required.items():
        if (value := header.metadata.get(key)) != wanted:
            raise ModelError(f"{path} is not a LoRA adapter for {model.name}: its {key} is {value!r}, not {wanted!r}")
    if not isinstance(header.metadata.get("adapter.lora.alpha"), float):
        raise ModelError(f"{path} is not a LoRA adapter: it has no adapter.lora.alpha")
    if unknown := [kind for kind, _ in header.places.values() if kind not in _MULTIPLIABLE]:
        raise ModelError(f"{path} has tensors of a type that llama.cpp cannot multiply with ({unknown[0]})")
    weights = {name: shape for part in base for name, shape in part.shapes.items()}
    shapes, changed = header.shapes, sorted({name[: -len(_A)] for name in header.shapes if name.endswith((_A, _B))})
    if not changed:
        raise ModelError(f"{path} is not a LoRA adapter: it changes no weights")
    for name in changed:
        if name not in weights:
            raise ModelError(f"{path} is not for {model.name}: it changes {name}, which the model does not have")
        if not (name + _A in shapes and name + _B in shapes):
            what = f"it contains only one of the two matrices for {name}"
            raise ModelError(f"{path} is damaged: {what}; download it again")
        weight, a, b = ((*shape, 1, 1, 1, 1)[:4] for shape in (weights[name], shapes[name + _A], shapes[name + _B]))
        if name == "token_embd.weight":  # in this case A has a row for each token
            fits = (a[1], b[1], a[0]) == (weight[1], weight[0], b[0])
            if "output.weight" not in weights:
                what = f"which is also the output matrix of {model.name}"
                raise ModelError(f"{path} changes {name}, {what}; llama.cpp cannot apply it")
        else:
            fits = (a[0], b[1], a[1]) == (weight[0], weight[1], b[0])
        if not (fits and a[2:] == b[2:] == weight[2:]):
            raise ModelError(f"{path} is not for {model.name}: it changes {name}, which has another shape in the model")


def check_complete(path: Path, what: str = "model") -> GGUFHeader:
    """Return the header of a complete GGUF file, with or without weights; `what` is the noun for it in messages."""
    try:
        if path.is_dir():
            if names := sorted(file.name for file in path.glob("*.gguf")):
                raise ModelError(f"{path} is a folder; pass one of its files: {join_names(names, 3)}")
            raise ModelError(f"{path} is a folder without .gguf files; pass the path of a .gguf file")
        if path.is_symlink() and not path.exists():
            target = path.readlink()
            raise ModelError(f"{path} is a link to {target}, which does not exist; download the {what} again")
        if not path.exists():
            raise ModelError(f"no such {what} file: {path}{_suggestion(path)}")
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file; pass a .gguf file")
        with path.open("rb") as file:
            start = file.read(512)
        if not start:
            raise ModelError(f"{path} is empty; download it again")
        if not start.startswith(MAGIC):
            raise ModelError(f"{path} is not a GGUF {what}: it {_describe_content(start)}")
        header = read_header(path)
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {get_reason(error)}") from error
    if size < (needed := header.required_bytes):
        raise ModelError(f"{path} is truncated: it has {size:,} of at least {needed:,} bytes; download it again")
    return header


@cache
def _read_wrong_files() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(Path(__file__).with_name("wrong_files.toml").read_text("utf-8"))


def _describe_content(start: bytes) -> str:
    """Describe a file that begins with `start`, as a phrase that follows "it"."""
    for signature, meaning in _read_wrong_files()["signatures"].items():
        if start.startswith(bytes.fromhex(signature)):
            return meaning
    # A safetensors file begins with the u64 length of a JSON object, followed by that object.
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        return "looks like a safetensors file; convert it to GGUF first"
    if not start.strip(b"\0"):
        return "begins with zeros (an incomplete download?); download it again"
    if start.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "is a web page (a failed download?); download the file itself"
    text = start.decode("utf-8", errors="replace").rstrip("\ufffd")  # the cut may split a character
    if all(character.isprintable() or character in "\t\r\n\f" for character in text):
        return "looks like a text file"
    return "is binary data of another kind"


def is_companion(header: GGUFHeader) -> bool:
    """Return True if a file accompanies a model: a vision part, an importance matrix, or a separate draft head."""
    kind, architecture = (header.metadata.get(f"general.{name}") for name in ("type", "architecture"))
    is_whole = header.metadata.get("split.count", 1) == 1
    is_head = is_whole and not any(name.startswith("blk.0.") for name in header.shapes)
    return kind in ("mmproj", "imatrix") or architecture in ("clip", "eagle3", "dflash", "gemma4-assistant") or is_head


def _check_parts(path: Path, parts: int) -> None:
    """Check the other parts of a split model, of which `path` should be the first."""
    name = SPLIT_NAME.match(path.name)
    if name is None or int(name["parts"]) != parts:
        raise ModelError(
            f"{path} is one of {parts} parts and was renamed; llama.cpp finds the others only when "
            f"all are named NAME-00001-of-{parts:05d}.gguf and so on"
        )
    files = parts_of(path)
    if int(name["part"]) != 1:
        raise ModelError(f"{path} is part {int(name['part'])} of {parts}; pass the first one, {files[0].name}")
    for file in files[1:]:
        if not file.exists():
            raise ModelError(f"{path} is part 1 of {parts}, and {file.name} is missing in the same folder")
        check_complete(file)


def parts_of(path: Path) -> list[Path]:
    """Return the files of a split model, given one of them; a file of a model that is not split is the only one."""
    name = SPLIT_NAME.match(path.name)
    if name is None:
        return [path]
    return [
        path.with_name(f"{name['stem']}-{part:05d}-of-{name['parts']}.gguf")
        for part in range(1, int(name["parts"]) + 1)
    ]


def read_headers(path: Path) -> list[GGUFHeader]:
    """Return the headers of all files of a model; empty for a model that the loader will reject."""
    parts = parts_of(path)
    return [read_header(part) for part in parts] if all(map(has_gguf_magic, parts)) else []


def join_names(names: Iterable[str], maximum: int) -> str:
    """Return the first `maximum` names and the number of the others, for a message."""
    names = list(names)
    more = f" and {len(names) - maximum} more" if len(names) > maximum else ""
    return ", ".join(names[:maximum]) + more


def _suggestion(path: Path) -> str:
    """Return a hint with similar files in the same folder, or with the syntax for a repository; "" without one."""
    names = {file.name.lower(): file.name for file in path.parent.glob("*.gguf") if file.exists()}
    file_name = path.name.lower()
    close = difflib.get_close_matches(file_name, names, n=3) or difflib.get_close_matches(f"{file_name}.gguf", names)
    if close:
        return f" (did you mean {' or '.join(names[name] for name in close)}?)"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists():
        return f" (for a Hugging Face repository write hf:{path})"
    return ""
