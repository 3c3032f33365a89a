"""What a predicted output brings: `python tools/measure/prediction.py TRANSCRIPTS.jsonl... --vocab FILE.gguf`

Takes recorded answers of which at least LIKE of the lines stand in one earlier message, as where a file is changed, and
replays them three times: with that message in the prompt, without it, and without it but with its text as the
prediction. Prints the modelled gain of each on a few cost curves: the geometric mean over answers, the lowest, and how
many answers there were. What was learnt from one answer is forgotten before the next.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from ngramspec.cost.given import find_curves
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.instruments.replay.replay import Recording, Replay
from ngramspec.llama.vocabulary import Vocabulary

CURVES = ("apple-silicon-akunu", "cuda-34b-q8_0", "cpu-1.5b-q4_0")
LIKE, LEAST = 0.3, 8


class Predicting(MixtureDrafter):
    """Has the same prediction for every text: a replay's loop knows of none.

    Args:
        prediction: token ids.
    """

    def __init__(self, prediction: list[int]) -> None:
        super().__init__()
        self._prediction = prediction

    def begin(self, prompt: Sequence[int]) -> None:
        self.prediction = self._prediction
        super().begin(prompt)


def alike(old: str, new: str) -> float:
    """The share of the lines of `new`, blank ones and indents aside, that `old` has too."""
    known = {line.strip() for line in old.splitlines()}
    lines = [line.strip() for line in new.splitlines() if line.strip()]
    return sum(line in known for line in lines) / max(LEAST, len(lines))


def edits(path: Path) -> list[tuple[list[str], int, str]]:
    """Of each conversation (messages, number of the one with the file, the first answer that changes it)."""
    found = []
    for line in path.read_text("utf-8").splitlines():
        before: list[str] = []
        for message in json.loads(line)["messages"]:
            text = message["content"] if isinstance(message["content"], str) else ""
            if message["role"] == "assistant" and before:
                best = max(range(len(before)), key=lambda number: alike(before[number], text))
                if alike(before[best], text) >= LIKE:
                    found.append((before, best, text))
                    break
            before.append(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--vocab", required=True, type=Path)
    given = parser.parse_args()
    found = [edit for file in given.files for edit in edits(file)]
    with Vocabulary(given.vocab) as vocabulary:
        for name in CURVES:
            curve = find_curves(name)[name]
            gains: dict[str, list[float]] = {"in the prompt": [], "nowhere": [], "as prediction": []}
            for messages, number, answer in found:
                response = vocabulary.tokenize(answer, add_bos=False)
                whole = vocabulary.tokenize("\n".join(messages))
                without = vocabulary.tokenize("\n".join([*messages[:number], *messages[number + 1 :]]))
                predicted = vocabulary.tokenize(messages[number], add_bos=False)
                for way, tokens, prediction in zip(gains, (whole, without, without), ([], [], predicted), strict=True):
                    recording = Recording("edit", "", tokens, response)
                    gains[way].append(Replay(Predicting(prediction), curve=curve).run(recording).speedup(curve))
            for way, values in gains.items():
                print(
                    f"{name:22} {way:14} {geometric_mean(values):.3f}  lowest {min(values):.3f}  {len(values)} answers"
                )


if __name__ == "__main__":
    main()
