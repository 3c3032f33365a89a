"""Fixtures of the command line's tests: chat sessions on the demo model in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ngramspec_cli.chat_session import ChatOptions, Session
from ngramspec_cli.options import CHAT_TEMPERATURE, SamplingOptions
from support.cli_runner import DEMO, environment
from support.model_files import write_model

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.loading.load import LoadedModel
from ngramspec.loading.settings import LoadSettings
from ngramspec.models.find import ModelSource


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    with Target(DEMO, ctx_size=512, threads=1) as found:
        yield found


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with another vocabulary whose passes take almost no time."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "llama")


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the costs of passes, which all sessions share."""
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two prompts in two categories, of which one name looks like markup."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = {"code": "x[5] = x[5] + 1\n" * 8, "notes[b]": "buy 5 apples, and 5 pears\n" * 8}
    path.write_text("\n".join(json.dumps({"id": "1", "category": c, "text": text}) for c, text in texts.items()))
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return empty folders of a user, which the test itself uses too."""
    own = environment(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", own["XDG_CACHE_HOME"])
    return own


@pytest.fixture
def session(target: Target, measured: Path) -> Session:
    return make_session(target, measured)


@pytest.fixture
def own_session(measured: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Yield a session whose model may be closed and loaded again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(measured))
    session = make_session(Target(DEMO, ctx_size=512, threads=1), measured)
    yield session
    session.target.close()


def make_session(target: Target, measured: Path) -> Session:
    settings = LoadSettings(ctx_size=512, threads=1, exact="off", no_memory=True)
    decoder = SpeculativeDecoder(target, calibration_folder=measured)
    found = ModelSource(DEMO, DEMO.name)
    loaded = LoadedModel(target, decoder.drafter, None, settings, {}, None)
    vars(loaded)["decoder"] = decoder  # with the calibration of all tests
    sampling = SamplingOptions().settings({"temperature": CHAT_TEMPERATURE, "seed": 1})
    return Session(found, loaded, ChatOptions(settings, sampling, Acceptance(), predict=20))
