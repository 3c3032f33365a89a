"""Options shared by several commands, with the names of llama.cpp's options, and their conversion into settings.

`ngramspec.sampling.settings.option` declares an option, as a field of a dataclass or as the default of a command's
parameter. A command takes a dataclass as one parameter, and `expand_groups` turns its fields into options for typer.
"""

from __future__ import annotations

import inspect
import math
import os
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypeVar, get_args, get_origin, get_type_hints

import typer

from ngramspec import leaves
from ngramspec.acceptance.verifier import Acceptance
from ngramspec.data import NGramSpecError
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading.load import Display, find_file
from ngramspec.loading.settings import DRAFTING, GPUS, LOADING, LoadSettings
from ngramspec.model_settings import ALL, LoadSettingsError
from ngramspec.model_settings import AUTO as AUTO_LAYERS
from ngramspec.models.check import check_complete
from ngramspec.models.find import is_model_argument
from ngramspec.sampling.settings import KEY, Allowed, Sampling, TextRules, option, options, resolve_flags
from ngramspec.steps import Step

from .console import defer_signals, fail, note, read_text, usage_error, usage_errors
from .models import complete_model
from .show import progress_bars

Command = TypeVar("Command", bound=Callable[..., None])

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete_model,
        help="GGUF file, hf:USER/REPO:QUANT, lmstudio:USER/MODEL, ollama:NAME:TAG, smollm2;"
        " default: $NGRAMSPEC_MODEL, smollm2 or a toy model.",
    ),
]

MODEL: Any = option(None, "-m", "--model", metavar="MODEL", help="Model, instead of the argument MODEL.")
"""Option that `expand_groups` adds to each command with a `Model`."""

PROMPTS: Path | None = option(
    None, metavar="DIR|FILE", help="Folder or file with prompts; default: the packaged prompts."
)
TRACE: Path | None = option(None, help="Record every decode call in FILE; show it with ngramspec trace.")


def predict_option(default: int | None, help: str) -> Any:
    allowed = Allowed(lambda n: n == -1 or n > 0, "at least 1, or -1 (until the context is full)")
    return option(default, "-n", "--predict", "--n-predict", help=help, allowed=allowed)


def parse_stop(texts: Sequence[str]) -> tuple[str, ...]:
    if not all(texts):
        raise LoadSettingsError("{stop} must not be empty")
    return tuple(texts)


STOP: tuple[str, ...] = option((), help="Stop before this text; repeatable.", parse=parse_stop, repeatable=True)


def choose_model(argument: str | None, model_option: str | None) -> str | None:
    if argument is not None and model_option is not None:
        usage_error(f"two models were given: {argument} and -m {model_option}; remove one")
    return argument if model_option is None else model_option


def is_model(argument: str) -> bool:
    """Return True if an argument names a model; the name of a missing file decides, since its bytes are unknown."""
    return is_model_argument(argument) or (argument.endswith(".gguf") and not os.path.exists(argument))


def draw_seed() -> int:
    return random.SystemRandom().randrange(2**32)


def token_limit(predict: int) -> int:
    """Return the maximum number of tokens to generate; for -1, one that is larger than any context."""
    return predict if predict > 0 else 2**31


DISPLAY = Display(note, progress_bars, defer_signals)
"""Output of loading: notes on stderr, progress of downloads, and signals that are deferred while weights are loaded."""


def open_vocabulary(file: Path | None, model: str | None, note_start: str) -> Vocabulary:
    """Load the vocabulary of a file without weights, of a model, or of the default model, with a note that names it."""
    if file is None:
        source = find_file(model, LoadSettings(), DISPLAY)  # converts as chats do
        if source.fallback:
            note(f"{note_start} {source.fallback}")
        file = source.path
    else:
        check_complete(file)
    with defer_signals():
        return Vocabulary(file)


def keep(memory: leaves.Memory | None, vocabulary: Vocabulary, steps: Sequence[Step]) -> list[int]:
    """Save an answer for later sessions and return its tokens; a failure only prints a warning."""
    tokens = [token for step in steps for token in step.tokens if not vocabulary.is_eog(token)]
    try:
        if memory is not None:
            memory.save_answer(tokens)
    except NGramSpecError as error:
        note(f"warning: this answer is not saved for later sessions: {error}")
    return tokens


COMMON = (
    *("diff", "write", "open_page", "prompts", "file", "text_file", "prompt", "prompt_text", "system"),
    *("host", "port", "parallel", "predict", "ctx_size", "gpu_layers", "no_draft", "temperature", "seed", "help"),
)
"""Options that people use first, which precede all others in the help of a command."""

_GRAMMAR = "grammar", "grammar_file", "json_schema", "json_schema_file"

GROUPS = {
    "Output files": ("markdown", "svg", "html", "as_json"),
    "Address and access": (
        *("host", "port", "api_key", "api_key_file", "ssl_key_file", "ssl_cert_file", "cors", "allow_host"),
        *("alias", "tags", "no_ui", "no_slots", "metrics", "verbose"),
    ),
    "Requests": ("parallel", "batch_size", "cache_ram", "slot_save_path", "spm_infill"),
    "Embeddings": ("embeddings", "pooling", "embd_normalize"),
    "Model": ("model_option", *(name for name in LOADING if name not in GPUS)),
    "GPUs and other machines": GPUS,
    "Drafting": (*DRAFTING, "rule", "lenience", "typical_acceptance"),
    "Chat template and reasoning": (
        *("chat_template", "chat_template_file", "chat_template_kwargs"),
        *("reasoning", "reasoning_budget", "reasoning_budget_message"),
    ),
    "Grammars": _GRAMMAR,
    "Sampling": (*(name for name in options(Sampling) if name not in _GRAMMAR), *options(TextRules), "stop"),
}
"""Names of options by the heading of their group; a command's other options are its own."""

AUTO = "auto"


def _reader(values: Mapping[str, Any], minimum: float, message: str) -> Callable[[str], Any]:
    """Return a parser of words and of whole numbers from a minimum on; `message` continues the error."""

    def read(text: str) -> Any:
        if text in values:
            return values[text]
        with suppress(ValueError):
            if int(text) >= minimum:
                return int(text)
        raise ValueError(f"{text!r} {message}")

    return read


_read_layers = _reader({AUTO: AUTO_LAYERS, "all": ALL}, -math.inf, f"is not a whole number, 'all' or {AUTO!r}")
_FLASH_WORDS = {"on": "on enabled true 1", "off": "off disabled false 0", AUTO: f"{AUTO} -1"}  # llama.cpp's
_FLASH = {word: value for value, words in _FLASH_WORDS.items() for word in words.split()}

PLACEHOLDERS = {int: "N", float: "N", Path: "FILE", str: "TEXT"}

_TYPERS: dict[str, dict[str, Any]] = {
    "threads": {"parser": _reader({AUTO: None}, 1, f"is neither a whole number of at least 1 nor {AUTO!r}")},
    "gpu_layers": {"parser": _read_layers},
    "gpu_layers_draft": {"parser": _read_layers},
    "flash_attn": {"parser": _reader(_FLASH, math.inf, f"is not one of: {', '.join(_FLASH_WORDS)}")},
    "draft_model": {"autocompletion": complete_model},
    "model_option": {"autocompletion": complete_model},
    "api_key": {"envvar": "NGRAMSPEC_API_KEY", "show_envvar": False},
}
"""Additional arguments for typer by option name."""


def _placeholder(hint: Any) -> str | None:
    """Return the placeholder of a value of a type in the help; `None` for a flag."""
    kinds = [kind for kind in (hint, *get_args(hint)) if kind is not type(None)]
    if choices := next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ()):
        return "|".join(choices)
    kinds += [item for kind in kinds for item in get_args(kind)]
    return next((text for kind, text in PLACEHOLDERS.items() if kind in kinds), None)


def _parameter(name: str, hint: Any, declaration: Field[Any]) -> inspect.Parameter:
    spec, default = resolve_flags(name, declaration.metadata[KEY]), declaration.default
    more = _TYPERS.get(name, {})
    if spec.allowed is not None and "parser" not in more:
        more = {"min": spec.allowed.minimum, "max": spec.allowed.maximum, **more}
    option_info = typer.Option(
        *spec.flags,
        help=spec.help,
        metavar=spec.metavar or _placeholder(hint),
        hidden=spec.is_hidden,
        # A default that is None or parsed from text means nothing to the user; the help text describes it instead.
        show_default=spec.parse is None and default is not None,
        **more,
    )
    if _is_parsed(declaration):
        hint, default = list[str] | None, None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option_info]
    )


def _is_parsed(declaration: Field[Any]) -> bool:
    """Return True if a field contains values read from the typed texts; sampling options read theirs themselves."""
    return declaration.metadata[KEY].repeatable and declaration.default is not None


def _select_fields(group: Any, *selections: Any) -> dict[str, tuple[Any, Field[Any]]]:
    """Return the types and declarations of the selected fields of a group; see `expand_groups`."""
    names = next((selection for selection in selections if isinstance(selection, tuple)), tuple(options(group)))
    overrides = next((selection for selection in selections if isinstance(selection, Mapping)), {})
    hints, result = get_type_hints(group), dict[str, tuple[Any, Field[Any]]]()
    for item in fields(group):
        override = overrides.get(item.name, item)
        if isinstance(override, str):
            override = field(default=item.default, metadata={KEY: replace(item.metadata[KEY], help=override)})
        if item.name in names:
            result[item.name] = hints[item.name], override
    return result


def expand_groups(command: Command) -> Command:
    """Return a command with an option for each field of the groups among a command's parameters.

    typer calls the result with a value for each parameter of its `__signature__`, in which each group is replaced by
    its fields. The result calls `command` with these values, those of a group as an instance of it.

    A group is a dataclass. `load: Annotated[LoadSettings, ("threads", "ctx_size"), {"ctx_size": "..."}]` selects
    fields by name, and maps names to another help text or to a field that replaces the original. A command with a
    `Model` gets the option -m too.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    declared: dict[str, tuple[Any, Field[Any]]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        hint, own = parameter.annotation, dict[str, tuple[Any, Field[Any]]]()
        group, *selections = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(group):
            own = _select_fields(group, *selections)
            groups[name] = group, [*own]
        elif isinstance(parameter.default, Field):
            own = {name: (hint, parameter.default)}
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            if hint == Model:
                own = {"model_option": (str | None, MODEL)}
        declared |= own
        parameters += [_parameter(each, *declaration) for each, declaration in own.items()]
    has_model = any(parameter.annotation == Model for parameter in parameters)
    specs = {name: resolve_flags(name, declaration.metadata[KEY]) for name, (_, declaration) in declared.items()}
    parsed = [name for name, (_, declaration) in declared.items() if _is_parsed(declaration)]
    unchecked = specs.keys() - options(Sampling).keys() - options(LoadSettings).keys()  # by the classes of groups

    def spread(**values: Any) -> None:
        if has_model:
            values["model"] = choose_model(values["model"], values.pop("model_option"))
        for name in unchecked & values.keys():
            spec, value = specs[name], values[name]
            if value is not None and spec.allowed is not None and not spec.allowed.accepts(value):
                usage_error(f"{'/'.join(spec.flags[:2])} must be {spec.allowed.description}, got {value}")
        try:
            for name in parsed:
                values[name] = specs[name].read(values[name] or ())
            for name, (group, names) in groups.items():
                values[name] = group(**{each: values.pop(each) for each in names})
            command(**values)
        except LoadSettingsError as error:  # settings conflict
            known = {**options(LoadSettings), **specs}
            usage_error(error.message({name: spec.flags[0] for name, spec in known.items()}))

    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread  # type: ignore[return-value]


_SETTINGS = {item.name: item for item in fields(Sampling)}
_OPTIONS = options(Sampling)

CHAT_TEMPERATURE = 0.8  # of `chat` and `serve`, as in llama.cpp


def setting(name: str, default: Any) -> Any:
    return field(default=default, metadata=_SETTINGS[name].metadata)


def _sampling_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings of `Sampling`; those that are parsed are texts here, or `None`."""
    hints = get_type_hints(Sampling)
    for name, spec in _OPTIONS.items():
        if spec.parse is None:
            yield name, hints[name], setting(name, _SETTINGS[name].default)
        else:
            yield name, (list[str] if spec.repeatable else str) | None, setting(name, None)


@dataclass(frozen=True)
class SamplingOptions(make_dataclass("_Settings", _sampling_fields(), frozen=True)):  # type: ignore[misc]
    """Options for llama.cpp's samplers, in its default order, and for the acceptance of drafts."""

    grammar: str | None = setting("grammar", None)
    grammar_file: Path | None = option(None, help="File with a GBNF grammar that constrains the output.")
    json_schema: str | None = option(None, "-j", metavar="JSON", help="JSON schema that constrains the output.")
    json_schema_file: Path | None = option(None, "-jf", help="File with a JSON schema that constrains the output.")
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

    def settings(self, overrides: Mapping[str, Any]) -> Sampling:
        """Return the sampling with the values in `overrides` in place of the options."""
        values = dict(overrides)
        with usage_errors():
            for name, spec in _OPTIONS.items():
                if name not in values and (value := getattr(self, name)) is not None:
                    values[name] = spec.read(value)
            return Sampling(**values)

    def choose(self, load: LoadSettings, restriction: str = "") -> tuple[Sampling, Acceptance]:
        """Return the sampling, with a random seed for -1, and the acceptance of drafts; see `TextRules.restriction`."""
        seed = draw_seed() if self.seed == -1 else self.seed
        sampling = self.settings({"seed": seed, "grammar": self._grammar()})
        with usage_errors():
            acceptance = Acceptance(self.rule, self.lenience, self.typical_acceptance)
            acceptance.rule(sampling, restriction)
        if acceptance.lossy:
            note(f"warning: {acceptance.lossy}: drafts change the output")
            if load.no_draft:
                usage_error(f"{acceptance.lossy} cannot be combined with --no-draft")
        return sampling, acceptance

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
    with usage_errors():
        vocabulary.sampler(sampling)
    if logprobs is not None and logprobs > vocabulary.n_vocab:
        usage_error(f"--logprobs must be at most {vocabulary.n_vocab}, the size of the vocabulary, got {logprobs}")


_ROWS = tomllib.loads(Path(__file__).with_name("llama_options.toml").read_text("utf-8"))

REASONS = {flag: reason for flags, reason in _ROWS["unsupported"].items() for flag in flags.split()}
"""Reasons why options are rejected, by flag."""


def _fields_without_effect() -> Iterator[tuple[str, Any, Any]]:
    """Yield a field for each row: a flag, or a value with choices or any value, which are the row's last word."""
    for words, reason in (_ROWS["always"] | _ROWS["no_effect"]).items():
        flags = [word for word in words.split() if word.startswith("-")]
        name = next(flag for flag in flags if flag.startswith("--")).removeprefix("--").replace("-", "_")
        values = [word.split("|") for word in words.split() if not word.startswith("-")]
        hint: Any = bool
        if values:
            hint = Optional[str if len(values[0]) == 1 else Literal[tuple(values[0])]]  # noqa: UP045 - made at run time
        yield name, hint, option(None if values else False, *flags, help=reason, is_hidden=True)


@dataclass(frozen=True)
class NoEffect(make_dataclass("_Flags", _fields_without_effect(), frozen=True)):  # type: ignore[misc]
    """Options of llama-server that are accepted and change nothing; cli/README.md lists them."""

    def report(self) -> None:
        """Print a note for each given option that users could expect to have an effect."""
        silent = {word for words in _ROWS["always"] for word in words.split()}
        for name, spec in options(NoEffect).items():
            flag = f"--{name.replace('_', '-')}"
            if getattr(self, name) and flag not in silent:
                note(f"{flag} has no effect: {spec.help}")


SHORT = {
    flag
    for group in (LoadSettings, NoEffect)
    for spec in options(group).values()
    for flag in spec.flags
    if len(flag) > 2 and not flag.startswith("--")
}
"""Short options of several letters, which some commands lack."""
