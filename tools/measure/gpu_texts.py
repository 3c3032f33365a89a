"""Part C of the experiment on a GPU: recorded texts, forced on the passes of a model with random weights, on a clock.

    python gpu_texts.py MODEL.gguf TEXTS.npz OUT.jsonl SECONDS [ROUNDS]

`run.sh` of the packed experiment calls it with these arguments as part_c.py, in the folder of ngram_mod.py and
raw.py, which it imports. The project's decoder makes the passes with its own policy and learned costs. Only the
verifier differs: it accepts what the record says, after it has searched as many rows as a greedy verifier would have.
ngram-mod has no policy and drafts in Python here, so the time of its drafting is kept apart.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ngram_mod import NgramMod
from raw import DRY, Results, clocks

from ngramspec.acceptance.rules import Rows, Verdict
from ngramspec.backend import ExactnessMode
from ngramspec.cost.times import PassTimes
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import find_uncompiled_modules
from ngramspec.drafting.draft import Draft
from ngramspec.instruments.replay.replay import RecordedVerifier, Recording
from ngramspec.llama.sequence import CacheSequence
from ngramspec.llama.target import Target
from ngramspec.sampling.rows import append_most_likely
from ngramspec.steps import Stats
from ngramspec.tokens import common_prefix

TOKENS = 16 if DRY else 160  # tokens of an answer
# Drafter and constant number of rows of each pass, 0 if the policy chooses; rounds after the first use `FREQUENT` only.
MODES: dict[str, tuple[str | tuple[int, int, int] | None, int]] = {
    "plain": (None, 0),
    "mixture": ("mixture", 0),
    "mixture, constant 8": ("mixture", 8),
    "ngram-mod": ((24, 48, 63), 0),
    "ngram": ("ngram", 0),
    "mixture, constant 16": ("mixture", 16),
    "ngram-mod, short": ((16, 2, 16), 0),
    "mixture, constant 4": ("mixture", 4),
}
FREQUENT = 4


class ForcedVerifier(RecordedVerifier):
    """Accepts what the record says, after the work of a greedy verifier."""

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        verdict = super().verify(rows, draft, position)
        search(rows, verdict.accepted + 1)
        return verdict


def search(rows: Any, count: int) -> None:
    """Find the most likely token of the first rows, one by one."""
    found: list[int] = []
    for i in range(min(count, len(rows))):
        append_most_likely(rows[i : i + 1], (), found)


def read_recordings(path: str) -> list[tuple[int, Recording]]:
    """Return the round and the record of each conversation."""
    data = dict(np.load(path))

    def part(name: str, i: int) -> list[int]:
        first, end = data[f"{name}_at"][i : i + 2]
        tokens: list[int] = data[name][first:end].tolist()
        return tokens

    return [
        (int(number), Recording(str(category), str(i), part("prompts", i), part("responses", i)[:TOKENS]))
        for i, (number, category) in enumerate(zip(data["rounds"], data["categories"], strict=True))
    ]


def force(decoder: SpeculativeDecoder, recording: Recording) -> dict[str, object]:
    """Decode a record with the project's decoder; the seconds are those after the first token."""
    stats, sizes, changes, last, text = Stats(), Counter[int](), 0, 0, list[int]()
    for step in decoder.generate(recording.prompt, max_tokens=TOKENS, acceptance=ForcedVerifier(recording)):
        stats.add(step)
        text += step.tokens
        if step.batch:
            sizes[step.batch] += 1
            changes, last = changes + (step.batch != last), step.batch
        if len(text) >= len(recording.response):
            break
    return {
        "tokens": stats.tokens,
        "passes": stats.passes,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "changes": changes,
        "seconds": round(stats.decode_seconds, 6),
        "pass_seconds": round(stats.seconds, 6),
        "draft_seconds": round(stats.draft_seconds, 6),
        "sizes": sizes,
        "same": text == list(recording.response),
    }


def force_mod(drafter: NgramMod, sequence: CacheSequence, recording: Recording) -> dict[str, object]:
    """Decode a record with ngram-mod; `seconds` lacks the time of its drafting."""
    response = list(recording.response)
    search(np.asarray(sequence.prefill(recording.prompt))[np.newaxis], 1)
    drafter.begin(recording.prompt)
    text, emitted, counts, sizes, last = list(recording.prompt), 0, Counter[str](), Counter[int](), 0
    seconds = draft_seconds = 0.0
    while emitted < len(response) - 1:
        began = time.perf_counter()
        draft = drafter.draft(text, response[emitted])[: max(0, TOKENS - emitted - 2)]
        middle = time.perf_counter()
        rows = sequence.evaluate([response[emitted], *draft])
        truth = response[emitted + 1 : emitted + 2 + len(draft)]
        right = common_prefix(draft, truth)
        search(rows, right + 1)
        text += response[emitted : emitted + 1 + right]
        if len(sequence.tokens) > len(text):
            sequence.rollback(len(text))
        drafter.accept(right)
        end, size = time.perf_counter(), 1 + len(draft)
        emitted += len(truth[: right + 1])
        counts.update(tokens=len(truth[: right + 1]), passes=1, drafted=len(draft), accepted=right)
        counts["changes"] += size != last
        sizes[size] += 1
        seconds, draft_seconds, last = seconds + end - middle, draft_seconds + middle - began, size
    return {**counts, "seconds": round(seconds, 6), "draft_seconds": round(draft_seconds, 6), "sizes": sizes}


def open_decoder(target: Target, drafter: str | None, width: int, learned: PassTimes) -> SpeculativeDecoder:
    decoder = SpeculativeDecoder(target, drafter=drafter, exact="off", times=learned.copy())
    if width:
        decoder.exactness = ExactnessMode(sizes=(width,), bit_identical=True)
    return decoder


def main(path: str, texts: str, out: str, seconds: str, rounds: str = "3") -> None:
    began = time.perf_counter()
    results, recordings = Results(out, part="C", model=Path(path).stem), read_recordings(texts)
    settings: Mapping[str, Any] = {"gpu_layers": 0, "threads": 1} if DRY else {}
    with Target(path, ctx_size=4096, exact="off", **settings) as target:
        first = SpeculativeDecoder(target, drafter="mixture", exact="off", times=PassTimes())
        force(first, recordings[0][1])  # the costs are learned as in the first answer of a user
        results.add(
            kind="start",
            seconds=round(time.perf_counter() - began, 1),
            curve=first.times.to_json(),
            plain_python=find_uncompiled_modules(),
            layers=dict(target.weights.layers),
            clocks=clocks(),
        )
        decoders: dict[str, SpeculativeDecoder | NgramMod] = {}
        names = list(MODES)
        for number in range(int(rounds)):
            names = names if number == 0 else list(MODES)[:FREQUENT]
            for recording in [recording for of_round, recording in recordings if of_round == number]:
                names = names[1:] + names[:1]  # another mode begins at each conversation
                for name in names:
                    if time.perf_counter() > began + float(seconds):
                        results.add(kind="end", clocks=clocks(), complete=False)
                        return
                    how, width = MODES[name]
                    if isinstance(how, tuple):
                        mod = decoders.setdefault(name, NgramMod(*how))
                        record = force_mod(mod, target.sequences[0], recording)
                    else:
                        if name not in decoders:
                            decoders[name] = open_decoder(target, how, width, first.times)
                        record = force(decoders[name], recording)
                    place = {"round": number, "category": recording.category, "prompt": len(recording.prompt)}
                    results.add(kind="answer", mode=name, **place, **record)
        results.add(kind="end", clocks=clocks(), complete=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
