"""`Sampling`: all that a user sets about how a token is chosen.

`ngramspec.llama.samplers` makes llama.cpp's samplers of it.

Names, defaults and order are llama.cpp's (`common/common.h`, `struct common_params_sampling`), but for the
temperature, whose default is greedy decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""llama.cpp's default order."""

_ALIASES = {"typical": "typ_p", "typical_p": "typ_p", "temp": "temperature", "nucleus": "top_p"}

_OF_SAMPLER = {
    "penalties": ("repeat_penalty", "presence_penalty", "frequency_penalty"),
    "dry": ("dry_multiplier",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typ_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability",),
    "temperature": ("dynatemp_range",),
}
"""The settings that a sampler alone acts on."""

_LARGEST_BIAS = 1e6  # decisive, and well below 3e8, beyond which llama.cpp sorts logits wrongly


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, int) and least <= x <= most


# Written so that a nan, for which every comparison is false, fails them all.
_LARGEST = float(np.finfo(np.float32).max)  # llama.cpp's settings are floats of 32 bits
_FINITE = (lambda x: -_LARGEST <= x <= _LARGEST, "finite, in 32 bits")
_POSITIVE = (lambda x: 0 <= x <= _LARGEST, "finite and at least 0, in 32 bits")
_SHARE = (lambda x: 0 <= x <= 1, "between 0 and 1")
_MASS = (lambda x: 0 < x <= 1, "above 0 and at most 1 (1: off)")
_WINDOW = (_whole(-1), "a whole number, at least -1 (0: off, -1: the whole context)")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": _POSITIVE,
    "top_k": (_whole(0), "a whole number, at least 0 (0: off)"),
    "top_p": _MASS,
    "min_p": (lambda x: 0 <= x <= 1, "between 0 (off) and 1"),
    "seed": (_whole(0, 2**64 - 1), "a whole number from 0 to 2^64 - 1"),
    "typical_p": _MASS,
    "top_n_sigma": _FINITE,
    "xtc_probability": _SHARE,
    "xtc_threshold": _SHARE,
    "dynatemp_range": _POSITIVE,
    "dynatemp_exponent": _POSITIVE,
    "repeat_penalty": (lambda x: 1e-30 < x <= _LARGEST, "finite and above 0 (1: off), in 32 bits"),
    "repeat_last_n": _WINDOW,
    "presence_penalty": _FINITE,
    "frequency_penalty": _FINITE,
    "dry_multiplier": _POSITIVE,
    "dry_base": (lambda x: 1 <= x <= _LARGEST, "finite and at least 1, in 32 bits"),
    "dry_allowed_length": (_whole(0), "a whole number, at least 0"),
    "dry_penalty_last_n": _WINDOW,
    "mirostat": (lambda x: x in (0, 1, 2), "0 (off), 1 or 2"),
    "mirostat_tau": _POSITIVE,
    "mirostat_eta": _POSITIVE,
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits. Raises ValueError for a value outside its range, or a contradiction.

    Attributes:
        temperature: 0 is greedy decoding, 1 the model's own distribution; finite, >= 0.
        top_k: how many of the largest logits are kept; 0 keeps all.
        top_p: probability mass kept; in (0, 1], 1 keeps all.
        min_p: least probability relative to the best token's; in [0, 1], 0 keeps all.
        seed: the same seed gives the same text; 0 .. 2^64 - 1.
        typical_p: mass kept of the tokens closest to the expected surprise; 1 keeps all.
        top_n_sigma: keep logits within this many standard deviations of the largest; below 0: off.
        xtc_probability, xtc_threshold: with this probability, drop all tokens above the threshold but the last.
        dynatemp_range, dynatemp_exponent: temperature +- range, by the entropy of the candidates; 0: off.
        repeat_penalty, repeat_last_n: divide (or, below 0, multiply) logits of the last n tokens; 1: off. n
            counts the prompt's too; 0: off, -1: the whole context.
        presence_penalty, frequency_penalty: subtracted from those tokens' logits, once and once per occurrence.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers: subtract
            multiplier * base^(length - allowed length) where a token would extend a repeated sequence; 0: off.
        mirostat, mirostat_tau, mirostat_eta: 1 or 2 steer the surprise of the text to tau at learning rate eta,
            in place of all filters; 0: off.
        logit_bias: (token id, what is added to its logit), ...
        grammar: GBNF, with a rule "root": the text must be one of its sentences, or the start of one.
        samplers: names from `SAMPLERS`, in the order they are applied.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    samplers: tuple[str, ...] = SAMPLERS

    def __post_init__(self) -> None:
        for name, (holds, meaning) in _RANGES.items():
            value = getattr(self, name)
            if not holds(value):
                raise ValueError(f"{name} is {value}, but must be {meaning}")
        for token, bias in self.logit_bias:
            if not (bias == -math.inf or abs(bias) <= _LARGEST_BIAS):
                limits = f"from {-_LARGEST_BIAS:g} to {_LARGEST_BIAS:g}, or -inf"
                raise ValueError(f"the logit bias of token {token} is {bias}, but must be {limits}")
        for text in self.dry_sequence_breakers:
            if not text or "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
                raise ValueError(f"dry_sequence_breakers holds {text!r}, but must hold valid text that is not empty")
        self._check_order()
        self._check_together()

    def _check_order(self) -> None:
        for name in self.samplers:
            if name not in SAMPLERS:
                raise ValueError(f"unknown sampler {name!r}; there are: {', '.join(SAMPLERS)}")
        if len(set(self.samplers)) < len(self.samplers):
            raise ValueError(f"a sampler is named twice in: {', '.join(self.samplers)}")
        for name in SAMPLERS:
            if name not in self.samplers:
                for setting in self._changed(_OF_SAMPLER[name]):
                    raise ValueError(f"{setting} is set, but samplers leaves out {name}")
        if "temperature" not in self.samplers and self.temperature != 1:
            raise ValueError(f"temperature is {self.temperature}, but samplers leaves it out, which means 1")

    def _check_together(self) -> None:
        if self.mirostat:
            others = [n for of in _OF_SAMPLER.values() for n in self._changed(of)]
            if others or self.samplers != SAMPLERS:
                raise ValueError(f"mirostat takes the place of other samplers; leave out {(*others, 'samplers')[0]}")
        if self.temperature == 0:
            for name in self._changed(("mirostat", "xtc_probability", "typical_p")):
                raise ValueError(f"{name} chooses among tokens, and temperature 0 takes the likeliest; drop one")

    def _changed(self, names: Sequence[str]) -> list[str]:
        return [f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken (after penalties, biases and grammar)."""
        return self.temperature == 0 and self.dynatemp_range == 0

    @property
    def moves_logits(self) -> bool:
        """Whether penalties, biases or a grammar change which token is the likeliest."""
        moving = ("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "logit_bias", "grammar")
        return bool(self._changed(moving))

    @property
    def selects(self) -> bool:
        """Whether a sampler draws the token itself, with random numbers of its own."""
        return self.mirostat != 0


def parse_samplers(text: str) -> tuple[str, ...]:
    """Names of samplers out of "top_k;temperature", hyphens and llama.cpp's other names allowed."""
    names = (name.strip().lower().replace("-", "_") for name in text.split(";"))
    return tuple(_ALIASES.get(name, name) for name in names if name)
