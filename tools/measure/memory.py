"""Measure the cost of a memory of the user's files.

    python tools/measure/memory.py --model vocab.gguf /usr/lib/python3

The figures are time and peak memory for adding the files, bytes per token, time to open the memory, and microseconds
that its lookups add to a draft. The drafts are for a text in the memory, for which lookups find most. Opening is timed
in separate processes with the file in the page cache and includes all checks. For measurements at a given size,
`--tokens` fills the memory with a random walk over the added text.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from ngramspec.cpu.cores import usable_cores
from ngramspec.drafting import make_drafter, token_index
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.memory import Memory, Store
from ngramspec.memory.indexing import add_files
from ngramspec.memory.store import Document, Ints

RUNS = 9
TEXT, PROMPT, LONGEST = 20_000, 1_000, 15
SPAN = 200
"""Number of tokens in a piece of the random walk."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("-t", type=int, default=usable_cores())
    options = parser.parse_args()
    vocabulary = Vocabulary(options.model)
    began = time.perf_counter()
    name = vocabulary.vocabulary_hash
    print(f"index: {token_index.__file__}")
    print(f"hash of a vocabulary of {vocabulary.n_vocab}: {(time.perf_counter() - began) * 1e3:.0f} ms")
    before = read_peak_memory()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), name, options.model.name)
        began = time.perf_counter()
        changes = add_files(store, vocabulary, options.paths, threads=options.t)
        seconds = time.perf_counter() - began
        rate = changes.tokens / seconds / 1e6
        print(f"added {changes.new} files, {changes.tokens:,} tokens in {seconds:.1f} s: {rate:.2f} M tokens/s")
        print(f"peak memory {read_peak_memory():.0f} MiB, {before:.0f} before; {options.t} threads")
        began = time.perf_counter()
        if fill(store, options.tokens - changes.tokens):
            print(
                f"rewritten with more in {time.perf_counter() - began:.1f} s; peak memory {read_peak_memory():.0f} MiB"
            )
        context = multiprocessing.get_context("spawn")
        with context.Pool(1, maxtasksperchild=1) as pool:
            times = [pool.apply(time_opening, (folder, name)) for _ in range(RUNS)]
        size = times[0][1]
        print(f"{size:,} tokens, {store.size() / size:.2f} bytes each")
        print(
            f"open: median {median(t for t, _ in times) * 1e3:.1f} ms, most {max(times)[0] * 1e3:.1f} ms, {RUNS} runs"
        )
        memory = Memory(store.read())
        text = np.array(memory.indexes[0].tokens[:TEXT])
        drafts = [(time_passes(text, None), time_passes(text, memory)) for _ in range(3)]
        without_memory, with_memory = (median(d[i] for d in drafts) for i in (0, 1))
        print(f"a pass of drafting: {with_memory * 1e6:.1f} us with it, {without_memory * 1e6:.1f} without")
        began = time.perf_counter()
        store.append(list(range(300)))
        print(f"remember an answer of 300 tokens: {(time.perf_counter() - began) * 1e3:.1f} ms")


def fill(store: Store, missing: int) -> bool:
    """Add `missing` tokens that are similar to the present ones and return True if any are missing."""
    if missing <= 0:
        return False
    rng = np.random.default_rng(0)

    def more(texts: list[Document]) -> list[Document]:
        tokens_so_far = np.concatenate([t.tokens for t in texts])
        starts = rng.integers(0, len(tokens_so_far) - SPAN, missing // SPAN)
        tokens = np.concatenate([tokens_so_far[s : s + SPAN] for s in starts])
        return [*texts, Document("file", "/random walk", tokens)]

    store.update(more)
    return True


def time_opening(folder: str, name: bytes) -> tuple[float, int]:
    """Return the time in seconds to open the store in this process, and its number of tokens."""
    began = time.perf_counter()
    memory = Memory(Store(Path(folder), name).read())
    return time.perf_counter() - began, memory.indexes[0].size


def time_passes(text: Ints, memory: Memory | None) -> float:
    """Return the seconds per pass for proposing and learning if the target writes `text`."""
    tokens = text[text >= 0].tolist()
    drafter = make_drafter("mixture", memory=memory)
    drafter.begin(tokens[:PROMPT])
    at, count = PROMPT, 0
    began = time.perf_counter()
    while at < len(tokens) - LONGEST:
        draft = drafter.propose(LONGEST)
        hits = next((i for i, token in enumerate(draft.tokens) if token != tokens[at + i]), len(draft))
        drafter.accept(tokens[at : at + hits + 1])
        at, count = at + hits + 1, count + 1
    return (time.perf_counter() - began) / count


def read_peak_memory() -> float:
    """Return the peak memory in MiB; the kernel counts in KiB, on macOS in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / 2**20 if sys.platform == "darwin" else size / 2**10


if __name__ == "__main__":
    main()
