"""All settings of sampling (`Sampling`) and the rules of one text (`TextRules`), each defined once by an `Option`.

A field has a type, a default, allowed values, flags and a help text:

    top_k: int = option(40, help="Keep the k most likely tokens; 0: off.", allowed=allow_integers(0))

The command line, its help, the checks and `cli/README.md` are made of these, and `ngramspec.llama.samplers` makes
llama.cpp's samplers of `Sampling`. Names, defaults and order are llama.cpp's (`common/common.h`, `struct
common_params_sampling`), except that the default temperature is 0, greedy decoding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
KEY = "option"  # key of the `Option` in the metadata of a dataclass field


class Allowed(NamedTuple):
    accepts: Callable[[Any], bool]  # predicate for allowed values
    description: str  # description of the values, which follows "must be"
    minimum: float | None = None  # minimum in the command line's help, if it shows one
    maximum: float | None = None  # maximum in the command line's help, if it shows one


@dataclass(frozen=True, slots=True)
class Option:
    """Description of a setting, except its type and default."""

    flags: tuple[str, ...]  # names on the command line; without a long one, also that of the field, as --no-mmap
    help: str  # short help text, which includes the value that turns the setting off
    allowed: Allowed | None = None  # allowed values; `None` if the class with the field checks them
    metavar: str | None = None  # placeholder of the value in the help; `None` means the name of its type
    # Function that returns the value of a text, or of a list of texts if the option is `repeatable`. It may raise a
    # ValueError. With `None` the command line converts the text according to the type.
    parse: Callable[[Any], Any] | None = None
    repeatable: bool = False  # whether the flag may be given more than once
    is_hidden: bool = False  # whether the help omits the option
    sampler: str | None = None  # sampler that this setting turns on, without which it has no effect
    changes_logits: bool = False  # whether the setting can change which token is the most likely
    needs_sampling: bool = False  # whether the setting chooses among tokens, and so contradicts temperature 0

    def read(self, value: Any) -> Any:
        """Return the value of a command line argument, or of one text in its place; see `parse`."""
        if self.parse is None:
            return value
        return self.parse([value] if self.repeatable and isinstance(value, str) else value)


def option(default: T, *flags: str, help: str, **details: Any) -> T:
    """Return a dataclass field with an `Option`; the return type is that of the value, as with `dataclasses.field`."""
    return field(default=default, metadata={KEY: Option(flags, help, **details)})


@cache  # a request makes several `Sampling`, which would take longer to find their options than to check them
def options(settings: type[Any]) -> Mapping[str, Option]:
    """Return the options of a dataclass by the names of their fields."""
    return {f.name: resolve_flags(f.name, f.metadata[KEY]) for f in fields(settings) if KEY in f.metadata}


def resolve_flags(name: str, setting: Option) -> Option:
    """Return the option of a field; the name of the field is its last flag, unless it has another long one."""
    if any(flag.startswith("--") for flag in setting.flags):
        return setting
    return replace(setting, flags=(*setting.flags, f"--{name.replace('_', '-')}"))


# --------------------------------------------------------------------------- ranges
# Every comparison with nan is false, so nan is in no range.
#
# The command line checks the ranges of `allow_int_range` and `allow_range` itself, and its help shows them. The class
# of the settings checks the others, whose message also gives the meaning of 0 or -1, such as `COUNT` and `WINDOW`.

_LARGEST = float(np.finfo(np.float32).max)  # settings of llama.cpp are 32-bit floats


def allow_integers(minimum: int, maximum: int = 2**31 - 1, description: str | None = None) -> Allowed:
    return Allowed(
        lambda x: isinstance(x, int) and minimum <= x <= maximum, description or f"a whole number of at least {minimum}"
    )


def allow_int_range(minimum: int, maximum: int) -> Allowed:
    """Return the whole numbers in a range that the command line's help shows."""
    return Allowed(
        lambda x: isinstance(x, int) and minimum <= x <= maximum, f"from {minimum} to {maximum}", minimum, maximum
    )


def allow_range(minimum: float, maximum: float | None = None) -> Allowed:
    """Return the numbers in a range that the command line's help shows."""
    description = f"at least {minimum:g}" if maximum is None else f"from {minimum:g} to {maximum:g}"
    return Allowed(lambda x: minimum <= x and (maximum is None or x <= maximum), description, minimum, maximum)


def allow_choices(*values: str) -> Allowed:
    return Allowed(lambda x: x in values, f"one of: {', '.join(values)}")


FINITE = Allowed(lambda x: -_LARGEST <= x <= _LARGEST, "finite, in 32 bits")
NOT_NEGATIVE = Allowed(lambda x: 0 <= x <= _LARGEST, "finite and at least 0, in 32 bits")
SHARE = Allowed(lambda x: 0 <= x <= 1, "between 0 and 1")
MASS = Allowed(lambda x: 0 < x <= 1, "above 0 and at most 1 (1: off)")
COUNT = allow_integers(0, description="a whole number of at least 0 (0: off)")
WINDOW = allow_integers(-1, description="a whole number of at least -1 (0: off, -1: the whole context)")


# --------------------------------------------------------------------------- settings of sampling

# Names of the samplers in llama.cpp's default order.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
# Samplers of llama.cpp that are used only if `Sampling.samplers` contains them; infill is for fill-in-the-middle.
NAMED_ONLY = ("infill",)
_MOST_COMPARED = 256  # maximum number of tokens for infill, which compares all pairs: about a millisecond

LARGEST_BIAS = 1e6  # large enough to decide, and well below 3e8, beyond which llama.cpp sorts logits wrongly
MAX_BREAKERS = 32  # llama.cpp compares each breaker with all tokens of the vocabulary, which takes milliseconds
_BREAKER_BYTES = 40  # llama.cpp cuts longer breakers


def parse_samplers(text: str) -> tuple[str, ...]:
    """Return the names of samplers in a text such as "top_k;temperature", with hyphens or llama.cpp's aliases."""
    aliases = {"typical": "typ_p", "typical_p": "typ_p", "temp": "temperature", "nucleus": "top_p"}
    names = (name.strip().lower().replace("-", "_") for name in text.split(";"))
    return tuple(aliases.get(name, name) for name in names if name)


def parse_biases(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Return the token ids and biases in texts such as "15043+1" and "15043-inf"; raise a ValueError for others."""
    biases = []
    for text in texts:
        parts = re.fullmatch(r"(\d+)([+-].+)", text.replace(" ", ""))
        try:
            biases.append((int(parts[1]), float(parts[2])))  # type: ignore[index]
        except (TypeError, ValueError):
            message = f"-l/--logit-bias {text!r} is not a token id with a bias, such as 15043+1 or 15043-inf"
            raise ValueError(message) from None
    return tuple(biases)


def parse_breakers(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the given texts; only "none" means no text."""
    return () if list(texts) == ["none"] else tuple(texts)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the choice of a token from logits.

    The `help` of a field describes it. In addition: `repeat_penalty` multiplies logits below 0. DRY subtracts
    multiplier * base^(length - allowed length) from the logit of a token that would extend a repeated sequence.
    `logit_bias` contains token ids and the values to add to their logits. `samplers` contains names from `SAMPLERS` and
    `NAMED_ONLY`, in the order of use.

    Raises:
        ValueError: A value is out of range, or settings contradict each other.
    """

    temperature: float = option(
        0.0, "--temp", "--temperature", help="Temperature; 0: greedy decoding.", allowed=NOT_NEGATIVE
    )
    top_k: int = option(40, help="Keep the k most likely tokens; 0: off.", allowed=COUNT, sampler="top_k")
    top_p: float = option(
        0.95, help="Keep the most likely tokens with this total probability; 1: off.", allowed=MASS, sampler="top_p"
    )
    min_p: float = option(
        0.05,
        help="Minimum probability relative to the most likely token; 0: off.",
        allowed=Allowed(lambda x: 0 <= x <= 1, "between 0 (off) and 1"),
        sampler="min_p",
    )
    seed: int = option(
        0,
        "-s",
        help="Random seed; -1: a random one, shown afterwards.",
        allowed=allow_integers(0, 2**64 - 1, "a whole number from 0 to 2^64 - 1"),
    )
    typical_p: float = option(
        1.0,
        "--typical-p",
        "--typical",
        help="Locally typical sampling: keep tokens with this total probability; 1: off.",
        allowed=MASS,
        sampler="typ_p",
        needs_sampling=True,
    )
    top_n_sigma: float = option(
        -1.0,
        "--top-n-sigma",
        "--top-nsigma",
        help="Keep logits within this many standard deviations of the maximum; -1: off.",
        allowed=FINITE,
        sampler="top_n_sigma",
    )
    xtc_probability: float = option(
        0.0, help="XTC: probability of applying it; 0: off.", allowed=SHARE, sampler="xtc", needs_sampling=True
    )
    xtc_threshold: float = option(
        0.1, help="XTC: remove tokens above this probability, except the least likely one.", allowed=SHARE
    )
    dynatemp_range: float = option(
        0.0,
        help="Dynamic temperature: vary it by up to this, by entropy; 0: off.",
        allowed=NOT_NEGATIVE,
        sampler="temperature",
    )
    dynatemp_exponent: float = option(
        1.0, "--dynatemp-exp", help="Dynamic temperature: exponent.", allowed=NOT_NEGATIVE
    )
    repeat_penalty: float = option(
        1.0,
        help="Divide the logits of recent tokens, including the prompt's, by this; 1: off.",
        allowed=Allowed(lambda x: 1e-30 < x <= _LARGEST, "finite and above 0 (1: off), in 32 bits"),
        sampler="penalties",
        changes_logits=True,
    )
    repeat_last_n: int = option(
        64, help="Number of recent tokens for the penalties; 0: none, -1: the whole context.", allowed=WINDOW
    )
    presence_penalty: float = option(
        0.0,
        help="Subtract this from the logits of recent tokens; 0: off.",
        allowed=FINITE,
        sampler="penalties",
        changes_logits=True,
    )
    frequency_penalty: float = option(
        0.0,
        help="Subtract this from logits once per recent occurrence; 0: off.",
        allowed=FINITE,
        sampler="penalties",
        changes_logits=True,
    )
    dry_multiplier: float = option(
        0.0,
        help="DRY: penalty for repeated sequences; 0: off.",
        allowed=NOT_NEGATIVE,
        sampler="dry",
        changes_logits=True,
    )
    dry_base: float = option(
        1.75,
        help="DRY: base of the exponential growth with the length.",
        allowed=Allowed(lambda x: 1 <= x <= _LARGEST, "finite and at least 1, in 32 bits"),
    )
    dry_allowed_length: int = option(2, help="DRY: maximum length without a penalty.", allowed=allow_integers(0))
    dry_penalty_last_n: int = option(
        64, help="DRY: number of recent tokens to search; 0: none, -1: the whole context.", allowed=WINDOW
    )
    dry_sequence_breakers: tuple[str, ...] = option(
        ("\n", ":", '"', "*"),
        "--dry-sequence-breaker",
        help="DRY: text that ends a sequence, instead of newline : \" and *; repeatable; 'none': no text.",
        parse=parse_breakers,
        repeatable=True,
    )
    mirostat: int = option(
        0,
        help="Mirostat version (1 or 2), instead of other samplers; 0: off.",
        allowed=Allowed(lambda x: x in (0, 1, 2), "0 (off), 1 or 2"),
        needs_sampling=True,
    )
    mirostat_tau: float = option(
        5.0, "--mirostat-ent", help="Mirostat: target entropy tau, in bits.", allowed=NOT_NEGATIVE
    )
    mirostat_eta: float = option(0.1, "--mirostat-lr", help="Mirostat: learning rate eta.", allowed=NOT_NEGATIVE)
    logit_bias: tuple[tuple[int, float], ...] = option(
        (),
        "-l",
        metavar="ID(+|-)BIAS",
        help="Add a bias to a token's logit, such as 15043+1 or 15043-inf; repeatable.",
        parse=parse_biases,
        repeatable=True,
        changes_logits=True,
    )
    grammar: str | None = option(
        None,
        metavar="GBNF",
        help="GBNF grammar that constrains the output; needs a rule named root.",
        changes_logits=True,
    )
    samplers: tuple[str, ...] = option(
        SAMPLERS,
        metavar="A;B;...",
        help=f"Samplers to use, in order; infill is also available; default: '{'; '.join(SAMPLERS)}'.",
        parse=parse_samplers,
    )

    def __post_init__(self) -> None:
        for name, setting in options(Sampling).items():
            value, valid = getattr(self, name), setting.allowed
            if valid is not None and not valid.accepts(value):
                raise ValueError(f"{name} must be {valid.description}, got {value}")
        for token, bias in self.logit_bias:
            if not (bias == -math.inf or abs(bias) <= LARGEST_BIAS):
                limits = f"from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}, or -inf"
                raise ValueError(f"the logit bias of token {token} must be {limits}, got {bias}")
        for text in self.dry_sequence_breakers:
            if not text or "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
                raise ValueError(f"dry_sequence_breakers must contain valid, non-empty text, got {text!r}")
            if (size := len(text.encode())) > _BREAKER_BYTES:
                raise ValueError(f"dry_sequence_breakers must have at most {_BREAKER_BYTES} bytes each, got {size}")
        if (count := len(self.dry_sequence_breakers)) > MAX_BREAKERS:
            raise ValueError(f"dry_sequence_breakers must contain at most {MAX_BREAKERS} texts, got {count}")
        self._check_samplers()
        if self.mirostat:
            names = self._find_changed(lambda setting: setting.sampler is not None)
            if names or self.samplers != SAMPLERS:
                raise ValueError(f"mirostat replaces the other samplers; remove {(*names, 'samplers')[0]}")
        if self.temperature == 0:
            for name in self._find_changed(lambda setting: setting.needs_sampling):
                raise ValueError(
                    f"{name} cannot be combined with temperature 0, which always takes the most likely token"
                )

    def _check_samplers(self) -> None:
        for name in self.samplers:
            if name not in SAMPLERS and name not in NAMED_ONLY:
                raise ValueError(
                    f"samplers: unknown sampler {name!r}; choose from: {', '.join((*SAMPLERS, *NAMED_ONLY))}"
                )
        if len(set(self.samplers)) < len(self.samplers):
            raise ValueError(f"samplers names one twice: {', '.join(self.samplers)}")
        for name in self._find_changed(lambda setting: setting.sampler not in (None, *self.samplers)):
            raise ValueError(f"{name} has no effect: samplers does not include {options(Sampling)[name].sampler}")
        if "temperature" not in self.samplers and self.temperature != 1:
            raise ValueError(f"temperature must be 1 if samplers does not include it, got {self.temperature}")
        if "infill" not in self.samplers:
            return
        if "top_k" not in self.samplers[: self.samplers.index("infill")]:
            raise ValueError("samplers: infill requires top_k before it, which limits the number of tokens to compare")
        if not 0 < self.top_k <= _MOST_COMPARED:
            raise ValueError(f"top_k must be 1 to {_MOST_COMPARED} with the sampler infill, got {self.top_k}")
        if self.grammar is not None:
            raise ValueError(
                "the sampler infill cannot be combined with a grammar, which may not allow the end of the text there"
            )

    def _find_changed(self, is_relevant: Callable[[Option], bool]) -> list[str]:
        """Return the names of the settings of a kind that do not have their default."""
        names = [name for name, setting in options(Sampling).items() if is_relevant(setting)]
        return [name for name in names if getattr(self, name) != self.__dataclass_fields__[name].default]

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken (after penalties, biases and grammar)."""
        return self.temperature == 0 and self.dynatemp_range == 0

    @property
    def changes_logits(self) -> bool:
        """True if penalties, biases, a grammar or infill can change which token is the most likely."""
        return "infill" in self.samplers or bool(self._find_changed(lambda setting: setting.changes_logits))

    @property
    def samples_internally(self) -> bool:
        """True if a sampler draws the token itself, with separate random numbers."""
        return self.mirostat != 0


# --------------------------------------------------------------------------- rules of one text


@dataclass(frozen=True, slots=True)
class ReasoningBlock:
    start: str  # opening tag
    end: str  # closing tag
    closing: tuple[int, ...]  # token ids that close the block: the message and the closing tag


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """Maximum number of tokens in each block of reasoning; `budget_for` makes it for a prompt."""

    limit: int  # tokens after the opening tag; 0 closes a block as soon as it is opened
    blocks: tuple[ReasoningBlock, ...]  # blocks that the model may open
    piece: Callable[[int], bytes] = field(repr=False)  # bytes of a token, names of control tokens included
    open_block: ReasoningBlock | None = None  # block that the prompt has opened
    used: int = 0  # tokens of the prompt after the opening tag of that block


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one text that depend on the tokens before, so that no logit bias can express them.

    Rules that vLLM also has are named like its fields. A whole number declared with `option` is an option of `complete`
    and `chat`, a setting of `/set`, a field of every HTTP API, and one of Ollama's `options`, without further code;
    `complete --beams` rejects it.
    """

    # Minimum number of tokens before the text may end, by a token or a stop string. Limits have priority: `max_tokens`,
    # the context, and those of the server's text readers.
    min_tokens: int = option(
        0,
        help="Minimum number of tokens before the text may end; stop strings within them do not count; 0: off.",
        allowed=allow_range(0),
    )
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end the text, in addition to those of the vocabulary
    bad_words: tuple[tuple[int, ...], ...] = ()  # forbidden sequences of token ids, of two or more tokens each
    reasoning: ReasoningBudget | None = None  # budget of reasoning; `None` means no limit

    @property
    def restriction(self) -> str:
        """Name of a rule that forbids or forces tokens; empty without one. `stop_token_ids` does neither."""
        if self.reasoning is not None:
            return "a reasoning budget"
        return "min_tokens" if self.min_tokens else "bad_words" if self.bad_words else ""


NO_RULES = TextRules()
