"""Train the initial state of the default drafter on recorded conversations: `ngramspec/drafting/mixture/start.npz`.

    train_start.py --vocab V.gguf FOLDER        every *.jsonl in FOLDER; `ngramspec replay --help` describes the format

The script starts without any state and replays the conversations in an order that mixes the kinds. Each one uses the
next of several cost curves, and every other one has a memory of the previous answers. State about tokens is dropped
after every conversation. The result is the mean of the states after each conversation of the second half. All
vocabularies start from it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.fixed_curves import find_curves
from ngramspec.drafting.mixture import weight_files
from ngramspec.drafting.mixture.drafter import MixtureDrafter, TextIndexSet
from ngramspec.instruments.replay.replay import Recording, Replay
from ngramspec.instruments.replay.transcripts import TranscriptReader, Transcripts
from ngramspec.llama.vocabulary import Vocabulary

CURVE_NAMES = ("flat", "apple-silicon-akunu", "cuda-34b-q8_0", "cpu-1.5b-q4_0", "moe-mlx")
"""Names of the cost curves for drafting, whose draft lengths differ and so cover different positions for training."""

MAX_COUNT = 100.0
"""Maximum number of outcomes recorded in the state; it is less than the true number, so the state adapts to users."""


def read_recordings(vocabulary: Vocabulary, folder: Path) -> list[Recording]:
    """Return all conversations of a folder as tokens, in an order that depends only on their ids."""
    transcripts = Transcripts()
    for file in sorted(folder.glob("*.jsonl")):
        transcripts.read(str(file), file.read_bytes())
    result = [r for r in map(TranscriptReader(vocabulary).record, transcripts.usable) if r is not None]
    return sorted(result, key=lambda r: blake2b(f"{r.category}/{r.id}".encode()).digest())


def train(conversations: Sequence[Recording]) -> Mapping[str, NDArray[np.float64]]:
    """Return the state learned from the conversations in the format that `weight_files.save` writes."""
    weight_files.START = Path(os.devnull)
    curves = [find_curves(name)[name] for name in CURVE_NAMES]
    weights = _copy(MixtureDrafter().guesser.global_weights)
    half = len(conversations) // 2
    total = {name: np.zeros_like(array) for name, array in weights.items()}
    memory = TextIndexSet()
    for number, conversation in enumerate(conversations):
        # The shared state must suit a drafter without state about tokens, like the first one of a user.
        drafter = MixtureDrafter(memory if number % 2 else None)
        weight_files.load_into(drafter.guesser.global_weights, weights)
        Replay(drafter, curve=curves[number % len(curves)]).run(conversation)
        memory.add_text(conversation.response)
        weights = _copy(drafter.guesser.global_weights)
        if number >= half:
            for name, array in weights.items():
                total[name] += array
    mean = {name: array / (len(conversations) - half) for name, array in total.items()}
    mean["seen"] = np.minimum(mean["seen"], MAX_COUNT)
    return mean


def _copy(arrays: Mapping[str, memoryview]) -> dict[str, NDArray[np.float64]]:
    return {name: np.array(array) for name, array in arrays.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    path = weight_files.START
    conversations = read_recordings(Vocabulary(options.vocab), options.folder)
    if not conversations:
        parser.error(f"no conversations in {options.folder}")
    weight_files.save(path, train(conversations))
    path.chmod(0o644)  # the file belongs to the package and must be readable for all users
    print(f"{path}: {path.stat().st_size} bytes, from {len(conversations)} conversations")


if __name__ == "__main__":
    main()
