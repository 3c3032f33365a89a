"""Texts of the demo model with drafts are those without, whatever the samplers."""

from __future__ import annotations

import math
from typing import Any

from support.decoder_loop import drive, unmeasured

from ngramspec.drafting import make_drafter
from ngramspec.llama.json_schema import schema_grammar
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling


def test_the_demo_model_says_the_same_with_and_without_drafts() -> None:
    """A real target, exact: every pass has the logits that plain decoding has, to the last bit."""
    schema = '{"type":"object","properties":{"name":{"type":"string","maxLength":8},"old":{"type":"boolean"}}}'
    source = "def total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n"
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"repeat_penalty": 1.1, "dry_multiplier": 0.8},
        {"xtc_probability": 0.5, "typical_p": 0.9},
        {"mirostat": 1},
        {"mirostat": 2},
        {"grammar": schema_grammar(schema)},
        {"grammar": schema_grammar(schema), "temperature": 0.0},
        {"dynatemp_range": 0.3, "top_n_sigma": 2.0, "logit_bias": ((30, 5.0), (40, -math.inf))},
    ]
    with Target("ngramspec/demo/demo.gguf", exact="on", n_ctx=512, threads=1) as target:
        prompt = target.tokenize(source * 2)
        accepted = 0
        decoder = unmeasured(target, policy="fixed", draft_max=4, exact="on")
        for case in cases:
            sampling = Sampling(**{"temperature": 0.8, "seed": 3} | case)
            told = []
            for drafter, method in ((None, None), ("mixture", None), ("ngram", "match")):
                decoder.drafter = make_drafter(drafter) if drafter is not None else None
                emitted, steps = drive(decoder, prompt, max_tokens=24, sampling=sampling, verify=method, logprobs=2)
                told.append((emitted, [one for step in steps for one in step.logprobs]))
                accepted += sum(step.accepted for step in steps)
            assert told[0] == told[1] == told[2], case
        assert accepted > 60
