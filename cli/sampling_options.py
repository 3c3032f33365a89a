"""The options that choose a token and accept a draft, and what they are turned into."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.llama.grammar import schema_grammar
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import SAMPLERS, Sampling, parse_samplers

from .console import fail, note, read_text, usage_error

_BREAKERS = Sampling().dry_sequence_breakers
_BIAS = re.compile(r"(\d+)([+-].+)")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How a token is chosen. Commands with another default temperature subclass this."""

    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0: greedy.")] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0: off.")] = 40
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens with this mass; 1: off.")] = 0.95
    min_p: Annotated[float, typer.Option("--min-p", help="Least probability relative to the best; 0: off.")] = 0.05
    typical_p: Annotated[
        float, typer.Option("--typical-p", "--typical", help="Keep this mass of tokens of typical surprise; 1: off.")
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        typer.Option("--top-n-sigma", "--top-nsigma", help="Keep logits this many deviations below the best; -1: off."),
    ] = -1.0
    xtc_probability: Annotated[float, typer.Option("--xtc-probability", help="How often XTC acts; 0: off.")] = 0.0
    xtc_threshold: Annotated[
        float, typer.Option("--xtc-threshold", help="XTC drops all tokens above this but the last.")
    ] = 0.1
    dynatemp_range: Annotated[
        float, typer.Option("--dynatemp-range", help="Temperature plus or minus this, by entropy; 0: off.")
    ] = 0.0
    dynatemp_exp: Annotated[float, typer.Option("--dynatemp-exp", help="Exponent of dynamic temperature.")] = 1.0
    repeat_penalty: Annotated[
        float, typer.Option("--repeat-penalty", help="Divide the logits of recent tokens; 1: off.")
    ] = 1.0
    repeat_last_n: Annotated[
        int, typer.Option("--repeat-last-n", help="How many tokens are recent; 0: none, -1: the whole context.")
    ] = 64
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Taken off the logits of recent tokens; 0: off.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="Taken off once per recent occurrence; 0: off.")
    ] = 0.0
    dry_multiplier: Annotated[
        float, typer.Option("--dry-multiplier", help="DRY: penalty of repeated sequences; 0: off.")
    ] = 0.0
    dry_base: Annotated[float, typer.Option("--dry-base", help="DRY: growth of the penalty with the length.")] = 1.75
    dry_allowed_length: Annotated[
        int, typer.Option("--dry-allowed-length", help="DRY: length that goes unpunished.")
    ] = 2
    dry_penalty_last_n: Annotated[
        int, typer.Option("--dry-penalty-last-n", help="DRY: tokens looked at; 0: none, -1: the whole context.")
    ] = 64
    dry_sequence_breaker: Annotated[
        list[str] | None,
        typer.Option(
            "--dry-sequence-breaker",
            help="DRY: text that ends a sequence, for newline : \" and *; repeatable; 'none': no text.",
            show_default=False,
        ),
    ] = None
    mirostat: Annotated[int, typer.Option("--mirostat", help="1 or 2: mirostat instead of filters; 0: off.")] = 0
    mirostat_lr: Annotated[float, typer.Option("--mirostat-lr", help="Mirostat: learning rate eta.")] = 0.1
    mirostat_ent: Annotated[float, typer.Option("--mirostat-ent", help="Mirostat: target surprise tau, in bits.")] = 5.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "-l",
            "--logit-bias",
            metavar="ID(+|-)BIAS",
            help="Add to a token's logit: 15043+1, 15043-inf; repeatable.",
            show_default=False,
        ),
    ] = None
    grammar: Annotated[
        str | None, typer.Option("--grammar", metavar="GBNF", help="Grammar of the text.", show_default=False)
    ] = None
    grammar_file: Annotated[
        Path | None, typer.Option("--grammar-file", metavar="FILE", help="The same, from a file.", show_default=False)
    ] = None
    json_schema: Annotated[
        str | None,
        typer.Option("-j", "--json-schema", metavar="JSON", help="JSON schema of the text.", show_default=False),
    ] = None
    json_schema_file: Annotated[
        Path | None,
        typer.Option("-jf", "--json-schema-file", metavar="FILE", help="The same, from a file.", show_default=False),
    ] = None
    samplers: Annotated[
        str | None,
        typer.Option(
            "--samplers",
            metavar="A;B;...",
            help=f"Samplers and their order; default: {';'.join(SAMPLERS)}.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[int, typer.Option("-s", "--seed", help="Seed; -1: a random one, shown afterwards.")] = -1
    verify: Annotated[
        Literal["coupled", "match", "rejection"] | None,
        typer.Option(
            help="Above temperature 0: coupled (default), match (both keep a seed's text) or rejection.",
            show_default=False,
        ),
    ] = None
    lenience: Annotated[
        float, typer.Option("--lenience", metavar="L", help="CHANGES THE OUTPUT: accept drafts 1/L times as readily.")
    ] = 1.0
    typical_acceptance: Annotated[
        bool, typer.Option("--typical-acceptance", help="CHANGES THE OUTPUT: accept drafts that are plausible enough.")
    ] = False

    def sampling(self) -> Sampling:
        """The sampling asked for; ends the program if a value is out of its range, or two contradict each other."""
        try:
            return Sampling(
                temperature=self.temp,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self._seed(),
                typical_p=self.typical_p,
                top_n_sigma=self.top_n_sigma,
                xtc_probability=self.xtc_probability,
                xtc_threshold=self.xtc_threshold,
                dynatemp_range=self.dynatemp_range,
                dynatemp_exponent=self.dynatemp_exp,
                repeat_penalty=self.repeat_penalty,
                repeat_last_n=self.repeat_last_n,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                dry_multiplier=self.dry_multiplier,
                dry_base=self.dry_base,
                dry_allowed_length=self.dry_allowed_length,
                dry_penalty_last_n=self.dry_penalty_last_n,
                dry_sequence_breakers=self._breakers(),
                mirostat=self.mirostat,
                mirostat_tau=self.mirostat_ent,
                mirostat_eta=self.mirostat_lr,
                logit_bias=tuple(map(_bias, self.logit_bias or ())),
                grammar=self._grammar(),
                samplers=SAMPLERS if self.samplers is None else parse_samplers(self.samplers),
            )
        except ValueError as error:
            usage_error(str(error))

    def acceptance(self, sampling: Sampling) -> Acceptance:
        """How drafts are to be accepted; ends the program if that contradicts itself, and tells of a lossy one."""
        try:
            acceptance = Acceptance(self.verify, self.lenience, self.typical_acceptance)
            acceptance.resolve(sampling)
        except ValueError as error:
            usage_error(str(error))
        if acceptance.lossy:
            note(f"{acceptance.lossy}: drafts change the output")
        return acceptance

    def reseeded(self, sampling: Sampling) -> Sampling:
        """The same with another random seed, unless the user chose one."""
        return replace(sampling, seed=self._seed())

    def _seed(self) -> int:
        return random.SystemRandom().randrange(2**32) if self.seed == -1 else self.seed

    def _breakers(self) -> tuple[str, ...]:
        if self.dry_sequence_breaker is None:
            return _BREAKERS
        return () if self.dry_sequence_breaker == ["none"] else tuple(self.dry_sequence_breaker)

    def _grammar(self) -> str | None:
        named = {
            "--grammar": self.grammar,
            "--grammar-file": self.grammar_file,
            "--json-schema": self.json_schema,
            "--json-schema-file": self.json_schema_file,
        }
        given = [name for name, value in named.items() if value is not None]
        if len(given) > 1:
            usage_error(f"{' and '.join(given)} exclude each other")
        if not given:
            return None
        value = named[given[0]]
        text = read_text(value) if isinstance(value, Path) else str(value)
        if not text.strip():
            fail(f"{given[0]}: there is nothing in it")
        return schema_grammar(text) if "schema" in given[0] else text


def check_sampling(vocabulary: Vocabulary, sampling: Sampling, logprobs: int | None = None) -> None:
    """End the program if this model cannot sample so, or has fewer tokens than `logprobs`, before any work is done."""
    try:
        vocabulary.sampler(sampling)
    except ValueError as error:
        usage_error(str(error))
    if logprobs is not None and logprobs > vocabulary.n_vocab:
        usage_error(f"--logprobs is {logprobs}, but the vocabulary has {vocabulary.n_vocab} tokens")


def _bias(text: str) -> tuple[int, float]:
    parts = _BIAS.fullmatch(text.replace(" ", ""))
    try:
        if parts is None:
            raise ValueError
        return int(parts[1]), float(parts[2])
    except ValueError:
        usage_error(f"-l/--logit-bias {text!r} is no token id with a bias; it looks like 15043+1 or 15043-inf")
