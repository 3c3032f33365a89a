"""The examples of llama-cpp-python's own README, which it brings along when installed, with both `Llama`s.

An example that a newer README adds is run too. It may need what is not here; where the parent's class fails, ours need
not do better.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from support.cli_runner import DEMO
from support.twins import FREE, bare

import ngramspec
from ngramspec.cost.calibration import Calibration
from ngramspec.dropin import look_ahead
from ngramspec.llama.borrowed import mend
from ngramspec.policies.simple import FixedPolicy

RUN = {
    "High-level API",
    "Pulling models from Hugging Face Hub",
    "Chat Completion",
    "JSON Mode",
    "JSON Schema Mode",
    "Function Calling",
    "Speculative Decoding",
    "Embeddings",
    "Adjusting the Context Window",
}
"""Headings whose examples need nothing that is not here: where one of them fails, so does its test."""

NEEDS = {
    "ChatHandler": "a model that sees images",
    "LlamaHFTokenizer": "a tokenizer from the Hugging Face Hub",
}
"""What an example with such a word in it needs besides a model."""


@dataclass(frozen=True)
class Example:
    """A block of Python, and the heading that it stands under."""

    heading: str
    code: str


def examples() -> list[Example]:
    """Those that make a `Llama`."""
    text = str(metadata("llama-cpp-python").get_payload())
    heading, found = "", []
    for title, code in re.findall(r"^##+ ([^\n]+)$|^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        heading = title or heading
        if re.search(r"\bLlama(\.from_pretrained)?\(", code):
            found.append(Example(heading, code))
    return found


@dataclass
class Recorder:
    """Makes `Llama`s of one class, of the demo model wherever an example has another, and hears what they answer."""

    kind: type[llama_cpp.Llama]
    settings: dict[str, Any]
    made: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def llama(self) -> type[llama_cpp.Llama]:
        """The class that an example is given."""
        recorder = self
        kind: Any = self.kind

        class Recorded(kind):  # type: ignore[misc]
            def __init__(self, model_path: str, **settings: Any) -> None:
                given = {"n_ctx": 448, "n_threads": 1, "n_threads_batch": 1, "seed": 7, "verbose": False}
                super().__init__(str(DEMO), **{**given, **recorder.settings, **settings})
                recorder.made.append(self)

            @classmethod
            def from_pretrained(cls, repo_id: str, filename: str, **settings: Any) -> llama_cpp.Llama:
                return cls(f"{repo_id}/{filename}", **settings)

            def create_completion(self, *arguments: Any, **settings: Any) -> Any:
                return recorder.heard(super().create_completion(*arguments, **settings))

            def create_chat_completion(self, *arguments: Any, **settings: Any) -> Any:
                return recorder.heard(super().create_chat_completion(*arguments, **settings))

            def create_embedding(self, *arguments: Any, **settings: Any) -> Any:
                return recorder.heard(super().create_embedding(*arguments, **settings))

        return Recorded

    def heard(self, answer: Any) -> Any:
        answer = list(answer) if isinstance(answer, Iterator) else answer
        self.answers.append(bare(answer))
        return iter(answer) if isinstance(answer, list) else answer

    def run(self, code: str, patch: pytest.MonkeyPatch) -> None:
        """An example; the models that it only makes are asked something."""
        llama = self.llama()
        patch.setattr(llama_cpp, "Llama", llama)
        exec(code, {"Llama": llama})
        if not self.answers:
            for model in self.made:
                model.create_completion("one two three four one two three", max_tokens=24)


@pytest.mark.filterwarnings("ignore:.*drafts by itself")
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.heading)
def test_an_example_gives_what_it_gives_with_the_parent(
    example: Example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for word, what in NEEDS.items():
        if word in example.code:
            pytest.skip(f"needs {what}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(look_ahead, "make_policy", lambda *_: FixedPolicy(6))
    monkeypatch.setattr(Calibration, "load", lambda *_: Calibration.given(FREE))
    mend(0)
    parent, ours = Recorder(llama_cpp.Llama, {}), Recorder(ngramspec.Llama, {"exact": "off"})
    try:
        try:
            parent.run(example.code, monkeypatch)
        except Exception as error:
            if example.heading in RUN:
                raise
            pytest.skip(f"the parent fails: {error}")
        ours.run(example.code, monkeypatch)
        assert ours.answers == parent.answers
        assert ours.answers
        for model in ours.made:
            short = model.draft_stats.generated < 20
            assert model.draft_stats.drafted or short or model.no_drafts or model.draft_model
    finally:
        for model in [*parent.made, *ours.made]:
            model.close()


def test_most_headings_are_still_there() -> None:
    """Those of version 0.3.36: were the examples not found any more, nothing would be tested."""
    found = {example.heading for example in examples()}
    if not found:
        pytest.skip("this llama-cpp-python was installed without its README")
    assert len(found & RUN) >= 5
