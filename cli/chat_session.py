"""A chat's session: one target, one decoder, one conversation; what a user turn does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.conversation import ChatPrompt, Conversation, answer_room
from ngramspec.cost.disturbance import Disturbance
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Stats, Step
from ngramspec.errors import NGramSpecError
from ngramspec.llama.target import Target
from ngramspec.memory import Memory
from ngramspec.sampling.settings import Sampling
from ngramspec.trace.file import TraceWriter
from ngramspec.trace.passes import TraceHeader

from .chat_input import StopKey, no_echo
from .chat_view import AnswerView
from .console import complain, guarded_stdout, note, prefill_bar
from .memory_option import keep
from .sampling_options import SamplingOptions
from .view import rounding, slow_core, summary

_CUT = {"length": "cut off by -n/--predict", "context": "cut off: the context is full"}


class _Stopped(Exception):  # noqa: N818 - nothing went wrong
    """Ctrl-C during a prefill."""


@dataclass(slots=True)
class Session:
    """Everything that lasts longer than a turn.

    Attributes:
        limit: most tokens of an answer.
        seed_note: what the status line says about a seed that the user did not choose.
        trace: where every pass is written.
        memory: the source of drafts beside the context; it is told of every answer.
        totals: counters over all answers, those before a /reset included.
        answers: how many there were.
        disturbed: whether the user was told that another process holds the cores.
    """

    target: Target
    decoder: SpeculativeDecoder
    options: SamplingOptions
    sampling: Sampling
    acceptance: Acceptance
    limit: int
    stop: Sequence[str]
    view: AnswerView
    stop_key: StopKey
    conversation: Conversation = field(default_factory=Conversation)
    memory: Memory | None = None
    trace: TraceWriter | None = None
    totals: Stats = field(default_factory=Stats)
    answers: int = 0
    disturbed: bool = False
    _unheard: list[list[int]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget the turns. A random seed is drawn anew, or the same question would get the same answer again."""
        self.conversation = Conversation(self.conversation.system)
        # The memory hears of these answers only now: until now they were in the context.
        if self.memory is not None:
            for answer in self._unheard:
                self.memory.hear(answer)
        self._unheard.clear()
        self.sampling = self.options.reseeded(self.sampling)

    def ask(self, question: str) -> bool:
        """Answer a user turn. An error is one line, takes the turn back, and gives False."""
        stats, answer, disturbance = Stats(), list[int](), Disturbance()
        try:
            prompt = self._prompt(question)
            with self.stop_key, no_echo(), guarded_stdout():
                try:
                    text, ending = self._answer(prompt, stats, answer, disturbance)
                finally:
                    self.view.end()
        except NGramSpecError as error:
            complain(f"{error} (the turn was taken back)")
            return False
        finally:
            self.totals.merge(stats)
        if ending == "stopped" and not text:
            note("stopped before the answer began; the turn was taken back")
            return True
        self.conversation.add(question, text, prompt)
        self.answers += 1
        keep(self.memory, answer)
        self._unheard.append(answer)
        note(self._status(stats, ending))
        if disturbance.note is not None and not self.disturbed:
            self.disturbed = True
            note(disturbance.note)
        return True

    def _prompt(self, question: str) -> ChatPrompt:
        most = self.target.n_ctx - answer_room(self.target.n_ctx, self.limit)
        prompt = self.conversation.prompt(question, self.target.chat_prompt, most)
        dropped = prompt.first - self.conversation.first
        if dropped:
            turns = "oldest turn no longer fits" if dropped == 1 else f"{dropped} oldest turns no longer fit"
            note(f"the {turns} in the context; the model answers without")
        return prompt

    def _answer(self, prompt: ChatPrompt, stats: Stats, tokens: list[int], disturbance: Disturbance) -> tuple[str, str]:
        """(text, why it ended), what was written so far if Ctrl-C stopped it; the tokens are added to `tokens`."""
        pieces: list[str] = []
        with prefill_bar() as bar:

            def progress(done: int, total: int) -> None:
                if self.stop_key.pressed:
                    raise _Stopped
                bar(done, total)

            if self.trace is not None:
                header = TraceHeader.of(self.decoder, self.target.name, self.sampling, self.acceptance)
                self.trace.begin(prompt.tokens, self.target.piece, header)
            steps = self.decoder.generate(
                prompt.tokens,
                max_tokens=self.limit,
                sampling=self.sampling,
                verify=self.acceptance,
                stop=self.stop,
                detail=self.trace is not None,
                progress=progress,
            )
            try:
                # Closing rolls the cache back to what was emitted.
                with closing(steps):
                    for step in steps:
                        self._take(step, stats, pieces)
                        disturbance.see(step.seconds, step.batch, step.plain_seconds)
                        tokens += [token for token in step.tokens if not self.target.is_eog(token)]
                        if step.stop is not None:
                            return "".join(pieces), step.stop
                        if self.stop_key.pressed:
                            break
            except _Stopped:
                pass
        return "".join(pieces), "stopped"

    def _take(self, step: Step, stats: Stats, pieces: list[str]) -> None:
        stats.add(step)
        if self.trace is not None:
            self.trace.add(step)
        pieces.append(step.text)
        self.view.show(step)

    def _status(self, stats: Stats, ending: str) -> str:
        line = summary(stats)
        if ending == "stopped":
            line = f"stopped; {line}"
        elif ending in _CUT:
            line += f"; {_CUT[ending]}"
        if self.acceptance.lossy:
            line += f"; {self.acceptance.lossy}"
        if not self.sampling.greedy and self.options.seed == -1:
            line += f"; seed {self.sampling.seed}"
        if (said := rounding(stats)) is not None:
            line += f"; {said}"
        if self.decoder.drafter and (said := slow_core()) is not None:
            line += f"; {said}"
        return line
