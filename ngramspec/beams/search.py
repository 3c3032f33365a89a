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
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from copy import deepcopy
from functools import cache, reduce
from typing import TYPE_CHECKING, NamedTuple

from ngramspec.backend import Logits, Progress
from ngramspec.cost.store import StoredTimes
from ngramspec.cost.times import PassTimes
from ngramspec.data import ModelError, PromptError
from ngramspec.decoding.text import TextStream
from ngramspec.drafting.acceptance_estimator import DecayingRate
from ngramspec.drafting.draft import MarginalCost
from ngramspec.sampling.distribution import logprobs, top_token
from ngramspec.steps import Stats, StopReason
from ngramspec.tokens import Node, TopLogprobs, common_ancestor

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
    score: float  # that of its `Hypothesis`
    node: Node  # last token
    stream: TextStream | None  # characters for the search for stop strings, if there are any
    stop: StopReason | None = None  # reason for the end; `None` while the text is alive


Extension = tuple[float, Beam, int]  # extended text: new score, text before the extension, added token


class BeamSearch:
    """Beam searches on one target, one at a time, with or without drafts; one beam is greedy decoding.

    The `n_seq` of the target must be above `beams`; `SEQUENCES` leaves room for drafts. The costs of passes, `stored`,
    decide the draft lengths, at most `draft_max` rounds; `None` means no drafts.
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
        self.target, self.beams, self.stored, self.draft_max = target, beams, stored, draft_max
        self._clock = clock
        self._is_eog = target.vocabulary.is_eog
        # Counters of the last search: `tokens` of each text after the first one (the passes without drafts), `drafted`
        # tokens that were evaluated before a live text ended in them, and `draft_seconds` of all work outside passes.
        self.stats = Stats()
        self._live: list[Beam] = []  # texts that continue, the best one first
        self._finished: list[Beam] = []
        self._rows: dict[Node, Logits] = {}  # of the last pass

    def run(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Generator[None]:
        """Search, and yield after the prefill and after each pass; a PromptError means that the context has no room."""
        # The prompt is checked here and not at the first `next`, so that a wrong call fails immediately.
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
        results = []
        for beam in sorted([*self._finished, *self._live], key=lambda beam: -beam.score)[: self.beams]:
            stream, tokens = deepcopy(self._stream), tuple(beam.node.path())
            stop = beam.stop or (None if self._rounds_left else self._limit_reason)
            text = "".join([stream.push(self._piece(token)) for token in tokens]) + stream.finish()
            # A complete stop string may have been held back because a longer one that began before was still possible.
            results += [Hypothesis(tokens, text, beam.score, "stop" if stop and stream.stop_string else stop)]
        return [result for result in results if result.tokens]

    def _piece(self, token: int) -> bytes:
        """Return the bytes of a token; those that end a text have none, except for stop strings that name them."""
        named = self._stream.pieces.get(token)
        return named or (b"" if self._is_eog(token) else self.target.vocabulary.piece(token))

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

    @property
    def _is_open(self) -> bool:
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
        live: list[Beam] = []
        children: dict[Node, dict[int, Node]] = {beam.node: {} for beam in self._live}
        for score, beam, token in extensions:
            node = children[beam.node][token] = beam.node.child(token)
            stop: StopReason | None = "eog" if self._is_eog(token) else None
            stream = deepcopy(beam.stream)
            if stream is not None:
                stream.push(self._piece(token))
                stop = "stop" if stream.stop_string is not None else stop
            (self._finished if stop else live).append(Beam(score, node, stream, stop))
        for parent, new_children in children.items():
            parent.children = new_children
        self._finished.sort(key=lambda beam: -beam.score)
        del self._finished[self.beams :]
        if len(self._finished) == self.beams:
            live = [beam for beam in live if beam.score > self._finished[-1].score]
        self._live = live
        self._rounds_left -= 1
        return [beam.node for beam in live]

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


# --------------------------------------------------------------------------- drafts
#
# Each round of a draft takes the best `width` results, by the target's rows if they are known and by guesses otherwise.
# A guess is several tokens with their probabilities, from the source with the longer context:
#
#     rows    the most likely tokens of the target's last row after the same 1 to 3 tokens, with their probabilities (as
#             in Token Recycling, Luo et al. 2024, arXiv 2408.08696), because beams often differ in only one token
#     copies  tokens that followed the longest known context of 1 to 8 tokens, in the prompt or in the common start of
#             all beams
#
# The draft is evaluated to the length k that maximises
#
#     1 + c_1 + c_1 c_2 + ... + c_1 ... c_k - rate * T(n + n_1 + ... + n_k)
#
# Here c_i is the probability that round i of the draft contains all nodes that the search then chooses. n is the number
# of rows that the pass must compute without a draft, and n_i the number that round i adds. T is the cost of a pass by
# its size. rate is the recent number of rounds per plain pass, but at least that of plain beam search. If a round
# misses, about PARTIAL_SHARE of its rows need not be computed later, and their share of T is not counted.

ORDERS = 3  # maximum number of context tokens of a row
LONGEST = 8  # maximum number of context tokens of a copy
FADE = 0.98  # factor by which earlier counts fade at each new count
DECAY = 0.95  # factor by which earlier gains and costs fade at each pass

PARTIAL_SHARE = 0.5
"""Share of a round's rows that the search chooses if it does not choose all; measured 0.3 to 0.5 for 2 to 8 beams. A
single beam chooses one row or no row."""

COVERAGE = (0.15, 0.4, 0.7, 0.9, 0.6, 0.65, 0.65, 0.7, 0.9)
"""Probability that a round with one guess contains all nodes that the search chooses, by the length of the guess's
context, measured on the demo model (rounded). Contexts of 1 to 3 tokens are mostly rows, longer ones are copies."""

PER_GUESS, MANY = 0.84, 4
"""Factor of that probability for each further guess, because all guesses of a round must be good enough, and the number
of guesses from which on they are not counted."""

WEIGHT = 4.0  # weight of these probabilities in rounds

Context = tuple[int, ...]

Layer = tuple[list[Node], list[Node], DecayingRate]
"""One round of a draft: the nodes that it chooses, those of them without known rows, and the rate of such rounds that
contained all nodes that the search chose."""


class BeamPlan:
    """The drafts of one search: up to `depth` rounds, each of `width` texts.

    The `notes` of a node are the copy proposed after it, and the probability that the target gives such copies.
    """

    def __init__(
        self, prompt: Sequence[int], root: Node, times: PassTimes, width: int, depth: int, is_eog: Callable[[int], bool]
    ) -> None:
        self._is_eog = is_eog
        self._trunk = root  # last node that all texts have in common
        self._times = times.for_plain(width)
        self._width, self._depth = width, depth
        self._partial_share = PARTIAL_SHARE * (1.0 - 1.0 / width)
        # Rates of rounds that contained all nodes that the search chose, by shortest context and number of guesses.
        self._coverage = cache(
            lambda shortest, n: DecayingRate(WEIGHT * (COVERAGE[shortest] * PER_GUESS ** (n - 1)), WEIGHT, fade=FADE)
        )
        self._layers: list[Layer] = []
        self._per_token = 0.0  # cost of the work outside the pass, per token of the pass
        self._rounds = self._units = 0.0  # fading sums over the last passes: rounds, and cost
        self._end: Context = ()  # last tokens of the prompt and of all committed tokens
        self._prompt_end = tuple(prompt[-LONGEST:])
        # Number of occurrences of each token after a context, the most recent token last.
        self._copies: defaultdict[Context, dict[int, int]] = defaultdict(dict)
        self._rows: dict[Context, TopLogprobs] = {}
        self._trust: defaultdict[tuple[int, int], DecayingRate] = defaultdict(lambda: DecayingRate(1.0, 2.0, fade=FADE))
        self._commit(prompt)

    def _commit(self, tokens: Sequence[int]) -> None:
        """Add the next tokens that all beams have in common."""
        for token in tokens:
            for start in range(len(self._end)):
                counts = self._copies[self._end[start:]]
                counts[token] = counts.pop(token, 0) + 1
            self._end = (*self._end, token)[-LONGEST:]

    def observe_row(self, node: Node, likely: TopLogprobs) -> None:
        tail = self._tail(node)[-ORDERS:]
        for start in range(len(tail)):
            self._rows[tail[start:]] = likely
        if node.notes is not None:
            copy, trust = node.notes
            trust.add(sum(math.exp(logprob) for token, logprob in likely if token == copy))

    def _guess(self, node: Node) -> tuple[TopLogprobs, int]:
        """Return likely tokens after a node and the length of their context, at most LONGEST; 0 means no guess."""
        tail = self._tail(node)
        contexts = [tail[start:] for start in range(len(tail))]
        row_context = next((context for context in contexts[-ORDERS:] if context in self._rows), ())
        copy_context = next((context for context in contexts if context in self._copies), ())
        row = self._rows.get(row_context)
        if len(copy_context) < len(row_context) + 2:  # a row contains more information than a copy
            return row or (), len(row_context)
        counts = self._copies[copy_context]
        *_, latest = counts
        most_frequent = max(counts, key=counts.__getitem__)
        copy = most_frequent if counts[most_frequent] >= 2 * counts[latest] else latest
        rate = self._trust[len(copy_context), len(row_context)]
        node.notes = copy, rate
        total = sum(counts.values())
        alternatives = row or [(token, math.log(n / total)) for token, n in counts.items()]
        # The copy has the probability `trust`, and the other tokens share the rest.
        trust = min(rate.value, 0.99)
        copy_probability = sum(math.exp(logprob) for token, logprob in alternatives if token == copy)
        likely = [(copy, math.log(trust))]
        if copy_probability < 1.0:
            shift = math.log((1.0 - trust) / (1.0 - copy_probability))
            likely += [(token, logprob + shift) for token, logprob in alternatives if token != copy]
        return sorted(likely, key=lambda guess: -guess[1]), len(copy_context)

    def _tail(self, node: Node) -> Context:
        """Return the last LONGEST tokens up to a node, oldest first."""
        tail: list[int] = []
        while node.parent is not None and len(tail) < LONGEST:
            tail.append(node.token)
            node = node.parent
        return (*self._prompt_end, *reversed(tail))[-LONGEST:]

    def plan(
        self, live: Sequence[tuple[float, Node]], rounds: int, room: int, leaves: int
    ) -> tuple[list[Node], list[Node]]:
        """Return at most `room` nodes to evaluate ahead, and known ones that may be needed, without the live ones."""
        common = reduce(common_ancestor, [node for _, node in live])
        if common is not self._trunk:
            self._commit(common.path()[self._trunk.length - common.length :])
            self._trunk = common
        n_missing = sum(node.likely is None for _, node in live)
        count = self._draft(live, min(rounds, self._depth), room, n_missing, leaves)
        layers = self._layers[:count]
        new = [node for _, unknown, _ in layers for node in unknown]
        known_nodes = [node for nodes, _, _ in self._layers for node in nodes if node.likely is not None]
        # Forget nodes that were drafted but are not sent, and nodes that were sent earlier but are no longer needed.
        needed_nodes = {*new, *known_nodes}
        for node in [node for _, node in live] + new + known_nodes:
            node.children = {token: child for token, child in node.children.items() if child in needed_nodes}
        return new, known_nodes

    def _draft(self, live: Sequence[tuple[float, Node]], rounds: int, room: int, n_missing: int, leaves: int) -> int:
        """Draft layers, and return how many are worth their time; a pass without them has `n_missing` tokens."""
        self._layers = []
        front, tips, size, rate = live, len(live), n_missing, self._rate()
        # A further round must be likely enough to justify one more token in the pass.
        price = MarginalCost(rate, [slope + self._per_token for slope in self._times.slopes(range(1, 65))])
        before = cost = self._cost(size)
        best, best_value = 0, 1.0 - rate * cost
        expected_steps = chance = 1.0
        for _ in range(rounds):
            results: list[tuple[float, Node, int]] = []
            contexts: list[int] = []
            for score, node in front:
                likely = node.likely
                if likely is None:
                    likely, context = self._guess(node)
                    contexts.append(context)
                results += [(score + logprob, node, token) for token, logprob in likely]
            results.sort(key=lambda result: -result[0])
            best_results = [result for result in results[: self._width] if not self._is_eog(result[2])]
            tips += len(best_results) - len({node for _, node, _ in best_results})
            if not best_results or tips > leaves:
                break
            front = [(score, node.child(token)) for score, node, token in best_results]
            nodes = [node for _, node in front]
            unknown = [node for node in nodes if node.likely is None]
            size += len(unknown)
            if size - n_missing > room:
                break
            coverage = DecayingRate(1.0, 1.0, fade=1.0)  # a round without guesses is certain
            if contexts:
                coverage = self._coverage(min(contexts), min(len(contexts), MANY))
            self._layers.append((nodes, unknown, coverage))
            after = self._cost(size)
            cost += (after - before) * (1.0 - chance * (1.0 - coverage.value) * self._partial_share)
            before = after
            chance *= coverage.value
            expected_steps += chance
            if expected_steps - rate * cost > best_value:
                best, best_value = len(self._layers), expected_steps - rate * cost
            if not price.worth_extending(chance, size - 1):
                break
        return best

    def _rate(self) -> float:
        """Return the recent number of rounds per plain pass, but at least that of plain beam search."""
        plain = 1.0 / self._cost(self._width)
        return max(plain, self._rounds / self._units) if self._units else plain

    def _cost(self, size: int) -> float:
        """Return the cost of a pass and of the work outside it, in plain passes."""
        return self._times.ratio(size) + self._times.change_now(size) + self._per_token * size

    def learn(self, size: int, seconds: float, other_seconds: float, rounds: Sequence[Sequence[Node]]) -> None:
        """Learn from the last planned pass, and from the last nodes of the live texts after each round since then."""
        for (nodes_drafted, _, coverage), nodes in zip(self._layers, rounds, strict=False):
            keys = {(node.parent, node.token) for node in nodes_drafted}
            hit = all((node.parent, node.token) in keys for node in nodes)
            coverage.add(hit)
            if not hit:
                break
        self._rounds = DECAY * self._rounds + len(rounds)
        cost, other_cost = self._times.observe(size, seconds).cost, other_seconds / self._times.level
        self._units = DECAY * self._units + cost + other_cost
        self._per_token += 0.1 * (other_cost / size - self._per_token)
