"""Options and packaged prompts of the scripts that compare ngramspec with `llama_cpp.Llama`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ngramspec.instruments.prompts import Prompt, load_prompts


def make_parser(about: str | None, limit: int) -> argparse.ArgumentParser:
    """Return a parser with the shared options; `limit` is the default number of prompts per category."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("model", type=Path)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", type=int, default=2)
    parser.add_argument("--limit", type=int, default=limit, help="prompts per category")
    return parser


def get_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as arguments of `Llama`."""
    return {"n_ctx": options.c, "n_threads": options.t, "n_threads_batch": options.t, "verbose": False}


def select_prompts(
    options: argparse.Namespace, tokens: Callable[[Prompt], list[int]]
) -> Iterator[tuple[Prompt, list[int]]]:
    """Yield the prompts that fit in the context, up to the limit per category, with their tokens from `tokens`."""
    counts = Counter[str]()
    for prompt in load_prompts(None):
        ids = tokens(prompt)
        if counts[prompt.category] < options.limit and len(ids) + options.n + 16 <= options.c:
            counts[prompt.category] += 1
            yield prompt, ids
