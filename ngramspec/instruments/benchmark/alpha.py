"""Alpha by n-gram order: the acceptance rate of drafts from the counts of one order, measured in two ways.

    measured   the mean of sum_x min(p(x), q(x)) over the verified positions, with the target's distribution p and the
               normalised counts of the context q, which is the definition of alpha (Leviathan, Kalman, Matias 2023,
               definition 3.1 and corollary 3.6)
    inferred   accepted / tested positions of the same drafts; a position is tested if all before it were accepted

At temperature 0 both distributions have only their most likely token, so the two figures are equal (section 2.2: the
standardised p and q). Orders 1 and 2 are the unigrams and bigrams of the paper's table 3, counted only in the context.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ngramspec.backend import Runner
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Chooser, Draft, Drafter, MarginalCost
from ngramspec.exactness.decision import Exact
from ngramspec.instruments.benchmark.figures import alpha
from ngramspec.instruments.reports.report import Section, Table, figure
from ngramspec.policies.policy import FixedPolicy
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats
from ngramspec.tokens import common_prefix

ORDERS = (1, 2, 3, 4)


class OrderDrafter(Drafter):
    """A drafter that uses the counts of one order over the whole context; order 1 counts tokens without context."""

    def __init__(self, order: int) -> None:
        self.name = f"{order}-gram"
        self._width = order - 1
        self._counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._tail: tuple[int, ...] = ()
        self._proposed: tuple[int, ...] = ()

    def begin(self, prompt: Sequence[int]) -> None:
        self._counts.clear()
        self._tail = ()
        self._count(prompt)

    def propose(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Draft:
        tokens: list[int] = []
        distributions: list[dict[int, float]] = []
        tail = self._tail
        while len(tokens) < limit and (counts := self._counts.get(tail)):
            token = choose(len(tokens), counts) if choose is not None else max(counts, key=lambda x: (counts[x], -x))
            total = counts.total()
            distributions.append({x: count / total for x, count in counts.items()})
            tokens.append(token)
            tail = self._after(tail, token)
        self._proposed = tuple(tokens)
        return Draft(self._proposed, tuple(distributions) if choose is not None else (), source=self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        self._count(tokens)
        return common_prefix(self._proposed, tokens)

    def _count(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if len(self._tail) == self._width:
                self._counts[self._tail][token] += 1
            self._tail = self._after(self._tail, token)

    def _after(self, tail: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*tail, token)[-self._width :] if self._width else ()


class AlphaOfOrder:
    """Alpha of the drafts of one order. Above temperature 0 drafts are verified with rejection sampling.

    Drafts have up to `gamma` tokens. `overlap` is the sum of sum_x min(p(x), q(x)) over the `n_verified` positions.
    """

    def __init__(self, order: int, target: Runner, sampling: Sampling, gamma: int, *, exact: Exact = "off") -> None:
        self.order, self.gamma = order, gamma
        self.stats, self.n_verified, self.overlap = Stats(), 0, 0.0
        self._sampling = sampling
        curve = None if exact == "on" else make_fixed_curve({1: 1.0})  # no time is measured here
        options: dict[str, Any] = {"policy": FixedPolicy(gamma), "exact": exact, "curve": curve}
        self._decoder = SpeculativeDecoder(target, drafter=OrderDrafter(order), **options)

    def run(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Continue a prompt, and update the counts."""
        acceptance = None if self._sampling.greedy else "rejection"
        settings: dict[str, Any] = {"sampling": self._sampling, "acceptance": acceptance, "return_decisions": True}
        for step in self._decoder.generate(prompt, max_tokens=max_tokens, **settings):
            self.stats.add(step)
            for decision in step.decisions:
                if decision.accepted is not None:
                    self.n_verified += 1
                    self.overlap += decision.why.get("overlap", float(decision.accepted))

    @property
    def mean_overlap(self) -> float | None:
        """Alpha by its definition; `None` if nothing was drafted."""
        return self.overlap / self.n_verified if self.n_verified else None

    @property
    def acceptance_rate(self) -> float | None:
        """Alpha as accepted / tested positions; `None` if nothing was drafted."""
        return alpha(self.stats)

    def to_json(self) -> dict[str, Any]:
        names = ("drafted", "accepted", "passes", "passes_without_draft", "tokens_per_pass")
        return {
            "order": self.order,
            "gamma": self.gamma,
            "measured": self.mean_overlap,
            "inferred": self.acceptance_rate,
            "verified": self.n_verified,
            **{name: getattr(self.stats, name) for name in names},
        }


def alpha_section(orders: Sequence[AlphaOfOrder], *, greedy: bool) -> Section:
    """Return the section with one row per order."""
    rows = [
        [
            {1: "1 (unigram)", 2: "2 (bigram)"}.get(row.order, str(row.order)),
            figure(row.mean_overlap, ".3f"),
            figure(row.acceptance_rate, ".3f"),
            str(row.n_verified),
            f"{1 - row.stats.passes_without_draft / row.stats.passes if row.stats.passes else 0.0:.0%}",
            f"{row.stats.tokens_per_pass:.2f}",
        ]
        for row in orders
    ]
    headings = ["order", "measured", "inferred", "verified", "passes with a draft", "tokens per pass"]
    about = f"{'greedy' if greedy else 'rejection sampling'}, drafts of up to {orders[0].gamma} tokens."
    return Section("Alpha of n-gram counts by order", about, [Table(headings, rows)])
