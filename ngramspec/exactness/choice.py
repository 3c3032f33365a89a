"""Whether a text can be the same bit for bit with and without drafts, and at what price: how `exact="auto"` chooses.

Three ways to decode are compared, by what was measured of each (`ngramspec.exactness.trial`):

    fast     the fastest settings; batches of different sizes may differ in the last bits
    padded   the same settings, single tokens padded to two, where all sizes from two on agree
    exact    settings under which single tokens agree with the other sizes: on a CPU no flash attention, whose
             kernel splits a single token's context over the threads

The first is taken that agrees and takes at most `TOLERANCE` times as long as the fastest for a usual request. Only
measurements decide, never drafts: every process that reads the same measurements decodes the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

Exact = Literal["auto", "on", "off"]
EXACT: tuple[Exact, ...] = ("auto", "on", "off")

Way = Literal["fast", "padded", "exact"]
WAYS: tuple[Way, ...] = ("fast", "padded", "exact")

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
"""Batch sizes that a trial compares."""

PROMPT, ANSWER = 1024, 256
"""Tokens of the usual request that the price is for."""

DEPTHS = (0, PROMPT)
"""Tokens of context after which sizes are compared and passes are timed, one after the other; CPU kernels were seen to
change at 256 and 512."""

MOST = 7
"""All sizes up to this one must agree, and only sizes that do are used: K-quants change their kernel at 8."""

TOLERANCE = 1.05
"""The most that bit-identical text may cost: time of the request / its time under the fastest settings."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which batch sizes agree under one setting.

    Attributes:
        agreeing: the compared sizes that agree bit for bit with single tokens, 1 among them, ascending.
        padded: those, from two on, that agree with the largest that drafts would use.
    """

    agreeing: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether single tokens agree with every size that drafts would use."""
        return set(self.agreeing) >= {n for n in SIZES if n <= MOST}

    @property
    def pads(self) -> bool:
        """Whether all sizes from two on agree with each other."""
        return set(self.padded) >= {n for n in SIZES if 2 <= n <= MOST}

    def merge(self, other: Identity) -> Identity:
        """What holds at both of two depths."""
        return Identity(
            tuple(n for n in self.agreeing if n in other.agreeing),
            tuple(n for n in self.padded if n in other.padded),
        )


class Times(NamedTuple):
    """Seconds of one way to decode, after a context of one depth.

    Attributes:
        single: of a pass without a draft.
        prefill: per token of a prompt.
    """

    single: float
    prefill: float


@dataclass(slots=True)
class Measured:
    """What is known of one model, build, machine and settings: what was found at each of `DEPTHS`, as far as it was.

    Attributes:
        identities: by setting, "fast" or "exact".
        times: of every way to decode.
        rounding: largest absolute difference of one logit between batches and single tokens under the fastest
            settings; None: not measured.
    """

    identities: dict[str, tuple[Identity, ...]] = field(default_factory=dict)
    times: tuple[Mapping[str, Times], ...] = ()
    rounding: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "identities": {setting: [asdict(one) for one in found] for setting, found in self.identities.items()},
            "times": self.times,
            "rounding": self.rounding,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measured:
        """The inverse of `to_json`; raises KeyError, TypeError, ValueError or AttributeError on anything else."""
        identities = {
            str(setting): tuple(Identity(_sizes(one["agreeing"]), _sizes(one["padded"])) for one in found)
            for setting, found in data["identities"].items()
        }
        times = tuple(
            {str(way): Times(float(single), float(prefill)) for way, (single, prefill) in found.items()}
            for found in data["times"]
        )
        if max(map(len, (times, *identities.values()))) > len(DEPTHS):
            raise ValueError(f"more than was measured at the depths {DEPTHS}")
        return cls(identities, times, None if data["rounding"] is None else float(data["rounding"]))

    def join(self, other: Measured) -> None:
        """Take over what another one knows: as to what both know, it is right."""
        for setting, found in other.identities.items():
            self.identities[setting] = found + self.identities.get(setting, ())[len(found) :]
        self.times = other.times + self.times[len(other.times) :]
        self.rounding = self.rounding if other.rounding is None else other.rounding

    def identity(self, setting: str) -> Identity | None:
        """Which sizes agree at all depths; None where that is not known of each."""
        found = self.identities.get(setting, ())
        return found[0].merge(found[1]) if len(found) == len(DEPTHS) else None

    def seconds(self, way: Way) -> float | None:
        """Expected time of a usual request without drafts; None if unmeasured."""
        if len(self.times) < len(DEPTHS) or any(way not in found for found in self.times):
            return None
        shallow, deep = (found[way] for found in self.times)
        return PROMPT * (shallow.prefill + deep.prefill) / 2 + ANSWER * deep.single

    def price(self, way: Way) -> float | None:
        """Expected time of a usual request decoded that way / that of the fastest way; None if unmeasured."""
        known = [seconds for other in WAYS if (seconds := self.seconds(other)) is not None]
        mine = self.seconds(way)
        return None if mine is None else mine / min(known)

    def _worth(self, way: Way) -> bool:
        price = self.price(way)
        return price is not None and price <= TOLERANCE

    def missing(self, ways: Sequence[Way]) -> str | None:
        """What is to be measured next to choose: "times", or how sizes agree under a setting; None: nothing."""
        fast = self.identity("fast")
        if fast is None:
            return "fast"
        pads, other = fast.pads and "padded" in ways, "exact" in ways
        if fast.whole or not (pads or other):
            return None
        if len(self.times) < len(DEPTHS):
            return "times"
        decided = not (other and self._worth("exact")) or (pads and self._worth("padded"))
        return None if decided or self.identity("exact") is not None else "exact"

    def choose(self, ways: Sequence[Way]) -> Way:
        """How requests are decoded; "fast" also where nothing better is known.

        Args:
            ways: that may be chosen, "fast" among them.
        """
        fast, exact = self.identity("fast"), self.identity("exact")
        if fast is None or fast.whole:
            return "fast"
        if fast.pads and "padded" in ways and self._worth("padded"):
            return "padded"
        if exact is not None and exact.whole and "exact" in ways and self._worth("exact"):
            return "exact"
        return "fast"


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    sizes = tuple(int(n) for n in values)
    if not set(sizes) <= set(SIZES):
        raise ValueError(f"a trial of the sizes {sizes}, not of {SIZES}")
    return sizes
