"""Tests of stop strings that name control tokens, with a real vocabulary and answers that a grammar dictates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from support.cli_runner import DEMO, run
from support.serving import serve

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(DEMO, ctx_size=64, threads=1) as target:
        yield target


START, END = "<|im_start|>", "<|im_end|>"


class Case(NamedTuple):
    answer: tuple[str, ...]  # texts and names of control tokens
    stop: tuple[str, ...]
    text: str  # expected text; names of tokens that do not end it are part of it if the request shows them
    reason: str
    stop_string: str | None = None


CASES = [
    Case(("ab", START, "cd", END), (), f"ab{START}cd", "eog"),
    Case(("ab", START, "cd", END), ("xyz",), f"ab{START}cd", "eog"),
    Case(("ab", START, "cd", END), (START,), "ab", "stop", START),
    Case(("ab", START, "cd", END), (f"b{START}c",), "a", "stop", f"b{START}c"),
    Case(("ab", START, "cd", END), (f"b{START}x",), f"ab{START}cd", "eog"),
    Case(("ab", START, "cd", END), (END,), f"ab{START}cd", "stop", END),
    Case(("ab", START, "cd", END), (f"d{END}", "x"), f"ab{START}c", "stop", f"d{END}"),
    Case(("ab", START, START, END), (START * 2,), "ab", "stop", START * 2),
    Case((START, "ab", END), (START,), "", "stop", START),
]


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_generate_with_control_token_in_stop_string_ends_before_it(target: Target, case: Case, shown: bool) -> None:
    names = target.vocabulary.controls
    items = " ".join(f"<[{names[part]}]>" if part in names else f'"{part}"' for part in case.answer)
    sampling = Sampling(grammar=f"root ::= {items}")
    prompt = target.vocabulary.tokenize("ab")
    decoder = SpeculativeDecoder(target, drafter=None)
    controls = frozenset(names.values()) if shown else frozenset()
    steps = list(decoder.generate(prompt, max_tokens=20, sampling=sampling, stop=case.stop, controls=controls))
    assert "".join(step.text for step in steps) == (case.text if shown else case.text.replace(START, ""))
    assert (steps[-1].stop, steps[-1].stop_string) == (case.reason, case.stop_string)


def test_serve_and_complete_with_control_token_in_stop_string_end_before_it(env: dict[str, str]) -> None:
    grammar = 'root ::= "ab" <[1]> "cd" <[1]> "e" <[2]>'
    stop = f"d{START}e"
    prompt: dict[str, Any] = {"prompt": "x", "stop": [stop]}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "stop": [stop], "stop_sequences": [stop]}

    texts = []

    def client(http: httpx.Client) -> None:
        for path, body, text in (
            ("/v1/completions", prompt, "abc"),
            ("/v1/messages", chat, "abc"),
        ):
            for stream in (False, True):
                settings = {"max_tokens": 20, "grammar": grammar, "stream": stream}
                response = http.post(path, json=body | settings)
                texts.append((text, "".join(re.findall(r'"(?:content|text)": ?"([^"]*)"', response.text))))

    serve(env, client, "--no-draft").ok()
    assert len(texts) == 4
    assert all(expected == text for expected, text in texts), texts
    small = ("-t", "1", "-c", "64", "--exact", "off", "--no-draft")
    done = run(env, "complete", DEMO, *small, "--grammar", grammar, "--stop", stop, stdin=b"x").ok()
    assert done.raw.decode().strip() == "abc"
