"""`ngramspec.Llama` with a second GGUF file that drafts, and over machines."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from support.cli_runner import DEMO
from support.tiny_models import write_model
from support.twins import FREE

import ngramspec
from ngramspec import Target
from ngramspec.cost.calibration import Calibration
from ngramspec.dropin import look_ahead
from ngramspec.errors import ModelError
from ngramspec.llama import log, rpc
from ngramspec.policies.simple import FixedPolicy

PROMPT = "def value_0(self):\n    return self._value_0\n\n\ndef value_1("
SMALL: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
OURS: dict[str, Any] = {**SMALL, "exact": "off", "keep": False}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of four tokens in every pass, whatever they cost."""
    monkeypatch.setattr(look_ahead, "make_policy", lambda *_: FixedPolicy(4))
    monkeypatch.setattr(Calibration, "load", lambda *_: Calibration.given(FREE))


def text(llama: Any, **settings: Any) -> str:
    answer: str = llama.create_completion(PROMPT, max_tokens=40, **settings)["choices"][0]["text"]
    return answer


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("opened", [False, True])
def test_a_model_that_drafts_for_itself_is_right_and_changes_nothing(opened: bool) -> None:
    small: Any = Target(DEMO, n_ctx=512, threads=1) if opened else str(DEMO)
    ours = ngramspec.Llama(str(DEMO), draft_model=small, **OURS)
    parent = llama_cpp.Llama(str(DEMO), **SMALL)
    for settings in ({"temperature": 0.9, "seed": 5}, {"temperature": 0.0}):
        before = ours.draft_stats.accepted, ours.draft_stats.drafted
        for _ in range(2):  # the second time with what the first left in both caches
            assert text(ours, **settings) == text(parent, **settings)
    stats = ours.draft_stats
    assert stats.accepted - before[0] > 0.7 * (stats.drafted - before[1]) > 35
    if not opened:
        twin = pickle.loads(pickle.dumps(ours))
        assert text(twin, temperature=0.0) == text(parent, temperature=0.0)
        assert twin.draft_stats.accepted
        twin.close()
    for made in (ours, parent):
        made.close()
    if opened:
        assert small.tokenize("still open")


def test_what_cannot_draft_is_said_in_a_line(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", "llama")
    with pytest.raises(ModelError, match="their vocabularies differ, at token"):
        ngramspec.Llama(str(DEMO), draft_model=other, **OURS)
    with pytest.raises(ModelError, match=r"gone\.gguf"):
        ngramspec.Llama(str(DEMO), draft_model=str(tmp_path / "gone.gguf"), **OURS)
    ours = ngramspec.Llama(str(DEMO), **OURS)
    with pytest.raises(TypeError, match="give the path of its file"):
        ngramspec.Llama(str(DEMO), draft_model=ours, **OURS)
    ours.close()


def test_the_log_goes_back_to_where_it_went(capfd: pytest.CaptureFixture[str]) -> None:
    ours = ngramspec.Llama(str(DEMO), draft_model=str(DEMO), **{**OURS, "verbose": True})
    ours.close()
    capfd.readouterr()
    llama_cpp.Llama(str(DEMO), **{**SMALL, "verbose": True}).close()
    assert "llama_model_loader" in capfd.readouterr().err


def test_machines_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'host' is not HOST:PORT"):
        ngramspec.Llama(str(DEMO), rpc_servers="host", **OURS)
    with pytest.raises(ValueError, match="n_gpu_layers=0 leaves no layer"):
        ngramspec.Llama(str(DEMO), rpc_servers="127.0.0.1:1", n_gpu_layers=0, **OURS)

    def none() -> int:
        raise ModelError(f"built without; {rpc.BUILD}")

    monkeypatch.setattr(rpc, "registry", none)
    with pytest.raises(ModelError, match="DGGML_RPC=on"):
        ngramspec.Llama(str(DEMO), rpc_servers="127.0.0.1:1", **OURS)


def test_machines_are_joined_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []

    def connect(names: Any) -> None:
        log.init_backend()
        joined.append(names)

    monkeypatch.setattr(rpc, "connect", connect)
    ours = ngramspec.Llama(str(DEMO), rpc_servers="a:1, b:2", **OURS)
    assert joined == [("a:1", "b:2")]
    assert ours.model_params.n_gpu_layers > 1000
    assert ours.__getstate__()["rpc_servers"] == "a:1, b:2"
    ours.close()
