"""The options of a draft model, and how it is loaded beside its target.

`SecondModelOptions` are those of a second file, which `serve` has too; `DraftModelOptions` know a model's head as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.asked_model import AskedModel
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.hybrid import HybridDrafter
from ngramspec.drafting.recall import Recall
from ngramspec.llama.draft_model import asked_for
from ngramspec.llama.shared import SharedTarget
from ngramspec.llama.target import Target
from ngramspec.models.find import ModelSource, resolve
from ngramspec.tuning.settings import MOST_THREADS

from .completion import models
from .console import download_bar, note, signals_deferred, usage_error

ALONE = "model"
"""What `--drafter` calls a draft model that drafts alone."""


@dataclass(frozen=True, slots=True)
class SecondModelOptions:
    """Which second model drafts, if one does, and how it is run."""

    draft_model: Annotated[
        str | None,
        typer.Option(
            "-md",
            "--draft-model",
            metavar="MODEL",
            autocompletion=models,
            help="Draft with this model of the same vocabulary too; named as MODEL is.",
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

    def check_second_model(self) -> None:
        """End the program where options are for a draft model, and there is none."""
        if self.draft_model is None and (self.gpu_layers_draft, self.threads_draft) != (None, None):
            usage_error("-ngld and -td are for a draft model; name it with -md, or leave them out")

    def find_draft_model(self) -> ModelSource | None:
        """Find the draft model's file, and fetch it if need be; None if there is none. ModelError: there is no such."""
        if self.draft_model is None:
            return None
        with download_bar() as progress:
            return resolve(self.draft_model, progress=progress)

    def load_asked(self, target: Target | SharedTarget, source: ModelSource) -> AskedModel:
        """The draft model of a target, with a context, or as many lanes, as long. Notes on it go to stderr.

        Raises:
            ModelError: it cannot be loaded, has another vocabulary, or cannot take back what it has evaluated.
        """
        settings: dict[str, Any] = {
            "n_ctx": target.n_ctx,
            "n_gpu_layers": -1 if self.gpu_layers_draft is None else self.gpu_layers_draft,
            "threads": self.threads_draft or target.threads,
            "exact": "off",
        }
        model: Target | SharedTarget
        if isinstance(target, SharedTarget):
            model = SharedTarget(source.path, lanes=len(target.lanes), **settings)
        else:
            model = Target(source.path, **settings)
        for line in [line for line in model.notes if line not in target.notes]:
            note(f"draft model: {line}")
        return asked_for(target, model)


@dataclass(frozen=True, slots=True)
class DraftModelOptions(SecondModelOptions):
    """Which model drafts, if one does, and how it is run."""

    mtp: Annotated[
        bool, typer.Option("--mtp", help="Draft with the model's own NextN (MTP) layer, where it has one.")
    ] = False

    @property
    def draft_model_flag(self) -> str:
        """The option that makes a model draft; "" if none does."""
        return "-md" if self.draft_model is not None else "--mtp" if self.mtp else ""

    def check_drafter(self, drafter: str, *, memory: bool = False) -> None:
        """End the program where these options contradict each other, or the drafter that is named.

        Args:
            drafter: its name, known or not.
            memory: as in `make_drafter`.
        """
        flag = self.draft_model_flag
        if self.draft_model is not None and self.mtp:
            usage_error("-md and --mtp exclude each other")
        self.check_second_model()
        if not flag and drafter == ALONE:
            usage_error(f"--drafter {ALONE} is for a draft model; name it with -md, or leave out --drafter")
        if flag and drafter not in (DEFAULT, ALONE):
            usage_error(
                f"with {flag} a model drafts, beside {DEFAULT}, or alone with --drafter {ALONE};"
                f" leave out --drafter {drafter}"
            )
        if not flag:
            try:
                make_drafter(drafter, memory=memory)
            except ValueError as error:
                usage_error(str(error))

    def load_drafter(
        self, target: Target, drafter: str, memory: Recall | None = None, kept: Path | None = None
    ) -> Drafter:
        """What drafts for a target: a model, if one does, and n-grams beside it. Notes on the model go to stderr.

        A draft model has a context as long as the target's. A target's own head is there if it was loaded with it.

        Args:
            target: drafts are for this model.
            drafter: the name of what drafts; ALONE for the model without n-grams.
            memory, kept: as in `make_drafter`.

        Raises:
            ModelError: it cannot be loaded, has another vocabulary, or cannot take back what it has evaluated.
        """
        asked = self._asked(target)
        if asked is None:
            return make_drafter(DEFAULT if drafter == ALONE else drafter, memory=memory, kept=kept)
        return asked if drafter == ALONE else HybridDrafter(asked, memory, kept)

    def _asked(self, target: Target) -> AskedModel | None:
        if target.head is not None:
            return AskedModel(target.head, n_vocab=target.n_vocab)
        source = self.find_draft_model()
        if source is None:
            return None
        with signals_deferred():
            return self.load_asked(target, source)
