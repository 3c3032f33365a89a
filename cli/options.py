"""The options that commands share, named as llama.cpp users know them, and what they are turned into.

An option is told by `ngramspec.sampling.option.option`, as a field of a dataclass or as the default of a command's
parameter. A group of options is a dataclass; a command takes the whole group as one parameter, and `grouped` makes all
of them options that typer sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading import load as loading
from ngramspec.loading.load import LoadedModel
from ngramspec.loading.settings import LoadSettings, LoadSettingsError
from ngramspec.machine import Flash
from ngramspec.memory import Memory, MemoryFileError
from ngramspec.models.check import check_whole
from ngramspec.models.find import ModelSource, resolve
from ngramspec.sampling.option import KEY, named, option, options

from .console import download_bar, note, signals_deferred, usage_error
from .models import complete_model

Command = TypeVar("Command", bound=Callable[..., None])

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete_model,
        help="GGUF file, hf:owner/repo:file-or-quant, ollama:NAME:TAG, lmstudio:PUBLISHER/MODEL or smollm2;"
        " default: $NGRAMSPEC_MODEL, then smollm2 if installed, then the demo model.",
    ),
]

PROMPTS: Path | None = option(
    None, "--prompts", metavar="DIR|FILE", help="Folder or file with prompts; default: the packaged prompts."
)
TRACE: Path | None = option(
    None, "--trace", metavar="FILE", help="Record every decode call in FILE; show it with ngramspec trace."
)
STOP: list[str] | None = option(None, "--stop", help="Stop before this text; repeatable.")

NO_LIMIT = 2**31
"""More tokens than any context holds."""


def check_predict(predict: int) -> int:
    """Most tokens to generate, -1 turned into more than any context holds."""
    if predict != -1 and predict < 1:
        usage_error(f"-n/--predict must be at least 1, or -1 (until the context is full), got {predict}")
    return predict if predict > 0 else NO_LIMIT


def check_stop(stop: list[str] | None) -> tuple[str, ...]:
    """The stop strings; ends the program if one is empty."""
    if any(not text for text in stop or ()):
        usage_error("--stop must not be empty")
    return tuple(stop or ())


# --------------------------------------------------------------------------- models


def find(model: str | None, settings: LoadSettings) -> ModelSource:
    """Find, fetch if need be, and check a model and its draft model; a note on stderr says which if none is named."""
    with download_bar() as progress, flags_in_errors():
        found = loading.find(model, settings, progress)
    if found.fallback:
        note(f"no model given; using {found.label}")
    return found


def open_found(
    found: ModelSource, settings: LoadSettings, *, learn: bool = True, remember: bool = False
) -> LoadedModel:
    """See `ngramspec.loading.load.open_found`; what the user should know goes to stderr."""
    with signals_deferred():
        return loading.open_found(found, settings, on_note=note, learn=learn, remember=remember)


def open_target(model: ModelSource, settings: LoadSettings, *, n_seq: int | None = None, head: bool = False) -> Target:
    """Load a model alone, under the settings that are kept for it."""
    settings, _ = loading.tuned(model.path, settings, note)
    with signals_deferred():
        return loading.open_target(model.path, settings, note, n_seq=n_seq, head=head)


def open_vocabulary(file: Path | None, model: str | None, unnamed: str) -> Vocabulary:
    """The vocabulary of `file`, with weights or without; if that is None, the one of `model`.

    If none is named either, a note on stderr begins with `unnamed`.
    """
    if file is None:
        with download_bar() as progress:
            source = resolve(model, progress=progress)
        if source.fallback:
            note(f"{unnamed} {source.label}")
        file = source.path
    else:
        check_whole(file)
    with signals_deferred():
        return Vocabulary(file)


def keep(memory: Memory | None, tokens: Sequence[int]) -> None:
    """Keep an answer for later sessions; failing to keep one does not end anything."""
    if memory is None:
        return
    try:
        memory.keep(tokens)
    except MemoryFileError as error:
        note(f"warning: this answer is not saved for later sessions: {error}")


# --------------------------------------------------------------------------- groups of options

_FLAGS = {name: known.flags[0] for name, known in options(LoadSettings).items()}
AUTO = "auto"


def parse_threads(text: str) -> int | None:
    """Return a number of threads, or `None` for "auto"; raises ValueError."""
    if text == AUTO:
        return None
    with suppress(ValueError):
        if (number := int(text)) > 0:
            return number
    raise ValueError(f"{text!r} is neither a whole number of at least 1 nor {AUTO!r}")


def parse_layers(text: str) -> int:
    """Return a number of layers, -1 for "all" and "auto"; raises ValueError."""
    try:
        return -1 if text in ("all", AUTO) else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number, 'all' or {AUTO!r}") from None


def parse_flash(text: str) -> Flash:
    """Return a setting of flash attention from any of llama.cpp's words for it; raises ValueError."""
    for value, words in _FLASH_WORDS.items():
        if text in words:
            return value
    raise ValueError(f"{text!r} is not one of: {', '.join(_FLASH_WORDS)}")


_FLASH_WORDS: Mapping[Flash, tuple[str, ...]] = {
    "on": ("on", "enabled", "true", "1"),
    "off": ("off", "disabled", "false", "0"),
    "auto": (AUTO, "-1"),
}

_TYPERS: dict[str, dict[str, Any]] = {
    "threads": {"parser": parse_threads},
    "gpu_layers": {"parser": parse_layers},
    "flash_attn": {"parser": parse_flash},
    "draft_model": {"autocompletion": complete_model},
    "model_file": {"autocompletion": complete_model},
    "api_key": {"envvar": "NGRAMSPEC_API_KEY"},
}
"""Arguments for typer that only some options have, by option name."""


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """End the program where settings contradict each other, which are then called by their flags."""
    try:
        yield
    except LoadSettingsError as error:
        usage_error(error.worded(_FLAGS))


def _parameter(name: str, hint: Any, one: Field[Any], other: str | Field[Any] | None = None) -> inspect.Parameter:
    """The parameter that typer sees for a field that `option` made; `other`: a field in its place, or its help."""
    one = other if isinstance(other, Field) else one
    known = named(name, one.metadata[KEY])
    # A default that is None, or is parsed from text, says nothing to the user; the help text does.
    shown = known.parse is None and one.default is not None
    least, most = (None, None) if known.allowed is None else (known.allowed.least, known.allowed.most)
    made = typer.Option(
        *known.flags,
        help=other if isinstance(other, str) else known.help,
        metavar=known.metavar,
        hidden=known.is_hidden,
        show_default=shown,
        **_TYPERS.get(name, {"min": least, "max": most}),
    )
    default = one.default
    if _is_read(one):
        hint, default = list[str] | None, None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, made])


def _is_read(one: Field[Any]) -> bool:
    """Whether a field holds what is read from texts that are typed; the sampling options read theirs by themselves."""
    return one.metadata[KEY].repeatable and one.default is not None


def _built(group: type, typed: Mapping[str, Any]) -> Any:
    """A group of what was typed for its fields."""
    values = dict(typed)
    for one in fields(group):
        if one.name in values and _is_read(one):
            values[one.name] = one.metadata[KEY].read(values[one.name] or ())
    return group(**values)


def grouped(command: Command) -> Command:
    """Let typer see the fields of a command's dataclass parameters as options of its own.

    Where a command has only some of them, it says so by their names; where some differ for it, by what its help says
    of them, or by a field in their place:
    `load: Annotated[LoadSettings, ("threads", "ctx_size"), {"ctx_size": "..."}]`.
    """
    groups: dict[str, tuple[type, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        group, *chosen = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if isinstance(parameter.default, Field):
            parameters.append(_parameter(name, hint, parameter.default))
        elif not is_dataclass(group):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            assert isinstance(group, type)
            typed = get_type_hints(group)
            names = next((one for one in chosen if isinstance(one, tuple)), tuple(one.name for one in fields(group)))
            other = next((one for one in chosen if isinstance(one, Mapping)), {})
            groups[name] = group, [one.name for one in fields(group) if one.name in names]
            for one in fields(group):
                if one.name in names:
                    parameters.append(_parameter(one.name, typed[one.name], one, other.get(one.name)))

    def spread(**values: Any) -> None:
        with flags_in_errors():
            built = {name: _built(group, {n: values.pop(n) for n in names}) for name, (group, names) in groups.items()}
        command(**values, **built)

    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread  # type: ignore[return-value]
