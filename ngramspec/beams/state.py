"""State of a beam search: its texts and the rounds that extend them, independent of passes and drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import NamedTuple

from ngramspec.backend import Vocabulary
from ngramspec.decoding.stream import TextStream
from ngramspec.steps import StopReason
from ngramspec.tokens import Node, TopLogprobs


class Hypothesis(NamedTuple):
    """A text that the search found."""

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


class BeamState:
    """The state of one search, which keeps `beams` texts after the node of the prompt, `root`."""

    def __init__(self, vocabulary: Vocabulary, beams: int, root: Node, stop: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._beams = beams
        self._stream = TextStream(stop, controls=vocabulary.controls if stop else {})
        # The texts that continue, the best one first.
        self.live = [Beam(0.0, root, self._stream if stop else None)]
        self._finished: list[tuple[Beam, StopReason]] = []
        self.rounds = 0

    def extensions(self, read: Callable[[Node], TopLogprobs | None]) -> list[Extension] | None:
        """Return the best `beams` results of a round, the best one first; `None` if the round needs a missing row.

        `read` returns at least the target's `beams` most likely tokens after a node; `None` if that row is missing.
        """
        candidates: list[Extension] = []
        missing = -math.inf
        for beam in self.live:
            likely = read(beam.node)
            if likely is None:
                missing = max(missing, beam.score)
            else:
                candidates += [(beam.score + logprob, beam, token) for token, logprob in likely]
        candidates.sort(key=lambda extension: -extension[0])  # equal scores stay in the order of texts and tokens
        del candidates[self._beams :]
        # No extension of a text scores more than the text.
        enough = len(candidates) == self._beams and candidates[-1][0] > missing
        return candidates if enough or missing == -math.inf else None

    def advance(self, extensions: Sequence[Extension]) -> list[Node]:
        """Continue with these texts, and return the last nodes of the live ones."""
        live: list[Beam] = []
        finished_beams = list(self._finished)
        children: dict[Node, dict[int, Node]] = {beam.node: {} for beam in self.live}
        for score, beam, token in extensions:
            node = children[beam.node][token] = beam.node.child(token)
            stop: StopReason | None = "eog" if self._vocabulary.is_eog(token) else None
            stream = deepcopy(beam.stream)
            if stream is not None:
                stream.push(self._piece(token))
                stop = "stop" if stream.stop_string is not None else stop
            new_beam = Beam(score, node, stream)
            if stop is None:
                live.append(new_beam)
            else:
                finished_beams.append((new_beam, stop))
        for parent, new_children in children.items():
            parent.children = new_children
        finished_beams.sort(key=lambda new_beam: -new_beam[0].score)
        del finished_beams[self._beams :]
        if len(finished_beams) == self._beams:
            worst = finished_beams[-1][0].score
            live = [beam for beam in live if beam.score > worst]
        self.live, self._finished = live, finished_beams
        self.rounds += 1
        return [beam.node for beam in live]

    def hypotheses(self, out_of: StopReason | None) -> list[Hypothesis]:
        """Return the best texts so far; `out_of` is the reason why the live ones end here, `None` if they continue."""
        beams: list[tuple[Beam, StopReason | None]] = [*self._finished, *((beam, out_of) for beam in self.live)]
        beams.sort(key=lambda entry: -entry[0].score)
        return [self._hypothesis(beam, stop) for beam, stop in beams[: self._beams] if beam.node.parent is not None]

    def _hypothesis(self, beam: Beam, stop: StopReason | None) -> Hypothesis:
        stream = deepcopy(self._stream)
        tokens = tuple(beam.node.path())
        text = "".join([stream.push(self._piece(token)) for token in tokens])
        text += stream.finish()
        # A complete stop string may have been held back because a longer one that began before it was still possible.
        return Hypothesis(tokens, text, beam.score, "stop" if stop and stream.stop_string else stop)

    def _piece(self, token: int) -> bytes:
        """Return the bytes of a token; those that end a text have none, except for stop strings that name them."""
        named = self._stream.pieces.get(token)
        return named or (b"" if self._vocabulary.is_eog(token) else self._vocabulary.piece(token))
