"""The options of a draft model, and how it is loaded beside its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ngramspec.drafting.model import ModelDrafter
from ngramspec.errors import ModelError
from ngramspec.llama.same_vocabulary import common_tokens
from ngramspec.llama.target import Target
from ngramspec.models.find import resolve
from ngramspec.tuning.settings import MOST_THREADS

from .completion import models
from .console import download_bar, note, signals_deferred, usage_error


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Which model drafts, if one does, and how it is run."""

    draft_model: Annotated[
        str | None,
        typer.Option(
            "-md",
            "--draft-model",
            metavar="MODEL",
            autocompletion=models,
            help="Draft with this model, which has the same vocabulary; named as MODEL is.",
            show_default=False,
        ),
    ] = None
    gpu_layers_draft: Annotated[
        int | None,
        typer.Option(
            "-ngld", "--gpu-layers-draft", min=-1, max=9999, help="Layers of the draft model on the GPU; default: all."
        ),
    ] = None
    threads_draft: Annotated[
        int | None,
        typer.Option(
            "-td", "--threads-draft", min=1, max=MOST_THREADS, help="CPU threads of the draft model; default: as -t."
        ),
    ] = None
    mtp: Annotated[
        bool, typer.Option("--mtp", help="Draft with the model's own NextN (MTP) layer, where it has one.")
    ] = False

    @property
    def draft_model_flag(self) -> str:
        """The option that makes a model draft; "" if none does."""
        return "-md" if self.draft_model is not None else "--mtp" if self.mtp else ""

    def check_draft_model(self) -> None:
        """End the program if options of a draft model are given without one, or two models are to draft."""
        if self.draft_model is not None and self.mtp:
            usage_error("-md and --mtp exclude each other")
        if self.draft_model is None and (self.gpu_layers_draft, self.threads_draft) != (None, None):
            usage_error("-ngld and -td are for a draft model; name it with -md, or leave them out")

    def load_drafter(self, target: Target) -> ModelDrafter | None:
        """The model that drafts; None if none does. Notes on it go to stderr.

        A draft model has a context as long as the target's. A target's own head is there if it was loaded with it.

        Raises:
            ModelError: it cannot be loaded, has another vocabulary, or cannot take back what it has evaluated.
        """
        if target.head is not None:
            return ModelDrafter(target.head, n_vocab=target.n_vocab)
        if self.draft_model is None:
            return None
        with download_bar() as progress:
            source = resolve(self.draft_model, progress=progress)
        with signals_deferred():
            model = Target(
                source.path,
                n_ctx=target.n_ctx,
                n_gpu_layers=-1 if self.gpu_layers_draft is None else self.gpu_layers_draft,
                threads=self.threads_draft or target.threads,
                exact="off",
            )
        for line in [line for line in model.notes if line not in target.notes]:
            note(f"draft model: {line}")
        shared = common_tokens(target, model)
        if not model.can_rollback:
            raise ModelError(
                f"{source.path} cannot draft: what it has evaluated cannot be taken back; take another -md"
            )
        return ModelDrafter(model, n_vocab=shared)
