"""Running a session, and judging every request of it by a decoder that never rolls back.

What is compared are the logits that decided on each token, not the tokens alone: a state that is wrong is seen even
where the text came out right. Three ends are possible: the text is the reference's and its logits differ by rounding;
the text is another one, and the logits along it are the reference's except for rounding ("rounding"); or logits are
farther off than that, or a token is not what its own logits say: "CORRUPT".

How far rounding goes is measured row by row, since a model that picks by rank is discontinuous: where the router of a
mixture of experts or the indexer of sparse attention is at a tie, rounding takes another expert or another token, and
the logits of that row jump, while those before and behind it stay. So a row may be as far off as the reference itself
is there when it is sent the text in other ways. A state that is wrong shows in the rows that are at no tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from architectures.oracle import Oracle
from architectures.reference import Chooser, Reference, Rows, likeliest
from architectures.settings import Ask, Prompts, Setting
from ngramspec.backend import Logits
from ngramspec.cost.curve import CostCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.errors import TargetError
from ngramspec.instruments.selfcheck.texts import LogitsKeeper
from ngramspec.llama.target import Target
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats

N_CTX = 2048
SEED = 11
MARGIN = 4.0
"""A difference is rounding up to so many times the largest one that was measured anywhere in the text ..."""

LEAST, CAP = 1e-3, 0.1
"""... but at least and at most that: those of corrupt states are above 0.1, up to 20."""

TIE = 2.0
"""A difference is rounding up to so many times the largest one that was measured in the same row: two ties in it."""

WAYS = (
    *((1, 32, 0), (1, 512, 5), (7, 128, 1), (16, 300, 17), (64, 512, 0)),
    *((size, chunk, end) for end in range(0, 48, 6) for chunk in range(40, 513, 37) for size in (1, 7)),
)
"""Of sending a text, as in `Reference.follow`, that are tried one after another before logits count as corrupt."""

Way = tuple[int, int, int]
Status = Literal["equal", "rounding", "CORRUPT"]


@dataclass(frozen=True, slots=True)
class Result:
    """A request.

    Attributes:
        ask: which it was.
        status: as above.
        first: where its text leaves the reference's; None: nowhere.
        gap: difference of a logit to the reference along the request's own text, in the row where it is most suspect.
        tolerance: up to which it is rounding in that row.
        drafted, accepted, passes, tokens: of the whole request but its prefill, as in `Stats`.
    """

    ask: Ask
    status: Status
    first: int | None
    gap: float
    tolerance: float
    drafted: int
    accepted: int
    passes: int
    tokens: int = 0


class Bench:
    """A model loaded in one way, and its reference; `folder` is for measurements."""

    def __init__(self, path: Path, folder: Path, *, exact: bool = False, threads: int = 1) -> None:
        self.target = Target(path, n_ctx=N_CTX, threads=threads, exact="on" if exact else "off")
        flash = {"auto": -1, "off": 0, "on": 1}[self.target.flash_attn]
        n_batch = self.target.n_batch
        self.reference = Reference(path, n_ctx=N_CTX, n_batch=n_batch, flash=flash, threads=threads)
        self.exact = exact
        self._folder = folder
        self._texts: dict[tuple[tuple[int, ...], float], tuple[list[int], Rows]] = {}
        self._spreads: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[NDArray[np.float64], Iterator[Way]]] = {}
        self._sessions = 0

    def run(self, setting: Setting) -> list[Result]:
        """All requests of a session, after which the cache is empty."""
        return list(self.requests(setting))

    def requests(self, setting: Setting) -> Iterator[Result]:
        """The requests of a session one by one: who looks for a corrupt one need not judge those behind it."""
        prompts = Prompts(self.target.n_vocab, setting.length)
        self._sessions += 1
        folder = self._folder / str(self._sessions)
        try:
            for asks in setting.asks:
                recorder = LogitsKeeper(self.target)
                decoder = SpeculativeDecoder(
                    recorder,
                    vocabulary=self.target,
                    drafter=self._drafter(setting),
                    policy=setting.policy,
                    draft_max=setting.draft_max,
                    exact="on" if self.exact else "off",
                    calibration_folder=folder,
                    curve=None if setting.measured or self.exact else CostCurve({1: 1.0}),
                )
                for ask in asks:
                    yield self._request(decoder, recorder, setting, prompts, ask)
        finally:
            self.target.clear()

    def _drafter(self, setting: Setting) -> Oracle | str | None:
        if setting.drafter != "oracle":
            return None if setting.drafter == "plain" else setting.drafter
        expected = lambda prompt: self._expected(prompt, setting)[0]  # noqa: E731
        return Oracle(expected, self.target.n_vocab, seed=setting.draft_max or 0)

    def _request(
        self, decoder: SpeculativeDecoder, recorder: LogitsKeeper, setting: Setting, prompts: Prompts, ask: Ask
    ) -> Result:
        answer = self._expected(prompts["same"], setting)[0]
        prompt, sampling = prompts.get(ask.prompt, answer), Sampling(setting.temperature, seed=SEED)
        text: list[int] = []
        rows: list[Logits] = []
        stats = Stats()
        generation = decoder.generate(prompt, max_tokens=ask.tokens, sampling=sampling)
        try:
            for step in generation:
                text += step.tokens
                rows += [row.copy() for row in recorder.rows[: len(step.tokens)]]
                stats.add(step)
                if ask.leaves and len(text) >= ask.leaves:
                    generation.close()
        except (BadLogits, TargetError):
            judged: tuple[Status, int | None, float, float] = "CORRUPT", len(text), math.inf, LEAST
        else:
            judged = self._judge(prompt, text, np.array(rows), setting)
        return Result(ask, *judged, stats.drafted, stats.accepted, stats.passes, stats.tokens)

    def _judge(
        self, prompt: list[int], text: list[int], rows: Rows, setting: Setting
    ) -> tuple[Status, int | None, float, float]:
        expected, theirs = self._expected(prompt, setting)
        first = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), None)
        theirs = theirs[: len(text)] if first is None else self.reference.follow(prompt, text)
        gaps = np.abs(rows - theirs).max(axis=1)
        for tolerances in self._tolerances(prompt, text, theirs):
            if rounding := bool((gaps <= tolerances).all()):
                break
        worst = int((gaps - tolerances).argmax())
        choose = self._choose(prompt, setting.temperature)
        chosen = [choose(row, text[:i]) for i, row in enumerate(rows)]
        status: Status = "CORRUPT" if chosen != text or not rounding else "equal" if first is None else "rounding"
        return status, first, float(gaps[worst]), float(tolerances[worst])

    def _expected(self, prompt: Sequence[int], setting: Setting) -> tuple[list[int], Rows]:
        """The reference's own text, and the logits that decided on it."""
        key = tuple(prompt), setting.temperature
        if key not in self._texts or len(self._texts[key][0]) < setting.most:
            self._texts[key] = self.reference.text(prompt, setting.most, self._choose(list(prompt), key[1]))
        return self._texts[key]

    def _choose(self, prompt: list[int], temperature: float) -> Chooser:
        if temperature == 0:
            return likeliest
        sampling = Sampling(temperature, seed=SEED)

        def sample(row: Logits, text: list[int]) -> int:
            sampler = self.target.sampler(sampling)
            sampler.begin([*prompt, *text])
            return sampler.draw(row, len(prompt) + len(text))

        return sample

    def _tolerances(self, prompt: Sequence[int], text: Sequence[int], theirs: Rows) -> Iterator[NDArray[np.float64]]:
        """How far each row of a text may be off the reference's: ever more, as more ways of sending it are tried."""
        key = tuple(prompt), tuple(text)
        spread, ways = self._spreads.setdefault(key, (np.zeros(len(text)), iter(WAYS)))
        while True:
            yield np.maximum(np.clip(MARGIN * spread.max(), LEAST, CAP), TIE * spread)
            if (way := next(ways, None)) is None:
                return
            np.maximum(spread, np.abs(self.reference.follow(prompt, text, *way) - theirs).max(axis=1), out=spread)

    def close(self) -> None:
        """Free target and reference."""
        self.target.close()
        self.reference.close()


def worst(results: Sequence[Result]) -> Result:
    """The one to show for a session."""
    return max(results, key=lambda result: (("equal", "rounding", "CORRUPT").index(result.status), result.gap))
