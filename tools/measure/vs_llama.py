"""Compare `ngramspec.Llama` with `llama_cpp.Llama`, alone and with prompt lookup: tokens per second by kind of text.

All three continue every packaged prompt in turn, and texts that differ from those of `llama_cpp.Llama` are listed.
Prompt lookup (`LlamaPromptLookupDecoding`) uses its defaults and `logits_all`, because it fails after 512 tokens
without that. Time is measured from the first token, so that the figures exclude the prompt and the measurements of the
machine.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import ngramspec
from ngramspec.instruments.prompts import Prompt, load_prompts


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", type=int, default=2)
    parser.add_argument("--limit", type=int, default=3, help="prompts per category")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--flash-attn", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    threads = {"n_threads": options.t, "n_threads_batch": options.t}
    settings: dict[str, Any] = {"n_ctx": options.c, **threads, "verbose": False, "flash_attn": options.flash_attn}
    # ngramspec is loaded first because it disables AMX kernels that would end the process.
    ours = ngramspec.Llama(str(options.model), **settings)
    plain = Llama(str(options.model), **settings)
    lookup = Llama(str(options.model), draft_model=LlamaPromptLookupDecoding(), logits_all=True, **settings)
    ways = {"Llama": plain, "prompt lookup": lookup, "ngramspec.Llama": ours}
    for llama in ways.values():
        generate(llama, ours.tokenize(b"warm"), 8, 0.0)
    speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    different: dict[str, list[str]] = {name: [] for name in ways}
    counts = Counter[str]()
    for prompt in load_prompts(None):
        ids = ours.tokenize(format_prompt(prompt).encode(), special=True)
        if counts[prompt.category] == options.limit or len(ids) + options.n + 16 > options.c:
            continue
        counts[prompt.category] += 1
        for number in range(options.rounds):
            runs = {
                name: generate(ways[name], ids, options.n, options.temp) for name in list(ways)[:: 1 - 2 * (number % 2)]
            }
            for name, (text, speed) in runs.items():
                speeds[prompt.category][name].append(speed)
                if not number and text != runs["Llama"][0]:
                    different[name].append(f"{prompt.category}/{prompt.id}")
    print(f"{'median tokens/s':20s}" + "".join(f"{name:>16s} ratio  min." for name in ways))
    for category, by_name in speeds.items():
        print(f"{category:20s}", end="")
        for name in ways:
            ratios = [speed / base for speed, base in zip(by_name[name], by_name["Llama"], strict=True)]
            print(f"{median(by_name[name]):16.1f} {median(ratios):5.2f} {min(ratios):5.2f}", end="")
        print()
    for name, prompts in different.items():
        if prompts:
            print(f"texts of {name} that differ: {', '.join(prompts)}")
    stats = ours.draft_stats
    print(f"passes {stats.passes}, drafted {stats.drafted}, accepted {stats.accepted}, gain {stats.estimated_gain}")


if __name__ == "__main__":
    main()
