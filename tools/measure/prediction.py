"""Measure the gain of a predicted output: `python tools/measure/prediction.py TRANSCRIPTS.jsonl... --vocab FILE.gguf`.

The script uses recorded answers that share at least LIKE of their lines with one earlier message, such as an edited
file. It replays each answer three times: with that message in the prompt, without it, and without it but with its text
as the prediction. For each cost curve it prints the modelled gains: the geometric mean over the answers, the minimum
and the number of answers. Each answer starts with a drafter without learned state.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from ngramspec.cost.fixed_curves import find_curves
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.instruments.replay.replay import Recording, Replay
from ngramspec.llama.vocabulary import Vocabulary

CURVES = ("apple-silicon-akunu", "cuda-34b-q8_0", "cpu-1.5b-q4_0")
MIN_SIMILARITY, MIN_LINES = 0.3, 8


class PredictionDrafter(MixtureDrafter):
    """Drafter with the same prediction for every text, because the loop of a replay does not support predictions."""

    def __init__(self, prediction: list[int]) -> None:
        super().__init__()
        self._prediction = prediction

    def begin(self, prompt: Sequence[int]) -> None:
        self.prediction = self._prediction
        super().begin(prompt)


def similarity(old: str, new: str) -> float:
    """Return the share of the lines of `new` that `old` also contains, without blank lines and indents."""
    old_lines = {line.strip() for line in old.splitlines()}
    new_lines = [line.strip() for line in new.splitlines() if line.strip()]
    return sum(line in old_lines for line in new_lines) / max(MIN_LINES, len(new_lines))


def find_edits(path: Path) -> list[tuple[list[str], int, str]]:
    """Return the first edit of each conversation, if it has one.

    Each item contains the messages before the edit, the number of the message with the file, and the answer.
    """
    result = []
    for line in path.read_text("utf-8").splitlines():
        before: list[str] = []
        for message in json.loads(line)["messages"]:
            text = message["content"] if isinstance(message["content"], str) else ""
            if message["role"] == "assistant" and before:
                best = max(range(len(before)), key=lambda number: similarity(before[number], text))
                if similarity(before[best], text) >= MIN_SIMILARITY:
                    result.append((before, best, text))
                    break
            before.append(text)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--vocab", required=True, type=Path)
    options = parser.parse_args()
    edits = [edit for file in options.files for edit in find_edits(file)]
    with Vocabulary(options.vocab) as vocabulary:
        for name in CURVES:
            curve = find_curves(name)[name]
            gains: dict[str, list[float]] = {"in the prompt": [], "nowhere": [], "as prediction": []}
            for messages, number, answer in edits:
                response = vocabulary.tokenize(answer, add_bos=False)
                whole = vocabulary.tokenize("\n".join(messages))
                without = vocabulary.tokenize("\n".join([*messages[:number], *messages[number + 1 :]]))
                prediction_tokens = vocabulary.tokenize(messages[number], add_bos=False)
                for way, tokens, prediction in zip(
                    gains, (whole, without, without), ([], [], prediction_tokens), strict=True
                ):
                    recording = Recording("edit", "", tokens, response)
                    gains[way].append(Replay(PredictionDrafter(prediction), curve=curve).run(recording).speedup(curve))
            for way, values in gains.items():
                print(
                    f"{name:22} {way:14} {geometric_mean(values):.3f}  lowest {min(values):.3f}  {len(values)} answers"
                )


if __name__ == "__main__":
    main()
