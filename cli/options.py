"""The options that commands share, named as llama.cpp users know them, and what they are turned into.

A group of options is a dataclass; a command takes the whole group as one parameter, and `grouped` spreads its
fields over the command's own signature for typer to see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.cost.calibration import Calibration
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DEFAULT, DRAFTERS, REMEMBERING
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.mixture.learnt import file_of
from ngramspec.exactness.choice import Exact
from ngramspec.llama.kv_cache import UNQUANTISED, CacheType
from ngramspec.llama.rpc import PATIENCE, connect, workers
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.memory import Memory
from ngramspec.memory.names import DEFAULT as DEFAULT_MEMORY
from ngramspec.memory.names import memory_folder
from ngramspec.models.check import check_vocabulary_file
from ngramspec.models.find import ModelSource, resolve
from ngramspec.models.hub import PREFIX
from ngramspec.policies import POLICIES, make_policy
from ngramspec.policies.simple import FixedPolicy
from ngramspec.tuning.kept import Kept, recalled, wanted
from ngramspec.tuning.settings import LEAST_MICRO, MOST_MICRO, MOST_THREADS, flags

from .completion import models
from .console import download_bar, note, signals_deferred, usage_error
from .draft_model import ALONE, DraftModelOptions
from .memory_option import open_memory
from .tuned import as_options, file_for

Command = TypeVar("Command", bound=Callable[..., None])

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        autocompletion=models,
        help="GGUF file, hf:owner/repo:file-or-quant, ollama:NAME:TAG, lmstudio:PUBLISHER/MODEL, or smollm2;"
        " default: $NGRAMSPEC_MODEL, smollm2 if it is installed, the demo model.",
        show_default=False,
    ),
]

DrafterName = Annotated[str, typer.Option(help=f"What drafts: {', '.join(DRAFTERS)}.")]
DrafterOrModel = Annotated[
    str, typer.Option(help=f"What drafts: {', '.join(DRAFTERS)}; {ALONE}: the draft model without n-grams.")
]
PolicyName = Annotated[str, typer.Option(help=f"How much to draft: {', '.join(POLICIES)}.")]
DraftMax = Annotated[int | None, typer.Option(min=1, max=63, help="Most tokens in a draft; default: the policy's.")]

PromptFiles = Annotated[
    Path | None,
    typer.Option(
        "--prompts", metavar="DIR|FILE", help="Your own prompts; default: those of ngramspec.", show_default=False
    ),
]

TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", help="Write every pass to FILE; see ngramspec trace --help.", show_default=False
    ),
]

Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", min=1, max=MOST_THREADS, help="CPU threads; default: the physical cores."),
]

Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")]

Workers = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Machines to spread the layers over, where ngramspec rpc-worker runs; trusted networks only.",
        show_default=False,
    ),
]


def find_model(model: str | None, unnamed: str) -> ModelSource:
    """Find, fetch if need be, and check a model file. If none is named, a note on stderr begins with `unnamed`."""
    with download_bar() as progress:
        source = resolve(model, progress=progress)
    if source.fallback:
        note(f"{unnamed} {source.label}")
    return source


def open_vocabulary(file: Path | None, model: str | None, unnamed: str) -> Vocabulary:
    """The vocabulary of `file`, with weights or without; if that is None, the one of `model`, as in `find_model`."""
    if file is None:
        file = find_model(model, unnamed).path
    else:
        check_vocabulary_file(file)
    with signals_deferred():
        return Vocabulary(file)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded."""

    hf_repo: Annotated[
        str | None,
        typer.Option(
            "-hf",
            "--hf-repo",
            metavar="USER/REPO[:QUANT]",
            help="The model, from Hugging Face, instead of MODEL; quant: Q4_K_M, else Q8_0, else the first.",
            show_default=False,
        ),
    ] = None
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--ctx-size",
            min=16,
            max=2**24,
            help="Context in tokens; default: the model's, if memory allows.",
        ),
    ] = None
    gpu_layers: Annotated[
        int, typer.Option("-ngl", "--gpu-layers", min=-1, max=9999, help="Layers on the GPU; -1: all.")
    ] = -1
    rpc: Workers = None
    rpc_timeout: Annotated[
        float | None,
        typer.Option(
            "--rpc-timeout",
            min=1,
            help=f"Seconds without an answer after which a machine counts as lost; default: {PATIENCE:g}.",
            show_default=False,
        ),
    ] = None
    threads: Threads = None
    threads_batch: Annotated[
        int | None,
        typer.Option(
            "-tb",
            "--threads-batch",
            min=1,
            max=MOST_THREADS,
            help="CPU threads for prompts and drafts; default: as -t.",
        ),
    ] = None
    ubatch_size: Annotated[
        int | None,
        typer.Option(
            "-ub",
            "--ubatch-size",
            min=LEAST_MICRO,
            max=MOST_MICRO,
            help="Tokens of a prompt per pass; default: 512, without flash attention 128.",
        ),
    ] = None
    flash_attn: Annotated[
        Literal["auto", "on", "off"] | None,
        typer.Option(
            "-fa",
            "--flash-attn",
            help="Flash attention; auto, the default: llama.cpp decides, off on a CPU for --exact.",
            show_default=False,
        ),
    ] = None
    cache_type_k: Annotated[CacheType, typer.Option("-ctk", "--cache-type-k", help="Type of the K cache.")] = "f16"
    cache_type_v: Annotated[CacheType, typer.Option("-ctv", "--cache-type-v", help="Type of the V cache.")] = "f16"
    no_mmap: Annotated[bool, typer.Option("--no-mmap", help="Read the model instead of mapping it.")] = False
    no_repack: Annotated[
        bool, typer.Option("--no-repack", help="Leave the weights in the file's order, not that of CPU kernels.")
    ] = False
    no_tuned: Annotated[
        bool, typer.Option("--no-tuned", help="Leave out the settings that ngramspec tune --apply keeps.")
    ] = False
    exact: Annotated[
        Exact,
        typer.Option(help="The same text bit for bit, whatever is drafted: on, off; auto: where it costs at most 5 %."),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.flash_attn == "off" and self.cache_type_v not in UNQUANTISED:
            usage_error(f"-ctv {self.cache_type_v} needs flash attention; leave out -fa off")
        if self.rpc is not None:
            if self.gpu_layers == 0:
                usage_error("-ngl 0 leaves no layer to --rpc; leave out one of them")
            try:
                workers(self.rpc)
            except ValueError as error:
                usage_error(f"--rpc: {error}")
        elif self.rpc_timeout is not None:
            usage_error("--rpc-timeout is for --rpc; leave it out")

    def find(self, model: str | None) -> ModelSource:
        """Connect to the workers, and find, fetch if need be, and check a model file.

        A note on stderr says which if none is named.
        """
        if self.rpc is not None:
            connect(workers(self.rpc), self.rpc_timeout or PATIENCE)
        if self.hf_repo is not None:
            if model is not None:
                usage_error(f"two models are named: {model} and, with -hf, {self.hf_repo}; give one")
            model = f"{PREFIX}{self.hf_repo}"
        return find_model(model, "no model given: running")

    def tuned_file(self, model: Path) -> Path:
        """Where `tune` keeps the settings that are the fastest for a model, loaded as these options say."""
        return file_for(model, self.gpu_layers, (self.cache_type_k, self.cache_type_v))

    @property
    def _said(self) -> set[str]:
        """The settings that the options name, by their names in a tuning."""
        named = {
            "threads": self.threads is not None,
            "threads_batch": self.threads is not None or self.threads_batch is not None,
            "flash_attn": self.flash_attn is not None,
            # Wide pieces of a prompt are found to be faster with flash attention only.
            "micro_batch": self.ubatch_size is not None or self.flash_attn == "off",
            "mmap": self.no_mmap,
            "repack": self.no_repack,
        }
        return {name for name, is_named in named.items() if is_named}

    def tuned(self, source: ModelSource) -> LoadOptions:
        """These options with the settings that `tune --apply` keeps for the model; see `using`."""
        return self if self.no_tuned else self.using(recalled(self.tuned_file(source.path)))

    def using(self, kept: Kept | None) -> LoadOptions:
        """These options with the kept settings that are applied, as far as they say nothing else.

        A note on stderr names them.
        """
        changes = {} if self.no_tuned else wanted(kept, self._said)
        if changes:
            note(f"tuned: {flags(changes)} (--no-tuned leaves it out, ngramspec tune --forget takes it away)")
        return replace(self, no_tuned=True, **as_options(changes))

    def settings(self, draft_max: int | None) -> dict[str, Any]:
        """The arguments that `Target` and `SharedTarget` have in common, for drafts of that length."""
        return {
            "n_ctx": self.ctx_size,
            "n_gpu_layers": self.gpu_layers,
            "threads": self.threads,
            "threads_batch": self.threads_batch,
            "micro_batch": self.ubatch_size,
            "flash_attn": self.flash_attn or "auto",
            "cache_type_k": self.cache_type_k,
            "cache_type_v": self.cache_type_v,
            "mmap": not self.no_mmap,
            "extra_buffers": False if self.no_repack else None,
            # In exact mode the sizes of passes must not depend on whether or how much is drafted.
            "draft_max": None if self.exact == "on" else draft_max,
        }

    def load(
        self, source: ModelSource, *, n_seq: int | None = None, draft_max: int | None = None, head: bool = False
    ) -> Target:
        """Load a model, for so many sequences and drafts of that length; notes on it go to stderr, a line each.

        Settings that are kept for it are used; see `tuned`. With `head` its own head is loaded too; see `Target`.
        """
        options = self.tuned(source).settings(draft_max)
        # Where beams lie in the cache moves last bits: nothing would come of exact settings.
        exact = self.exact if n_seq is None else "off"
        with signals_deferred():
            target = Target(source.path, **options, exact=exact, n_seq=n_seq, head=head)
        for line in target.notes:
            note(line)
        return target


@dataclass(frozen=True, slots=True)
class DraftOptions(DraftModelOptions):
    """Whether, how and how much to draft."""

    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding: one token per pass.")] = False
    drafter: DrafterOrModel = DEFAULT
    policy: PolicyName = "cost"
    draft_max: DraftMax = None
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="NAME",
            help=f"Draft from this memory too (ngramspec memory --help); default: {DEFAULT_MEMORY!r}, if it exists.",
            show_default=False,
        ),
    ] = None
    no_memory: Annotated[
        bool,
        typer.Option(
            "--no-memory", help="Draft from the context alone; remember nothing, nor what drafts have learnt."
        ),
    ] = False

    def __post_init__(self) -> None:
        # Checked here, before a model is fetched and loaded for nothing.
        self.check_drafter(self.drafter, memory=self.drafter in REMEMBERING and not self.no_memory)
        try:
            make_policy(self.policy, self.draft_max)
        except ValueError as error:
            usage_error(str(error))
        if (flag := self.draft_model_flag) and self.no_draft:
            usage_error(f"{flag} is for drafts; leave out --no-draft")
        if self.memory is None:
            return
        memory_folder(self.memory)
        if self.no_memory:
            usage_error("--memory and --no-memory exclude each other")
        if self.no_draft:
            usage_error("--memory is for drafts; leave out --no-draft")
        if self.drafter not in REMEMBERING:
            usage_error(f"the drafter {self.drafter!r} looks at no memory; leave out --memory or --drafter")

    @property
    def longest(self) -> int | None:
        """The longest draft that there can be, as far as the options say so."""
        return 1 if self.no_draft else self.draft_max or (FixedPolicy.DRAFT_MAX if self.policy == "fixed" else None)

    def check(self, acceptance: Acceptance) -> None:
        """End the program if there is nothing for this acceptance to accept."""
        if self.no_draft and acceptance.lossy:
            usage_error(f"{acceptance.lossy} is for drafts; leave out --no-draft")

    def open_memory(self, target: Target, *, keep: bool) -> Memory | None:
        """The memory to draft from, or None without one; `keep`: see `memory_option.open_memory`."""
        if self.no_memory or self.no_draft or self.drafter not in REMEMBERING or not target.can_rollback:
            return None
        return open_memory(self.memory, target, keep=keep)

    def decoder(self, target: Target, memory: Memory | None, *, keep: bool) -> SpeculativeDecoder:
        """A decoder on `target`; what the user should know about it goes to stderr.

        Args:
            target, memory: what it works on, and drafts from.
            keep: its judge goes on from what earlier sessions learnt, and leaves what it learns to later ones.
        """
        if not self.no_draft and not target.can_rollback:
            note("this model's memory cannot be taken back (recurrent or hybrid), so drafting is off")
        if not self.no_draft and not target.exact_rollback and target.exact == "on":
            note("drafting is off with --exact on: taking tokens back may move last bits on this model")
        decoder = self.quiet_decoder(target, memory, keep=keep)
        if decoder.exact == "on" and decoder.calibration.exact_sizes is None and target.can_rollback:
            note("comparing batch sizes bit by bit for --exact on; this happens once per model and machine")
        return decoder

    def quiet_decoder(
        self,
        target: Target,
        memory: Memory | None,
        calibration: Calibration | None = None,
        *,
        keep: bool = False,
        drafter: Drafter | None = None,
    ) -> SpeculativeDecoder:
        """The same, with nothing said; `calibration` as in `SpeculativeDecoder`, `drafter` in place of a new one."""
        if self.no_draft or not target.can_rollback:
            drafter = None
        elif drafter is None:
            kept = file_of(target.vocabulary_hash) if keep and not self.no_memory and self.drafter == DEFAULT else None
            drafter = self.load_drafter(target, self.drafter, memory, kept)
        return SpeculativeDecoder(
            target,
            drafter=drafter,
            policy=self.policy,
            draft_max=self.draft_max,
            exact=target.exact,
            calibration=calibration,
        )


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


def grouped(command: Command) -> Command:
    """Let typer see the fields of a command's dataclass parameters as options of its own."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(hint, type)
        groups[parameter.name] = hint
        inner = get_type_hints(hint, include_extras=True)
        for field in fields(hint):
            assert field.default is not MISSING
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=inner[field.name]
                )
            )

    def spread(**values: Any) -> None:
        built = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**values, **built)

    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread  # type: ignore[return-value]
