"""Which settings are worth trying on a machine, the likeliest to help first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ngramspec.tuning.measures import DEEP, DRAFTS, LONG_READING, READING, SINGLE, Measure
from ngramspec.tuning.rounds import Candidate
from ngramspec.tuning.settings import Settings

MICRO_BATCHES = (256, 1024)

WHOLE: tuple[Measure, ...] = (SINGLE, *DRAFTS, READING)
ATTENTION: tuple[Measure, ...] = (SINGLE, DRAFTS[0], READING, *DEEP)
"""What attention has a share in, the longer the context the more."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a machine and a model leave to be chosen.

    Attributes:
        physical, logical: cores, and threads that the system runs at once on them.
        on_cpu: whether the CPU computes any of the model.
        flash_free: whether flash attention can be switched.
        quantised_cache: whether a cache of 8 bits is possible and not yet taken.
    """

    physical: int
    logical: int
    on_cpu: bool
    flash_free: bool
    quantised_cache: bool


def candidates(present: Settings, scope: Scope) -> dict[str, Candidate]:
    """What to compare with the present settings, by the options of the command line that set it."""
    found: list[Candidate] = []
    if scope.on_cpu:
        for count in _counts(scope.physical, scope.logical):
            if count != present.threads:
                found.append(Candidate("threads", replace(present, threads=count), (SINGLE,)))
        for count in dict.fromkeys((scope.logical, scope.physical)):
            if count != present.threads_batch:
                settings = replace(present, threads_batch=count)
                found.append(Candidate("threads_batch", settings, (*DRAFTS, READING)))
    if scope.flash_free:
        other = replace(present, flash_attn="on" if present.flash_attn == "off" else "off")
        found.append(Candidate("flash_attn", other, ATTENTION))
    if scope.on_cpu and present.mmap:
        found.append(Candidate("weights", replace(present, mmap=False), WHOLE))
    if scope.on_cpu and present.repack:
        found.append(Candidate("weights", replace(present, repack=False), WHOLE))
    if scope.quantised_cache:
        other = replace(present, cache_types=("q8_0", "q8_0"))
        found.append(Candidate("cache_types", other, ATTENTION, advice=True))
    if present.flash_attn != "off" and present.micro_batch is None:
        found += [Candidate("micro_batch", replace(present, micro_batch=n), (LONG_READING,)) for n in MICRO_BATCHES]
    return {one.settings.flags(present): one for one in found}


def _counts(physical: int, logical: int) -> list[int]:
    """Numbers of threads for a pass over one token: few saturate the memory of a machine of many cores."""
    counts = {physical, logical, max(1, physical // 2), max(1, 3 * physical // 4)}
    return sorted(counts | ({physical // 4} if physical >= 16 else set()), reverse=True)


def combined(present: Settings, winners: dict[str, Settings]) -> Settings:
    """The winners of all knobs together.

    Without flash attention a micro-batch holds scores for the whole context, so it is not widened then.

    Args:
        present: the settings they were compared with.
        winners: by knob.
    """
    without = winners.get("flash_attn", present).flash_attn == "off"
    return present.merged([s for knob, s in winners.items() if not (without and knob == "micro_batch")])
