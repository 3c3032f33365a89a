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
from ngramspec.chat.conversation import Conversation, Turn, answer_room, load, save
from ngramspec.chat.families import AnswerParser, find_open_tag, reasoning_tags
from ngramspec.chat.features import Message
from ngramspec.chat.stream import Delta
from ngramspec.data import NGramSpecError, encode
from ngramspec.instruments.trace import TraceHeader, TraceWriter
from ngramspec.loading.load import LoadedModel, open_resolved
from ngramspec.loading.settings import LoadSettings
from ngramspec.models.find import ModelSource
from ngramspec.sampling.settings import NO_RULES, Sampling, TextRules, budget_for
from ngramspec.steps import Stats, Step
from ngramspec.storage import state_folder

from .answer_line import AnswerReport
from .chat_input import StopKey, disable_echo
from .chat_view import AnswerView
from .console import Terminated, fail, format_error, guard_stdout, note, prefill_bar, print_error
from .memory_tip import MemoryTip
from .options import DISPLAY, keep
from .reasoning_options import UNLIMITED


def open_model(source: ModelSource, settings: LoadSettings) -> LoadedModel:
    """Load a model and take the measurements that exact mode needs before the first answer."""
    loaded_model = open_resolved(source, settings, DISPLAY, remember=True)
    if loaded_model.target.exact == "on" and loaded_model.target.sequences[0].can_rollback:
        loaded_model.decoder.kernels.ensure_exact(loaded_model.decoder.sequence)
    return loaded_model


def conversation_path() -> Path:
    """Return the path of the saved conversation, which only the user can read."""
    return state_folder() / "chat_last.json"


def load_last() -> tuple[Conversation, str]:
    """Load the saved conversation with `load`."""
    if not conversation_path().exists():
        raise NGramSpecError("there is no saved conversation; ngramspec chat --keep saves one")
    return load(conversation_path())


class Session:
    """State of a chat that lasts longer than a turn."""

    def __init__(
        self,
        source: ModelSource,
        settings: LoadSettings,
        loaded_model: LoadedModel,
        sampling: Sampling,
        acceptance: Acceptance,
        *,
        limit: int,
        interactive: bool = False,
    ) -> None:
        self._use(source, settings, loaded_model)
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
        self.attachments: list[str] = []  # texts inserted before the next message
        self.prediction = ""  # text that the next answer is likely to copy
        self.variables: dict[str, Any] = {}  # additional variables of the chat template, such as "enable_thinking"
        self.rules = NO_RULES  # rules of each answer, except the budget of reasoning
        self.reasoning_budget = UNLIMITED  # maximum number of tokens in a block of reasoning
        self.reasoning_message = ""  # text before the closing tag that ends reasoning at its budget
        self.editing = False  # True if the user's next message replaces the last one
        self.report = AnswerReport()
        self.memory_tip = MemoryTip()
        self._opening = ""  # start of the answer that is part of the last prompt

    def _use(self, source: ModelSource, settings: LoadSettings, loaded_model: LoadedModel) -> None:
        self.source, self.load, self._loaded = source, settings, loaded_model
        self.target, self.decoder, self.memory = loaded_model.target, loaded_model.decoder, loaded_model.memory
        # Answers of the last turns are passed to the memory when they leave the context.
        self._pending_answers: list[list[int]] = []
        self._n_tokens: int | None = None

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the context that the conversation occupies."""
        if self._n_tokens is None:
            try:
                self._n_tokens = len(self.encode(self.conversation.messages(self.conversation.first)))
            except NGramSpecError:  # templates may reject a conversation that does not end with a user message
                self._n_tokens = 0
        return self._n_tokens

    # ------------------------------------------------------------------ conversation

    def reset(self) -> None:
        """Remove all turns.

        A random seed is drawn again; otherwise the same message would get the same answer.
        """
        self.switch_conversation(Conversation(self.conversation.system))
        if self.random_seed:
            self.draw_seed()

    def draw_seed(self) -> None:
        """Use another random seed for the following answers."""
        self.sampling = replace(self.sampling, seed=random.SystemRandom().randrange(2**32))

    def switch_conversation(self, conversation: Conversation) -> None:
        """Replace the conversation with another one."""
        self._add_to_memory(0)
        self.attachments.clear()
        self.prediction = ""
        self.conversation = conversation
        self.save_changes()

    def set_system(self, text: str | None) -> None:
        """Set the system message for the following turns; `None` removes it."""
        self.conversation.system = text
        self.save_changes()

    def undo(self) -> Turn:
        """Remove the last turn and return it."""
        turn = self.conversation.undo()
        self._add_to_memory(-1)
        self.save_changes()
        return turn

    def save_changes(self) -> None:
        """Update the saved file after a change of the conversation; if that fails, stop saving."""
        self._n_tokens = None
        if not self.keep:
            return
        try:
            if self.conversation.turns:
                conversation_path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                save(
                    self.conversation,
                    conversation_path(),
                    model=self.source.label,
                    sampling=encode(asdict(self.sampling)),
                )
            else:
                conversation_path().unlink(missing_ok=True)
        except (NGramSpecError, OSError) as error:
            self.keep = False
            print_error(f"the conversation could not be saved: {format_error(error)}")

    def reload_model(self, source: ModelSource, settings: LoadSettings) -> None:
        """Continue with another model or other settings.

        Answers that are not yet in the memory of the previous model are dropped. The program ends if neither the new
        nor the previous model can be loaded.

        Raises:
            NGramSpecError: Model or settings that cannot be used; the session continues with the previous ones.
        """
        previous = self.source, self.load
        # Two models at once may not fit in memory.
        self._loaded.close()
        try:
            self._use(source, settings, open_model(source, settings))
            self.target.vocabulary.sampler(self.sampling)
        except (NGramSpecError, ValueError, MemoryError, typer.Exit) as error:
            name = previous[0].label
            try:
                self._use(*previous, open_model(*previous))
            except NGramSpecError as second_error:
                fail(f"cannot use {source.label} ({error}), and cannot return to {name}: {second_error}")
            why = "" if isinstance(error, typer.Exit) else f": {error or 'out of memory'}"
            raise NGramSpecError(f"cannot use {source.label}{why} (continuing with {name})") from error

    def _add_to_memory(self, start: int) -> None:
        """Pass the answers from index `start` on to the memory, because they leave the context."""
        if self.memory is not None:
            for answer in self._pending_answers[start:]:
                self.memory.add_text(answer)
        del self._pending_answers[start:]

    # ------------------------------------------------------------------ answers

    def regenerate(self, message: str | None = None) -> bool:
        """Answer the last message again, or another message in its place, and return True if the turn succeeded.

        Without a new answer the old turn stays.
        """
        previous, sampling = self.conversation, self.sampling
        if message is None:
            message = previous.turns[-1].user
            if self.random_seed:
                self.draw_seed()
            else:
                self.sampling = replace(sampling, seed=(sampling.seed + 1) % 2**64)
        success = self.ask(message, is_retry=True)
        if self.conversation is previous:
            self.sampling = sampling
        return success

    def ask(self, message: str, *, is_retry: bool = False) -> bool:
        """Answer a user turn, which replaces the last one if `is_retry`; return False after an error, which is printed.

        Without an answer the conversation does not change, and attached files stay for the next message.
        """
        conversation = replace(self.conversation, turns=[*self.conversation.turns])
        if is_retry:
            conversation.undo()
        full_message = message if is_retry else "\n\n".join([*self.attachments, message])
        steps, stats = list[Step](), Stats()
        deltas: list[Delta] = []  # reasoning and content
        try:
            prompt, first = conversation.prompt(full_message, self.encode, self.room())
            if n_dropped := first - conversation.first:
                turns = "oldest turn does not fit" if n_dropped == 1 else f"{n_dropped} oldest turns do not fit"
                note(f"the {turns} in the context; the model answers without {'it' if n_dropped == 1 else 'them'}")
            with self.stop_key, disable_echo(), guard_stdout():
                try:
                    self.generate(prompt, steps, deltas)
                except Terminated:  # keep the incomplete turn for --resume
                    if deltas or not is_retry:
                        conversation.add(_make_turn(full_message, deltas), first)
                        self.conversation = conversation
                        self.save_changes()
                    raise
                finally:
                    self.view.end()
        except NGramSpecError as error:
            print_error(f"{error} (the turn was removed)")
            return False
        finally:
            for step in steps:
                stats.add(step)
            self.totals.merge(stats)
        ending = (steps[-1].stop if steps else None) or "stopped"
        if ending == "stopped" and not deltas:
            note("stopped before the answer began; the turn was removed")
            return True
        conversation.add(_make_turn(full_message, deltas), first)
        self.conversation = conversation
        self.prediction = ""
        self.answers += 1
        answer = [token for step in steps for token in step.tokens if not self.target.vocabulary.is_eog(token)]
        keep(self.memory, answer)
        if is_retry:
            self._add_to_memory(-1)
        else:
            self.attachments.clear()
        self._pending_answers.append(answer)
        self.save_changes()
        self._n_tokens = len(self.target.sequences[0].tokens)
        seed = self.sampling.seed if self.random_seed and not self.sampling.greedy else None
        self.report.show(stats, self.decoder, self.target.governor, ending, seed=seed)
        if self.interactive and self.memory is not None:
            self.memory_tip.show_after(answer, is_retry=is_retry)
        return True

    def room(self) -> int:
        """Return the maximum number of tokens in a prompt."""
        return self.target.n_ctx - answer_room(self.target.n_ctx, self.limit)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of a conversation, whose answer `generate` generates."""
        prompt = self.target.vocabulary.chat(messages, variables=self.variables)
        self._opening = prompt.opening
        return prompt.tokens

    def generate(self, prompt: list[int], steps: list[Step], deltas: list[Delta]) -> None:
        """Show an answer until it ends or Ctrl-C is pressed, and append its steps and its reasoning and content."""
        if self.trace is not None:
            header = TraceHeader.of(self.decoder, self.source.label, self.sampling, self.acceptance)
            self.trace.begin(prompt, self.target.vocabulary.piece, header)
        parser = AnswerParser(self.target.vocabulary.chat_template, opening=self._opening)
        self.view.begin()
        with prefill_bar() as bar, suppress(KeyboardInterrupt):

            def progress(done: int, total: int) -> None:
                if self.stop_key.pressed:
                    raise KeyboardInterrupt
                bar(done, total)

            generation = self.decoder.generate(
                prompt,
                max_tokens=self.limit,
                sampling=self.sampling,
                acceptance=self.acceptance,
                stop=self.stop,
                return_decisions=self.trace is not None,
                prediction=self.target.vocabulary.tokenize(self.prediction, add_bos=False) if self.prediction else (),
                rules=self._rules(prompt),
                controls=self.target.vocabulary.marks,
                progress=progress,
            )
            # Closing rolls the KV cache back to the emitted tokens.
            with closing(generation):
                for step in generation:
                    steps.append(step)
                    deltas += (additions := parser.push(step.text))
                    self.view.show(step, additions, self.target.vocabulary.display_piece)
                    steps[-1] = last = replace(step, stop=step.stop or self.view.ending)
                    if self.trace is not None:
                        self.trace.add(last)
                    if last.stop is not None or self.stop_key.pressed:
                        break
            deltas += (additions := parser.finish(cut=steps[-1].stop not in ("eog", "stop")))
            if not self.view.drafts:
                self.view.write(additions)

    def _rules(self, prompt: Sequence[int]) -> TextRules:
        if self.reasoning_budget == UNLIMITED:
            return self.rules
        tags, target = reasoning_tags(self.target.vocabulary.chat_template), self.target
        start = find_open_tag(tags, self._opening)
        limit, message = self.reasoning_budget, self.reasoning_message
        budget = budget_for(
            limit, message, tags, target.vocabulary, target.vocabulary.display_piece, prompt=prompt, start=start
        )
        return replace(self.rules, reasoning=budget)


def _make_turn(message: str, deltas: Sequence[Delta]) -> Turn:
    texts = ("".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("text", "reasoning"))
    return Turn(message, *texts)
