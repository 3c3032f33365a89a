"""Runs of sessions, and a comparison of every request with a decoder that never rolls back.

The comparison uses the logits that decided on each token, not only the tokens. So it detects a wrong state even if the
text is correct. There are three results:

- "equal": the text is the reference's, and its logits differ only by rounding.
- "rounding": the text differs, but along it the logits equal the reference's except for rounding.
- "CORRUPT": some logits differ by more, or a token does not follow from its own logits.

The tolerance for rounding is measured row by row, since a model that selects by rank is discontinuous. If the router
of a mixture of experts or the indexer of sparse attention is at a tie, rounding selects another expert or token. The
logits of that row then jump, while those of the rows before and after it do not change. So a row may differ as much as
the reference itself when it evaluates the text in other batches. A wrong state shows in the rows without a tie.
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
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.data import TargetError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.instruments.selfcheck.texts import LogitsRecorder
from ngramspec.llama.target import Target
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats

N_CTX = 2048
SEED = 11
MARGIN = 4.0
"""Maximum of a rounding difference, in units of the largest difference measured in the whole text ..."""

LEAST, CAP = 1e-3, 0.1
"""... and the limits of that maximum; differences of corrupt states are from 0.1 to 20."""

TIE = 2.0
"""Maximum of a rounding difference, in units of the largest one measured in the same row, for two ties in a row."""

WAYS = (
    *((1, 32, 0), (1, 512, 5), (7, 128, 1), (16, 300, 17), (64, 512, 0)),
    *((size, chunk, end) for end in range(0, 48, 6) for chunk in range(40, 513, 37) for size in (1, 7)),
)
"""(size, chunk, end) of `Reference.follow`, all of which are tried before logits count as corrupt."""

Way = tuple[int, int, int]
Status = Literal["equal", "rounding", "CORRUPT"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a request."""

    ask: Ask
    status: Status  # result of the comparison; see the module's docstring
    first: int | None  # position of the first token that differs from the reference's; `None` means that all are equal
    gap: float  # largest difference of a logit to the reference along the request's text, in the most suspect row
    tolerance: float  # maximum difference that counts as rounding in that row
    drafted: int  # number of draft tokens, without the prefill, as in `Stats`
    accepted: int
    passes: int
    tokens: int = 0  # number of emitted tokens


class Bench:
    """A loaded model and its reference; `folder` receives measurements."""

    def __init__(self, path: Path, folder: Path, *, exact: bool = False, threads: int = 1) -> None:
        self.target = Target(path, ctx_size=N_CTX, threads=threads, exact="on" if exact else "off")
        flash = {"auto": -1, "off": 0, "on": 1}[self.target.settings.flash_attn]
        n_batch = self.target.n_batch
        self.reference = Reference(path, n_ctx=N_CTX, n_batch=n_batch, flash=flash, threads=threads)
        self.exact = exact
        self._folder = folder
        self._texts: dict[tuple[tuple[int, ...], float], tuple[list[int], Rows]] = {}
        self._spreads: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[NDArray[np.float64], Iterator[Way]]] = {}
        self._sessions = 0

    def requests(self, setting: Setting) -> Iterator[Result]:
        """Yield the results of a session one by one, so that a caller can stop at a corrupt one."""
        prompts = Prompts(self.target.vocabulary.n_vocab, setting.length)
        self._sessions += 1
        folder = self._folder / str(self._sessions)
        try:
            for asks in setting.asks:
                recorder = LogitsRecorder(self.target.sequences[0])
                decoder = SpeculativeDecoder(
                    recorder,
                    vocabulary=self.target.vocabulary,
                    drafter=self._drafter(setting),
                    policy=setting.policy,
                    draft_max=setting.draft_max,
                    exact="on" if self.exact else "off",
                    calibration_folder=folder,
                    times=None if setting.measured or self.exact else make_fixed_curve({1: 1.0}),
                )
                for ask in asks:
                    yield self._request(decoder, recorder, setting, prompts, ask)
        finally:
            self.target.sequences[0].clear()

    def _drafter(self, setting: Setting) -> Oracle | str | None:
        if setting.drafter != "oracle":
            return None if setting.drafter == "plain" else setting.drafter
        expected = lambda prompt: self._expected(prompt, setting)[0]  # noqa: E731
        return Oracle(expected, self.target.vocabulary.n_vocab, seed=setting.draft_max or 0)

    def _request(
        self, decoder: SpeculativeDecoder, recorder: LogitsRecorder, setting: Setting, prompts: Prompts, ask: Ask
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
        """Return the reference's text and the logits that decided on it."""
        key = tuple(prompt), setting.temperature
        if key not in self._texts or len(self._texts[key][0]) < setting.most:
            self._texts[key] = self.reference.text(prompt, setting.most, self._choose(list(prompt), key[1]))
        return self._texts[key]

    def _choose(self, prompt: list[int], temperature: float) -> Chooser:
        if temperature == 0:
            return likeliest
        sampling = Sampling(temperature, seed=SEED)

        def sample(row: Logits, text: list[int]) -> int:
            sampler = self.target.vocabulary.sampler(sampling)
            sampler.begin([*prompt, *text])
            return sampler.draw(row, len(prompt) + len(text))

        return sample

    def _tolerances(self, prompt: Sequence[int], text: Sequence[int], theirs: Rows) -> Iterator[NDArray[np.float64]]:
        """Yield the tolerance of each row of a text; it grows as more ways to evaluate the text are tried."""
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
