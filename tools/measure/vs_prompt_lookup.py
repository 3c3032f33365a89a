"""Compare ngramspec with llama-cpp-python's prompt lookup and plain decoding on the packaged prompts.

Each prompt has four greedy runs in turn: `Llama`, `Llama` with `LlamaPromptLookupDecoding`, ngramspec without drafts,
and ngramspec. Prompt lookup uses its defaults and `logits_all`, because it fails after 512 tokens without that. Time is
measured from the first token.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import comparison
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target


def measure_llama(llama: Llama, prompt: list[int], tokens: int) -> float:
    """Return the tokens per second of greedy `Llama.generate`."""
    stream = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
    next(stream)
    began = time.perf_counter()
    count = sum(1 for _ in zip(range(tokens), stream, strict=False))
    return count / (time.perf_counter() - began)


def measure_ngramspec(decoder: SpeculativeDecoder, prompt: list[int], tokens: int) -> float:
    """Return the tokens per second of greedy ngramspec; a rare end-of-generation token ends the run."""
    steps = decoder.generate(prompt, max_tokens=tokens + 1)
    next(steps)
    began = time.perf_counter()
    count = sum(len(step.tokens) for step in steps)
    return count / (time.perf_counter() - began) if count else float("nan")


def main() -> None:
    options = comparison.make_parser(__doc__, limit=2).parse_args()
    settings = comparison.get_settings(options)
    # ngramspec runs first because it disables AMX kernels that would end the process.
    target = Target(options.model, n_ctx=options.c, threads=options.t)
    plain_llama = Llama(str(options.model), **settings)
    lookup = Llama(str(options.model), draft_model=LlamaPromptLookupDecoding(), logits_all=True, **settings)
    plain, speculative = SpeculativeDecoder(target, drafter=None), SpeculativeDecoder(target)
    runs: dict[str, Callable[[list[int]], float]] = {
        "Llama plain": lambda p: measure_llama(plain_llama, p, options.n),
        "Llama prompt lookup": lambda p: measure_llama(lookup, p, options.n),
        "ngramspec plain": lambda p: measure_ngramspec(plain, p, options.n),
        "ngramspec": lambda p: measure_ngramspec(speculative, p, options.n),
    }
    speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    measure_ngramspec(speculative, target.vocabulary.tokenize("warm"), 8)
    for prompt, ids in comparison.select_prompts(
        options,
        lambda p: target.vocabulary.tokenize(p.text) if p.text else target.vocabulary.chat_prompt(p.messages or ()),
    ):
        for name, run in runs.items():
            speeds[prompt.category][name].append(run(ids))
    print(f"{'median tokens/s':20s}" + "".join(f"{name:>22s}" for name in runs))
    for category, by_name in speeds.items():
        print(f"{category:20s}" + "".join(f"{median(by_name[name]):22.1f}" for name in runs))


if __name__ == "__main__":
    main()
