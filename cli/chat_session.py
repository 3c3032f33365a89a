"""A chat's session: one target, one decoder, one conversation; what a user turn does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.conversation import (
    Conversation,
    Message,
    Turn,
    answer_room,
    load,
    save,
)
from ngramspec.cost.calibration import Disturbance
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.errors import NGramSpecError
from ngramspec.instruments.trace import TraceHeader, TraceWriter
from ngramspec.json_data import encode
from ngramspec.llama.target import Target
from ngramspec.loading.load import Found, Loaded
from ngramspec.loading.settings import LoadSettings
from ngramspec.memory import Memory
from ngramspec.models.find import ModelSource
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats, Step
from ngramspec.storage import state_folder
from ngramspec.tool_calls import AnswerParser, thoughts_parser

from .chat_input import StopKey, no_echo
from .chat_view import AnswerView
from .console import Terminated, complain, fail, guarded_stdout, note, prefill_bar
from .options import keep, open_found
from .sampling_options import SamplingOptions
from .view import no_gain, rounding, slow_core, summary

KEPT = "chat_last.json"
"""The file of the conversation that is kept, in the user's state folder."""

_CUT = {"length": "cut off by -n/--predict", "context": "cut off: the context is full"}


def open_model(found: Found, settings: LoadSettings) -> Loaded:
    """Load a model, and measure what exact answers need before the first one. Raises NGramSpecError."""
    loaded = open_found(found, settings, remember=True)
    target, calibration = loaded.target, loaded.decoder.calibration
    if target.exact == "on" and target.can_rollback and calibration.exact_sizes is None:
        calibration.ensure_exact(target)
    return loaded


def kept_path() -> Path:
    """The file of the conversation that is kept, readable by the user alone."""
    return state_folder() / KEPT


def last_kept() -> tuple[Conversation, str]:
    """What was kept, as `load` gives it. Raises NGramSpecError if there is none, or it cannot be read."""
    if not kept_path().exists():
        raise NGramSpecError("no conversation is kept; ngramspec chat --keep keeps one")
    return load(kept_path())


@dataclass(slots=True)
class Session:
    """Everything that lasts longer than a turn."""

    target: Target
    decoder: SpeculativeDecoder
    options: SamplingOptions
    sampling: Sampling
    acceptance: Acceptance
    limit: int  # most tokens of an answer
    stop: Sequence[str]
    view: AnswerView
    stop_key: StopKey
    conversation: Conversation = field(default_factory=Conversation)
    memory: Memory | None = None  # the source of drafts beside the context; it is told of every answer
    trace: TraceWriter | None = None  # where every pass is written
    totals: Stats = field(default_factory=Stats)  # counters over all answers, those before a /reset included
    answers: int = 0  # how many there were
    disturbed: bool = False  # whether the user was told that another process holds the cores
    # Whether the conversation is kept on disk, as it is: what is taken back or forgotten goes there too, and of several
    # chats that keep theirs, the last one to get an answer has the file.
    keep: bool = False
    attached: list[str] = field(default_factory=list)  # texts that go in front of the next message
    predicted: str = ""  # a text that the next answer is likely to copy
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template, beside its own ("enable_thinking")
    interactive: bool = False  # whether there is a user at a terminal
    editing: bool = False  # whether the user's next message takes the place of the last one
    load: LoadSettings = field(default_factory=LoadSettings)  # the settings to load another model with
    found: Found | None = None  # the files of the model; None: of its target alone
    # Of the last turns; the memory hears of them when they leave the context.
    _unheard: list[list[int]] = field(default_factory=list)
    _opening: str = ""
    _used: int | None = None

    @property
    def used(self) -> int:
        """Tokens of the context that the conversation takes."""
        if self._used is None:
            try:
                self._used = len(self._encode(self.conversation.messages(self.conversation.first)))
            except NGramSpecError:  # templates may refuse a conversation that does not end in a question
                self._used = 0
        return self._used

    def thoughts(self) -> AnswerParser:
        """What tells the thoughts of an answer to the last prompt from what it says."""
        return thoughts_parser(self.target.chat_template, opening=self._opening)

    # ------------------------------------------------------------------ what is said so far

    def reset(self) -> None:
        """Forget the turns. A random seed is drawn anew, or the same question would get the same answer again."""
        self.go_on_with(Conversation(self.conversation.system))
        self.sampling = self.options.reseeded(self.sampling)

    def go_on_with(self, conversation: Conversation) -> None:
        """Leave the conversation for another one."""
        self._hear(self._unheard)
        self._unheard = []
        self.attached.clear()
        self.predicted = ""
        self.conversation = conversation
        self.changed()

    def set_system(self, text: str | None) -> None:
        """Use another system message from the next turn on, or none."""
        self.conversation.system = text
        self.changed()

    def undo(self) -> Turn:
        """Take the last turn back. Raises IndexError if there is none."""
        turn = self.conversation.undo()
        self._hear(self._unheard[-1:])
        del self._unheard[-1:]
        self.changed()
        return turn

    def changed(self) -> None:
        """The conversation is another one now: the file of it follows, or nothing is kept from now on."""
        self._used = None
        if not self.keep:
            return
        try:
            if self.conversation.turns:
                kept_path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                save(self.conversation, kept_path(), model=self.target.name, sampling=encode(asdict(self.sampling)))
            else:
                self.forget_kept()
        except (NGramSpecError, OSError) as error:
            self.keep = False
            complain(f"the conversation is not kept: {error}")

    def forget_kept(self) -> None:
        """Delete the conversation that is kept. Raises NGramSpecError if that fails."""
        try:
            kept_path().unlink(missing_ok=True)
        except OSError as error:
            raise NGramSpecError(f"cannot delete {kept_path()}: {error.strerror}") from error

    def exchange(self, found: Found, settings: LoadSettings) -> None:
        """Go on with another model or other settings; what the memory of the last one was to hear is forgotten.

        Raises:
            NGramSpecError: they cannot be used; the session goes on as before. Ends the program where it cannot.
        """
        before = self.found or Found(ModelSource(self.target.path, self.target.name), None), self.load
        # Two models may not fit beside each other.
        self.target.close()
        try:
            self._open(found, settings)
            self.target.sampler(self.sampling)
        except (NGramSpecError, ValueError, MemoryError, typer.Exit) as error:
            name = before[0].model.label
            try:
                self._open(*before)
            except NGramSpecError as gone:
                fail(f"{found.model.label} cannot be used ({error}), nor {name} as before: {gone}")
            why = "" if isinstance(error, typer.Exit) else f": {error or 'out of memory'}"
            raise NGramSpecError(f"{found.model.label} cannot be used{why} (going on with {name})") from error

    def _open(self, found: Found, settings: LoadSettings) -> None:
        loaded = open_model(found, settings)
        self.found, self.load = found, settings
        self.target, self.decoder, self.memory = loaded.target, loaded.decoder, loaded.memory
        self._unheard, self._used = [], None
        self.view.use(self.target.piece)

    def _hear(self, answers: Sequence[Sequence[int]]) -> None:
        if self.memory is not None:
            for answer in answers:
                self.memory.hear(answer)

    # ------------------------------------------------------------------ questions

    def ask_again(self, question: str | None = None) -> bool:
        """Have the last message, or another one in its place, answered; without an answer the old turn stays."""
        first, unheard = self.conversation.first, self._unheard[-1:]
        turn = self.conversation.undo()
        del self._unheard[-1:]
        sampling, turns = self.sampling, len(self.conversation.turns)
        attached, self.attached = self.attached, []  # they wait for a new message
        if question is None:
            self.sampling = self._other_seed()
        try:
            well = self.ask(turn.user if question is None else question)
        except Terminated:
            if not self.conversation.turns[-1].assistant:  # nothing came in the place of the old answer
                self.conversation.turns[-1] = turn
                self.changed()
            raise
        if len(self.conversation.turns) == turns:
            self.conversation.turns.append(turn)
            self.conversation.first, self.sampling, self._used = first, sampling, None
            self._unheard += unheard
        else:
            self._hear(unheard)
        self.attached = attached
        return well

    def _other_seed(self) -> Sampling:
        if self.options.seed == -1:
            return self.options.reseeded(self.sampling)
        return replace(self.sampling, seed=(self.sampling.seed + 1) % 2**64)

    def ask(self, question: str) -> bool:
        """Answer a user turn. An error is one line, takes the turn back, and gives False."""
        stats, answer, pieces, disturbance = Stats(), list[int](), list[str](), Disturbance()
        message = "\n\n".join([*self.attached, question])
        try:
            prompt, first = self._prompt(message)
            with self.stop_key, no_echo(), guarded_stdout():
                try:
                    ending = self._answer(prompt, stats, answer, pieces, disturbance)
                except Terminated:  # what there is of the turn is kept for --resume
                    self.conversation.add(message, "".join(pieces), first)
                    self.changed()
                    raise
                finally:
                    self.view.end()
        except NGramSpecError as error:
            self._used = None
            complain(f"{error} (the turn was taken back)")
            return False
        finally:
            self.totals.merge(stats)
        text = "".join(pieces)
        if ending == "stopped" and not text:
            self._used = None
            note("stopped before the answer began; the turn was taken back")
            return True
        self.conversation.add(message, text, first)
        self.attached.clear()
        self.predicted = ""
        self.answers += 1
        keep(self.memory, answer)
        self._unheard.append(answer)
        self.changed()
        self._used = len(self.target.tokens)
        note(self._status(stats, ending))
        if disturbance.note is not None and not self.disturbed:
            self.disturbed = True
            note(disturbance.note)
        return True

    def room(self) -> int:
        """Most tokens of a prompt."""
        return self.target.n_ctx - answer_room(self.target.n_ctx, self.limit)

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        prompt = self.target.chat(messages, variables=self.variables)
        self._opening = prompt.opening
        return prompt.tokens

    def _prompt(self, question: str) -> tuple[list[int], int]:
        """See `Conversation.prompt`; says which turns no longer fit."""
        prompt, first = self.conversation.prompt(question, self._encode, self.room())
        dropped = first - self.conversation.first
        if dropped:
            turns = "oldest turn no longer fits" if dropped == 1 else f"{dropped} oldest turns no longer fit"
            note(f"the {turns} in the context; the model answers without")
        return prompt, first

    def _answer(
        self, prompt: list[int], stats: Stats, tokens: list[int], pieces: list[str], disturbance: Disturbance
    ) -> str:
        """Why the answer ended; its tokens and its text are added to `tokens` and `pieces`."""
        with prefill_bar() as bar:

            def progress(done: int, total: int) -> None:
                if self.stop_key.pressed:
                    raise KeyboardInterrupt
                bar(done, total)

            if self.trace is not None:
                header = TraceHeader.of(self.decoder, self.target.name, self.sampling, self.acceptance)
                self.trace.begin(prompt, self.target.piece, header)
            steps = self.decoder.generate(
                prompt,
                max_tokens=self.limit,
                sampling=self.sampling,
                verify=self.acceptance,
                stop=self.stop,
                detail=self.trace is not None,
                prediction=self.target.tokenize(self.predicted, add_bos=False) if self.predicted else (),
                progress=progress,
            )
            self.view.begin(self.thoughts())
            try:
                # Closing rolls the cache back to what was emitted.
                with closing(steps):
                    for step in steps:
                        self._take(step, stats, pieces)
                        disturbance.see(step.seconds, step.batch, step.plain_seconds)
                        tokens += [token for token in step.tokens if not self.target.is_eog(token)]
                        if step.stop is not None:
                            return step.stop
                        if self.stop_key.pressed:
                            break
            except KeyboardInterrupt:  # in the prefill
                pass
        return "stopped"

    def _take(self, step: Step, stats: Stats, pieces: list[str]) -> None:
        stats.add(step)
        if self.trace is not None:
            self.trace.add(step)
        pieces.append(step.text)
        self.view.show(step)

    def _status(self, stats: Stats, ending: str) -> str:
        drafting = self.decoder.drafter is not None
        told = [
            "stopped" if ending == "stopped" else None,
            summary(stats),
            _CUT.get(ending),
            self.acceptance.lossy,
            None if self.sampling.greedy or self.options.seed != -1 else f"seed {self.sampling.seed}",
            no_gain(stats, self.decoder.calibration.curve) if drafting else None,
            rounding(stats),
            slow_core() if drafting else None,
        ]
        return "; ".join(part for part in told if part)
