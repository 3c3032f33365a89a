"""Options shared by several commands, with the names of llama.cpp's options, and their conversion into settings.

`ngramspec.sampling.settings.option` declares an option, as a field of a dataclass or as the default of a command's
parameter. A group of options is a dataclass. A command takes the whole group as one parameter, and `expand_groups`
turns its fields into options for typer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from ngramspec import leaves
from ngramspec.data import NGramSpecError
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading.load import Display, find_file
from ngramspec.loading.settings import DRAFTING, GPUS, LOADING, LoadSettings
from ngramspec.model_settings import ALL, Flash, LoadSettingsError
from ngramspec.model_settings import AUTO as AUTO_LAYERS
from ngramspec.models.check import check_complete
from ngramspec.sampling.settings import KEY, Sampling, TextRules, option, options, resolve_flags

from .console import defer_signals, note, usage_error
from .models import complete_model
from .show import download_bar

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
    None, "--prompts", metavar="DIR|FILE", help="Folder or file with prompts; default: the packaged prompts."
)
TRACE: Path | None = option(
    None, "--trace", metavar="FILE", help="Record every decode call in FILE; show it with ngramspec trace."
)
STOP: list[str] | None = option(None, "--stop", help="Stop before this text; repeatable.")

NO_LIMIT = 2**31
"""Token limit that is larger than any context."""


def choose_model(argument: str | None, model_option: str | None) -> str | None:
    """Return the model that the argument or -m/--model names; the program ends if both do."""
    if argument is not None and model_option is not None:
        usage_error(f"two models were given: {argument} and -m {model_option}; remove one")
    return argument if model_option is None else model_option


def check_predict(predict: int) -> int:
    """Return the maximum number of tokens to generate, with `NO_LIMIT` in place of -1."""
    if predict != -1 and predict < 1:
        usage_error(f"-n/--predict must be at least 1, or -1 (until the context is full), got {predict}")
    return predict if predict > 0 else NO_LIMIT


def check_stop(stop: list[str] | None) -> tuple[str, ...]:
    """Return the stop strings; the program ends if one is empty."""
    if any(not text for text in stop or ()):
        usage_error("--stop must not be empty")
    return tuple(stop or ())


DISPLAY = Display(note, download_bar, defer_signals)
"""Output of loading: notes on stderr, progress of downloads, and signals that are deferred while weights are loaded."""


def open_vocabulary(file: Path | None, model: str | None, note_start: str) -> Vocabulary:
    """Load the vocabulary of a GGUF file, which needs no weights, or of a model if `file` is `None`.

    If `model` is `None` too, a note that begins with `note_start` names the default model.
    """
    if file is None:
        source = find_file(model, LoadSettings(), DISPLAY)  # converts as chats do
        if source.fallback:
            note(f"{note_start} {source.fallback}")
        file = source.path
    else:
        check_complete(file)
    with defer_signals():
        return Vocabulary(file)


def keep(memory: leaves.Memory | None, tokens: Sequence[int]) -> None:
    """Save an answer for later sessions; a failure prints a warning and does not end the program."""
    if memory is None:
        return
    try:
        memory.save_answer(tokens)
    except NGramSpecError as error:
        note(f"warning: this answer is not saved for later sessions: {error}")


# --------------------------------------------------------------------------- groups of options

COMMON = (
    *("diff", "write", "open_page", "prompts", "file", "text_file", "prompt", "prompt_text", "system"),
    *("host", "port", "parallel", "predict", "ctx_size", "gpu_layers", "no_draft", "temperature", "seed", "help"),
)
"""Options that people use first, which precede all others in the help of a command."""

_GRAMMAR = "grammar", "grammar_file", "json_schema", "json_schema_file"
_ACCEPTANCE = "rule", "lenience", "typical_acceptance"

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
    "Drafting": (*DRAFTING, *_ACCEPTANCE),
    "Chat template and reasoning": (
        *("chat_template", "chat_template_file", "chat_template_kwargs"),
        *("reasoning", "reasoning_budget", "reasoning_budget_message"),
    ),
    "Grammars": _GRAMMAR,
    "Sampling": (*(name for name in options(Sampling) if name not in _GRAMMAR), *options(TextRules), "stop"),
}
"""Names of options by the heading of their group; a command's other options are its own."""

_FLAGS = {name: spec.flags[0] for name, spec in options(LoadSettings).items()}
AUTO = "auto"


def parse_threads(text: str) -> int | None:
    """Return a number of threads, or `None` for "auto"."""
    if text == AUTO:
        return None
    with suppress(ValueError):
        if (number := int(text)) > 0:
            return number
    raise ValueError(f"{text!r} is neither a whole number of at least 1 nor {AUTO!r}")


def parse_layers(text: str) -> int:
    """Return a number of layers, or llama.cpp's numbers for "all" and "auto"."""
    numbers = {AUTO: AUTO_LAYERS, "all": ALL}
    try:
        return numbers[text] if text in numbers else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number, 'all' or {AUTO!r}") from None


def parse_flash(text: str) -> Flash:
    """Return a setting of flash attention from any of llama.cpp's words for it."""
    for value, words in _FLASH_WORDS.items():
        if text in words:
            return value
    raise ValueError(f"{text!r} is not one of: {', '.join(_FLASH_WORDS)}")


_FLASH_WORDS: Mapping[Flash, tuple[str, ...]] = {
    "on": ("on", "enabled", "true", "1"),
    "off": ("off", "disabled", "false", "0"),
    "auto": (AUTO, "-1"),
}

PLACEHOLDERS = {int: "N", float: "N", Path: "FILE", str: "TEXT"}
"""Placeholders of values in the help, by type."""

_TYPERS: dict[str, dict[str, Any]] = {
    "threads": {"parser": parse_threads},
    "gpu_layers": {"parser": parse_layers},
    "gpu_layers_draft": {"parser": parse_layers},
    "flash_attn": {"parser": parse_flash},
    "draft_model": {"autocompletion": complete_model},
    "model_option": {"autocompletion": complete_model},
    "api_key": {"envvar": "NGRAMSPEC_API_KEY", "show_envvar": False},
}
"""Additional arguments for typer by option name."""


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """End the program if settings conflict; the message names them by their flags."""
    try:
        yield
    except LoadSettingsError as error:
        usage_error(error.message(_FLAGS))


def _placeholder(hint: Any) -> str | None:
    """Return the placeholder of a value of a type in the help; `None` for a flag."""
    kinds = [kind for kind in (hint, *get_args(hint)) if kind is not type(None)]
    if choices := next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ()):
        return "|".join(choices)
    kinds += [item for kind in kinds for item in get_args(kind)]
    return next((text for kind, text in PLACEHOLDERS.items() if kind in kinds), None)


def _parameter(name: str, hint: Any, field: Field[Any], override: str | Field[Any] | None = None) -> inspect.Parameter:
    """Return the parameter for typer of a field that `option` made; `override` replaces the field or its help."""
    field = override if isinstance(override, Field) else field
    spec = resolve_flags(name, field.metadata[KEY])
    # A default that is None or parsed from text means nothing to the user; the help text describes it instead.
    show_default = spec.parse is None and field.default is not None
    minimum, maximum = (None, None) if spec.allowed is None else (spec.allowed.minimum, spec.allowed.maximum)
    option_info = typer.Option(
        *spec.flags,
        help=override if isinstance(override, str) else spec.help,
        metavar=spec.metavar or _placeholder(hint),
        hidden=spec.is_hidden,
        show_default=show_default,
        **_TYPERS.get(name, {"min": minimum, "max": maximum}),
    )
    default = field.default
    if _is_parsed(field):
        hint, default = list[str] | None, None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option_info]
    )


def _is_parsed(field: Field[Any]) -> bool:
    """Return True if a field contains values read from the typed texts; sampling options read theirs themselves."""
    return field.metadata[KEY].repeatable and field.default is not None


def _group_parameters(group: Any, *selections: Any) -> list[inspect.Parameter]:
    names = next((selection for selection in selections if isinstance(selection, tuple)), tuple(options(group)))
    overrides = next((selection for selection in selections if isinstance(selection, Mapping)), {})
    hints = get_type_hints(group)
    return [_parameter(f.name, hints[f.name], f, overrides.get(f.name)) for f in fields(group) if f.name in names]


def _build_group(group: Any, values: dict[str, Any]) -> Any:
    for field in fields(group):
        if field.name in values and _is_parsed(field):
            values[field.name] = field.metadata[KEY].read(values[field.name] or ())
    return group(**values)


def expand_groups(command: Command) -> Command:
    """Return a command with an option for each field of the groups among a command's parameters.

    Invariant: typer calls the result with a value for each parameter of its `__signature__`: those of `command` in
    their order, each group replaced by its fields. The result calls `command` with the same values, those of a group
    as an instance of it.

    A group is a dataclass. `load: Annotated[LoadSettings, ("threads", "ctx_size"), {"ctx_size": "..."}]` selects
    fields by name, and maps names to another help text or to a field that replaces the original. A command with a
    `Model` gets the option -m too.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    has_model = False
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        hint = parameter.annotation
        group, *selections = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(group):
            own = _group_parameters(group, *selections)
            groups[name] = group, [field.name for field in own]
            parameters += own
        elif isinstance(parameter.default, Field):
            parameters.append(_parameter(name, hint, parameter.default))
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            if hint == Model:
                parameters.append(_parameter("model_option", str | None, MODEL))
                has_model = True

    def spread(**values: Any) -> None:
        if has_model:
            values["model"] = choose_model(values["model"], values.pop("model_option"))
        with flags_in_errors():
            for name, (group, names) in groups.items():
                values[name] = _build_group(group, {field: values.pop(field) for field in names})
            command(**values)

    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread  # type: ignore[return-value]
