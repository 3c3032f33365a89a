"""`NGramSpec`: a model as `llm` knows it. What it loads, it keeps until it is asked under other options of loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import llm

from ngramspec.errors import NGramSpecError, PromptError

if TYPE_CHECKING:
    from llm.parts import StreamEvent

    from ngramspec.llm_plugin.opened import Opened

ALIAS = "ngramspec"
"""What the default model is called too, and what all names begin with."""

OLDEST = "0.32"
"""The `llm` from which on a prompt says which messages it stands for."""


class PromptFailed(llm.ModelError, click.ClickException):
    """A prompt that cannot be answered, in one line. `llm chat` shows that for errors of click's alone."""


class NGramSpec(llm.Model):
    """A GGUF model that drafts.

    Args:
        name: as `ngramspec` takes it; None: its default model.
    """

    can_stream = True
    supports_schema = True
    supports_tools = True

    def __init__(self, name: str | None) -> None:
        self.model_id = f"{ALIAS}/{name or 'default'}"
        self._name = name
        self._opened: Opened | None = None

    @property
    def Options(self) -> type[llm.Options]:  # type: ignore[override]  # noqa: N802 - llm's name
        """The options of a prompt; made when they are first asked for."""
        from ngramspec.llm_plugin.options import prompt_options

        return prompt_options()

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str | StreamEvent]:
        """Answer a prompt. It comes in pieces either way; without a stream, `llm` joins them.

        Raises:
            PromptFailed: the model cannot be loaded, or the prompt not be answered.
        """
        if not hasattr(llm, "Message"):
            raise PromptFailed(f"ngramspec needs llm {OLDEST} or later; get it with: llm install -U llm")
        from ngramspec.llm_plugin.answering import answer
        from ngramspec.llm_plugin.opened import Opened, loading

        try:
            asked = loading(prompt.options)
            if self._opened is None or self._opened.loading != asked:
                if self._opened is not None:
                    self._opened.close()
                    self._opened = None
                self._opened = Opened(self._name, asked)
            yield from answer(self._opened, prompt, response)
        except PromptError as error:
            raise PromptFailed(f"{error}; begin a new conversation, or raise -o ctx_size") from error
        except (NGramSpecError, ValueError) as error:
            raise PromptFailed(str(error)) from error

    def __str__(self) -> str:
        return f"ngramspec: {self.model_id}"
