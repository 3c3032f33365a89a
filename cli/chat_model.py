"""The model that a chat is had with, and how it is changed for another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.memory import Memory
from ngramspec.models.find import ModelSource

from .options import DraftOptions, LoadOptions


class Loaded(NamedTuple):
    """A model, what decodes with it, and the texts that are drafted from beside the context."""

    target: Target
    decoder: SpeculativeDecoder
    memory: Memory | None


@dataclass(frozen=True, slots=True)
class Loader:
    """Finds and loads models as the command line's options say; notes go to stderr."""

    load: LoadOptions
    draft: DraftOptions

    def find(self, name: str | None) -> ModelSource:
        """A model's file. Raises ModelError."""
        return self.load.find(name)

    def open(self, source: ModelSource) -> Loaded:
        """Load a model. Raises NGramSpecError; ends the program where an option does not go with it."""
        target = self.load.load(source, draft_max=self.draft.longest, head=self.draft.mtp)
        memory = self.draft.open_memory(target, keep=True)
        decoder = self.draft.decoder(target, memory, keep=True)
        if target.exact == "on" and target.can_rollback and decoder.calibration.exact_sizes is None:
            decoder.calibration.ensure_exact(target)
        return Loaded(target, decoder, memory)
