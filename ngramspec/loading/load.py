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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from ngramspec.backend import SharedModel
from ngramspec.data import ModelError, NGramSpecError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DEFAULT, REMEMBERING, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.mixture.weight_files import file_of
from ngramspec.llama.placement import DRAFT_MARGIN
from ngramspec.llama.requantize import choose_smollm
from ngramspec.llama.rpc import PATIENCE, connect, workers
from ngramspec.llama.same_vocabulary import common_tokens
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.llama.weights import tuning_key
from ngramspec.loading.settings import LoadSettings
from ngramspec.loading.values import MODEL_ONLY, NO_DEVICE, LoadSettingsError
from ngramspec.machine import flags, load_tuned, tuning_path
from ngramspec.memory import Memory, MemoryFileError, Store
from ngramspec.memory.memory import DEFAULT as DEFAULT_MEMORY
from ngramspec.memory.memory import memory_folder, saves_answers
from ngramspec.models.check import parts_of
from ngramspec.models.find import ModelSource, remember_file, resolve
from ngramspec.models.hub import PREFIX, Progress

OnNote = Callable[[str], object]
"""Function that receives notes for the user."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model."""

    target: Target  # the model
    decoder: SpeculativeDecoder  # decoder that generates with the target, with drafts
    # The user's texts for drafting; it remembers the tokens passed to `hear`. `None` without a memory.
    memory: Memory | None
    settings: LoadSettings  # settings of the model, including the tuned ones
    tuning: Mapping[str, Any]  # settings that tuning changed
    draft_model: Target | None  # second model that drafts, if there is one

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
    return open_resolved(find(model, settings, progress, on_note), settings, on_note=on_note)


def find(
    model: str | os.PathLike[str] | None,
    settings: LoadSettings,
    progress: Progress | None = None,
    on_note: OnNote = lambda _: None,
) -> ModelSource:
    """Connect to the RPC workers, and find, download if necessary, convert if that is faster, and check the files.

    It raises the same errors as `load`.
    """
    # Also called without RPC workers, because a process that is connected to some would spread every model over them.
    connect(() if settings.rpc is None else workers(settings.rpc), settings.rpc_timeout or PATIENCE)
    name = None if model is None else os.fspath(model)
    if settings.hf_repo is not None:
        if name is not None:
            raise LoadSettingsError(f"two models were given: {name} and {{hf_repo}} {settings.hf_repo}; remove one")
        name = f"{PREFIX}{settings.hf_repo}"
    source = find_file(name, settings, progress, on_note, offline=settings.offline)
    if settings.draft_model is not None:
        draft_settings = settings.make_draft_settings(0, None)
        draft = find_file(settings.draft_model, draft_settings, progress, on_note, offline=settings.offline)
        source = replace(source, draft=draft)
    return source


def find_file(
    name: str | None,
    settings: LoadSettings,
    progress: Progress | None = None,
    on_note: OnNote = lambda _: None,
    *,
    offline: bool = False,
) -> ModelSource:
    """Find one model file as `find` does, without a draft model; the RPC workers must be connected.

    Raises:
        ModelError: The file does not exist or cannot be used.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1"} if offline else os.environ
    choose = partial(choose_smollm, placement=settings.placement, repack=not settings.no_repack, on_note=on_note)
    return resolve(name, env, progress, choose)


def open_resolved(
    source: ModelSource,
    settings: LoadSettings,
    *,
    on_note: OnNote = lambda _: None,
    texts: int | None = None,
    learn: bool = True,
    remember: bool = False,
) -> LoadedModel:
    """Load the files that `find` returned.

    Args:
        source: Files of the model and of the draft model.
        settings: Settings.
        on_note: Function that receives notes for the user.
        texts: Number of sequences that an engine generates at once; see `Target`.
        learn: Load and save the learned state of the drafter, and draft repeated requests from their earlier answers.
            Benchmarks disable this, because they repeat prompts.
        remember: Let the memory save answers for later sessions, if the user has enabled that.
    """
    settings, changes = apply_tuning(source.path, settings, on_note)
    target = open_target(
        source.path,
        settings,
        on_note,
        texts=texts,
        head=settings.mtp,
        tuned_threads="threads" in changes,
        placement=replace(settings.placement, reserved=_draft_bytes(source, settings)),
    )
    try:
        drafter, memory, draft_model = open_drafter(
            target, source, settings, on_note=on_note, learn=learn, remember=remember
        )
    except BaseException:
        target.close()
        raise
    decoder = SpeculativeDecoder(
        target, drafter=drafter, policy=settings.policy, draft_max=settings.draft_max, exact=target.exact
    )
    if decoder.exact == "on" and decoder.kernels.exact_sizes is None and target.sequences[0].can_rollback:
        on_note("comparing the logits of batch sizes for --exact on; this happens once per model and machine")
    return LoadedModel(target, decoder, memory, settings, changes, draft_model)


def open_target(path: Path, settings: LoadSettings, on_note: OnNote = lambda _: None, **more: Any) -> Target:
    """Load only a model, from a checked file, without tuned settings; `more` are further arguments of `Target`."""
    target = Target(path, on_note=on_note, **{**settings.target_arguments, **more})
    remember_file(path)
    for line in target.weights.notes:
        on_note(line)
    return target


def _draft_bytes(source: ModelSource, settings: LoadSettings) -> int:
    """Return an estimate of the GPU memory for the draft model; 0 if it has none there."""
    draft_settings = settings.make_draft_settings(0, None)
    if source.draft is None or not draft_settings.gpu_layers or draft_settings.device == NO_DEVICE:
        return 0
    return DRAFT_MARGIN + sum(part.stat().st_size for part in parts_of(source.draft.path)) * 5 // 4


# --------------------------------------------------------------------------- tuned settings


def model_tuning_path(path: Path, settings: LoadSettings) -> Path:
    """Return the path at which `ngramspec tune` saves the fastest settings for a model with these settings."""
    types = (settings.cache_type_k, settings.cache_type_v)
    return tuning_path(tuning_key(path, settings.gpu_layers, types, settings.placement))


_TUNED_FIELDS = {
    **{name: name for name in ("threads", "threads_batch", "flash_attn")},
    **{"micro_batch": "ubatch_size", "mmap": "no_mmap", "repack": "no_repack"},
}
"""The fields of `LoadSettings` by their names in tuning."""


def apply_tuning(path: Path, settings: LoadSettings, on_note: OnNote) -> tuple[LoadSettings, dict[str, Any]]:
    """Return the settings with the saved ones of `tune --apply` for all that have their default, and the changes."""
    if settings.ignore_tuned:
        return settings, {}
    tuning, plain = load_tuned(model_tuning_path(path, settings)), LoadSettings()
    explicit_names = {
        name for name, field in _TUNED_FIELDS.items() if getattr(settings, field) != getattr(plain, field)
    }
    if "threads" in explicit_names:
        explicit_names.add("threads_batch")
    if settings.flash_attn == "off":
        explicit_names.add("micro_batch")  # tuning measured larger micro-batches only with flash attention
    saved_changes = tuning.changes if tuning is not None else {}
    changes = {name: value for name, value in saved_changes.items() if name not in explicit_names}
    if changes:
        on_note(f"tuned: {flags(changes)} (--ignore-tuned ignores it, ngramspec tune --reset deletes it)")
    new_values: dict[str, Any] = {
        _TUNED_FIELDS[name]: not value if isinstance(value, bool) else value for name, value in changes.items()
    }
    return replace(settings, ignore_tuned=True, **new_values), changes


# --------------------------------------------------------------------------- drafts


def open_drafter(
    target: Target, source: ModelSource, settings: LoadSettings, *, on_note: OnNote, learn: bool, remember: bool = False
) -> tuple[Drafter | None, Memory | None, Target | None]:
    """Open the drafter (`None` for plain decoding), its memory and the draft model; see `open_resolved`."""
    if settings.no_draft:
        return None, None, None
    if not target.sequences[0].can_rollback:
        on_note("this model's state cannot be rolled back (recurrent or hybrid), so drafting is off")
        return None, None, None
    if not target.sequences[0].exact_rollback and target.exact == "on":
        on_note("drafting is off with --exact on: rollbacks can change the rounding on this model")
    memory = state_path = None
    if not settings.no_memory and settings.drafter in REMEMBERING:
        memory = open_memory(settings.memory, target.vocabulary, on_note=on_note, keep=remember)
        if not learn:
            memory.answers = None
        state_path = file_of(target.vocabulary.vocabulary_hash) if learn and settings.drafter == DEFAULT else None
    drafting_model = draft_model = None
    if target.heads is not None:
        # The cast is valid because a draft model is only evaluated and rolled back, never copied.
        shared = cast(SharedModel, target.heads) if target.texts is not None else None
        drafting_model = ModelDrafter(target.heads.sequences[0], n_vocab=target.vocabulary.n_vocab, shared_model=shared)
    elif source.draft is not None:
        draft_settings, target_notes = (
            settings.make_draft_settings(target.n_ctx, settings.threads),
            target.weights.notes,
        )
        draft_model = open_target(
            source.draft.path,
            draft_settings,
            lambda line: line in target_notes or on_note(f"draft model: {line}"),
            texts=target.texts,
            placement=replace(draft_settings.placement, margin=DRAFT_MARGIN),
        )
        try:
            drafting_model = make_model_drafter(target.vocabulary, draft_model)
        except ModelError:
            draft_model.close()
            raise
    if drafting_model is None:
        name = DEFAULT if settings.drafter == MODEL_ONLY else settings.drafter
        return make_drafter(name, memory=memory, state_path=state_path, vocabulary=target.vocabulary), memory, None
    return (
        drafting_model if settings.drafter == MODEL_ONLY else HybridDrafter(drafting_model, memory, state_path),
        memory,
        draft_model,
    )


def make_model_drafter(target: Vocabulary, model: Target) -> ModelDrafter:
    """Return a loaded model as a draft model for a target.

    A model with several sequences can draft for as many sequences of the target.

    Raises:
        ModelError: The model has another vocabulary, or its state cannot be rolled back.
    """
    n_common = common_tokens(target, model.vocabulary)
    if not model.sequences[0].can_rollback:
        raise ModelError(
            f"{model.weights.path} cannot be used as a draft model: its state cannot be rolled back; use another one"
        )
    return ModelDrafter(model.sequences[0], n_vocab=n_common, shared_model=model if model.texts is not None else None)


def open_memory(name: str | None, target: Vocabulary, *, on_note: OnNote, keep: bool) -> Memory:
    """Return a memory for a tokenizer: the named one, or the default memory, which need not exist.

    With `keep`, it saves answers for later sessions, if the user has enabled that.

    Raises:
        NGramSpecError: `name` is given, and the memory contains nothing for this tokenizer.
    """
    keep = keep and saves_answers()
    folder = memory_folder(name or DEFAULT_MEMORY)
    stores = Store.all_in(folder)
    store = Store(folder, target.vocabulary_hash, target.path.name)
    if not stores and name is None and not keep:
        return Memory(store=store)
    try:
        contents = store.read()
    except MemoryFileError as error:
        on_note(f"warning: memory {name or DEFAULT_MEMORY!r} is not used: {error}")
        return Memory()
    if not contents.generation and not keep:
        missing = f"memory {name or DEFAULT_MEMORY!r} has no files for this model's tokenizer"
        advice = f"ngramspec memory add --memory {name or DEFAULT_MEMORY} --model {target.path} PATH adds files"
        if name is not None:
            raise NGramSpecError(f"{missing} ({advice})")
        on_note(f"{missing}, only for other tokenizers ({advice})")
    return Memory(contents, store=store, saves_answers=keep)
