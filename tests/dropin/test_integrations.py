"""Tests of programs that use llama-cpp-python's `Llama`, with ours in its place; they skip programs that are missing.

Their imports take most of the time, so the tests only run with `--exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from support.cli_runner import DEMO
from support.twins import FREE

import ngramspec
from ngramspec.cost import store
from ngramspec.dropin import llama as dropin
from ngramspec.llama.llama_class import prepare
from ngramspec.policies.policy import FixedPolicy

pytestmark = pytest.mark.exhaustive

TEXT = "one two three four five six seven eight nine ten " * 4
SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False}
BATCHES: dict[str, Any] = {"n_threads_batch": 1}
"""Number of batch threads, for which some programs have no option; two threads would wait on busy cores."""

Maker = Callable[..., Any]


@pytest.fixture(autouse=True)
def _drafting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Draft all repetitions, whether they pay or not, and neither read nor write the user's files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dropin, "make_policy", lambda *_: FixedPolicy(6))
    monkeypatch.setattr(store, "_read", lambda _: FREE.copy())
    prepare(0)


def same(ask: Callable[[Maker], Any]) -> Any:
    """Return the answers of a program with either class, with drafts in ours."""
    made: list[Any] = []

    def make(kind: Maker, *arguments: Any, **settings: Any) -> Any:
        made.append(kind(*arguments, **BATCHES, **settings))
        return made[-1]

    theirs = ask(partial(make, llama_cpp.Llama))
    count = len(made)
    ours = ask(partial(make, ngramspec.Llama, exact="off"))
    assert theirs == ours
    assert all(model.draft_stats.drafted for model in made[count:])
    assert len(made) == 2 * count > 0
    for model in made:
        model.close()
    return ours


def test_langchain_with_drafting_llama_returns_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = pytest.importorskip("langchain_community.chat_models.llamacpp")
    completions = pytest.importorskip("langchain_community.llms.llamacpp")

    def ask(maker: Maker) -> Any:
        monkeypatch.setattr(llama_cpp, "Llama", maker)
        chat = chats.ChatLlamaCpp(model_path=str(DEMO), temperature=0.0, max_tokens=40, **SETTINGS)
        completion = completions.LlamaCpp(model_path=str(DEMO), temperature=0.7, seed=4, max_tokens=40, **SETTINGS)
        return [part.content for part in chat.stream(TEXT)], chat.invoke(TEXT).content, completion.invoke(TEXT)

    same(ask)


def test_llama_index_with_drafting_llama_returns_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("llama_index.llms.llama_cpp.base")

    def ask(maker: Maker) -> Any:
        monkeypatch.setattr(module, "Llama", maker)
        llm = module.LlamaCPP(
            model_path=str(DEMO), temperature=0.0, max_new_tokens=40, context_window=512, model_kwargs={"n_threads": 1},
            messages_to_prompt=str, completion_to_prompt=str, verbose=False,
        )  # fmt: skip
        return llm.complete(TEXT).text, [part.delta for part in llm.stream_complete(TEXT)]

    same(ask)
