"""Measure `NGramPredictor`: microseconds of an `update` plus a `predict(4)`, early and late.

    python tools/bench_predictor.py [--tokens 200000]

Each case runs in a process of its own, so that its memory is its own. Times are CPU times of that
process, which other work on the machine disturbs least. Needs the module `resource`, so no Windows.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import re
import resource
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import process_time

from ngramspec.drafting.predictor import NGramPredictor

VOCABULARY = 151_936  # Qwen2.5's and Qwen3's
DRAFT = 4


def random_stream(count: int) -> list[int]:
    """Tokens without any repetition to speak of: the worst case for the tables' size."""
    rng = random.Random(0)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def code_stream(count: int) -> list[int]:
    """The standard library's own source, cut into words, runs of spaces and single signs."""
    ids: dict[str, int] = {}

    def tokens() -> Iterator[int]:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for piece in re.findall(r"\w+|[ \t]+|\n|.", path.read_text("utf-8", errors="replace")):
                yield ids.setdefault(piece, len(ids))

    return list(itertools.islice(itertools.cycle(tokens()), count))


def loop_stream(count: int) -> list[int]:
    """A model stuck in a loop of 50 tokens."""
    return [i % 50 for i in range(count)]


def table_stream(count: int) -> list[int]:
    """Random numbers between separators, as in CSV: a context with very many continuations."""
    rng = random.Random(0)
    return [0 if i % 2 else rng.randrange(1, 1000) for i in range(count)]


STREAMS = {"random": random_stream, "code": code_stream, "loop": loop_stream, "table": table_stream}


@dataclass(frozen=True)
class Result:
    """What one case cost.

    Attributes:
        first, last, mean: microseconds per update + predict; first and last tenth, whole stream.
        drafted: mean tokens per draft.
        prefill: microseconds per token of `update_batch`, over 20,000 tokens.
        tables: bytes that the process's peak memory grew by.
        peak: bytes of the process's peak memory, the stream included.
    """

    first: float
    last: float
    mean: float
    drafted: float
    prefill: float
    tables: int
    peak: int


def peak_memory() -> int:
    """Most bytes of memory that this process has held at once."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(stream: str, count: int) -> Result:
    """Run one case in this process."""
    tokens = STREAMS[stream](count)
    before = peak_memory()
    predictor = NGramPredictor()
    update, predict = predictor.update, predictor.predict
    tenth = count // 10
    marks = [process_time()]
    drafted = 0
    for begin in range(0, tenth * 10, tenth):
        for token in tokens[begin : begin + tenth]:
            update(token)
            drafted += len(predict(DRAFT))
        marks.append(process_time())
    peak = peak_memory()

    prompt = tokens[:20_000]
    predictor.reset()
    start = process_time()
    predictor.update_batch(prompt)
    prefill = process_time() - start
    microseconds = 1e6 / tenth
    return Result(
        first=(marks[1] - marks[0]) * microseconds,
        last=(marks[-1] - marks[-2]) * microseconds,
        mean=(marks[-1] - marks[0]) / 10 * microseconds,
        drafted=drafted / (tenth * 10),
        prefill=prefill / len(prompt) * 1e6,
        tables=peak - before,
        peak=peak,
    )


def main() -> None:
    """Print one line per stream."""
    parser = argparse.ArgumentParser(description="Measure NGramPredictor.")
    parser.add_argument("--tokens", type=int, default=200_000, help="length of each stream")
    count = parser.parse_args().tokens
    print(f"{count:,} tokens; microseconds per update + predict({DRAFT})")
    print("stream | first10% last10%   mean | drafted batch/token | tables MiB  peak MiB")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for stream in STREAMS:
            r = pool.submit(measure, stream, count).result()
            print(
                f"{stream:6} | {r.first:8.2f} {r.last:7.2f} {r.mean:6.2f} "
                f"| {r.drafted:7.2f} {r.prefill:11.2f} "
                f"| {r.tables / 2**20:10.1f} {r.peak / 2**20:9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
