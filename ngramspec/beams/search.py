"""`BeamSearch`: beam search with drafts. Beams and scores are those of beam search without drafts, in fewer passes.

Beam search keeps the `beams` most likely texts. A text scores the sum of the logarithms of its tokens' probabilities
under the softmax of the target's raw logits; there is no length penalty. A step expands each live text by every
token and keeps the best `beams` of all the results; equal scores go to the text that ranked higher, then to the
larger logit, then to the lower token id. A result that ends (its last token ends generations, or completes a stop
string) is finished and takes no part in later steps. The search continues for at most `max_tokens` steps; as scores
only fall, it is over as soon as `beams` texts are finished and none alive scores more than the last of those.

Without drafts every step costs a pass. Leviathan, Kalman, Matias (2023, arXiv 2211.17192, appendix A.4) let a cheap
model, here a `BeamDrafter`, run ahead with a beam search of its own, and evaluate all its nodes in one pass: a step is
then free if all that the target's logits make it choose is among them. Three additions: known rows replace guesses;
drafted nodes that were not reached yet stay in the cache; and a text whose row is missing holds nothing up if enough
results of the other texts score more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from functools import reduce
from typing import TYPE_CHECKING

from ngramspec.backend import Logits, Progress
from ngramspec.beams.draft import BeamDrafter, BeamPlan
from ngramspec.beams.state import BeamState, Hypothesis
from ngramspec.cost.calibration import Calibration
from ngramspec.errors import ModelError, PromptError
from ngramspec.sampling.distribution import logprobs, top_token
from ngramspec.steps import Stats, StopReason
from ngramspec.tokens import Likely, Node, common_ancestor

if TYPE_CHECKING:
    from ngramspec.llama.cache_tree import CacheTree
    from ngramspec.llama.target import Target

DRAFT_MAX = 16  # most steps that a draft runs ahead, unless told otherwise
SEQUENCES = 64  # the `n_seq` that a target for beam search is loaded with: one for each row of the largest pass


class BeamSearch:
    """One beam search after another on one target, with drafts or without.

    Args:
        target: loaded with `n_seq` above `beams`; `SEQUENCES` leaves room for drafts.
        beams: how many texts are kept; 1 is greedy decoding.
        drafter: None for plain beam search.
        calibration: tells which drafts pay; None: all that fits is drafted.
        draft_max: most steps that a draft runs ahead, at least 1.

    Attributes:
        stats: counters of the last search. `tokens`: by how many each text grew after the first, which is how many
            passes the search takes without drafts; `drafted`: tokens evaluated before any live text ended in them;
            `draft_seconds`: of all other work for the passes: drafting, reading logits, choosing.

    Raises:
        ModelError: the target's memory cannot hold several continuations of a text.
        ValueError: `beams` below 1, or more than the target's sequences can hold; `draft_max` below 1.
    """

    def __init__(
        self,
        target: Target,
        beams: int,
        *,
        drafter: BeamDrafter | None = None,
        calibration: Calibration | None = None,
        draft_max: int = DRAFT_MAX,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if not target.can_branch:
            raise ModelError(
                "beam search does not support this model: its memory is recurrent or read in blocks; remove --beams"
            )
        if not 1 <= beams < target.n_seq:
            raise ValueError(f"beams must be 1 to {target.n_seq - 1}, got {beams}")
        if draft_max < 1:
            raise ValueError(f"draft_max must be at least 1, got {draft_max}")
        self.target, self.beams, self.drafter = target, beams, drafter
        self.calibration, self.draft_max = calibration, draft_max
        self.stats = Stats()
        self._clock = clock or time.perf_counter
        self._state: BeamState | None = None
        self._limit = 0
        self._out_of: StopReason = "length"
        self._rows: dict[Node, Logits] = {}

    def run(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Generator[None]:
        """Search; yields after the prefill and after each pass. `hypotheses` tells what was found, at any time.

        Args:
            prompt, stop, progress: as in `SpeculativeDecoder.generate`.
            max_tokens: most tokens of a text, at least 1; None: what the context has room for.

        Raises:
            PromptError: the prompt is empty, or the context has no room for so many texts of that length.
            ValueError: `max_tokens` below 1, or an empty stop string.
            BadLogits: during the search, at a nan in the target's logits.
            TargetError: llama.cpp failed; what was found stays found.
        """
        # Checked here, not at the first `next`: a wrong call must fail where it is made.
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if not prompt:
            raise PromptError("the prompt is empty")
        room = (self.target.n_ctx - len(prompt)) // self.beams
        # A single text ends where the context does, as in plain decoding.
        if room < (1 if self.beams == 1 else max_tokens or 1):
            raise PromptError(self._too_much(len(prompt), max_tokens or 1, room))
        self._limit = min(max_tokens or room, room)
        self._out_of = "length" if max_tokens == self._limit else "context"
        self.stats = Stats()
        self._state = BeamState(self.target, self.beams, Node(None, -1, len(prompt)), stop)
        return self._run(list(prompt), self._state, progress)

    def hypotheses(self) -> list[Hypothesis]:
        """The best texts so far, at most `beams`, the best one first."""
        state = self._state
        return state.hypotheses(self._out_of if state.steps == self._limit else None) if state is not None else []

    def _too_much(self, prompt_tokens: int, max_tokens: int, room: int) -> str:
        needed = prompt_tokens + self.beams * max_tokens
        changes = [f"-c {needed}"] + [f"-n {room}"] * (room > 0) + ["fewer beams"] * (self.beams > 1)
        texts = f"{self.beams} beams of {max_tokens} tokens" if self.beams > 1 else "an answer"
        return (
            f"{texts} after a prompt of {prompt_tokens} tokens can need a context of {needed} tokens, but it has"
            f" {self.target.n_ctx}; try {' or '.join(changes)}"
        )

    # ------------------------------------------------------------------ passes

    def _run(self, prompt: list[int], state: BeamState, progress: Progress | None) -> Generator[None]:
        target, drafter, stats, clock = self.target, self.drafter, self.stats, self._clock
        began = clock()
        row = target.prefill(prompt, progress=progress)
        root = state.live[0].node
        root.likely = self._likely(row)
        stats.prefill_seconds = clock() - began
        self._take_steps(state)
        yield
        if not self._goes_on(state):
            return
        curve, plan = None, None
        if drafter is not None:
            if self.calibration is not None:
                curve = self.calibration.ensure_curve(target, self._limit)
            drafter.begin(prompt)
            drafter.see(root, root.likely)
            plan = BeamPlan(drafter, curve, self.beams, self.draft_max, target.is_eog)
        self._trunk = root
        tree = target.tree(root)
        try:
            while self._goes_on(state):
                began = clock()
                nodes = self._choose(tree, state, plan)
                asked = clock()
                rows = tree.evaluate(nodes)
                ended = clock()
                self._rows = dict(zip(nodes, rows, strict=True))
                taken = self._take_steps(state)
                besides = clock() - ended + asked - began
                if plan is not None:
                    plan.learn(len(nodes), ended - asked, besides, taken)
                stats.passes += 1
                stats.seconds += ended - asked
                stats.draft_seconds += besides
                stats.decode_seconds = stats.seconds + stats.draft_seconds
                yield
        finally:
            self._rows = {}
            tree.close()
            if self.calibration is not None:
                self.calibration.save()

    def _goes_on(self, state: BeamState) -> bool:
        return bool(state.live) and state.steps < self._limit

    def _take_steps(self, state: BeamState) -> list[list[Node]]:
        """Take all steps whose rows are known; the last tokens of the texts still alive after each."""
        taken: list[list[Node]] = []
        while self._goes_on(state):
            extensions = state.extensions(self._read)
            if extensions is None:
                break
            nodes = state.step(extensions)
            self.stats.accepted += sum(node.likely is not None or node in self._rows for node in nodes)
            self.stats.tokens = state.steps - 1  # of the first step, the prefill made the row
            taken.append(nodes)
        return taken

    def _choose(self, tree: CacheTree, state: BeamState, plan: BeamPlan | None) -> list[Node]:
        """The nodes that the next pass evaluates; nodes that are no longer needed leave the cache."""
        nodes = [beam.node for beam in state.live]
        missing = [node for node in nodes if self._read(node) is None]
        kept = [node if node.likely is not None or node.parent is None else node.parent for node in nodes]
        ahead: list[Node] = []
        if plan is not None:
            if tree.windowed:  # nothing may stay that is ahead of the texts
                for node in nodes:
                    node.children = {}
            self._read_all([*nodes])
            self._commit(nodes)
            live = [(beam.score, beam.node) for beam in state.live]
            steps = self._limit - state.steps - 1
            ahead, known = plan.plan(live, steps, tree.max_batch - len(missing), tree.leaves)
            kept += known
            self.stats.drafted += len(ahead)
        tree.keep(kept)
        return missing + ahead

    def _commit(self, nodes: Sequence[Node]) -> None:
        """Tell the drafter what all texts agree on."""
        common = reduce(common_ancestor, nodes)
        if common is not self._trunk and self.drafter is not None:
            self.drafter.commit(common.path()[self._trunk.length - common.length :])
            self._trunk = common

    # ------------------------------------------------------------------ rows

    def _read(self, node: Node) -> Likely | None:
        """Return the target's prediction after a node; None if it was not evaluated."""
        if node.likely is None:
            row = self._rows.get(node)
            if row is None:
                return None
            node.likely = self._likely(row)
            if self.drafter is not None:
                self.drafter.see(node, node.likely)
        return node.likely

    def _read_all(self, nodes: list[Node]) -> None:
        """Read the rows of these nodes and of all after them, before the next pass overwrites them."""
        while nodes:
            node = nodes.pop()
            if self._read(node) is not None:
                nodes += node.children.values()

    def _likely(self, row: Logits) -> Likely:
        """The tokens that a step may choose after a row, best first: `beams` of them are enough."""
        suppressed = self.target.suppressed
        best = logprobs(row, 0, self.beams + len(suppressed)).top
        if not math.isfinite(best[0][1]):
            top_token(row)  # says what is wrong
        return [(t, logprob) for t, logprob in best if logprob > -math.inf and t not in suppressed][: self.beams]
