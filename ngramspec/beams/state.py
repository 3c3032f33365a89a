"""`BeamState`: the texts of a beam search, and what a step does to them. Knows nothing of passes and drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import NamedTuple

from ngramspec.backend import Likely, Node, Vocabulary
from ngramspec.beams.result import Hypothesis
from ngramspec.decoding.step import StopReason
from ngramspec.decoding.text import TextStream


class Beam(NamedTuple):
    """A live text: its score, its last token, and its text for the check of stop strings (None: there are none)."""

    score: float
    node: Node
    stream: TextStream | None


class Result(NamedTuple):
    """A text with one more token: its new score, the text before, the token."""

    score: float
    beam: Beam
    token: int


class BeamState:
    """One search.

    Args:
        vocabulary: knows which tokens end a text, and what tokens stand for.
        beams: how many texts are kept.
        root: the prompt.
        stop: strings that end a text.

    Attributes:
        live: the texts that go on, the best one first.
        steps: how many were taken.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(self, vocabulary: Vocabulary, beams: int, root: Node, stop: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._beams = beams
        self._stop = stop
        self.live = [Beam(0.0, root, TextStream(stop) if stop else None)]
        self._finished: list[tuple[Beam, StopReason]] = []
        self.steps = 0

    def results(self, read: Callable[[Node], Likely | None]) -> list[Result] | None:
        """The best `beams` results of a step, the best one first; None if rows are missing that it may depend on.

        Args:
            read: what the target says after a node, the `beams` likeliest tokens at least; None if that is missing.
        """
        results: list[Result] = []
        missing = -math.inf
        for beam in self.live:
            likely = read(beam.node)
            if likely is None:
                missing = max(missing, beam.score)
            else:
                results += [Result(beam.score + logprob, beam, token) for token, logprob in likely]
        results.sort(key=_falling)  # stable: equal scores stay in the order of texts, and of tokens
        del results[self._beams :]
        # No result of a text scores more than the text.
        enough = len(results) == self._beams and results[-1].score > missing
        return results if enough or missing == -math.inf else None

    def step(self, results: Sequence[Result]) -> list[Node]:
        """Go on with these texts; returns the last tokens of those that live."""
        live: list[Beam] = []
        finished = list(self._finished)
        children: dict[Node, dict[int, Node]] = {beam.node: {} for beam in self.live}
        for score, beam, token in results:
            node = children[beam.node][token] = beam.node.child(token)
            stream = beam.stream
            if self._vocabulary.is_eog(token):
                finished.append((Beam(score, node, stream), "eog"))
                continue
            if stream is not None:
                stream = deepcopy(stream)
                stream.push(self._vocabulary.piece(token))
            if stream is not None and stream.stopped is not None:
                finished.append((Beam(score, node, stream), "stop"))
            else:
                live.append(Beam(score, node, stream))
        for parent, kept in children.items():
            parent.children = kept
        finished.sort(key=_best_first)
        del finished[self._beams :]
        if len(finished) == self._beams:
            worst = finished[-1][0].score
            live = [beam for beam in live if beam.score > worst]
        self.live, self._finished = live, finished
        self.steps += 1
        return [beam.node for beam in live]

    def hypotheses(self, out_of: StopReason | None) -> list[Hypothesis]:
        """The best texts so far, at most `beams`, the best one first.

        Args:
            out_of: why the live ones end here; None: they do not.
        """
        found: list[tuple[Beam, StopReason | None]] = [*self._finished, *((beam, out_of) for beam in self.live)]
        found.sort(key=_best_first)
        return [self._hypothesis(beam, stop) for beam, stop in found[: self._beams] if beam.node.parent is not None]

    def _hypothesis(self, beam: Beam, stop: StopReason | None) -> Hypothesis:
        stream, vocabulary = TextStream(self._stop), self._vocabulary
        tokens = tuple(beam.node.path())
        text = "".join(stream.push(vocabulary.piece(token)) for token in tokens if not vocabulary.is_eog(token))
        text += stream.finish()
        # A stop string may have waited for the end of a longer one that began before it.
        return Hypothesis(tokens, text, beam.score, "stop" if stop and stream.stopped else stop)


def _falling(result: Result) -> float:
    return -result.score


def _best_first(found: tuple[Beam, StopReason | None]) -> float:
    return -found[0].score
