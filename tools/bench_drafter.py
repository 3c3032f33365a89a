"""Measure the default drafter in microseconds per prompt token and per pass, and in bytes per token of context.

    python tools/bench_drafter.py [--ids FILE.npy] [--sizes 1000 8000 ...] [--plain]

A pass consists of a proposal, which depends on a cost curve, and of learning from the result. The stream itself is the
text that the target would write. One stream contains random tokens, for which every draft is short and wrong. Another
is the source code of the standard library, and `--ids` adds an array of token ids. Times are CPU times of the process,
which other work on the machine disturbs least. `--plain` measures the same modules as plain Python, which is used where
they cannot be compiled.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np

import ngramspec
from ngramspec.cost.fixed_curves import find_curves
from ngramspec.cost.times import PassTimes
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import DraftedText, Drafts
from ngramspec.drafting.mixture import guesser
from ngramspec.drafting.mixture.drafter import LONGEST, MixtureDrafter
from ngramspec.instruments.replay.replay import RecordedTarget
from ngramspec.policies.cost import CostPolicy
from ngramspec.steps import Step

N_MEASURED = 4000
"""Number of tokens after the context that the passes cover."""
SIZES = tuple(range(1, LONGEST + 2))
VOCABULARY = 151_936  # vocabulary size of Qwen2.5 and Qwen3
HEAD = """\
               |  us/prompt token  | us/pass, cpu-1.5b-q4_0   | us/pass, flat            | bytes/token   | MiB
stream context | first begin again |      mean    99%    most |      mean    99%    most |   kept   peak | empty"""


def random_stream(count: int) -> list[int]:
    """Return random tokens, which hardly ever repeat."""
    rng = random.Random(0)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def code_stream(count: int) -> list[int]:
    """Return the source code of the standard library as words, runs of spaces and single characters."""
    ids: dict[str, int] = {}

    def tokens() -> Iterator[int]:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for piece in re.findall(r"\w+|[ \t]+|\n|.", path.read_text("utf-8", errors="replace")):
                yield ids.setdefault(piece, len(ids))

    return list(itertools.islice(itertools.cycle(tokens()), count))


def time_passes(drafter: MixtureDrafter, truth: list[int], curve: PassTimes) -> list[float]:
    """Return the microseconds of each pass over `truth`; the drafter must have read the prompt."""
    text, loop = DraftedText(Drafts(drafter), RecordedTarget(curve)), DecodingLoop(CostPolicy())
    loop.prepare(curve, SIZES)
    text.tokens_left = 2
    loop.plan(text, 0)  # build the tables of the curve before the measurement
    drafter.accept(())
    # The policy must ask for drafts even if they do not pay.
    loop.policy.limit = lambda: LONGEST  # type: ignore[method-assign]
    microseconds, position, text.tokens_left = [], 0, LONGEST + 1
    while position < len(truth) - LONGEST:
        began = process_time()
        plan = loop.plan(text, 0)
        draft = plan.draft.tokens
        right = 0
        while right < len(draft) and draft[right] == truth[position + right]:
            right += 1
        tokens, seconds = tuple(truth[position : position + right + 1]), curve.ratio(plan.size)
        current = Pass((text,), (plan,), plan.size, 0, text.drafts.proposal is not None, seconds=seconds)
        loop.finish(current, Step(tokens, drafted=draft, accepted=right))
        microseconds.append((process_time() - began) * 1e6)
        position += len(tokens)
    return microseconds


def format_figures(stream: list[int], size: int, repeat: int) -> str:
    """Return the figures for a context of `size` tokens in one line."""
    # The same text follows every context.
    end = len(stream) - N_MEASURED
    prompt, truth = stream[end - size : end], stream[end:]
    first, later = [], []
    for _ in range(repeat):
        drafter = MixtureDrafter()
        for times in (first, later):
            began = process_time()
            drafter.begin(prompt)
            times.append((process_time() - began) * 1e6 / size)
    figures = []
    for name in ("cpu-1.5b-q4_0", "flat"):
        microseconds: list[float] = []
        for _ in range(repeat):
            drafter = MixtureDrafter()
            drafter.begin(prompt)
            microseconds += time_passes(drafter, truth, find_curves(name)[name])
        mean, percentile = sum(microseconds) / len(microseconds), sorted(microseconds)[len(microseconds) * 99 // 100]
        figures.append(f"{mean:9.1f} {percentile:6.0f} {max(microseconds):7.0f}")
    tracemalloc.start()
    drafter = MixtureDrafter()
    empty = tracemalloc.get_traced_memory()[0]
    drafter.begin(prompt)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    history = drafter.guesser.history
    n_bytes = sum(memoryview(ints).nbytes for ints in (history.tokens, history.links, history.heads))
    return (
        f"{size:7,} | {median(first):10.2f} {median(later):6.2f} | {figures[0]} | {figures[1]} |"
        f" {n_bytes / size:6.0f} {(peak - empty) / size:6.0f} | {empty / 2**20:5.1f}"
    )


def run_without_extensions() -> int:
    """Run this script again with a copy of the package without its compiled modules."""
    with tempfile.TemporaryDirectory() as folder:
        ignore = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "*.gguf")
        shutil.copytree(Path(ngramspec.__file__).parent, Path(folder) / "ngramspec", ignore=ignore)
        arguments = [argument for argument in sys.argv[1:] if argument != "--plain"]
        return subprocess.run(
            [sys.executable, __file__, *arguments], env={**os.environ, "PYTHONPATH": folder}, check=False
        ).returncode


def main() -> None:
    """Print one line per stream and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=Path, help="a numpy file of token ids")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 8_000, 32_000, 128_000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if options.plain:
        sys.exit(run_without_extensions())
    count = max(options.sizes) + N_MEASURED
    streams = {"random": random_stream(count), "code": code_stream(count)}
    if options.ids is not None:
        streams["ids"] = np.load(options.ids).tolist()[:count]
        if len(streams["ids"]) < count:
            sys.exit(f"{options.ids} has {len(streams['ids'])} tokens, but {count} are needed")
    print(guesser.__file__)
    print(HEAD)
    for name, stream in streams.items():
        for size in options.sizes:
            print(f"{name:6} {format_figures(stream, size, options.repeat)}", flush=True)


if __name__ == "__main__":
    main()
