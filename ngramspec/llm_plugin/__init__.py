"""The plugin of simonw's `llm`: `llm -m ngramspec/NAME "..."`, for every model that `ngramspec models` lists.

`llm` loads all plugins whenever it starts, so importing this loads neither numpy nor llama.cpp; the first prompt does.
Nothing is printed here: `llm` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import click
import llm

from ngramspec.errors import NGramSpecError, PromptError

if TYPE_CHECKING:
    from llm.parts import StreamEvent

    from ngramspec.loading.load import LoadedModel
    from ngramspec.loading.settings import LoadSettings

ALIAS = "ngramspec"  # what the default model is called too, and what all names begin with
OLDEST = "0.32"  # the `llm` from which on a prompt says which messages it stands for


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Name the default model, and those on this disk."""
    from ngramspec.models.find import names

    register(NGramSpec(None), aliases=(ALIAS,))
    # A folder that cannot be looked into is no reason for `llm` not to start.
    with suppress(OSError):
        for name in dict.fromkeys(name for name, _ in names()):
            register(NGramSpec(name))


class PromptFailed(llm.ModelError, click.ClickException):
    """A prompt that cannot be answered, in one line. `llm chat` shows that for errors of click's alone."""


class NGramSpec(llm.Model):
    """A GGUF model that drafts. What it loads, it keeps until it is asked under other options of loading.

    Args:
        name: as `ngramspec` takes it; None: its default model.
    """

    can_stream = True
    supports_schema = True
    supports_tools = True

    def __init__(self, name: str | None) -> None:
        self.model_id = f"{ALIAS}/{name or 'default'}"
        self._name = name
        self._loaded: LoadedModel | None = None
        self._asked: LoadSettings | None = None

    @property
    def Options(self) -> type[llm.Options]:  # type: ignore[override]  # noqa: N802 - llm's name
        """The options of a prompt; made when they are first asked for."""
        from ngramspec.llm_plugin.answering import prompt_options

        return prompt_options()

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str | StreamEvent]:
        """Answer a prompt. It comes in pieces either way; without a stream, `llm` joins them.

        Raises:
            PromptFailed: the model cannot be loaded, or the prompt not be answered.
        """
        if not hasattr(llm, "Message"):
            raise PromptFailed(f"ngramspec requires llm {OLDEST} or later; upgrade with: llm install -U llm")
        from ngramspec.llm_plugin.answering import answer, load_settings
        from ngramspec.loading.load import load

        try:
            asked = load_settings(prompt.options)
            if self._loaded is None or self._asked != asked:
                if self._loaded is not None:
                    self._loaded.close()
                    self._loaded = None
                self._loaded, self._asked = load(self._name, asked), asked
            yield from answer(self._loaded, prompt, response)
        except PromptError as error:
            raise PromptFailed(f"{error}; start a new conversation, or raise -o ctx_size") from error
        except (NGramSpecError, ValueError) as error:
            raise PromptFailed(str(error)) from error

    def __str__(self) -> str:
        return f"ngramspec: {self.model_id}"
