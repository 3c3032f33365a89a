"""Beam search with drafts. Beams and scores are those of beam search without drafts, in fewer passes.

Beam search keeps the `beams` most likely texts. The score of a text is the sum of the logarithms of its tokens'
probabilities, by the softmax of the target's raw logits; there is no length penalty. A round expands each live text by
every token and keeps the best `beams` of all the results. Among equal scores, the text that ranked higher is preferred,
then the larger logit, then the lower token id. A result is finished if its last token ends generations or completes a
stop string, and it is not expanded in later rounds. Scores only fall, so the search ends early when `beams` texts are
finished and no live text scores more than the last of them.

Without drafts every round costs a pass. Leviathan, Kalman, Matias (2023, arXiv 2211.17192, appendix A.4) let a cheap
model, here a `BeamPlan`, run ahead with a separate beam search, and evaluate all its nodes in one pass. A round costs
no pass if all nodes that it chooses are among them. There are three additions. Known rows replace guesses. Drafted
nodes that were not reached yet stay in the cache. And a text without a row does not delay a round if enough results of
the other texts score more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

from ngramspec.backend import Logits, Progress
from ngramspec.beams.draft import BeamPlan
from ngramspec.cost.store import StoredTimes
from ngramspec.data import ModelError, PromptError
from ngramspec.decoding.text import TextStream
from ngramspec.sampling.distribution import logprobs, top_token
from ngramspec.steps import Stats, StopReason
from ngramspec.tokens import Node, TopLogprobs

if TYPE_CHECKING:
    from ngramspec.llama.branches import Cells
    from ngramspec.llama.target import Target

DRAFT_MAX = 16  # default maximum number of rounds of a draft
SEQUENCES = 64  # `n_seq` of a target for beam search: one sequence for each row of the largest pass


class Hypothesis(NamedTuple):
    tokens: tuple[int, ...]  # tokens after the prompt, including the one that ended the text
    text: str  # text up to a stop string
    score: float  # sum of the natural logarithms of the tokens' probabilities
    stop: StopReason | None  # reason for the end; `None` while the text is alive


class Beam(NamedTuple):
    """A text: its score, its last token, and its characters for the search for stop strings, if there are any."""

    score: float
    node: Node
    stream: TextStream | None


Extension = tuple[float, Beam, int]  # extended text: new score, text before the extension, added token


class BeamSearch:
    """Beam searches on one target, one at a time, with or without drafts; one beam is greedy decoding.

    The `n_seq` of the target must be above `beams`; `SEQUENCES` leaves room for drafts. The costs of passes, `stored`,
    decide the draft lengths, at most `draft_max` rounds; `None` means no drafts. A ModelError means that the target's
    cache cannot contain several continuations of a text.
    """

    def __init__(
        self,
        target: Target,
        beams: int,
        *,
        stored: StoredTimes | None = None,
        draft_max: int = DRAFT_MAX,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not target.can_branch:
            raise ModelError(
                "beam search does not support this model: its memory is recurrent or read in blocks; remove --beams"
            )
        if not 1 <= beams < target.n_seq:
            raise ValueError(f"beams must be 1 to {target.n_seq - 1}, got {beams}")
        if draft_max < 1:
            raise ValueError(f"draft_max must be at least 1, got {draft_max}")
        self.target, self.beams, self.stored, self.draft_max = target, beams, stored, draft_max
        self._clock = clock
        self._is_eog = target.vocabulary.is_eog
        # Counters of the last search: `tokens` of each text after the first one (the passes without drafts), `drafted`
        # tokens that were evaluated before a live text ended in them, and `draft_seconds` of all work outside passes.
        self.stats = Stats()
        self._live: list[Beam] = []  # texts that continue, the best one first
        self._finished: list[tuple[Beam, StopReason]] = []
        self._rows: dict[Node, Logits] = {}  # of the last pass

    def run(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Generator[None]:
        """Search, and yield after the prefill and after each pass; `hypotheses` returns the results at any time.

        The arguments are those of `SpeculativeDecoder.generate`; without `max_tokens`, texts end with the context. If
        the context has no room for `beams` texts of this length, a PromptError is raised before the first pass.
        """
        # The arguments are checked here and not at the first `next`, so that a wrong call fails immediately.
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if not prompt:
            raise PromptError("the prompt is empty")
        room = (self.target.n_ctx - len(prompt)) // self.beams
        # A single text ends when the context is full, as in plain decoding.
        if room < (1 if self.beams == 1 else max_tokens or 1):
            n_required = len(prompt) + self.beams * (max_tokens or 1)
            changes = [f"-c {n_required}"] + [f"-n {room}"] * (room > 0) + ["fewer beams"] * (self.beams > 1)
            texts = f"{self.beams} beams of {max_tokens or 1} tokens" if self.beams > 1 else "an answer"
            raise PromptError(
                f"{texts} after a prompt of {len(prompt)} tokens can need a context of {n_required} tokens, but it has"
                f" {self.target.n_ctx}; try {' or '.join(changes)}"
            )
        self._rounds_left = min(max_tokens or room, room)
        self._limit_reason: StopReason = "length" if max_tokens == self._rounds_left else "context"
        self._stream = TextStream(stop, controls=self.target.vocabulary.controls if stop else {})
        root = Node(None, -1, len(prompt))
        self._live, self._finished = [Beam(0.0, root, self._stream if stop else None)], []
        self.stats = Stats()
        self._plan: BeamPlan | None = None
        return self._run(list(prompt), root, progress)

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best texts so far, at most `beams`, the best one first."""
        texts: list[tuple[Beam, StopReason | None]] = [*self._finished]
        texts += [(beam, None if self._rounds_left else self._limit_reason) for beam in self._live]
        texts.sort(key=lambda text: -text[0].score)
        return [self._hypothesis(beam, stop) for beam, stop in texts[: self.beams] if beam.node.parent is not None]

    def _hypothesis(self, beam: Beam, stop: StopReason | None) -> Hypothesis:
        stream, tokens = deepcopy(self._stream), tuple(beam.node.path())
        text = "".join([stream.push(self._piece(token)) for token in tokens]) + stream.finish()
        # A complete stop string may have been held back because a longer one that began before it was still possible.
        return Hypothesis(tokens, text, beam.score, "stop" if stop and stream.stop_string else stop)

    def _piece(self, token: int) -> bytes:
        """Return the bytes of a token; those that end a text have none, except for stop strings that name them."""
        named = self._stream.pieces.get(token)
        return named or (b"" if self._is_eog(token) else self.target.vocabulary.piece(token))

    # ------------------------------------------------------------------ passes

    def _run(self, prompt: list[int], root: Node, progress: Progress | None) -> Generator[None]:
        sequence, stats, clock = self.target.sequences[0], self.stats, self._clock
        started_at = clock()
        likely = root.likely = self._find_top_tokens(sequence.prefill(prompt, progress=progress))
        stats.prefill_seconds = clock() - started_at
        self._take_rounds()
        stats.tokens = 0  # the row of the first round comes from the prefill
        yield
        if not self._is_open:
            return
        if self.stored is not None:
            times = self.stored.times
            self._plan = BeamPlan(prompt, root, times, self.beams, self.draft_max, self._is_eog)
            self._plan.observe_row(root, likely)
        target = self.target
        from ngramspec.llama.branches import Cells

        cells = Cells(target.passes, root, target.n_seq, is_windowed=target.weights.window > 0)
        try:
            while self._is_open:
                started_at = clock()
                nodes = self._choose(cells)
                submitted_at = clock()
                rows = cells.evaluate(nodes)
                finished_at = clock()
                self._rows = dict(zip(nodes, rows, strict=True))
                rounds = self._take_rounds()
                other_seconds = clock() - finished_at + submitted_at - started_at
                if self._plan is not None:
                    self._plan.learn(len(nodes), finished_at - submitted_at, other_seconds, rounds)
                stats.passes += 1
                stats.seconds += finished_at - submitted_at
                stats.draft_seconds += other_seconds
                stats.decode_seconds = stats.seconds + stats.draft_seconds
                yield
        finally:
            self._rows = {}
            cells.clear()
            if self.stored is not None:
                self.stored.save()

    def _choose(self, cells: Cells) -> list[Node]:
        """Return the nodes that the next pass evaluates, and remove nodes that are no longer needed from the cache."""
        nodes = [beam.node for beam in self._live]
        missing = [node for node in nodes if self._read(node) is None]
        needed_nodes = [node if node.likely is not None or node.parent is None else node.parent for node in nodes]
        ahead: list[Node] = []
        if self._plan is not None:
            if cells.is_windowed:  # the cache must not keep nodes ahead of the texts
                for node in nodes:
                    node.children = {}
            waiting = [*nodes]
            while waiting:  # the next pass overwrites the rows of the live nodes and of all after them
                node = waiting.pop()
                if self._read(node) is not None:
                    waiting += node.children.values()
            live, room = [(beam.score, beam.node) for beam in self._live], cells.max_batch - len(missing)
            ahead, known_nodes = self._plan.plan(live, self._rounds_left - 1, room, cells.leaves)
            needed_nodes += known_nodes
            self.stats.drafted += len(ahead)
        cells.keep(needed_nodes)
        return missing + ahead

    # ------------------------------------------------------------------ rounds

    @property
    def _is_open(self) -> bool:
        """True if there may be another round."""
        return bool(self._live) and self._rounds_left > 0

    def _take_rounds(self) -> list[list[Node]]:
        """Take all rounds whose rows are known; return the last tokens of the live texts after each round."""
        rounds: list[list[Node]] = []
        while self._is_open and (extensions := self._extensions()) is not None:
            nodes = self._advance(extensions)
            self.stats.accepted += sum(node.likely is not None or node in self._rows for node in nodes)
            rounds.append(nodes)
        self.stats.tokens += len(rounds)
        return rounds

    def _extensions(self) -> list[Extension] | None:
        """Return the results of a round, the best one first; `None` if the round needs a missing row."""
        candidates: list[Extension] = []
        missing = -math.inf
        for beam in self._live:
            likely = self._read(beam.node)
            if likely is None:
                missing = max(missing, beam.score)
            else:
                candidates += [(beam.score + logprob, beam, token) for token, logprob in likely]
        candidates.sort(key=lambda extension: -extension[0])  # equal scores stay in the order of texts and tokens
        del candidates[self.beams :]
        # No extension of a text scores more than the text.
        enough = len(candidates) == self.beams and candidates[-1][0] > missing
        return candidates if enough or missing == -math.inf else None

    def _advance(self, extensions: Sequence[Extension]) -> list[Node]:
        """Continue with these texts, and return the last nodes of the live ones."""
        live: list[Beam] = []
        children: dict[Node, dict[int, Node]] = {beam.node: {} for beam in self._live}
        for score, beam, token in extensions:
            node = children[beam.node][token] = beam.node.child(token)
            stop: StopReason | None = "eog" if self._is_eog(token) else None
            stream = deepcopy(beam.stream)
            if stream is not None:
                stream.push(self._piece(token))
                stop = "stop" if stream.stop_string is not None else stop
            if stop is None:
                live.append(Beam(score, node, stream))
            else:
                self._finished.append((Beam(score, node, stream), stop))
        for parent, new_children in children.items():
            parent.children = new_children
        self._finished.sort(key=lambda entry: -entry[0].score)
        del self._finished[self.beams :]
        if len(self._finished) == self.beams:
            live = [beam for beam in live if beam.score > self._finished[-1][0].score]
        self._live = live
        self._rounds_left -= 1
        return [beam.node for beam in live]

    # ------------------------------------------------------------------ rows

    def _read(self, node: Node) -> TopLogprobs | None:
        """Return the target's most likely tokens after a node; `None` if it was not evaluated."""
        if node.likely is None:
            row = self._rows.get(node)
            if row is None:
                return None
            node.likely = self._find_top_tokens(row)
            if self._plan is not None:
                self._plan.observe_row(node, node.likely)
        return node.likely

    def _find_top_tokens(self, row: Logits) -> TopLogprobs:
        """Return the tokens that a round may choose after a row, best first; `beams` of them are enough."""
        suppressed_tokens = self.target.vocabulary.suppress_tokens
        best = logprobs(row, 0, self.beams + len(suppressed_tokens)).top
        if not math.isfinite(best[0][1]):
            top_token(row)  # raises a BadLogits with the reason
        return [(t, logprob) for t, logprob in best if logprob > -math.inf and t not in suppressed_tokens][: self.beams]
