"""`SettingTrials`: the settings of a loaded model that `exact="auto"` compares, each in a separate context."""

from __future__ import annotations

from dataclasses import replace

from ngramspec.llama.cache import UNQUANTISED
from ngramspec.llama.contexts import default_micro_batch, make_params
from ngramspec.llama.trial_context import ROOM, TrialContext
from ngramspec.llama.weights import Weights
from ngramspec.machine import Settings


class SettingTrials:
    """The settings "fast" and "exact" of a model, as `ngramspec.cost.bits.ExactnessSelector` compares them.

    Args:
        weights: The loaded model.
        fast: Requested settings; those of "exact" have no flash attention on a CPU.

    Attributes:
        by_name: Both settings.
        settings: Names of the settings to compare: "fast", and "exact" if its flash attention differs.
        identity: Key of comparisons under both.
    """

    def __init__(self, weights: Weights, fast: Settings) -> None:
        flash, micro_batch = fast.flash_attn, fast.micro_batch
        if flash == "auto" and not weights.on_gpu and fast.cache_types[1] in UNQUANTISED:
            flash = "off"
        if micro_batch:
            # It was chosen for the requested settings, so it may be too large for the exact ones.
            micro_batch = min(default_micro_batch(weights, flash), micro_batch)
        self._weights = weights
        self.by_name = {"fast": fast, "exact": replace(fast, flash_attn=flash, micro_batch=micro_batch)}
        self.settings = ("fast", "exact") if flash != fast.flash_attn else ("fast",)
        micro = "" if fast.micro_batch is None else f" ub={fast.micro_batch}"
        self.identity = weights.key(f"fa={fast.flash_attn} kv={fast.cache_types}{micro}")

    def open(self, settings: Settings, cells: int) -> TrialContext:
        """Return a separate context under other settings, except `mmap` and `repack`, which cannot change.

        Raises:
            TargetError: The machine lacks the memory for the context.
        """
        self._weights.check_open()
        params = make_params(self._weights, settings, cells)
        return TrialContext(self._weights.handle, params, self._weights.adapters)

    def trial(self, setting: str) -> TrialContext:
        """Return a separate context under the setting "fast" or "exact"."""
        return self.open(self.by_name[setting], ROOM)
