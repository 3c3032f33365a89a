"""Runs of sessions, and a comparison of every request with a decoder that never rolls back.

The comparison uses the logits that decided on each token, not only the tokens, so it detects a wrong state even if the
text is correct. Weights and caches are in single precision, without flash attention, so that rounding moves a logit by
less than `CLOSE`; corrupt states differ by 0.1 to 20.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from architectures.files import architecture
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
CLOSE = 0.02


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a request."""

    ask: Ask
    is_right: bool  # whether the text is the reference's, and its logits too except for rounding
    gap: float  # largest difference of a logit to the reference along the text
    stats: Stats


class Bench:
    """A loaded model and its reference; `folder` receives measurements."""

    def __init__(self, name: str, folder: Path, *, exact: bool = False, threads: int = 1) -> None:
        path = architecture(name, half=False)
        self.target = Target(
            path,
            ctx_size=N_CTX,
            threads=threads,
            exact="on" if exact else "off",
            flash_attn="off",
            cache_type_k="f32",
            cache_type_v="f32",
        )
        n_batch = self.target.n_batch
        self.reference = Reference(path, n_ctx=N_CTX, n_batch=n_batch, flash=0, threads=threads, cache_type=0)
        self.exact = exact
        self._folder = folder
        self._texts: dict[tuple[tuple[int, ...], float], tuple[list[int], Rows]] = {}
        self._sessions = 0

    def requests(self, setting: Setting) -> Iterator[Result]:
        """Yield the results of a session one by one, so that a caller can stop at a wrong one."""
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
            return Result(ask, False, math.inf, stats)
        expected, theirs = self._expected(prompt, setting)
        gap = float(np.abs(np.array(rows) - theirs[: len(text)]).max())
        return Result(ask, text == expected[: len(text)] and gap < CLOSE, gap, stats)

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

    def close(self) -> None:
        """Free target and reference."""
        self.target.close()
        self.reference.close()
