"""`Sampling`: all that a user sets about how a token is chosen, each setting told once.

A field has its type, its default, the values it may have, its flags and its line of help. The command line, its help,
the checks and `cli/README.md` are made of these; `ngramspec.llama.samplers` makes llama.cpp's samplers of them. Names,
defaults and order are llama.cpp's (`common/common.h`, `struct common_params_sampling`), except that the default
temperature is 0, greedy decoding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from ngramspec.sampling.option import (
    BASE,
    COUNT,
    FACTOR,
    FINITE,
    MASS,
    NOT_NEGATIVE,
    RELATIVE,
    SHARE,
    WINDOW,
    Allowed,
    Option,
    option,
    options,
    whole,
)

SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""llama.cpp's default order."""

NAMED_ONLY = ("infill",)
"""Samplers of llama.cpp that act only where `Sampling.samplers` names them; infill fills a gap in a text."""

_MOST_COMPARED = 256  # infill compares every two tokens that it is shown: a millisecond for so many

_ALIASES = {"typical": "typ_p", "typical_p": "typ_p", "temp": "temperature", "nucleus": "top_p"}

LARGEST_BIAS = 1e6  # decisive, and well below 3e8, beyond which llama.cpp sorts logits wrongly
_BIAS = re.compile(r"(\d+)([+-].+)")


def parse_samplers(text: str) -> tuple[str, ...]:
    """Names of samplers out of "top_k;temperature", hyphens and llama.cpp's other names allowed."""
    names = (name.strip().lower().replace("-", "_") for name in text.split(";"))
    return tuple(_ALIASES.get(name, name) for name in names if name)


def parse_biases(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """(token id, bias) out of texts like "15043+1" and "15043-inf". Raises ValueError."""
    return tuple(map(_parse_bias, texts))


def _parse_bias(text: str) -> tuple[int, float]:
    parts = _BIAS.fullmatch(text.replace(" ", ""))
    try:
        if parts is not None:
            return int(parts[1]), float(parts[2])
    except ValueError:
        pass
    raise ValueError(f"-l/--logit-bias {text!r} is no token id with a bias; it looks like 15043+1 or 15043-inf")


def parse_breakers(texts: Sequence[str]) -> tuple[str, ...]:
    """The texts themselves; "none" alone is no text."""
    return () if list(texts) == ["none"] else tuple(texts)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits. Raises ValueError for a value outside its range, or a contradiction.

    What a field means is its `help`. Beyond that: `repeat_penalty` multiplies logits below 0. DRY subtracts
    multiplier * base^(length - allowed length) where a token would extend a repeated sequence. `logit_bias` holds
    (token id, what is added to its logit). `samplers` holds names from `SAMPLERS` and `NAMED_ONLY`, in their order.
    """

    temperature: float = option(0.0, "--temp", help="Temperature; 0: greedy.", allowed=NOT_NEGATIVE)
    top_k: int = option(40, help="Keep the k likeliest tokens; 0: off.", allowed=COUNT, sampler="top_k")
    top_p: float = option(0.95, help="Keep the likeliest tokens with this mass; 1: off.", allowed=MASS, sampler="top_p")
    min_p: float = option(
        0.05, help="Least probability relative to the best; 0: off.", allowed=RELATIVE, sampler="min_p"
    )
    seed: int = option(
        0,
        "-s",
        "--seed",
        help="Seed; -1: a random one, shown afterwards.",
        allowed=whole(0, 2**64 - 1, "a whole number from 0 to 2^64 - 1"),
    )
    typical_p: float = option(
        1.0,
        "--typical-p",
        "--typical",
        help="Keep this mass of tokens of typical surprise; 1: off.",
        allowed=MASS,
        sampler="typ_p",
        draws=True,
    )
    top_n_sigma: float = option(
        -1.0,
        "--top-n-sigma",
        "--top-nsigma",
        help="Keep logits this many deviations below the best; -1: off.",
        allowed=FINITE,
        sampler="top_n_sigma",
    )
    xtc_probability: float = option(0.0, help="How often XTC acts; 0: off.", allowed=SHARE, sampler="xtc", draws=True)
    xtc_threshold: float = option(0.1, help="XTC drops all tokens above this probability but the last.", allowed=SHARE)
    dynatemp_range: float = option(
        0.0, help="Temperature plus or minus this, by entropy; 0: off.", allowed=NOT_NEGATIVE, sampler="temperature"
    )
    dynatemp_exponent: float = option(
        1.0, "--dynatemp-exp", help="Exponent of dynamic temperature.", allowed=NOT_NEGATIVE
    )
    repeat_penalty: float = option(
        1.0,
        help="Divide the logits of recent tokens, the prompt's included; 1: off.",
        allowed=FACTOR,
        sampler="penalties",
        moves=True,
    )
    repeat_last_n: int = option(64, help="How many tokens are recent; 0: none, -1: the whole context.", allowed=WINDOW)
    presence_penalty: float = option(
        0.0, help="Taken off the logits of recent tokens; 0: off.", allowed=FINITE, sampler="penalties", moves=True
    )
    frequency_penalty: float = option(
        0.0, help="Taken off once per recent occurrence; 0: off.", allowed=FINITE, sampler="penalties", moves=True
    )
    dry_multiplier: float = option(
        0.0, help="DRY: penalty of repeated sequences; 0: off.", allowed=NOT_NEGATIVE, sampler="dry", moves=True
    )
    dry_base: float = option(1.75, help="DRY: growth of the penalty with the length.", allowed=BASE)
    dry_allowed_length: int = option(2, help="DRY: length that goes unpunished.", allowed=whole(0))
    dry_penalty_last_n: int = option(64, help="DRY: tokens looked at; 0: none, -1: the whole context.", allowed=WINDOW)
    dry_sequence_breakers: tuple[str, ...] = option(
        ("\n", ":", '"', "*"),
        "--dry-sequence-breaker",
        help="DRY: text that ends a sequence, for newline : \" and *; repeatable; 'none': no text.",
        parse=parse_breakers,
        repeatable=True,
    )
    mirostat: int = option(
        0,
        help="1 or 2: mirostat instead of filters; 0: off.",
        allowed=Allowed(lambda x: x in (0, 1, 2), "0 (off), 1 or 2"),
        draws=True,
    )
    mirostat_tau: float = option(
        5.0, "--mirostat-ent", help="Mirostat: target surprise tau, in bits.", allowed=NOT_NEGATIVE
    )
    mirostat_eta: float = option(0.1, "--mirostat-lr", help="Mirostat: learning rate eta.", allowed=NOT_NEGATIVE)
    logit_bias: tuple[tuple[int, float], ...] = option(
        (),
        "-l",
        "--logit-bias",
        metavar="ID(+|-)BIAS",
        help="Add to a token's logit: 15043+1, 15043-inf; repeatable.",
        parse=parse_biases,
        repeatable=True,
        moves=True,
    )
    grammar: str | None = option(
        None, metavar="GBNF", help="Grammar, with a rule root, that the text keeps to.", moves=True
    )
    samplers: tuple[str, ...] = option(
        SAMPLERS,
        metavar="A;B;...",
        help=f"Samplers and their order, infill among them; default: '{'; '.join(SAMPLERS)}'.",
        parse=parse_samplers,
    )

    def __post_init__(self) -> None:
        for name, known in options(self).items():
            value, allowed = getattr(self, name), known.allowed
            if allowed is not None and not allowed.holds(value):
                raise ValueError(f"{name} is {value}, but must be {allowed.words}")
        for token, bias in self.logit_bias:
            if not (bias == -math.inf or abs(bias) <= LARGEST_BIAS):
                limits = f"from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}, or -inf"
                raise ValueError(f"the logit bias of token {token} is {bias}, but must be {limits}")
        for text in self.dry_sequence_breakers:
            if not text or "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
                raise ValueError(f"dry_sequence_breakers holds {text!r}, but must hold valid text that is not empty")
        self._check_order()
        self._check_together()

    def _check_order(self) -> None:
        for name in self.samplers:
            if name not in SAMPLERS and name not in NAMED_ONLY:
                raise ValueError(
                    f"samplers: unknown sampler {name!r}; there are: {', '.join((*SAMPLERS, *NAMED_ONLY))}"
                )
        if len(set(self.samplers)) < len(self.samplers):
            raise ValueError(f"a sampler is named twice in: {', '.join(self.samplers)}")
        for name in self._changed(lambda known: known.sampler not in (None, *self.samplers)):
            raise ValueError(f"{name} is set, but samplers leaves out {options(self)[name].sampler}")
        if "infill" in self.samplers:
            self._check_infill()
        if "temperature" not in self.samplers and self.temperature != 1:
            raise ValueError(f"temperature is {self.temperature}, but samplers leaves it out, which means 1")

    def _check_infill(self) -> None:
        before = self.samplers[: self.samplers.index("infill")]
        if "top_k" not in before:
            raise ValueError(
                "samplers names infill without top_k before it, which keeps the tokens that it compares few"
            )
        if not 0 < self.top_k <= _MOST_COMPARED:
            raise ValueError(f"top_k is {self.top_k}, but must be 1 to {_MOST_COMPARED} before the sampler infill")
        if self.grammar is not None:
            raise ValueError("the sampler infill ends a text where a grammar may not let it end; drop one")

    def _check_together(self) -> None:
        if self.mirostat:
            others = self._changed(lambda known: known.sampler is not None)
            if others or self.samplers != SAMPLERS:
                raise ValueError(f"mirostat takes the place of other samplers; leave out {(*others, 'samplers')[0]}")
        if self.temperature == 0:
            for name in self._changed(lambda known: known.draws):
                raise ValueError(f"{name} chooses among tokens, and temperature 0 takes the likeliest; drop one")

    def _changed(self, concerned: Callable[[Option], bool]) -> list[str]:
        """Those of the concerned settings that do not have their default."""
        defaults = {f.name: f.default for f in fields(self)}
        return [n for n, known in options(self).items() if concerned(known) and getattr(self, n) != defaults[n]]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken (after penalties, biases and grammar)."""
        return self.temperature == 0 and self.dynatemp_range == 0

    @property
    def moves_logits(self) -> bool:
        """Whether penalties, biases, a grammar or infill change which token is the likeliest."""
        return "infill" in self.samplers or bool(self._changed(lambda known: known.moves))

    @property
    def selects(self) -> bool:
        """Whether a sampler draws the token itself, with random numbers of its own."""
        return self.mirostat != 0
