"""Compare `ngramspec.Llama` with `llama_cpp.Llama`, which it replaces: tokens per second by kind of text.

Both continue every packaged prompt in turn with the settings of `llama_cpp.Llama`, and differing texts are listed. Time
is measured from the first token. The last line is the cost of the first call, in which ngramspec measures the machine
if it has not done so before.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import Any

import comparison
import llama_cpp

import ngramspec
from ngramspec.instruments.prompts import Prompt


def generate(llama: Any, prompt: list[int], tokens: int, temperature: float) -> tuple[list[int], float]:
    """Return a generated text and its tokens per second."""
    llama.reset()
    llama.set_seed(1)
    stream = llama.generate(prompt, temp=temperature)
    text = [next(stream)]
    began = time.perf_counter()
    text += [token for _, token in zip(range(tokens), stream, strict=False)]
    seconds = time.perf_counter() - began
    stream.close()
    return text, (len(text) - 1) / seconds


def format_prompt(prompt: Prompt) -> str:
    """Return the text of a prompt, with its messages in ChatML."""
    if prompt.text:
        return prompt.text
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in prompt.messages or ())
    return f"{turns}<|im_start|>assistant\n"


def main() -> None:
    parser = comparison.make_parser(__doc__, limit=3)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--flash-attn", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    settings = comparison.get_settings(options) | {"flash_attn": options.flash_attn}
    # ngramspec runs first because it disables AMX kernels that would end the process.
    ours = ngramspec.Llama(str(options.model), **settings)
    parent = llama_cpp.Llama(str(options.model), **settings)
    began = time.perf_counter()
    generate(ours, ours.tokenize(b"warm"), 8, 0.0)
    first = time.perf_counter() - began
    generate(parent, ours.tokenize(b"warm"), 8, 0.0)
    ratios: dict[str, list[float]] = defaultdict(list)
    speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    different: list[str] = []
    for prompt, ids in comparison.select_prompts(
        options, lambda p: ours.tokenize(format_prompt(p).encode(), special=True)
    ):
        for number in range(options.rounds):
            order = [("Llama", parent), ("ngramspec.Llama", ours)]
            runs = {
                name: generate(llama, ids, options.n, options.temp) for name, llama in order[:: 1 - 2 * (number % 2)]
            }
            for name, (_, speed) in runs.items():
                speeds[prompt.category][name].append(speed)
            ratios[prompt.category].append(runs["ngramspec.Llama"][1] / runs["Llama"][1])
            if not number and runs["Llama"][0] != runs["ngramspec.Llama"][0]:
                different.append(f"{prompt.category}/{prompt.id}")
    print(f"{'median tokens/s':20s}{'Llama':>10s}{'ngramspec.Llama':>18s}{'ratio':>8s}{'least':>8s}")
    for category, by_name in speeds.items():
        plain, ours_speed = (median(by_name[name]) for name in ("Llama", "ngramspec.Llama"))
        print(
            f"{category:20s}{plain:10.1f}{ours_speed:18.1f}{median(ratios[category]):8.2f}{min(ratios[category]):8.2f}"
        )
    print(f"texts that differ: {', '.join(different) or 'none'}; first call: {first:.1f} s")
    stats = ours.draft_stats
    print(
        f"passes {stats.passes}, drafted {stats.drafted}, accepted {stats.accepted}, by account {stats.estimated_gain}"
    )


if __name__ == "__main__":
    main()
