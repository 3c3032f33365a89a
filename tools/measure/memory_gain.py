"""Measure the modelled speed-up and the cost of a memory by its size, on texts that the memory does not contain.

    memory_gain.py --vocab V.gguf conversations FILE.jsonl...   every other conversation is replayed; the memory
                                                                contains the answers of a share of the others
    memory_gain.py --vocab V.gguf code FOLDER                   every tenth source file is completed from its middle;
                                                                the memory contains a share of all other files

`--share` (percent) can be repeated, and smaller shares are parts of larger ones. `--files FOLDER` adds rows for the
text files of a folder in memory, alone and together with all answers. `--drafter memory` drafts only from the memory. A
memory is created and opened as in `ngramspec chat` with saved answers: on disk, one answer after the other. Source code
is replayed as in `ngramspec complete`, as if the model wrote the text of the file.

A row shows the contents of the memory, its tokens, its size on disk in MiB and the time to open it. It also shows the
mean number of links and of blocks of 64 bytes per lookup, the microseconds of drafting per pass and the modelled
speed-ups.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from ngramspec.cost.fixed_curves import CURVES, find_curves
from ngramspec.cost.times import PassTimes
from ngramspec.drafting import DEFAULT, REMEMBERING, make_drafter
from ngramspec.drafting.token_index import ORDER, TokenIndex, slot
from ngramspec.instruments.replay.replay import Recording, Replay, ReplayCounts
from ngramspec.instruments.replay.transcripts import MAX_RESPONSE, TranscriptReader, Transcripts
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.memory.files import add_files, find_files, read_text
from ngramspec.memory.memory import Memory
from ngramspec.memory.store import Store

CONTEXT = 4096
"""Maximum number of prompt tokens from a source file, before the position of the completion."""

SHARES = (1.0, 10.0, 50.0, 100.0)
MAX_LOOKUP_TOKENS = 20_000
"""Maximum number of tokens in the replayed answers for counting lookups."""

MAX_LINKS, MAX_HITS = 24, 8
"""Maximum links that a lookup follows, and occurrences that it needs, in `ContextCounts.count_in_memory`."""


@dataclass(frozen=True, slots=True)
class Content:
    """Contents of a memory: saved answers and an added folder."""

    name: str
    answers: Sequence[Sequence[int]] = ()
    folder: Path | None = None


def read_conversations(vocabulary: Vocabulary, files: Sequence[Path]) -> tuple[list[Recording], list[Sequence[int]]]:
    """Return recordings to replay and token sequences to remember, in an order that mixes the kinds."""
    transcripts = Transcripts()
    for file in files:
        transcripts.read(str(file), file.read_bytes())
    recordings = [r for r in map(TranscriptReader(vocabulary).record, transcripts.usable) if r is not None]
    rest = sorted(recordings[1::2], key=lambda r: blake2b(f"{r.category}/{r.id}".encode()).digest())
    return recordings[::2], [recording.response for recording in rest]


def read_code(vocabulary: Vocabulary, folder: Path) -> tuple[list[Recording], list[Sequence[int]]]:
    """Return recordings to replay and token sequences to remember from a source tree."""
    recordings: list[Recording] = []
    rest: list[Sequence[int]] = []
    texts = [text for path in find_files(folder)[0] if path.suffix == ".py" and (text := read_text(path))]
    for number, text in enumerate(texts):
        tokens = vocabulary.tokenize(text, add_bos=False)
        middle = len(tokens) // 2
        if number % 10 or middle < 2:
            rest.append(tokens)
        else:
            before, after = tokens[max(0, middle - CONTEXT) : middle], tokens[middle : middle + MAX_RESPONSE]
            recordings.append(Recording("code", str(number), before, after))
    rest.sort(key=lambda tokens: blake2b(bytes(str(tokens), "ascii")).digest())
    return recordings, rest


@contextmanager
def open_memory(content: Content, vocabulary: Vocabulary) -> Iterator[tuple[Memory, float, float]]:
    """Yield a memory with these contents, opened from disk, its size there in MiB, and the seconds to open it."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), vocabulary.vocabulary_hash, vocabulary.path.name)
        if content.folder is not None:
            add_files(store, vocabulary, [content.folder])
        for answer in content.answers:
            store.append(answer)
        began = time.perf_counter()
        memory = Memory(store.read())
        yield memory, store.size() / 2**20, time.perf_counter() - began


def replay(
    recordings: Sequence[Recording], memory: Memory, curve: PassTimes, drafter: str
) -> Mapping[str, ReplayCounts]:
    """Replay the recordings with a memory and return the counters by category."""
    replayer = Replay(make_drafter(drafter, memory=memory), curve=curve)
    tallies: dict[str, ReplayCounts] = {}
    for recording in recordings:
        tallies.setdefault(recording.category, ReplayCounts()).merge(replayer.run(recording))
    return tallies


def measure_lookups(memory: Memory, recordings: Sequence[Recording]) -> tuple[float, float]:
    """Return the mean numbers of followed links and touched blocks of 64 bytes per lookup in the recordings."""
    text = [*islice((token for recording in recordings[::7] for token in recording.response), MAX_LOOKUP_TOKENS)]
    links = blocks = 0
    for end in range(ORDER, len(text)):
        for index in memory.indexes:
            n_links, n_blocks = count_lookup_steps(index, text[end - ORDER : end]) if index.size else (0, 0)
            links, blocks = links + n_links, blocks + n_blocks
    return links / (len(text) - ORDER), blocks / (len(text) - ORDER)


def count_lookup_steps(index: TokenIndex, context: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of followed links and touched blocks of a lookup in one index."""
    head = slot(*context, len(index.heads) - 1)
    touched_blocks = {("heads", head // 16)}
    place, links, n_hits = index.heads[head], 0, 0
    while place >= ORDER and n_hits < MAX_HITS and links < MAX_LINKS:
        links += 1
        n_hits += list(index.tokens[place - ORDER : place]) == context
        touched_blocks |= {("tokens", (place - ORDER) // 16), ("tokens", place // 16), ("links", place // 16)}
        place = index.links[place]
    return links, len(touched_blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--curve", action="append", choices=list(CURVES))
    parser.add_argument("--share", action="append", type=float, metavar="PERCENT")
    parser.add_argument("--files", type=Path, metavar="FOLDER")
    parser.add_argument("--drafter", choices=sorted(REMEMBERING), default=DEFAULT)
    parser.add_argument("kind", choices=("conversations", "code"))
    parser.add_argument("paths", type=Path, nargs="+")
    options = parser.parse_args()
    vocabulary = Vocabulary(options.vocab)
    if options.kind == "code":
        recordings, texts = read_code(vocabulary, options.paths[0])
    else:
        recordings, texts = read_conversations(vocabulary, options.paths)
    if not recordings:
        parser.error(f"nothing to replay in {options.paths[0]}")
    contents = [Content("nothing")]
    for share in options.share or SHARES:
        contents.append(Content(f"{share:g} %", texts[: max(1, round(len(texts) * share / 100))]))
    if options.files:
        contents += [Content("files", folder=options.files), Content("all and files", texts, options.files)]
    curves = {name: find_curves(name)[name] for name in options.curve or ["cpu-1.5b-q4_0", "cuda-34b-q8_0"]}
    print(f"{len(recordings)} replayed, {len(texts)} to remember")
    for content in contents:
        with open_memory(content, vocabulary) as (memory, size, seconds):
            links, blocks = measure_lookups(memory, recordings)
            stored = f"{memory.n_stored_tokens:,} tokens, {size:.1f} MiB, opened in {seconds * 1e3:.1f} ms"
            print(f"{content.name}: {stored}; a look-up {links:.1f} links, {blocks:.1f} blocks", flush=True)
            for name, curve in curves.items():
                show(name, curve, replay(recordings, memory, curve, options.drafter))


def show(name: str, curve: PassTimes, tallies: Mapping[str, ReplayCounts]) -> None:
    """Print the figures of one curve."""
    gains = {category: tally.speedup(curve) for category, tally in tallies.items()}
    passes = sum(tally.stats.passes for tally in tallies.values())
    work = 1e6 * sum(tally.work_seconds for tally in tallies.values()) / passes
    print(f"  {name:20} macro {sum(gains.values()) / len(gains):.3f}, {work:.1f} us a pass; ", end="")
    print(", ".join(f"{category} {gain:.3f}" for category, gain in gains.items()), flush=True)


if __name__ == "__main__":
    main()
