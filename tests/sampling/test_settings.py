"""Tests of `Sampling`: ranges, contradictions, and the effect of the settings."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from ngramspec.sampling.settings import SAMPLERS, Sampling, parse_samplers

ALONE, INFILL = ("temperature",), ("top_k", "infill", "temperature")
RANGES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "temperature": ((0.0, 0.1, 100.0), (-0.1, math.nan, math.inf, 1e39)),
    "top_k": ((0, 1, 2**31 - 1), (-1, 1.5, 2**31)),
    "top_p": ((1e-9, 1.0), (0.0, -0.1, 1.0001, math.nan)),
    "min_p": ((0.0, 1.0), (-0.01, 1.01, math.nan)),
    "seed": ((0, 2**64 - 1), (-1, 2**64, 0.5)),
    "typical_p": ((0.01, 1.0), (0.0, 1.1, math.nan)),
    "top_n_sigma": ((-1.0, 0.0, 5.0), (math.nan, math.inf, -math.inf)),
    "xtc_probability": ((0.0, 1.0), (-0.1, 1.1, math.nan)),
    "xtc_threshold": ((0.0, 0.5, 1.0), (-0.1, 1.1, math.nan)),
    "dynatemp_range": ((0.0, 5.0), (-0.1, math.inf, math.nan)),
    "dynatemp_exponent": ((0.0, 5.0), (-0.1, math.inf, math.nan, 1e300)),
    "repeat_penalty": ((0.1, 1.0, 5.0), (0.0, -1.0, 1e-31, math.inf, math.nan, 1e39)),
    "repeat_last_n": ((-1, 0, 2**31 - 1), (-2, 0.5, 2**31)),
    "presence_penalty": ((-2.0, 0.0, 2.0), (math.inf, -math.inf, math.nan, 1e39)),
    "frequency_penalty": ((-2.0, 0.0, 2.0), (math.inf, -math.inf, math.nan, -1e39)),
    "dry_multiplier": ((0.0, 5.0), (-0.1, math.inf, math.nan)),
    "dry_base": ((1.0, 5.0), (0.99, math.inf, math.nan)),
    "dry_allowed_length": ((0, 100), (-1, 1.5)),
    "dry_penalty_last_n": ((-1, 0, 100), (-2, 1.5)),
    "mirostat": ((0, 1, 2), (-1, 3, 1.5)),
    "mirostat_tau": ((0.0, 5.0), (-0.1, math.inf, math.nan)),
    "mirostat_eta": ((0.0, 5.0), (-0.1, math.inf, math.nan)),
}


@pytest.mark.parametrize("name", RANGES)
def test_sampling_accepts_values_in_range_and_rejects_others(name: str) -> None:
    fine, bad = RANGES[name]
    for value in fine:
        Sampling(**{"temperature": 0.5} | {name: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} must be .*, got ") as error:
            Sampling(**{"temperature": 0.5} | {name: value})
        assert "\n" not in str(error.value)


def test_sampling_range_is_tested_for_every_numeric_field() -> None:
    others = {"logit_bias", "grammar", "samplers", "dry_sequence_breakers"}
    assert {f.name for f in fields(Sampling)} - RANGES.keys() == others
    limits = r"^the logit bias of token 7 must be from -1e\+06 to 1e\+06, or -inf, got "
    for bias in (math.nan, math.inf, 1e39, 1.1e6, -1.1e6):
        with pytest.raises(ValueError, match=limits):
            Sampling(logit_bias=((3, -math.inf), (7, bias)))
    for breaker in ("", "a\0b", "\udc80"):
        with pytest.raises(ValueError, match="dry_sequence_breakers must contain"):
            Sampling(dry_multiplier=0.8, dry_sequence_breakers=("\n", breaker))


def test_sampling_defaults_equal_llama_cpp_except_temperature() -> None:
    # common/common.h, struct common_params_sampling
    s = Sampling()
    assert (s.top_k, s.top_p, s.min_p, s.typical_p, s.top_n_sigma) == (40, 0.95, 0.05, 1.0, -1.0)
    assert (s.xtc_probability, s.xtc_threshold, s.dynatemp_range, s.dynatemp_exponent) == (0.0, 0.1, 0.0, 1.0)
    assert (s.repeat_penalty, s.repeat_last_n, s.presence_penalty, s.frequency_penalty) == (1.0, 64, 0.0, 0.0)
    assert (s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n) == (0.0, 1.75, 2, 64)
    assert s.dry_sequence_breakers == ("\n", ":", '"', "*")
    assert (s.mirostat, s.mirostat_tau, s.mirostat_eta) == (0, 5.0, 0.1)
    assert s.samplers == ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
    assert s.temperature == 0.0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"samplers": ("top_k", "tpo_p")}, "unknown sampler 'tpo_p'; choose from: penalties, dry, "),
        ({"samplers": ("top_k", "top_p", "top_k")}, "samplers names one twice: top_k, top_p, top_k"),
        ({"samplers": ALONE, "top_k": 5}, "top_k has no effect: samplers does not include top_k"),
        ({"samplers": ALONE, "presence_penalty": 1.0}, "presence_penalty has no effect: .* include penalties"),
        ({"samplers": ALONE, "dry_multiplier": 1.0}, "dry_multiplier has no effect: .* include dry"),
        ({"samplers": ALONE, "top_n_sigma": 1.0}, "top_n_sigma has no effect: .* include top_n_sigma"),
        ({"samplers": ALONE, "typical_p": 0.5}, "typical_p has no effect: .* include typ_p"),
        ({"samplers": ALONE, "xtc_probability": 0.5}, "xtc_probability has no effect: .* include xtc"),
        ({"samplers": ("top_k",)}, "temperature must be 1 if samplers does not include it, got 0.8"),
        ({"samplers": ("top_k",), "temperature": 0.0}, "temperature must be 1 .*, got 0.0"),
        ({"samplers": ("top_k",), "temperature": 1.0, "dynatemp_range": 0.5}, "dynatemp_range has no effect"),
        ({"samplers": ("infill", "top_k", "temperature")}, "infill requires top_k before it"),
        ({"samplers": INFILL, "top_k": 0}, "top_k must be 1 to 256 with the sampler infill, got 0"),
        ({"samplers": INFILL, "top_k": 257}, "top_k must be 1 to 256 with the sampler infill, got 257"),
        ({"samplers": INFILL, "grammar": "root ::= [a]"}, "infill cannot be combined with a grammar"),
        ({"mirostat": 1, "top_k": 5}, "mirostat replaces the other samplers; remove top_k"),
        ({"mirostat": 2, "dynatemp_range": 0.1}, "mirostat replaces .* remove dynatemp_range"),
        ({"mirostat": 2, "samplers": ALONE}, "mirostat replaces .* remove samplers"),
        ({"mirostat": 1, "temperature": 0.0}, "mirostat cannot be combined with temperature 0"),
        ({"xtc_probability": 0.5, "temperature": 0.0}, "xtc_probability cannot be combined with temperature 0"),
    ],
    ids=str,
)
def test_sampling_rejects_contradictory_settings(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        Sampling(**{"temperature": 0.8} | settings)
    assert "\n" not in str(error.value)


def test_sampling_accepts_compatible_settings() -> None:
    Sampling(0.8, mirostat=2, logit_bias=((1, 2.0),), grammar='root ::= "a"', seed=5)
    Sampling(1.0, samplers=())
    Sampling(samplers=("temperature",))
    Sampling(1.0, samplers=("top_k", "top_p", "infill"), top_k=256)
    Sampling(0.0, repeat_penalty=1.2, dry_multiplier=0.5, top_k=5, grammar='root ::= "a"')
    for name in SAMPLERS:
        Sampling(1.0, samplers=(name,))
        Sampling(1.0, samplers=tuple(other for other in SAMPLERS if other != name))


def test_sampling_greedy_and_selects_depend_on_settings() -> None:
    greedy = [Sampling(), Sampling(repeat_penalty=2.0), Sampling(0.1), Sampling(0.0, dynatemp_range=0.5)]
    assert [settings.greedy for settings in greedy] == [True, True, False, False]
    assert [Sampling(1.0, mirostat=version).samples_internally for version in (0, 1, 2)] == [False, True, True]


@pytest.mark.parametrize(
    ("settings", "moves"),
    [
        ({}, False),
        ({"top_k": 5, "top_p": 0.5, "seed": 3, "repeat_last_n": 5}, False),
        ({"repeat_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"dry_multiplier": 0.1}, True),
        ({"logit_bias": ((1, 1.0),)}, True),
        ({"grammar": 'root ::= "a"'}, True),
        ({"samplers": ("top_k", "infill", "temperature")}, True),
    ],
    ids=str,
)
def test_sampling_moves_logits_is_true_only_for_logit_changes(settings: dict[str, Any], moves: bool) -> None:
    assert Sampling(**settings).changes_logits is moves


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("top_k;temperature", ("top_k", "temperature")),
        ("top_k;top_p;infill", ("top_k", "top_p", "infill")),
        (" Top-K ; typical_p;temp ", ("top_k", "typ_p", "temperature")),
        ("top-n-sigma;min-p;typical;nucleus", ("top_n_sigma", "min_p", "typ_p", "top_p")),
        (";".join(SAMPLERS), SAMPLERS),
        ("", ()),
        ("nonsense", ("nonsense",)),
    ],
)
def test_parse_samplers_returns_canonical_names(text: str, names: tuple[str, ...]) -> None:
    assert parse_samplers(text) == names
