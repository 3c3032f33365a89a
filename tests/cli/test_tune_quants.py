"""Tests of `ngramspec tune --quants` as a user runs it: its output, its advice, and arguments that it rejects."""

from __future__ import annotations

import itertools
import json
import math
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from ngramspec_cli import tune_quants
from ngramspec_cli.conditions import Load
from support.cli_runner import DEMO, run
from support.signals import signal_at
from support.tiny_gguf import write_changed_demo

from ngramspec.llama.target import Target
from ngramspec.quants import costs as quants
from ngramspec.quants.costs import QUANTISATIONS, SIZES, QuantCost, costs_path, keep_costs, quant_note
from ngramspec.quants.models import SyntheticModels
from ngramspec.quants.shape import parse_shape, shape_of

TINY = "layers=2,embd=64,ff=96,heads=2,vocab=100,tied=yes"
QUANTS = ["tune", "--quants", "-t", "1", "--time-limit", "5", "-ngl", "0"]


def prepare(models: SyntheticModels) -> Iterator[str]:
    """Yield a name as the real method does, without writing or loading models."""
    yield "loading"
    models.files.update(dict.fromkeys(models._quantisations, (100, "output")))
    models.outputs["output"] = "Q4_0"


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace models and timings by results that need no time."""
    monkeypatch.setattr(SyntheticModels, "prepare", prepare)
    monkeypatch.setattr(SyntheticModels, "seconds", lambda _models, _name, size: 0.001 * size)
    monkeypatch.setattr(quants, "typical_gain", lambda _curve: 1.5)


def test_it_compares_all_quantisations_of_a_shape(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_quants, "MAX_SPREAD", math.inf)  # the machine may be busy
    monkeypatch.setattr(Load, "is_high", False)
    done = run(home, *QUANTS, TINY, "--json", tmp_path / "found.json").ok()
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["complete"], found["shape"]["ff"], found["timed_layers"]) == (True, 96, 2)
    assert found["steady"]
    assert found["quantisations"].keys() == set(QUANTISATIONS)
    for name, one in found["quantisations"].items():
        line = next(line for line in done.out.splitlines() if line.startswith(f"{name} "))
        assert f"{one['size_bytes'] / 2**20:,.0f}" == line.split()[1]
        assert one["seconds"].keys() == set(map(str, SIZES))
        assert min(one["tokens_per_second"], one["prompt_tokens_per_second"]) > 0
        assert one["tokens_per_second_with_drafts"] >= 0.95 * one["tokens_per_second"]
    assert found["conclusions"] == [line for line in done.out.splitlines() if line.startswith("Recommended: ")]
    assert costs_path(parse_shape(TINY), 0).exists()
    command = f"ngramspec tune {TINY} --quants --time-limit 5.0 --context-depth 256 -ngl 0 -t 1"
    assert found["command"] == command
    assert command in done.out.splitlines()
    run(home, "tune", TINY, "--reset", "-ngl", "0").ok()
    assert not costs_path(parse_shape(TINY), 0).exists()


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("is_busy", "slowest"), [(False, 2.0), (True, 1.0)])
def test_a_disturbed_measurement_is_shown_but_not_stored(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, is_busy: bool, slowest: float
) -> None:
    monkeypatch.setattr(Load, "is_high", is_busy)
    slowdown = itertools.cycle([1.0, *[slowest] * 4])
    monkeypatch.setattr(SyntheticModels, "seconds", lambda _models, _name, size: 0.001 * size * next(slowdown))
    done = run(home, *QUANTS, TINY, "--json", "-")
    assert (done.json["steady"], done.json["conclusions"]) == (False, [])
    assert "measure on an idle machine" in done.err
    assert not costs_path(parse_shape(TINY), 0).exists()


def costs(path: Path) -> None:
    """Store invented costs: Q4_1 is slow in batches, and Q4_0 is not."""
    keep_costs(
        path,
        [
            QuantCost(name, 100, {n: 1.0 + growth * (n - 1) for n in SIZES}, prompt, 1.0)
            for name, growth, prompt in (("Q4_1", 0.7, 1.0), ("Q4_0", 0.1, 0.1), ("Q8_0", 0.7, 1.0))
        ],
    )


@pytest.mark.usefixtures("home")
def test_quant_note_names_a_faster_quantisation_once_the_costs_are_known(tiny: Path) -> None:
    slow = "note: a batch of 4 tokens costs 2.5 times one token here"
    with Target(tiny, ctx_size=512, threads=1) as target:
        assert quant_note(target.weights, 0, 2.5) == (
            f"{slow}; ngramspec tune --quants measures whether another quantisation of this model is faster"
        )
        costs(costs_path(shape_of(tiny), 0))
        better = f"{slow}, but 1.3 times in a file with Q4_0 (ngramspec tune --quants)"
        assert [quant_note(target.weights, 0, steepness) for steepness in (2.5, 1.9)] == [better, None]


def test_an_interruption_before_the_first_round_has_no_results(home: dict[str, str]) -> None:
    with signal_at(signal.SIGINT, SyntheticModels, "seconds", 20):
        done = run(home, *QUANTS, TINY, "--json", "-")
    assert done.code == 130, done.err
    assert json.loads(done.out)["quantisations"] == {}
    assert not costs_path(parse_shape(TINY), 0).exists()


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("kind", "more"), [(7, []), (14, ["Q4_K_S"]), (19, [])])  # 7: Q8_0, 19: IQ2_XXS
def test_a_model_file_gives_its_shape_and_quantisation(
    home: dict[str, str], tmp_path: Path, kind: int, more: list[str]
) -> None:
    path = write_changed_demo(tmp_path / "model.gguf", {"general.file_type": kind})
    found = run(home, *QUANTS, path, "--json", "-").json
    assert found["shape"] == asdict(shape_of(DEMO))
    assert set(found["quantisations"]) == {*QUANTISATIONS, *more}
