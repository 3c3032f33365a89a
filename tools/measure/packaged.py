"""Options and packaged prompts of the scripts that compare ngramspec with `llama_cpp.Llama`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ngramspec.instruments.prompts import Prompt, load_prompts


def parser(about: str | None, limit: int) -> argparse.ArgumentParser:
    """Return a parser with the shared options; `limit` is the default number of prompts per category."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("model", type=Path)
    made.add_argument("-n", type=int, default=128)
    made.add_argument("-c", type=int, default=2048)
    made.add_argument("-t", type=int, default=2)
    made.add_argument("--limit", type=int, default=limit, help="prompts per category")
    return made


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as arguments of `Llama`."""
    return {"n_ctx": options.c, "n_threads": options.t, "n_threads_batch": options.t, "verbose": False}


def chosen(options: argparse.Namespace, tokens: Callable[[Prompt], list[int]]) -> Iterator[tuple[Prompt, list[int]]]:
    """Yield the prompts that fit in the context, up to the limit per category, with their tokens from `tokens`."""
    seen = Counter[str]()
    for prompt in load_prompts(None):
        ids = tokens(prompt)
        if seen[prompt.category] < options.limit and len(ids) + options.n + 16 <= options.c:
            seen[prompt.category] += 1
            yield prompt, ids
