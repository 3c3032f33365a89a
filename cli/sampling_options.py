"""Options for sampling and for the acceptance of drafts, and their conversion into settings.

Options for settings of `Sampling` are built from the metadata of its fields: see `ngramspec.sampling.settings`.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from ngramspec import leaves
from ngramspec.acceptance.verifier import Acceptance
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import Sampling, option, options

from .console import fail, note, read_text, usage_error

T = TypeVar("T")

_SETTINGS = {item.name: item for item in fields(Sampling)}
_OPTIONS = options(Sampling)

CHAT_TEMPERATURE = 0.8
"""Default temperature of `chat` and `serve`, as in llama.cpp."""


def setting(name: str, default: Any) -> Any:
    """Return a field for a setting of `Sampling` with another default."""
    return field(default=default, metadata=_SETTINGS[name].metadata)


def _with_settings(group: type[T]) -> type[T]:
    """Make a class a dataclass whose first fields are the settings that the class does not define itself."""
    own, hints = inspect.get_annotations(group), get_type_hints(Sampling)
    annotations: dict[str, Any] = {}
    for name, spec in _OPTIONS.items():
        if name not in own:
            annotations[name] = hints[name] if spec.parse is None else (list[str] if spec.repeatable else str) | None
            setattr(group, name, setting(name, None if spec.parse is not None else _SETTINGS[name].default))
    group.__annotations__ = annotations | own
    return dataclass(frozen=True, slots=True)(group)


@_with_settings
class SamplingOptions:
    """Options for llama.cpp's samplers, in its default order, and for the acceptance of drafts."""

    grammar: str | None = setting("grammar", None)
    grammar_file: Path | None = option(
        None, metavar="FILE", help="File with a GBNF grammar that constrains the output."
    )
    json_schema: str | None = option(
        None, "-j", "--json-schema", metavar="JSON", help="JSON schema that constrains the output."
    )
    json_schema_file: Path | None = option(
        None, "-jf", "--json-schema-file", metavar="FILE", help="File with a JSON schema that constrains the output."
    )
    seed: int = setting("seed", -1)
    rule: Literal["coupled", "match", "rejection"] | None = option(
        None,
        "--acceptance",
        help="How drafts are accepted when sampling: coupled (default) or match reproduce the text of the"
        " seed; rejection preserves only the distribution.",
    )
    lenience: float = option(
        1.0, metavar="L", help="CHANGES THE OUTPUT: accept drafts up to 1/L times as readily; 1: off."
    )
    typical_acceptance: bool = option(
        False, help="CHANGES THE OUTPUT: accept drafts that are plausible enough (as in Medusa)."
    )

    def sampling(self) -> Sampling:
        """Return the requested sampling; the program ends if a value is out of range or two values conflict."""
        try:
            seed = random.SystemRandom().randrange(2**32) if self.seed == -1 else self.seed
            return self.settings({"seed": seed, "grammar": self._grammar()})
        except ValueError as error:
            usage_error(str(error))

    def settings(self, overrides: Mapping[str, Any]) -> Sampling:
        """Return the sampling with the values in `overrides` in place of the options."""
        values = dict(overrides)
        for name, spec in _OPTIONS.items():
            if name not in values and (value := getattr(self, name)) is not None:
                values[name] = spec.read(value)
        return Sampling(**values)

    def acceptance(self, sampling: Sampling, load: LoadSettings, restriction: str = "") -> Acceptance:
        """Return the acceptance of drafts and print a warning if it is lossy; see `TextRules.restriction`.

        The program ends if the acceptance conflicts with other options.
        """
        try:
            acceptance = Acceptance(self.rule, self.lenience, self.typical_acceptance)
            acceptance.rule(sampling, restriction)
        except ValueError as error:
            usage_error(str(error))
        if acceptance.lossy:
            note(f"warning: {acceptance.lossy}: drafts change the output")
            if load.no_draft:
                usage_error(f"{acceptance.lossy} cannot be combined with --no-draft")
        return acceptance

    def _grammar(self) -> str | None:
        sources = {
            "--grammar": self.grammar,
            "--grammar-file": self.grammar_file,
            "--json-schema": self.json_schema,
            "--json-schema-file": self.json_schema_file,
        }
        flags = [name for name, value in sources.items() if value is not None]
        if len(flags) > 1:
            usage_error(f"{' and '.join(flags)} cannot be combined")
        if not flags:
            return None
        value = sources[flags[0]]
        text = read_text(value) if isinstance(value, Path) else str(value)
        if not text.strip():
            fail(f"{flags[0]} is empty")
        return leaves.schema_grammar(text) if "schema" in flags[0] else text


def check_sampling(vocabulary: Vocabulary, sampling: Sampling, logprobs: int | None = None) -> None:
    """End the program early if the model does not support the sampling or has fewer tokens than `logprobs`."""
    try:
        vocabulary.sampler(sampling)
    except ValueError as error:
        usage_error(str(error))
    if logprobs is not None and logprobs > vocabulary.n_vocab:
        usage_error(f"--logprobs must be at most {vocabulary.n_vocab}, the size of the vocabulary, got {logprobs}")
