"""Corpus and tokenizer of the demo model: conversion of Python files and chat turns into token arrays.

The script writes these files into --out: tok.json, code.npy and chat.npy (uint16 token streams,
documents separated by <|endoftext|>), heldout_code.npy, heldout_chat.npy and corpus.json (sizes in
files, bytes, tokens). Whole packages are held out, not single files, because files of one package
share idioms. The weights from which training may continue were trained on the standard library and
the packages marked below.
"""

# mypy: disable-error-code="import-not-found,misc"

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from chat import chat_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
]
SEED = 1

# Folder in site-packages: licence (SPDX). The standard library (PSF-2.0) comes in addition.
TRAIN_PACKAGES = {
    # These packages were also in the corpus of the weights from which training continued.
    "numpy": "BSD-3-Clause",
    "rich": "MIT",
    "typer": "MIT",
    "jinja2": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "click": "BSD-3-Clause",
    "pip": "MIT",
    # These packages are new in this corpus.
    "_pytest": "MIT",
    "aiohttp": "Apache-2.0",
    "black": "MIT",
    "django": "BSD-3-Clause",
    "fastapi": "MIT",
    "mypy": "MIT",
    "pandas": "BSD-3-Clause",
    "prompt_toolkit": "BSD-3-Clause",
    "pydantic": "MIT",
    "pygments": "BSD-2-Clause",
    "requests": "Apache-2.0",
    "scipy": "BSD-3-Clause",
    "setuptools": "MIT",
    "sklearn": "BSD-3-Clause",
    "sqlalchemy": "MIT",
    "tornado": "Apache-2.0",
    "urllib3": "MIT",
}
HELD_OUT_PACKAGES = {
    "attr": "MIT",
    "flask": "BSD-3-Clause",
    "httpx": "BSD-3-Clause",
    "starlette": "BSD-3-Clause",
    "werkzeug": "BSD-3-Clause",
}
# Copies of packages under copyleft licences that pip and setuptools carry.
COPYLEFT = frozenset({"chardet", "certifi", "autocommand"})
PACKAGE_CAP = 7_000_000  # maximum number of characters per package, so that a few large packages do not dominate


def read_python_files(root: Path, hashes: set[bytes], skip: frozenset[str]) -> list[str]:
    """Return the texts of the usable Python files below `root` in the order of their paths.

    The function omits duplicates (by hash, over all calls that share `hashes`), files under 400 or over
    300,000 characters, and generated files (a line over 1,000 characters). It also omits files that
    contain a special token, and files with a folder in `skip` on their path.
    """
    texts = []
    for path in sorted(root.rglob("*.py")):
        if skip & set(path.parts):
            continue
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        usable = (
            400 < len(text) < 300_000
            and digest not in hashes
            and max(map(len, text.splitlines())) <= 1000
            and not any(special in text for special in SPECIAL)
        )
        if usable:
            hashes.add(digest)
            texts.append(text)
    return texts


def select_texts(texts: list[str], limit: int, rng: random.Random) -> list[str]:
    """Return a random selection of `texts` with at most `limit` characters in total."""
    selection, size = [], 0
    for text in rng.sample(texts, len(texts)):
        if size + len(text) <= limit:
            selection.append(text)
            size += len(text)
    return selection


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train byte-level BPE with GPT-2's splitting pattern, which llama.cpp calls pre = "gpt-2"."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
    )
    sample = random.Random(SEED).sample(texts, min(2500, len(texts)))
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """Return the documents as one token stream, each one after <|endoftext|>, uint16, shape (n,)."""

    def batches(items: list[str]) -> Iterator[list[str]]:
        for start in range(0, len(items), 256):
            yield items[start : start + 256]

    ids: list[int] = []
    for batch in batches(list(texts)):
        for encoding in tokenizer.encode_batch(batch):
            ids.append(0)
            ids += encoding.ids
    return np.array(ids, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="reuse this tok.json instead of training")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    paths = sysconfig.get_paths()
    site = Path(paths["purelib"])
    rng = random.Random(SEED)

    hashes: set[bytes] = set()
    held_out = [text for name in HELD_OUT_PACKAGES for text in read_python_files(site / name, hashes, COPYLEFT)]
    library = read_python_files(Path(paths["stdlib"]), hashes, frozenset({"site-packages", "idlelib"}))
    packages = [
        text
        for name in TRAIN_PACKAGES
        for text in select_texts(read_python_files(site / name, hashes, COPYLEFT), PACKAGE_CAP, rng)
    ]
    code = library + packages
    rng.shuffle(code)

    if arguments.tokenizer:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    else:
        tokenizer = train_tokenizer(code)
    tokenizer.save(str(out / "tok.json"))

    documents = {
        "code": code,
        "heldout_code": held_out,
        "chat": chat_documents(code, random.Random(SEED + 1), rounds=2, talk=True),
        "heldout_chat": chat_documents(held_out, random.Random(SEED + 2), rounds=1, talk=False),
    }
    sizes = {}
    for name, texts in documents.items():
        tokens = encode(tokenizer, texts)
        np.save(out / f"{name}.npy", tokens)
        sizes[name] = {
            "documents": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": len(tokens),
        }
        print(name, sizes[name], flush=True)
    (out / "corpus.json").write_text(json.dumps(sizes, indent=1) + "\n")


if __name__ == "__main__":
    main()
