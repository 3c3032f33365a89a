"""Tests of stop strings that name control tokens, with a real vocabulary and answers that a grammar dictates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from support.cli_runner import DEMO

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(DEMO, ctx_size=64, threads=1) as target:
        yield target


START, END = "<|im_start|>", "<|im_end|>"


ANSWER = ("ab", START, "cd", END)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    ("answer", "stop", "text", "stop_string"),
    [
        (ANSWER, (), f"ab{START}cd", None),
        (ANSWER, (START,), "ab", START),
        (ANSWER, (f"b{START}c",), "a", f"b{START}c"),
        (ANSWER, (f"b{START}x",), f"ab{START}cd", None),
        (ANSWER, (END,), f"ab{START}cd", END),
        (ANSWER, (f"d{END}", "x"), f"ab{START}c", f"d{END}"),
        (("ab", START, START, END), (START * 2,), "ab", START * 2),
        ((START, "ab", END), (START,), "", START),
    ],
)
def test_generate_with_control_token_in_stop_string_ends_before_it(
    target: Target, answer: Sequence[str], stop: Sequence[str], text: str, stop_string: str | None, shown: bool
) -> None:
    """Names of tokens that do not end the text are part of it if the request shows them."""
    names = target.vocabulary.controls
    items = " ".join(f"<[{names[part]}]>" if part in names else f'"{part}"' for part in answer)
    sampling = Sampling(grammar=f"root ::= {items}")
    prompt = target.vocabulary.tokenize("ab")
    decoder = SpeculativeDecoder(target, drafter=None)
    controls = frozenset(names.values()) if shown else frozenset()
    steps = list(decoder.generate(prompt, max_tokens=20, sampling=sampling, stop=stop, controls=controls))
    assert "".join(step.text for step in steps) == (text if shown else text.replace(START, ""))
    assert (steps[-1].stop, steps[-1].stop_string) == ("stop" if stop_string else "eog", stop_string)
