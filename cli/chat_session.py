"""A chat's session: one model, one conversation; what a user turn does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.conversation import Conversation, Message, Turn, answer_room, load, save
from ngramspec.errors import NGramSpecError
from ngramspec.instruments.trace import TraceHeader, TraceWriter
from ngramspec.json_data import encode
from ngramspec.loading.load import LoadedModel
from ngramspec.loading.settings import LoadSettings
from ngramspec.models.find import ModelSource
from ngramspec.sampling.reasoning_budget import budget_for
from ngramspec.sampling.sampler import NO_RULES, TextRules
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats, Step
from ngramspec.storage import state_folder
from ngramspec.tool_calls.families import opened, reasoning_tags
from ngramspec.tool_calls.parser import AnswerParser, thoughts_parser

from .answer_line import AnswerReport
from .chat_input import StopKey, no_echo
from .chat_view import AnswerView
from .console import Terminated, complain, fail, guarded_stdout, in_words, note, prefill_bar
from .memory_tip import MemoryTip
from .options import keep, open_found
from .reasoning_options import UNLIMITED


def open_model(found: ModelSource, settings: LoadSettings) -> LoadedModel:
    """Load a model, and measure what exact answers need before the first one. Raises NGramSpecError."""
    loaded = open_found(found, settings, remember=True)
    if loaded.target.exact == "on" and loaded.target.can_rollback:
        loaded.decoder.calibration.ensure_exact(loaded.target)
    return loaded


def kept_path() -> Path:
    """The file of the conversation that is kept, readable by the user alone."""
    return state_folder() / "chat_last.json"


def last_kept() -> tuple[Conversation, str]:
    """Load the saved conversation, as `load` does. Raises NGramSpecError if there is none, or it cannot be read."""
    if not kept_path().exists():
        raise NGramSpecError("there is no saved conversation; ngramspec chat --keep saves one")
    return load(kept_path())


class Session:
    """Everything that lasts longer than a turn."""

    def __init__(
        self,
        found: ModelSource,
        settings: LoadSettings,
        loaded: LoadedModel,
        sampling: Sampling,
        acceptance: Acceptance,
        *,
        limit: int,
        interactive: bool = False,
    ) -> None:
        self._use(found, settings, loaded)
        self.sampling, self.acceptance = sampling, acceptance
        self.random_seed = False  # whether the seed is drawn again with each conversation
        self.limit = limit  # most tokens of an answer
        self.stop: Sequence[str] = ()  # texts that end an answer
        self.conversation = Conversation()
        self.trace: TraceWriter | None = None  # where every pass is written
        self.interactive = interactive  # whether there is a user at a terminal
        self.view = AnswerView()
        self.stop_key = StopKey(keep_session=interactive)
        self.totals = Stats()  # counters over all answers, those before a /reset included
        self.answers = 0  # how many there were
        # Whether the conversation is kept on disk, as it is: what is undone or forgotten goes there too, and of
        # several chats that keep theirs, the last one to get an answer has the file.
        self.keep = False
        self.attached: list[str] = []  # texts that go in front of the next message
        self.predicted = ""  # a text that the next answer is likely to copy
        self.variables: dict[str, Any] = {}  # of the chat template, beside its own ("enable_thinking")
        self.reasoning_budget = UNLIMITED  # maximum number of tokens in a block of reasoning
        self.reasoning_message = ""  # text before the closing tag that ends reasoning at its budget
        self.editing = False  # whether the user's next message takes the place of the last one
        self.report = AnswerReport()
        self.memory_tip = MemoryTip()
        self._opening = ""  # what the last prompt begins the answer with

    def _use(self, found: ModelSource, settings: LoadSettings, loaded: LoadedModel) -> None:
        self.found, self.load, self._loaded = found, settings, loaded
        self.target, self.decoder, self.memory = loaded.target, loaded.decoder, loaded.memory
        # Answers of the last turns; the memory hears of them when they leave the context.
        self._unheard: list[list[int]] = []
        self._used: int | None = None

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
        """Return a parser that separates reasoning from the answer to the last prompt."""
        return thoughts_parser(self.target.chat_template, opening=self._opening)

    # ------------------------------------------------------------------ what is said so far

    def reset(self) -> None:
        """Forget the turns. A random seed is drawn again, or the same question would get the same answer again."""
        self.go_on_with(Conversation(self.conversation.system))
        if self.random_seed:
            self.draw_seed()

    def draw_seed(self) -> None:
        """Use another random seed from now on."""
        self.sampling = replace(self.sampling, seed=random.SystemRandom().randrange(2**32))

    def go_on_with(self, conversation: Conversation) -> None:
        """Leave the conversation for another one."""
        self._hear(0)
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
        self._hear(-1)
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
                kept_path().unlink(missing_ok=True)
        except (NGramSpecError, OSError) as error:
            self.keep = False
            complain(f"the conversation could not be saved: {in_words(error)}")

    def exchange(self, found: ModelSource, settings: LoadSettings) -> None:
        """Continue with another model or other settings; what the memory of the last one was to hear is forgotten.

        Raises:
            NGramSpecError: they cannot be used; the session continues as before. Ends the program where it cannot.
        """
        before = self.found, self.load
        # Two models may not fit beside each other.
        self._loaded.close()
        try:
            self._use(found, settings, open_model(found, settings))
            self.target.sampler(self.sampling)
        except (NGramSpecError, ValueError, MemoryError, typer.Exit) as error:
            name = before[0].label
            try:
                self._use(*before, open_model(*before))
            except NGramSpecError as gone:
                fail(f"cannot use {found.label} ({error}), and cannot return to {name}: {gone}")
            why = "" if isinstance(error, typer.Exit) else f": {error or 'out of memory'}"
            raise NGramSpecError(f"cannot use {found.label}{why} (continuing with {name})") from error

    def _hear(self, start: int) -> None:
        """Tell the memory of the answers from one on: they leave the context."""
        if self.memory is not None:
            for answer in self._unheard[start:]:
                self.memory.hear(answer)
        del self._unheard[start:]

    # ------------------------------------------------------------------ questions

    def ask_again(self, question: str | None = None) -> bool:
        """Have the last message, or another one in its place, answered; without an answer the old turn stays."""
        before, sampling = self.conversation, self.sampling
        if question is None:
            question = before.turns[-1].user
            if self.random_seed:
                self.draw_seed()
            else:
                self.sampling = replace(sampling, seed=(sampling.seed + 1) % 2**64)
        well = self.ask(question, again=True)
        if self.conversation is before:
            self.sampling = sampling
        return well

    def ask(self, question: str, *, again: bool = False) -> bool:
        """Answer a user turn, in the place of the last one perhaps. An error is one line, and gives False.

        Without an answer the conversation stays as it was; files that are attached wait for a new message.
        """
        conversation = replace(self.conversation, turns=[*self.conversation.turns])
        if again:
            conversation.undo()
        message = question if again else "\n\n".join([*self.attached, question])
        steps, stats = list[Step](), Stats()
        try:
            prompt, first = conversation.prompt(message, self._encode, self.room())
            if dropped := first - conversation.first:
                turns = "oldest turn does not fit" if dropped == 1 else f"{dropped} oldest turns do not fit"
                note(f"the {turns} in the context; the model answers without {'it' if dropped == 1 else 'them'}")
            with self.stop_key, no_echo(), guarded_stdout():
                try:
                    self._answer(prompt, steps)
                except Terminated:  # what there is of the turn is kept for --resume
                    if _text(steps) or not again:
                        conversation.add(message, _text(steps), first)
                        self.conversation = conversation
                        self.changed()
                    raise
                finally:
                    self.view.end()
        except NGramSpecError as error:
            complain(f"{error} (the turn was removed)")
            return False
        finally:
            for step in steps:
                stats.add(step)
            self.totals.merge(stats)
        ending = (steps[-1].stop if steps else None) or "stopped"
        text = _text(steps)
        if ending == "stopped" and not text:
            note("stopped before the answer began; the turn was removed")
            return True
        conversation.add(message, text, first)
        self.conversation = conversation
        self.predicted = ""
        self.answers += 1
        answer = [token for step in steps for token in step.tokens if not self.target.is_eog(token)]
        keep(self.memory, answer)
        if again:
            self._hear(-1)
        else:
            self.attached.clear()
        self._unheard.append(answer)
        self.changed()
        self._used = len(self.target.tokens)
        seed = self.sampling.seed if self.random_seed and not self.sampling.greedy else None
        self.report.show(stats, self.decoder, ending, seed=seed)
        if self.interactive and self.memory is not None:
            self.memory_tip.show_after(answer, is_retry=again)
        return True

    def room(self) -> int:
        """Most tokens of a prompt."""
        return self.target.n_ctx - answer_room(self.target.n_ctx, self.limit)

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        prompt = self.target.chat(messages, variables=self.variables)
        self._opening = prompt.opening
        return prompt.tokens

    def _answer(self, prompt: list[int], steps: list[Step]) -> None:
        """Show an answer until it ends or Ctrl-C is pressed; its passes are added to `steps`."""
        if self.trace is not None:
            header = TraceHeader.of(self.decoder, self.target.name, self.sampling, self.acceptance)
            self.trace.begin(prompt, self.target.piece, header)
        self.view.begin(self.thoughts())
        with prefill_bar() as bar, suppress(KeyboardInterrupt):

            def progress(done: int, total: int) -> None:
                if self.stop_key.pressed:
                    raise KeyboardInterrupt
                bar(done, total)

            made = self.decoder.generate(
                prompt,
                max_tokens=self.limit,
                sampling=self.sampling,
                acceptance=self.acceptance,
                stop=self.stop,
                return_decisions=self.trace is not None,
                prediction=self.target.tokenize(self.predicted, add_bos=False) if self.predicted else (),
                rules=self._rules(prompt),
                progress=progress,
            )
            # Closing rolls the cache back to what was emitted.
            with closing(made):
                for step in made:
                    steps.append(step)
                    if self.trace is not None:
                        self.trace.add(step)
                    self.view.show(step, self.target.piece)
                    if step.stop is not None or self.stop_key.pressed:
                        break

    def _rules(self, prompt: Sequence[int]) -> TextRules:
        """Return the rules of the answer to a prompt."""
        if self.reasoning_budget == UNLIMITED:
            return NO_RULES
        tags, target = reasoning_tags(self.target.chat_template), self.target
        start = opened(tags, self._opening)
        limit, message = self.reasoning_budget, self.reasoning_message
        return TextRules(reasoning=budget_for(limit, message, tags, target, target.shown, prompt=prompt, start=start))


def _text(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)
