"""Session of a chat: its model, its conversation and the handling of user turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.chat.conversation import Conversation, Turn, answer_room, load, save
from ngramspec.chat.families import AnswerParser, find_open_tag, reasoning_tags
from ngramspec.chat.stream import Delta
from ngramspec.chat.template import Message
from ngramspec.chat.template import worker as template_worker
from ngramspec.data import NGramSpecError, encode
from ngramspec.instruments.trace import TraceHeader, TraceWriter
from ngramspec.loading.load import LoadedModel, find, open_resolved
from ngramspec.loading.settings import LoadSettings
from ngramspec.models.find import ModelSource
from ngramspec.sampling.reasoning import budget_for
from ngramspec.sampling.settings import NO_RULES, Sampling, TextRules, option
from ngramspec.steps import Stats, Step
from ngramspec.storage import FOLDERS

from .chat_input import StopKey, disable_echo
from .chat_view import AnswerView, MemoryTip
from .console import Terminated, fail, format_error, note, print_error
from .options import DISPLAY, check_sampling, draw_seed, keep, parse_stop, predict_option, token_limit
from .reasoning_options import ENABLE, ReasoningOptions
from .show import AnswerReport, counting_bar

PREDICT: int = predict_option(-1, "Maximum number of tokens per answer; -1: until the context is full.")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat. Its `/set` knows those of the groups, and those declared with `option`."""

    load: LoadSettings
    sampling: Sampling
    acceptance: Acceptance
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    rules: TextRules = NO_RULES  # without the budget of reasoning, which depends on the prompt
    random_seed: bool = False  # True if each conversation draws a new seed
    predict: int = PREDICT
    stop: tuple[str, ...] = option((), help="Stop strings, quoted as in a shell.", parse=parse_stop, repeatable=True)
    markdown: bool = option(True, help="Render Markdown: on or off.")
    # While it is on, the file on disk always mirrors the current conversation: undone and forgotten turns are removed
    # from it too. If several chats save theirs, the file contains the one that got the last answer.
    keep: bool = option(
        False, help="Save this conversation for chat --resume: on, or off (which deletes the saved one)."
    )

    @property
    def restriction(self) -> str:
        """The rule or budget that limits the acceptance of drafts, as `TextRules.restriction` names it."""
        return self.reasoning.restriction or self.rules.restriction


def open_model(source: ModelSource, settings: LoadSettings) -> LoadedModel:
    """Load a model and take the measurements that exact mode needs before the first answer."""
    loaded_model = open_resolved(source, settings, DISPLAY, remember=True)
    if loaded_model.target.exact == "on" and loaded_model.target.sequences[0].can_rollback:
        loaded_model.decoder.kernels.ensure_exact(loaded_model.decoder.sequence)
    return loaded_model


def conversation_path() -> Path:
    return FOLDERS.user_state_path / "chat_last.json"


def load_last() -> tuple[Conversation, str]:
    if not conversation_path().exists():
        raise NGramSpecError("there is no saved conversation; ngramspec chat --keep saves one")
    return load(conversation_path())


def open_session(model: str | None, options: ChatOptions, trace: Path | None, **more: Any) -> Session:
    """Load a model, and check that it supports the options of a session; `more` are further arguments of `Session`."""
    writer = TraceWriter(trace) if trace is not None else None
    with disable_echo():  # keys typed while the model loads go to the prompt
        source = find(model, options.load, DISPLAY)
        template_worker.start()
        loaded_model = open_model(source, options.load)
        vocabulary = loaded_model.target.vocabulary
        vocabulary.chats.check()
    check_sampling(vocabulary, options.sampling)
    options.reasoning.check(vocabulary.chat_template)
    return Session(source, loaded_model, options, trace=writer, **more)


class Session:
    """State of a chat that lasts longer than a turn.

    `interactive` is True if a user is at a terminal, and `trace` gets all passes.
    """

    def __init__(
        self,
        source: ModelSource,
        loaded_model: LoadedModel,
        options: ChatOptions,
        conversation: Conversation | None = None,
        *,
        interactive: bool = False,
        trace: TraceWriter | None = None,
    ) -> None:
        self._load(source, loaded_model)
        # The argument -hf must not name another model that /model opens.
        self.options = replace(options, load=replace(options.load, hf_repo=None))
        self.conversation = conversation or Conversation()
        self.interactive, self._trace = interactive, trace
        self.view = AnswerView(markdown=options.markdown)
        self.stop_key = StopKey(keep_session=interactive)
        self.totals = Stats()  # counters over all answers, including those before a /reset
        self.answers = 0  # number of answers
        self.attachments: list[str] = []  # texts inserted before the next message
        self.prediction = ""  # text that the next answer is likely to copy
        # Function that lets the user change a line; `None` if input is not a terminal.
        self.edit_line: Callable[[str], str] | None = None
        self._report = AnswerReport()
        self._tip = MemoryTip()
        self._opening = ""  # start of the answer that is part of the last prompt

    def _load(self, source: ModelSource, loaded_model: LoadedModel) -> None:
        self.source, self._loaded = source, loaded_model
        self.target, self.decoder, self.memory = loaded_model.target, loaded_model.decoder, loaded_model.memory
        # Answers of the last turns are passed to the memory when they leave the context.
        self._pending_answers: list[list[int]] = []
        self._n_tokens: int | None = None

    def use(self, options: ChatOptions) -> None:
        """Use other options for the following answers; an error means that the model does not support them."""
        if options.load != self.options.load:
            self.load(self.source, options.load)
        template = self.target.vocabulary.chat_template
        if options.reasoning != self.options.reasoning:
            if options.reasoning.variables and ENABLE not in (template or ""):
                raise NGramSpecError(f"this model's chat template has no variable for reasoning ({ENABLE})")
            if options.reasoning.limited and not reasoning_tags(template):
                raise NGramSpecError("this model's chat template has no reasoning tags")
        self.target.vocabulary.sampler(options.sampling)
        options.acceptance.rule(options.sampling, options.restriction)
        self.options = options
        self.view.markdown = options.markdown
        self.save_changes()

    @property
    def n_tokens(self) -> int:
        if self._n_tokens is None:
            self._n_tokens = 0
            with suppress(NGramSpecError):  # templates may reject a conversation that does not end with a user message
                self._n_tokens = len(self.encode(self.conversation.messages(self.conversation.first)))
        return self._n_tokens

    def reset(self) -> None:
        self.switch_conversation(Conversation(self.conversation.system))
        if self.options.random_seed:  # otherwise the same message would get the same answer
            self._set_seed(draw_seed())

    def _set_seed(self, seed: int) -> None:
        self.options = replace(self.options, sampling=replace(self.options.sampling, seed=seed))

    def switch_conversation(self, conversation: Conversation) -> None:
        self._add_to_memory(0)
        self.attachments.clear()
        self.prediction = ""
        self.conversation = conversation
        self.save_changes()

    def undo(self) -> Turn:
        turn = self.conversation.undo()
        self._add_to_memory(-1)
        self.save_changes()
        return turn

    def save_changes(self) -> None:
        """Update the saved file after a change of the conversation; if that fails, stop saving."""
        self._n_tokens = None
        if not self.options.keep:
            return
        try:
            if self.conversation.turns:
                conversation_path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self.save(conversation_path())
            else:
                conversation_path().unlink(missing_ok=True)
        except (NGramSpecError, OSError) as error:
            self.options = replace(self.options, keep=False)
            print_error(f"the conversation could not be saved: {format_error(error)}")

    def save(self, path: Path) -> None:
        save(self.conversation, path, model=self.source.label, sampling=encode(asdict(self.options.sampling)))

    def load(self, source: ModelSource, settings: LoadSettings) -> None:
        """Continue with another model or other settings, or, after an error, with the previous ones."""
        previous = self.source, self.options.load
        # Two models at once may not fit in memory.
        self._loaded.close()
        try:
            self._load(source, open_model(source, settings))
            self.target.vocabulary.sampler(self.options.sampling)
        except (NGramSpecError, ValueError, MemoryError, typer.Exit) as error:
            try:
                self._load(previous[0], open_model(*previous))
            except NGramSpecError as second_error:
                fail(f"cannot use {source.label} ({error}), and cannot return to {previous[0].label}: {second_error}")
            why = "" if isinstance(error, typer.Exit) else f": {error or 'out of memory'}"
            raise NGramSpecError(f"cannot use {source.label}{why} (continuing with {previous[0].label})") from error
        self.options = replace(self.options, load=settings)

    def _add_to_memory(self, start: int) -> None:
        """Pass the answers from index `start` on to the memory, because they leave the context."""
        if self.memory is not None:
            for answer in self._pending_answers[start:]:
                self.memory.add_text(answer)
        del self._pending_answers[start:]

    def regenerate(self, message: str | None = None) -> bool:
        """Answer the last message again, or another one in its place; without a new answer the old turn stays."""
        previous, seed = self.conversation, self.options.sampling.seed
        if message is None:
            message = previous.turns[-1].user
            self._set_seed(draw_seed() if self.options.random_seed else (seed + 1) % 2**64)
        success = self.ask(message, is_retry=True)
        if self.conversation is previous:
            self._set_seed(seed)
        return success

    def ask(self, message: str, *, is_retry: bool = False) -> bool:
        """Answer a user turn, which replaces the last one if `is_retry`; return False after an error, which is printed.

        Without an answer the conversation does not change, and attached files stay for the next message.
        """
        conversation = replace(self.conversation, turns=[*self.conversation.turns])
        if is_retry:
            conversation.undo()
        full_message = message if is_retry else "\n\n".join([*self.attachments, message])
        steps, stats, deltas = list[Step](), Stats(), list[Delta]()

        def add_turn() -> None:
            texts = ("".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("text", "reasoning"))
            conversation.add(Turn(full_message, *texts), first)
            self.conversation = conversation
            self.save_changes()

        try:
            prompt, first = conversation.prompt(full_message, self.encode, self.room())
            if n_dropped := first - conversation.first:
                turns = "oldest turn does not fit" if n_dropped == 1 else f"{n_dropped} oldest turns do not fit"
                note(f"the {turns} in the context; the model answers without {'it' if n_dropped == 1 else 'them'}")
            with self.stop_key, disable_echo():
                try:
                    self.generate(prompt, steps, deltas)
                except Terminated:  # keep the incomplete turn for --resume
                    if deltas or not is_retry:
                        add_turn()
                    raise
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
        add_turn()
        self.prediction = ""
        self.answers += 1
        answer = keep(self.memory, self.target.vocabulary, steps)
        if is_retry:
            self._add_to_memory(-1)
        else:
            self.attachments.clear()
        self._pending_answers.append(answer)
        self._n_tokens = len(self.target.sequences[0].tokens)
        self.show_report(stats, ending)
        if self.interactive and self.memory is not None:
            self._tip.show_after(answer, is_retry=is_retry)
        return True

    def show_report(self, stats: Stats, ending: str, intro: str = "") -> None:
        sampling = self.options.sampling
        seed = sampling.seed if self.options.random_seed and not sampling.greedy else None
        self._report.show(stats, self.decoder, self.target.governor, ending, seed=seed, intro=intro)

    def room(self) -> int:
        return self.target.n_ctx - answer_room(self.target.n_ctx, token_limit(self.options.predict))

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of a conversation, whose answer `generate` generates."""
        prompt = self.target.vocabulary.chats.prompt(messages, variables=self.options.reasoning.variables)
        self._opening = prompt.opening
        return prompt.tokens

    def generate(self, prompt: list[int], steps: list[Step], deltas: list[Delta]) -> None:
        """Show an answer until it ends or Ctrl-C is pressed, and append its steps and its reasoning and content."""
        options, vocabulary = self.options, self.target.vocabulary
        if self._trace is not None:
            header = TraceHeader.of(self.decoder, self.source.label, options.sampling, options.acceptance)
            self._trace.begin(prompt, vocabulary.piece, header)
        parser = AnswerParser(vocabulary.chat_template, opening=self._opening)
        with self.view.answering(), counting_bar("reading") as bar, suppress(KeyboardInterrupt):

            def progress(done: int, total: int) -> None:
                if self.stop_key.pressed:
                    raise KeyboardInterrupt
                bar(done, total)

            generation = self.decoder.generate(
                prompt,
                max_tokens=token_limit(options.predict),
                sampling=options.sampling,
                acceptance=options.acceptance,
                stop=options.stop,
                return_decisions=self._trace is not None,
                prediction=vocabulary.tokenize(self.prediction, add_bos=False) if self.prediction else (),
                rules=self._rules(prompt),
                controls=vocabulary.chats.marks,
                progress=progress,
            )
            # Closing rolls the KV cache back to the emitted tokens.
            with closing(generation):
                for step in generation:
                    steps.append(step)
                    deltas += (additions := parser.push(step.text))
                    self.view.show(step, additions, vocabulary.display_piece)
                    steps[-1] = last = replace(step, stop=step.stop or self.view.ending)
                    if self._trace is not None:
                        self._trace.add(last)
                    if last.stop is not None or self.stop_key.pressed:
                        break
            deltas += (additions := parser.finish(cut=steps[-1].stop not in ("eog", "stop")))
            if not self.view.drafts:
                self.view.write(additions)

    def _rules(self, prompt: Sequence[int]) -> TextRules:
        reasoning, vocabulary = self.options.reasoning, self.target.vocabulary
        if not reasoning.limited:
            return self.options.rules
        tags = reasoning_tags(vocabulary.chat_template)
        limit = reasoning.reasoning_budget, reasoning.reasoning_budget_message
        start = find_open_tag(tags, self._opening)
        budget = budget_for(*limit, tags, vocabulary, prompt=prompt, start=start)
        return replace(self.options.rules, reasoning=budget)
