"""Loading of a model by its name: the target, a decoder that drafts for it, and the user's memory.

    with ngramspec.load("model.gguf", draft_model="small.gguf") as model:
        for step in model.decoder.generate(model.target.vocabulary.tokenize("def fib(n):"), max_tokens=200):
            print(step.text, end="")

This module opens the models of the commands, the server and the plugin for `llm`, and the draft model of
`ngramspec.Llama`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, cast

from ngramspec import leaves
from ngramspec.backend import SharedModel
from ngramspec.cost.bits import KernelClasses
from ngramspec.data import ModelError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DEFAULT, REMEMBERING, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.mixture.weight_files import file_of
from ngramspec.llama.placement import DRAFT_MARGIN
from ngramspec.llama.requantize import choose_smollm
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary, common_tokens
from ngramspec.llama.weights import tuning_key
from ngramspec.loading.settings import MODEL_ONLY, TUNABLE, LoadSettings, load_tuned
from ngramspec.model_settings import NO_DEVICE, LoadSettingsError, ModelSettings, flags
from ngramspec.models.check import parts_of
from ngramspec.models.find import ModelSource, remember_file, resolve
from ngramspec.models.hub import PREFIX, Progress
from ngramspec.storage import FOLDERS

OnNote = Callable[[str], object]
"""Function that receives notes for the user."""


@dataclass(frozen=True, slots=True)
class Display:
    """Functions that show the user what happens."""

    note: OnNote = lambda _: None
    # Context that yields the function that receives the progress of downloads, or `None`.
    downloads: Callable[[], AbstractContextManager[Progress | None]] = nullcontext
    guard: Callable[[], AbstractContextManager[None]] = nullcontext  # context in which weights are loaded


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its drafter and memory; a context manager that closes it."""

    target: Target  # the model
    drafter: Drafter | None  # drafter of its texts; `None` if nothing is drafted
    memory: leaves.Memory | None  # the user's texts for drafting
    settings: LoadSettings  # settings of the model, including the tuned ones
    tuning: Mapping[str, Any]  # settings that tuning changed
    draft_model: Target | None  # second model that drafts, if there is one

    @cached_property
    def decoder(self) -> SpeculativeDecoder:
        """Decoder that generates with the target, with drafts."""
        settings, target = self.settings, self.target
        return SpeculativeDecoder(
            target, drafter=self.drafter, policy=settings.policy, draft_max=settings.draft_max, exact=target.exact
        )

    def close(self) -> None:
        """Free the target and the draft model."""
        self.target.close()
        if self.draft_model is not None:
            self.draft_model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(
    model: str | os.PathLike[str] | None = None,
    settings: LoadSettings | None = None,
    *,
    on_note: OnNote = lambda _: None,
    progress: Progress | None = None,
    **changes: Any,
) -> LoadedModel:
    """Check and load a model as the command line does, with tuned settings, drafts, and the user's memory.

    Args:
        model: GGUF file, or a name for `resolve`; `None` means the default model.
        settings: Settings; `None` means the defaults.
        on_note: Function that receives notes for the user.
        progress: Function that receives the progress of downloads.
        changes: Settings by name that replace those in `settings`.

    Raises:
        LoadSettingsError: A setting has an invalid value, or two settings contradict each other.
        NGramSpecError: The model or the memory does not exist or cannot be loaded, or the draft model cannot be used
            for this model.
    """
    settings = replace(settings or LoadSettings(), **changes)
    display = Display(on_note, lambda: nullcontext(progress))
    return open_resolved(find(model, settings, display), settings, display)


def find(model: str | os.PathLike[str] | None, settings: LoadSettings, display: Display = Display()) -> ModelSource:
    """Connect to the RPC workers, and find, download if necessary, convert if that is faster, and check the files."""
    if settings.rpc is not None:
        leaves.connect(leaves.workers(settings.rpc))
    name = None if model is None else os.fspath(model)
    if settings.hf_repo is not None:
        if name is not None:
            raise LoadSettingsError(f"two models were given: {name} and {{hf_repo}} {settings.hf_repo}; remove one")
        name = f"{PREFIX}{settings.hf_repo}"
    source = find_file(name, settings, display, offline=settings.offline)
    if source.fallback:
        display.note(f"no model given; using {source.fallback}")
    if settings.draft_model is not None:
        draft_settings = settings.of_draft_model(0, None)
        draft = find_file(settings.draft_model, draft_settings, display, offline=settings.offline)
        source = replace(source, draft=draft)
    return source


def find_file(
    name: str | None, settings: ModelSettings, display: Display = Display(), *, offline: bool = False
) -> ModelSource:
    """Find one model file as `find` does, without a draft model; the RPC workers must be connected."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"} if offline else os.environ
    with display.downloads() as progress:
        return resolve(name, env, progress, partial(choose_smollm, settings=settings, on_note=display.note))


def open_resolved(
    source: ModelSource,
    settings: LoadSettings,
    display: Display = Display(),
    *,
    texts: int | None = None,
    learn: bool = True,
    remember: bool = False,
) -> LoadedModel:
    """Load the files that `find` returned; `texts` is that of `Target`.

    With `learn`, the learned state of the drafter is loaded and saved, and repeated requests are drafted from their
    earlier answers; benchmarks repeat prompts. With `remember`, the memory saves answers if the user has enabled that.
    """
    settings, changes = apply_tuning(source.path, settings, display.note)
    target = open_target(
        source.path,
        settings.of_target,
        display,
        texts=texts,
        tuned_threads="threads" in changes,
        reserved=_draft_bytes(source, settings),
    )
    try:
        drafter, memory, draft_model = open_drafter(target, source, settings, display, learn=learn, remember=remember)
    except BaseException:
        target.close()
        raise
    sequence, is_exact = target.sequences[0], target.exact == "on"
    if not sequence.can_rollback or (is_exact and not sequence.exact_rollback):
        drafter = None
    if is_exact and sequence.can_rollback and KernelClasses.load(sequence).exact_sizes is None:
        display.note("comparing the logits of batch sizes for --exact on, once per model, machine and settings")
    return LoadedModel(target, drafter, memory, settings, changes, draft_model)


def open_alone(
    source: ModelSource, settings: LoadSettings, display: Display = Display(), *, n_seq: int | None = None
) -> Target:
    settings, _ = apply_tuning(source.path, settings, display.note)
    return open_target(source.path, settings.of_target, display, n_seq=n_seq)


def open_target(path: Path, settings: ModelSettings, display: Display = Display(), **more: Any) -> Target:
    """Load only a model, from a checked file; `more` are further arguments of `Target`."""
    with display.guard():
        target = Target(path, settings, on_note=display.note, **more)
    remember_file(path)
    for line in target.weights.notes:
        display.note(line)
    return target


def _draft_bytes(source: ModelSource, settings: LoadSettings) -> int:
    """Return an estimate of the GPU memory for the draft model; 0 if it has none there."""
    draft_settings = settings.of_draft_model(0, None)
    if source.draft is None or not draft_settings.gpu_layers or draft_settings.device == NO_DEVICE:
        return 0
    return DRAFT_MARGIN + sum(part.stat().st_size for part in parts_of(source.draft.path)) * 5 // 4


# --------------------------------------------------------------------------- tuned settings


def model_tuning_path(path: Path, settings: ModelSettings) -> Path:
    """Return the path at which `ngramspec tune` saves the fastest settings for a model with these settings."""
    return FOLDERS.user_cache_path / "tuned" / f"{tuning_key(path, settings)}.json"


def apply_tuning(path: Path, settings: LoadSettings, on_note: OnNote) -> tuple[LoadSettings, dict[str, Any]]:
    """Return the settings with the saved ones of `tune --apply` for all that have their default, and the changes."""
    tuned = None if settings.ignore_tuned else load_tuned(model_tuning_path(path, settings))
    if tuned is None:
        return settings, {}
    plain = LoadSettings()
    explicit_names = {name for name in TUNABLE if getattr(settings, name) != getattr(plain, name)}
    if "threads" in explicit_names:
        explicit_names.add("threads_batch")
    if settings.flash_attn == "off":
        explicit_names.add("ubatch_size")  # tuning measured larger micro-batches only with flash attention
    changes = {name: value for name, value in tuned.changes.items() if name not in explicit_names}
    if changes:
        on_note(f"tuned: {flags(changes)} (--ignore-tuned ignores it, ngramspec tune --reset deletes it)")
    return replace(settings, ignore_tuned=True, **changes), changes


# --------------------------------------------------------------------------- drafts


def open_drafter(
    target: Target,
    source: ModelSource,
    settings: LoadSettings,
    display: Display,
    *,
    learn: bool,
    remember: bool = False,
) -> tuple[Drafter | None, leaves.Memory | None, Target | None]:
    """Open the drafter (`None` for plain decoding), its memory and the draft model; see `open_resolved`."""
    if settings.no_draft:
        return None, None, None
    sequence, vocabulary = target.sequences[0], target.vocabulary
    if not sequence.can_rollback:
        display.note("this model's state cannot be rolled back (recurrent or hybrid), so drafting is off")
        return None, None, None
    if not sequence.exact_rollback and target.exact == "on":
        display.note("drafting is off with --exact on: rollbacks can change the rounding on this model")
    memory = state_path = draft_target = None
    if not settings.no_memory and settings.drafter in REMEMBERING and "open_memory" in leaves.MODULES:
        memory = leaves.open_memory(
            settings.memory, vocabulary.vocabulary_hash, vocabulary.path, on_note=display.note, keep=remember
        )
        if not learn:
            memory.answers = None
        state_path = file_of(vocabulary.vocabulary_hash) if learn and settings.drafter == DEFAULT else None
    if target.heads is not None:
        # The cast is valid because a draft model is only evaluated and rolled back, never copied.
        shared = cast(SharedModel, target.heads) if target.texts is not None else None
        model = leaves.ModelDrafter(target.head, n_vocab=vocabulary.n_vocab, shared_model=shared)
    elif source.draft is not None:
        known_notes = target.weights.notes
        draft_target = open_target(
            source.draft.path,
            settings.of_draft_model(target.n_ctx, settings.threads),
            replace(display, note=lambda line: line in known_notes or display.note(f"draft model: {line}")),
            texts=target.texts,
            margin=DRAFT_MARGIN,
        )
        try:
            model = make_model_drafter(vocabulary, draft_target)
        except ModelError:
            draft_target.close()
            raise
    else:
        name = DEFAULT if settings.drafter == MODEL_ONLY else settings.drafter
        return make_drafter(name, memory=memory, state_path=state_path, vocabulary=vocabulary), memory, None
    drafter = model if settings.drafter == MODEL_ONLY else leaves.HybridDrafter(model, memory, state_path)
    return drafter, memory, draft_target


def make_model_drafter(target: Vocabulary, model: Target) -> leaves.ModelDrafter:
    """Return a loaded model as a draft model for a target, for as many sequences as it has."""
    n_common = common_tokens(target, model.vocabulary)
    if not model.sequences[0].can_rollback:
        raise ModelError(
            f"{model.weights.path} cannot be used as a draft model: its state cannot be rolled back; use another one"
        )
    shared_model = model if model.texts is not None else None
    return leaves.ModelDrafter(model.sequences[0], n_vocab=n_common, shared_model=shared_model)
