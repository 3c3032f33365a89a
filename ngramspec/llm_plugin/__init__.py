"""Plugin for simonw's `llm`: `llm -m ngramspec/NAME "..."`, for every model that `ngramspec models` lists.

`llm` loads all plugins when it starts, so this module imports neither numpy nor llama.cpp before the first prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import click
import llm

from ngramspec.data import NGramSpecError, PromptError

if TYPE_CHECKING:
    from llm.parts import StreamEvent

    from ngramspec.loading.load import LoadedModel
    from ngramspec.loading.settings import LoadSettings


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    from ngramspec.models.find import list_models

    register(NGramSpec(None), aliases=("ngramspec",))
    # `llm` must start even if a folder cannot be read.
    with suppress(OSError):
        for name in dict.fromkeys(name for name, _ in list_models()):
            register(NGramSpec(name))


class PromptFailed(llm.ModelError, click.ClickException):
    """An error for a prompt that cannot be answered. `llm chat` shows only errors of click without a traceback."""


class NGramSpec(llm.Model):
    """A GGUF model with drafts (`None`: the default); loaded until a prompt has other options for loading."""

    can_stream = True
    supports_schema = True
    supports_tools = True

    def __init__(self, name: str | None) -> None:
        self.model_id = f"ngramspec/{name or 'default'}"
        self._name = name
        self._loaded_model: LoadedModel | None = None
        self._settings: LoadSettings | None = None

    @property
    def Options(self) -> type[llm.Options]:  # type: ignore[override]  # noqa: N802 - llm's name
        from ngramspec.llm_plugin.answering import prompt_options

        return prompt_options()

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str | StreamEvent]:
        """Answer a prompt in pieces; without a stream, `llm` joins them."""
        if not hasattr(llm, "Message"):  # version 0.32 is the first whose prompts contain their messages
            raise PromptFailed("ngramspec requires llm 0.32 or later; upgrade with: llm install -U llm")
        from ngramspec.llm_plugin.answering import LOADING, answer, read_given
        from ngramspec.loading.load import load
        from ngramspec.loading.settings import LoadSettings

        try:
            settings = LoadSettings(**read_given(prompt.options, LOADING))
            if self._loaded_model is not None and self._settings != settings:
                self._loaded_model.close()
                self._loaded_model = None
            if self._loaded_model is None:
                self._loaded_model, self._settings = load(self._name, settings), settings
            yield from answer(self._loaded_model, prompt, response)
        except PromptError as error:
            raise PromptFailed(f"{error}; start a new conversation, or raise -o ctx_size") from error
        except (NGramSpecError, ValueError) as error:
            raise PromptFailed(str(error)) from error

    def __str__(self) -> str:
        return f"ngramspec: {self.model_id}"
