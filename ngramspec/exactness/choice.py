"""Whether a text can be the same bit for bit with and without drafts, and at what price: how `exact="auto"` chooses.

Three ways to decode are compared, by what was measured of each (`ngramspec.exactness.trial`):

    fast     the fastest settings; batches of different sizes may differ in the last bits
    padded   the same settings, single tokens padded to two, where all sizes from two on agree
    exact    settings under which single tokens agree with the other sizes: on a CPU no flash attention, whose
             kernel splits a single token's context over the threads

The first that agrees and takes at most `TOLERANCE` times as long as the fastest is taken. Only measurements, the
length of the prompt and the most tokens asked for decide, never drafts: a text with and without them is decoded the
same way, in every process that reads the same measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Literal, NamedTuple

Exact = Literal["auto", "on", "off"]
EXACT: tuple[Exact, ...] = ("auto", "on", "off")

Way = Literal["fast", "padded", "exact"]
WAYS: tuple[Way, ...] = ("fast", "padded", "exact")

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
"""Batch sizes that a trial compares."""

DEPTHS = (0, 1024)
"""Tokens of context after which sizes are compared and passes are timed, one after the other; CPU kernels were seen to
change at 256 and 512."""

MOST = 7
"""All sizes up to this one must agree, and only sizes that do are used: K-quants change their kernel at 8."""

TOLERANCE = 1.05
"""The most that bit-identical text may cost: time of the request / its time under the fastest settings."""

TYPICAL = 256
"""Tokens that a text is taken to have where more, or no limit, were asked for: most texts end by themselves."""

UNMEASURED = 1.0
"""How far batch sizes are taken to move a logit where there was no time to measure it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which batch sizes agree under one setting, at a short and at a long context.

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


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one way to decode, to be drawn as lines over the length of the context.

    Attributes:
        depth: tokens of context at which `deep` and `prefill_deep` were measured.
        shallow, deep: of a pass without a draft, after next to nothing and at `depth`.
        prefill_shallow, prefill_deep: per token of a prompt.
    """

    depth: int
    shallow: float
    deep: float
    prefill_shallow: float
    prefill_deep: float

    def seconds(self, prompt: int, tokens: int) -> float:
        """Expected seconds of a request: the whole prompt, and `tokens` without drafts. O(1)."""
        slope = (self.prefill_deep - self.prefill_shallow) / self.depth
        rise = (self.deep - self.shallow) / self.depth
        prefill = prompt * max(self.prefill_shallow + slope * prompt / 2, 0.0)
        return prefill + tokens * max(self.shallow + rise * (prompt + tokens / 2), 0.0)


@dataclass(slots=True)
class Measured:
    """What is known of one model, build, machine and settings. What is known once is not measured again.

    Attributes:
        identity: by setting, "fast" or "exact".
        speed: by way to decode.
        shallow_identity, shallow_times: what was found at the first of `DEPTHS`, which is measured first.
        rounding: largest absolute difference of one logit between batches and single tokens, under the fastest
            settings and on a user's text; None: not measured.
        wanted: seconds that the next measurement would take, where there was no time for it; 0: unknown.
    """

    identity: dict[str, Identity] = field(default_factory=dict)
    speed: dict[str, Speed] = field(default_factory=dict)
    shallow_identity: dict[str, Identity] = field(default_factory=dict)
    shallow_times: dict[str, Times] = field(default_factory=dict)
    rounding: float | None = None
    wanted: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "identity": {k: asdict(v) for k, v in self.identity.items()},
            "speed": {k: astuple(v) for k, v in self.speed.items()},
            "shallow_identity": {k: asdict(v) for k, v in self.shallow_identity.items()},
            "shallow_times": self.shallow_times,
            "rounding": self.rounding,
            "wanted": self.wanted,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measured:
        """The inverse of `to_json`; raises KeyError, TypeError, ValueError or AttributeError on anything else."""
        speed = {str(k): Speed(int(v[0]), *(float(x) for x in v[1:])) for k, v in data["speed"].items()}
        if any(v.depth < 1 for v in speed.values()):
            raise ValueError("a speed that was measured at no depth")
        times = {str(k): Times(float(single), float(prefill)) for k, (single, prefill) in data["shallow_times"].items()}
        if times and "fast" not in times:
            raise ValueError("times of other settings than the fastest")
        return cls(
            _identities(data["identity"]),
            speed,
            _identities(data["shallow_identity"]),
            times,
            None if data["rounding"] is None else float(data["rounding"]),
            float(data["wanted"]),
        )

    def add_identity(self, setting: str, found: Identity) -> None:
        """Take in what was found at the next depth."""
        if setting not in self.shallow_identity:
            self.shallow_identity[setting] = found
        else:
            self.identity[setting] = self.shallow_identity[setting].merge(found)

    def add_times(self, found: Mapping[str, Times]) -> None:
        """Take in what was timed at the next depth, of every way to decode."""
        if not self.shallow_times:
            self.shallow_times = dict(found)
            return
        for way in found.keys() & self.shallow_times.keys():
            shallow, deep = self.shallow_times[way], found[way]
            self.speed[way] = Speed(DEPTHS[1], shallow.single, deep.single, shallow.prefill, deep.prefill)

    @property
    def bound(self) -> float:
        """How far batch sizes move a logit under the fastest settings."""
        return UNMEASURED if self.rounding is None else self.rounding

    def price(self, way: Way, prompt: int, tokens: int) -> float | None:
        """Expected time of a request decoded that way / that of the fastest settings; None if unmeasured."""
        tokens = min(tokens, TYPICAL)
        if way not in self.speed:
            return None
        fastest = min(s.seconds(prompt, tokens) for s in self.speed.values())
        return self.speed[way].seconds(prompt, tokens) / fastest

    def worth(self, way: Way, prompt: int, tokens: int) -> bool:
        """Whether decoding that way costs next to nothing; False if unmeasured."""
        price = self.price(way, prompt, tokens)
        return price is not None and price <= TOLERANCE

    def choose(self, prompt: int, tokens: int, usable: Sequence[Way] = WAYS) -> Way:
        """How a request is decoded; "fast" also where nothing better is known (`same` then tells what it is)."""
        fast, exact = self.identity.get("fast"), self.identity.get("exact")
        if fast is not None and fast.whole:
            return "fast"
        if fast is not None and fast.pads and "padded" in usable and self.worth("padded", prompt, tokens):
            return "padded"
        if exact is not None and exact.whole and "exact" in usable and self.worth("exact", prompt, tokens):
            return "exact"
        return "fast"

    def sizes(self, way: Way) -> tuple[int, ...] | None:
        """Batch sizes that give the same bits when decoding that way, ascending; None: different ones may differ."""
        known = self.identity.get("exact" if way == "exact" else "fast")
        if known is None:
            return None
        if way == "padded":
            return known.padded if known.pads else None
        return known.agreeing if known.whole else None


def _identities(data: Mapping[str, Any]) -> dict[str, Identity]:
    return {str(k): Identity(_sizes(v["agreeing"]), _sizes(v["padded"])) for k, v in data.items()}


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    sizes = tuple(int(n) for n in values)
    if not set(sizes) <= set(SIZES):
        raise ValueError(f"a trial of the sizes {sizes}, not of {SIZES}")
    return sizes
