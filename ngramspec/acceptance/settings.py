"""`Acceptance`: settings of the acceptance of drafts, and the rule that they select."""

from __future__ import annotations

from dataclasses import dataclass

from ngramspec.sampling.settings import Sampling

METHODS = ("greedy", "coupled", "match", "rejection")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Settings of the acceptance of drafts.

    Raises:
        ValueError: A value is out of range, or options contradict each other.
    """

    # One of `METHODS`; `None` means greedy at temperature 0, rejection with lenience, and otherwise coupled.
    method: str | None = None
    lenience: float = 1.0  # factor above 0; below 1 draft tokens are accepted more often than their probabilities allow
    typical: bool = False  # whether to use typical acceptance, as in Medusa

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"acceptance must be one of {', '.join(METHODS)}, got {self.method!r}")
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience must be above 0 and at most 1 (1: off), got {self.lenience}")
        if self.lenience < 1 and self.method in ("coupled", "match"):
            raise ValueError(
                f"lenience has no effect with acceptance {self.method!r}; use 'rejection', or temperature 0"
            )
        if self.typical and (self.lenience < 1 or self.method is not None):
            raise ValueError("typical acceptance cannot be combined with lenience or another acceptance rule")

    @property
    def lossy(self) -> str | None:
        """Description of the setting that changes the output, if any."""
        if self.typical:
            return "typical acceptance"
        return f"lenience {self.lenience:g}" if self.lenience < 1 else None

    def rule(self, sampling: Sampling, restriction: str = "") -> str:
        """Return the rule to apply: one of `METHODS`, or "typical".

        Args:
            sampling: Settings that choose the tokens.
            restriction: A rule of the text that forbids or forces tokens, by name; see `TextRules.restriction`.

        Raises:
            ValueError: The acceptance contradicts the sampling or the restriction.
        """
        if self.method == "greedy" and not sampling.greedy:
            raise ValueError(f"acceptance 'greedy' requires temperature 0, got {sampling.temperature}")
        if sampling.samples_internally and (self.method == "rejection" or self.lossy):
            raise ValueError(
                f"mirostat cannot be combined with {self.lossy or 'rejection sampling'}: it samples by itself"
            )
        if sampling.greedy and self.typical:
            raise ValueError("typical acceptance requires a temperature above 0")
        if sampling.greedy and self.lossy and (sampling.changes_logits or restriction):
            obstacles = restriction or "penalties, logit biases or a grammar"
            raise ValueError(f"lenience at temperature 0 cannot be combined with {obstacles}")
        if sampling.greedy:
            # With all mass on one token all methods emit the same tokens, and greedy does it without noise.
            return "greedy"
        if self.typical:
            return "typical"
        if sampling.samples_internally or self.method == "match":
            return "match"
        return "rejection" if self.method == "rejection" or self.lossy else "coupled"
