"""Session of a chat: its model, its conversation and the handling of user turns."""

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
from ngramspec.sampling.settings import Sampling
from ngramspec.sampling.text_rules import NO_RULES, TextRules
from ngramspec.steps import Stats, Step
from ngramspec.storage import state_folder
from ngramspec.tool_calls.families import find_open_tag, reasoning_tags
from ngramspec.tool_calls.parser import AnswerParser, reasoning_parser

from .answer_line import AnswerReport
from .chat_input import StopKey, no_echo
from .chat_view import AnswerView
from .console import Terminated, complain, fail, guarded_stdout, in_words, note, prefill_bar
from .memory_tip import MemoryTip
from .options import keep, open_found
from .reasoning_options import UNLIMITED


def open_model(found: ModelSource, settings: LoadSettings) -> LoadedModel:
    """Load a model and take the measurements that exact mode needs before the first answer.

    Raises:
        NGramSpecError: Model that cannot be used.
    """
    loaded = open_found(found, settings, remember=True)
    if loaded.target.exact == "on" and loaded.target.can_rollback:
        loaded.decoder.calibration.ensure_exact(loaded.target)
    return loaded


def kept_path() -> Path:
    """Return the path of the saved conversation, which only the user can read."""
    return state_folder() / "chat_last.json"


def last_kept() -> tuple[Conversation, str]:
    """Load the saved conversation with `load`.

    Raises:
        NGramSpecError: Conversation that is missing or cannot be read.
    """
    if not kept_path().exists():
        raise NGramSpecError("there is no saved conversation; ngramspec chat --keep saves one")
    return load(kept_path())


class Session:
    """State of a chat that lasts longer than a turn."""

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
        self.random_seed = False  # True if each conversation draws a new seed
        self.limit = limit  # maximum number of tokens in an answer
        self.stop: Sequence[str] = ()  # stop strings that end an answer
        self.conversation = Conversation()
        self.trace: TraceWriter | None = None  # writer of the trace of all passes
        self.interactive = interactive  # True if a user is at a terminal
        self.view = AnswerView()
        self.stop_key = StopKey(keep_session=interactive)
        self.totals = Stats()  # counters over all answers, including those before a /reset
        self.answers = 0  # number of answers
        # If `keep` is True, the file on disk always mirrors the current conversation: undone and forgotten turns are
        # removed from it too. If several chats save theirs, the file contains the one that got the last answer.
        self.keep = False
        self.attached: list[str] = []  # texts inserted before the next message
        self.predicted = ""  # text that the next answer is likely to copy
        self.variables: dict[str, Any] = {}  # additional variables of the chat template, such as "enable_thinking"
        self.rules = NO_RULES  # rules of each answer, except the budget of reasoning
        self.reasoning_budget = UNLIMITED  # maximum number of tokens in a block of reasoning
        self.reasoning_message = ""  # text before the closing tag that ends reasoning at its budget
        self.editing = False  # True if the user's next message replaces the last one
        self.report = AnswerReport()
        self.memory_tip = MemoryTip()
        self._opening = ""  # start of the answer that is part of the last prompt

    def _use(self, found: ModelSource, settings: LoadSettings, loaded: LoadedModel) -> None:
        self.found, self.load, self._loaded = found, settings, loaded
        self.target, self.decoder, self.memory = loaded.target, loaded.decoder, loaded.memory
        # Answers of the last turns are passed to the memory when they leave the context.
        self._unheard: list[list[int]] = []
        self._used: int | None = None

    @property
    def used(self) -> int:
        """Number of tokens in the context that the conversation occupies."""
        if self._used is None:
            try:
                self._used = len(self._encode(self.conversation.messages(self.conversation.first)))
            except NGramSpecError:  # templates may reject a conversation that does not end with a user message
                self._used = 0
        return self._used

    def thoughts(self) -> AnswerParser:
        """Return a parser that separates reasoning from the answer to the last prompt."""
        return reasoning_parser(self.target.chat_template, opening=self._opening)

    # ------------------------------------------------------------------ conversation

    def reset(self) -> None:
        """Remove all turns.

        A random seed is drawn again; otherwise the same message would get the same answer.
        """
        self.go_on_with(Conversation(self.conversation.system))
        if self.random_seed:
            self.draw_seed()

    def draw_seed(self) -> None:
        """Use another random seed for the following answers."""
        self.sampling = replace(self.sampling, seed=random.SystemRandom().randrange(2**32))

    def go_on_with(self, conversation: Conversation) -> None:
        """Replace the conversation with another one."""
        self._hear(0)
        self.attached.clear()
        self.predicted = ""
        self.conversation = conversation
        self.changed()

    def set_system(self, text: str | None) -> None:
        """Set the system message for the following turns; `None` removes it."""
        self.conversation.system = text
        self.changed()

    def undo(self) -> Turn:
        """Remove the last turn and return it.

        Raises:
            IndexError: Conversation without turns.
        """
        turn = self.conversation.undo()
        self._hear(-1)
        self.changed()
        return turn

    def changed(self) -> None:
        """Update the saved file after a change of the conversation; if that fails, stop saving."""
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
        """Continue with another model or other settings.

        Answers that are not yet in the memory of the previous model are dropped. The program ends if neither the new
        nor the previous model can be loaded.

        Raises:
            NGramSpecError: Model or settings that cannot be used; the session continues with the previous ones.
        """
        before = self.found, self.load
        # Two models at once may not fit in memory.
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
        """Pass the answers from index `start` on to the memory, because they leave the context."""
        if self.memory is not None:
            for answer in self._unheard[start:]:
                self.memory.hear(answer)
        del self._unheard[start:]

    # ------------------------------------------------------------------ answers

    def ask_again(self, question: str | None = None) -> bool:
        """Answer the last message again, or another message in its place.

        Without a new answer the old turn stays.

        Args:
            question: Message that replaces the last one. `None` means the last message.

        Returns:
            True if the turn succeeded.
        """
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
        """Answer a user turn and report an error in one line.

        Without an answer the conversation does not change, and attached files stay for the next message.

        Args:
            question: Message of the user.
            again: True if the turn replaces the last one.

        Returns:
            False if an error occurred.
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
                except Terminated:  # keep the incomplete turn for --resume
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
        """Return the maximum number of tokens in a prompt."""
        return self.target.n_ctx - answer_room(self.target.n_ctx, self.limit)

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        prompt = self.target.chat(messages, variables=self.variables)
        self._opening = prompt.opening
        return prompt.tokens

    def _answer(self, prompt: list[int], steps: list[Step]) -> None:
        """Show an answer until it ends or Ctrl-C is pressed, and append its steps to `steps`."""
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
            # Closing rolls the KV cache back to the emitted tokens.
            with closing(made):
                for step in made:
                    steps.append(step)
                    if self.trace is not None:
                        self.trace.add(step)
                    self.view.show(step, self.target.piece)
                    if step.stop is not None or self.stop_key.pressed:
                        break

    def _rules(self, prompt: Sequence[int]) -> TextRules:
        """Return the text rules for the answer to a prompt."""
        if self.reasoning_budget == UNLIMITED:
            return self.rules
        tags, target = reasoning_tags(self.target.chat_template), self.target
        start = find_open_tag(tags, self._opening)
        limit, message = self.reasoning_budget, self.reasoning_message
        budget = budget_for(limit, message, tags, target, target.shown, prompt=prompt, start=start)
        return replace(self.rules, reasoning=budget)


def _text(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)
