"""The options that commands share, named as llama.cpp users know them, and what they are turned into.

A group of options is a dataclass; a command takes the whole group as one parameter, and `grouped` spreads its
fields over the command's own signature for typer to see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.instruments.prompts import Case, Prompt, Skipped, prepare
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading import load as loading
from ngramspec.loading.load import Found, Loaded
from ngramspec.loading.settings import LoadSettings, LoadSettingsError
from ngramspec.memory import Memory, MemoryFileError
from ngramspec.models.check import check_whole
from ngramspec.models.find import ModelSource, resolve
from ngramspec.sampling.option import Option, options

from .completion import models
from .console import download_bar, fail, note, signals_deferred, usage_error

Command = TypeVar("Command", bound=Callable[..., None])

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        autocompletion=models,
        help="GGUF file, hf:owner/repo:file-or-quant, ollama:NAME:TAG, lmstudio:PUBLISHER/MODEL, or smollm2;"
        " default: $NGRAMSPEC_MODEL, smollm2 if it is installed, the demo model.",
    ),
]

PromptFiles = Annotated[
    Path | None, typer.Option("--prompts", metavar="DIR|FILE", help="Your own prompts; default: those of ngramspec.")
]

TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write every pass to FILE; see ngramspec trace --help.")
]

Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")]

NO_LIMIT = 2**31
"""More tokens than any context holds."""


def check_predict(predict: int) -> int:
    """Most tokens to generate, -1 turned into more than any context holds."""
    if predict != -1 and predict < 1:
        usage_error(f"-n/--predict is {predict}, but must be at least 1 (or -1: until the context is full)")
    return predict if predict > 0 else NO_LIMIT


def check_stop(stop: list[str] | None) -> tuple[str, ...]:
    """The stop strings; ends the program if one is empty."""
    if any(not text for text in stop or ()):
        usage_error("--stop needs some text")
    return tuple(stop or ())


def check_lossy(acceptance: Acceptance, settings: LoadSettings) -> None:
    """End the program if there is nothing for this acceptance to accept."""
    if settings.no_draft and acceptance.lossy:
        usage_error(f"{acceptance.lossy} is for drafts; leave out --no-draft")


# --------------------------------------------------------------------------- models


def find(model: str | None, settings: LoadSettings) -> Found:
    """Find, fetch if need be, and check a model and its draft model; a note on stderr says which if none is named."""
    with download_bar() as progress, flags_in_errors():
        found = loading.find(model, settings, progress)
    if found.model.fallback:
        note(f"no model given: running {found.model.label}")
    return found


def open_found(found: Found, settings: LoadSettings, *, learn: bool = True, remember: bool = False) -> Loaded:
    """See `ngramspec.loading.load.open_found`; what the user should know goes to stderr."""
    with signals_deferred():
        return loading.open_found(found, settings, tell=note, learn=learn, remember=remember)


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


def prepared(
    target: Target, selected: Sequence[Prompt], predict: int, n_ctx: int | None
) -> tuple[list[Case], list[Skipped]]:
    """What can be run of the prompts, and what cannot (see `prepare`); ends the program if nothing can."""
    cases, skipped = prepare(target, selected, predict, n_ctx)
    if not cases:
        first = skipped[0]
        fail(f"no prompt left of {len(selected)}; {first['category']}/{first['id']}: {first['reason']}")
    return cases, skipped


def keep(memory: Memory | None, tokens: Sequence[int]) -> None:
    """Keep an answer for later sessions; failing to keep one does not end anything."""
    if memory is None:
        return
    try:
        memory.keep(tokens)
    except MemoryFileError as error:
        note(f"this answer is not kept for later sessions: {error}")


# --------------------------------------------------------------------------- groups of options

_FLAGS = {name: known.flags[0] for name, known in options(LoadSettings).items()}
_DEFAULTS = {one.name: one.default for one in fields(LoadSettings)}


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """End the program where settings contradict each other, which are then called by their flags."""
    try:
        yield
    except LoadSettingsError as error:
        usage_error(error.worded(_FLAGS))


def flag(known: Option, default: object, help: str | None = None, **more: Any) -> Any:
    """The command line's option for a setting, with another line of help if one is given."""
    # A default that is None, or is parsed from text, says nothing to the user; the help text does.
    shown = known.parse is None and default is not None
    least, most = (None, None) if known.allowed is None else (known.allowed.least, known.allowed.most)
    help = known.help if help is None else help
    return typer.Option(*known.flags, help=help, metavar=known.metavar, show_default=shown, min=least, max=most, **more)


def load_flag(name: str, help: str | None = None) -> Any:
    """The option for a setting of `LoadSettings`, where a command has it by itself."""
    return flag(options(LoadSettings)[name], _DEFAULTS[name], help)


def _fields(group: type, names: Sequence[str] | None, helps: Mapping[str, str]) -> Iterator[inspect.Parameter]:
    """The fields of a group as parameters of a command."""
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        if names is not None and one.name not in names:
            continue
        assert one.default is not MISSING
        hint = hints[one.name]
        if (known := options(group).get(one.name)) is not None:
            more = {"autocompletion": models} if one.name == "draft_model" else {}
            hint = Annotated[hint, flag(known, one.default, helps.get(one.name), **more)]
        yield inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hint)


def grouped(command: Command) -> Command:
    """Let typer see the fields of a command's dataclass parameters as options of its own.

    Where a command has only some of them, or with other lines of help, it says so by their names:
    `load: Annotated[LoadSettings, ("threads", "ctx_size"), {"ctx_size": "..."}]`.
    """
    groups: dict[str, tuple[type, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        group, *chosen = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not is_dataclass(group):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(group, type)
        spread_out = list(_fields(group, chosen[0] if chosen else None, chosen[1] if len(chosen) > 1 else {}))
        groups[parameter.name] = group, [one.name for one in spread_out]
        parameters += spread_out

    def spread(**values: Any) -> None:
        with flags_in_errors():
            built = {name: group(**{n: values.pop(n) for n in names}) for name, (group, names) in groups.items()}
        command(**values, **built)

    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread  # type: ignore[return-value]
