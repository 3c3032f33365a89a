"""What memory adds, on text that it does not hold itself: the modelled speedup without and with it.

    memory_gain.py --vocab V.gguf conversations FILE.jsonl...   every other conversation is replayed; with memory, the
                                                                answers of those between are in it
    memory_gain.py --vocab V.gguf code FOLDER                   every tenth source file is completed from its middle;
                                                                with memory, all the other files are in it

Source code is replayed as `ngramspec complete` would meet it, as if the model wrote what stands in the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ngramspec.cost.given import CURVES, GivenCurve
from ngramspec.drafting import make_drafter
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.memory import Memory
from ngramspec.memory.files import find_files, read_text
from ngramspec.replay.recording import Recording
from ngramspec.replay.replay import Replay
from ngramspec.replay.tally import Tally
from ngramspec.replay.transcripts import MAX_RESPONSE, TranscriptReader, Transcripts

CONTEXT = 4096
"""Tokens of a source file before the place where it is completed."""


def conversations(vocabulary: Vocabulary, files: Sequence[Path]) -> tuple[list[Recording], list[Sequence[int]]]:
    """Recordings to replay, and token sequences to remember."""
    transcripts = Transcripts()
    for file in files:
        transcripts.read(str(file), file.read_bytes())
    found = [r for r in map(TranscriptReader(vocabulary).record, transcripts.usable) if r is not None]
    return found[::2], [recording.response for recording in found[1::2]]


def code(vocabulary: Vocabulary, folder: Path) -> tuple[list[Recording], list[Sequence[int]]]:
    """As `conversations`, of a source tree."""
    replayed: list[Recording] = []
    remembered: list[Sequence[int]] = []
    texts = [text for file in find_files(folder).files if file.path.suffix == ".py" and (text := read_text(file))]
    for number, text in enumerate(texts):
        tokens = vocabulary.tokenize(text, add_bos=False)
        middle = len(tokens) // 2
        if number % 10 or middle < 2:
            remembered.append(tokens)
        else:
            before, after = tokens[max(0, middle - CONTEXT) : middle], tokens[middle : middle + MAX_RESPONSE]
            replayed.append(Recording("code", str(number), before, after))
    return replayed, remembered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--curve", action="append", choices=list(CURVES))
    parser.add_argument("kind", choices=("conversations", "code"))
    parser.add_argument("paths", type=Path, nargs="+")
    options = parser.parse_args()
    vocabulary = Vocabulary(options.vocab)
    if options.kind == "code":
        recordings, texts = code(vocabulary, options.paths[0])
    else:
        recordings, texts = conversations(vocabulary, options.paths)
    if not recordings:
        parser.error(f"nothing to replay in {options.paths[0]}")
    print(f"{len(recordings)} replayed, {sum(map(len, texts))} tokens in memory")
    for name in options.curve or ["cpu-1.5b-q4_0", "cuda-34b-q8_0"]:
        curve = GivenCurve(CURVES[name][0])
        gains = []
        for with_memory in (False, True):
            memory = Memory()
            for text in texts if with_memory else []:
                memory.hear(text)
            replay = Replay(make_drafter("mixture", memory=memory), curve=curve)
            tallies: dict[str, Tally] = {}
            for recording in recordings:
                tallies.setdefault(recording.category, Tally()).merge(replay.run(recording))
            gains.append({category: tally.speedup(curve) for category, tally in tallies.items()})
        without, with_ = gains
        print(
            f"{name}: macro {sum(without.values()) / len(without):.3f} -> {sum(with_.values()) / len(with_):.3f}; ",
            end="",
        )
        print(", ".join(f"{category} {without[category]:.3f} -> {with_[category]:.3f}" for category in without))


if __name__ == "__main__":
    main()
