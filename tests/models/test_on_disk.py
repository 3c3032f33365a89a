"""installed, and `ngramspec models`: what is on the disk, by names that `resolve` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli_runner import DEMO, NO_SMOLLM, environment, run
from support.tiny_gguf import write_gguf

from ngramspec.models.find import resolve
from ngramspec.models.on_disk import installed

HUB = "hub/models--owner--repo-GGUF"
SPLIT = "hf:owner/repo-GGUF:m-00001-of-00002.gguf"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A home with a model of each program, and without SmolLM2."""
    monkeypatch.syspath_prepend(NO_SMOLLM)
    monkeypatch.setenv("HOME", str(tmp_path))
    snapshot = tmp_path / HUB / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / HUB / "refs").mkdir()
    (tmp_path / HUB / "refs" / "main").write_text("abc")
    for number in range(2):
        write_gguf(snapshot / f"m-0000{number + 1}-of-00002.gguf", split=(number, 2), tensors={f"t{number}": 8})
    (snapshot / "mmproj-F16.gguf").symlink_to(DEMO)
    (snapshot / "gone.gguf").symlink_to(tmp_path / "gone")
    studio = tmp_path / ".lmstudio" / "models" / "me" / "toy"
    studio.mkdir(parents=True)
    (studio / "toy.gguf").symlink_to(DEMO)
    (studio / "bad.gguf").write_bytes(b"GGUF")
    return {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OLLAMA_MODELS": str(tmp_path / "none")}


def test_all_of_them_by_name(env: dict[str, str]) -> None:
    found = {one.name: one for one in installed(env)}
    assert [*found] == [
        SPLIT,
        "lmstudio:me/toy:bad.gguf",
        "lmstudio:me/toy:toy.gguf",
    ]
    split, bad, toy = found.values()
    assert split.size == sum(path.stat().st_size for path in split.path.parent.glob("m-*"))
    assert (toy.size, toy.architecture, toy.flaw) == (DEMO.stat().st_size, "llama", None)
    assert bad.flaw is not None
    for one in (split, toy):
        assert resolve(one.name, env).path == one.path


def test_the_caches_of_llama_cpp_and_of_the_hub(env: dict[str, str], tmp_path: Path) -> None:
    for repo, ref in (("owner--repo-GGUF", "main"), ("owner--other", "old")):
        kept = tmp_path / "llama" / f"models--{repo}"
        (kept / "refs").mkdir(parents=True)
        (kept / "refs" / ref).write_text("def")
        (kept / "snapshots" / "def").mkdir(parents=True)
        (kept / "snapshots" / "def" / "toy.gguf").symlink_to(DEMO)
    both = env | {"LLAMA_CACHE": str(tmp_path / "llama")}
    names = [one.name for one in installed(both) if one.name.startswith("hf:")]
    assert names == ["hf:owner/other:toy.gguf", "hf:owner/repo-GGUF:toy.gguf"]
    for name in names:
        assert resolve(name, both).path.is_relative_to(tmp_path / "llama")
    assert resolve(SPLIT, env).path.is_relative_to(tmp_path / "hub")


def test_hf_as_for_llama_cpp(env: dict[str, str], tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--toy" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "toy.Q8_0.gguf").symlink_to(DEMO)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    home = environment(tmp_path) | {"HOME": str(tmp_path)} | env
    (tmp_path / "text").write_text("def f(")
    asked = ["complete", "-t", "1", "-n", "3", "-hf", "owner/toy"]
    done = run(home, *asked, tmp_path / "text")
    assert (done.code, done.raw) == (0, run(home, "complete", "-t", "1", "-n", "3", DEMO, tmp_path / "text").raw)
    twice = run(home, *asked, DEMO, tmp_path / "text")
    assert twice.complaint == f"two models are named: {DEMO} and, with -hf, owner/toy; give one"
    wrong = run(home, *asked[:-1], "owner/toy:Q4_0", tmp_path / "text")
    assert wrong.complaint.startswith("hf:owner/toy:Q4_0: there is no Q4_0 in this repository; it has Q8_0")


def test_the_command(env: dict[str, str], tmp_path: Path) -> None:
    told = run(environment(tmp_path) | {"HOME": str(tmp_path)} | env, "models")
    rows = [line.split() for line in told.out.splitlines()]
    assert rows[0] == ["name", "size", "quantisation", "architecture", "T(4)/T(1)"]
    assert [row[0] for row in rows[1:]] == [SPLIT, "lmstudio:me/toy:toy.gguf"]
    assert rows[2][-1] == "llama", "nothing was measured of it"
    assert "lmstudio:me/toy:bad.gguf cannot be used" in told.err
    assert told.code == 0


def test_what_was_measured_of_a_model_is_told_without_loading_it(env: dict[str, str], tmp_path: Path) -> None:
    home = environment(tmp_path) | {"HOME": str(tmp_path)} | env
    done = run(home, "complete", "-t", "1", "-c", "512", "-n", "8", "lmstudio:me/toy:toy.gguf", stdin=b"one two three")
    assert done.code == 0, done.err
    steepness = {row.split()[0]: row.split()[-1] for row in run(home, "models").out.splitlines()}
    assert float(steepness["lmstudio:me/toy:toy.gguf"]) > 0.5
    assert steepness[SPLIT] == "llama", "of the other nothing is known"
