"""Tests of the hub: a server on the loopback interface, online, offline and with errors, and the choice of files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.fake_hub import COMMIT, FakeHub, serve
from support.model_files import write_gguf

from ngramspec.data import ModelError
from ngramspec.models import find
from ngramspec.models.hub import _bar_class, choose, fetch

REPO = "owner/repo-GGUF"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    # The user's settings must have no influence: proxies, offline switch and tokens.
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    model = write_gguf(tmp_path / "m.gguf").read_bytes()
    parts = {}
    for part in range(2):
        file = write_gguf(tmp_path / "part.gguf", split=(part, 2), tensors={f"t{part}": 8})
        parts[f"BF16/m-BF16-{part + 1:05d}-of-00002.gguf"] = file.read_bytes()
    files = {"README.md": b"hello", "m-Q4_K_M.gguf": model, "m-Q8_0.gguf": model + b"\0", **parts}
    repos = {REPO: files, "owner/gated": {"m.gguf": model}}
    with serve(FakeHub(repos, gated={"owner/gated"})) as running:
        yield running


@pytest.fixture
def env(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url + "/", "HF_HOME": str(tmp_path / "hf")}


def complaint(name: str, env: dict[str, str]) -> str:
    with pytest.raises(ModelError) as caught:
        fetch(name, env)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)
    return str(caught.value)


def test_fetch_of_repository_returns_preferred_quantisation(
    hub: FakeHub, env: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, label = fetch(f"hf:{REPO}", env)
    folder = tmp_path / "hf" / "hub" / "models--owner--repo-GGUF" / "snapshots" / COMMIT
    assert path == folder / "m-Q4_K_M.gguf"
    assert label == f"{REPO}:m-Q4_K_M.gguf"
    assert path.read_bytes() == hub.repos[REPO]["m-Q4_K_M.gguf"]
    # The second call fetches and prints nothing.
    hub.requests.clear()
    fetch(f"hf:{REPO}", env)
    assert [method for method, path in hub.requests if "resolve" in path] == ["HEAD"]
    assert capfd.readouterr() == ("", "")


def test_fetch_of_named_file_uses_configured_cache_folder(hub: FakeHub, env: dict[str, str], tmp_path: Path) -> None:
    env["HF_HUB_CACHE"] = str(tmp_path / "mine")
    for wanted in ("q8_0", "m-Q8_0.gguf"):
        path, _ = fetch(f"hf:{REPO}:{wanted}", env)
        assert path.read_bytes() == hub.repos[REPO]["m-Q8_0.gguf"]
        assert path.is_relative_to(tmp_path / "mine" / "models--owner--repo-GGUF")


def test_fetch_of_split_model_downloads_all_parts(env: dict[str, str]) -> None:
    chosen = find.resolve(f"hf:{REPO}:BF16", env)  # checks every part
    assert chosen.path.name == "m-BF16-00001-of-00002.gguf"
    assert chosen.label == f"{REPO}:m-BF16-00001-of-00002.gguf"
    assert len(list(chosen.path.parent.iterdir())) == 2
    chosen.path.with_name("m-BF16-00002-of-00002.gguf").unlink()
    assert "only 1 of the 2 parts" in complaint(f"hf:{REPO}:BF16", {**env, "HF_HUB_OFFLINE": "yes"})


def test_fetch_progress_reaches_file_size(hub: FakeHub, env: dict[str, str]) -> None:
    seen: list[tuple[str, int, int | None]] = []
    fetch(f"hf:{REPO}:Q8_0", env, lambda *step: seen.append(step))
    size = len(hub.repos[REPO]["m-Q8_0.gguf"])
    assert seen[-1] == ("m-Q8_0.gguf", size, size)
    seen.clear()
    fetch(f"hf:{REPO}:Q8_0", env, lambda *step: seen.append(step))
    assert seen == []


def test_fetch_progress_of_xet_transfer_counts_bytes_on_disk() -> None:
    # huggingface_hub reports Xet downloads to one bar if its class has update_transfer.
    seen: list[tuple[str, int, int | None]] = []
    bar_class = _bar_class("m.gguf", lambda *step: seen.append(step))
    assert callable(getattr(bar_class, "update_transfer", None))
    with bar_class(total=10, desc="m.gguf", unit="B", position=1) as bar:
        bar.update_transfer(9)
        bar.set_transfer_postfix_str("3 MB/s", refresh=False)
        bar.update(4)
        bar.total = 12
        bar.update(2.0)
    bar.close()
    assert seen == [("m.gguf", 4, 10), ("m.gguf", 6, 12)]


@pytest.mark.parametrize("trouble", ["switch", "error", "no server"])
def test_fetch_when_offline_uses_cache(hub: FakeHub, env: dict[str, str], trouble: str) -> None:
    name = f"hf:{REPO}"
    first, _ = fetch(name, env)
    fetch(f"{name}:BF16", env)
    if trouble == "switch":
        env["HF_HUB_OFFLINE"] = "1"
    elif trouble == "error":
        hub.error_status = 503
    else:
        env["HF_ENDPOINT"] = "http://127.0.0.1:9"  # No program listens on the discard port.
    hub.requests.clear()
    assert fetch(name, env)[0] == first
    assert fetch(f"{name}:q4_k_m", env)[0] == first
    assert fetch(f"{name}:bf16", env)[0].name == "m-BF16-00001-of-00002.gguf"
    message = complaint(f"{name}:Q8_0", env)
    assert "there is no Q8_0 in this repository; it has BF16, Q4_K_M (only the local" in message
    assert not any("resolve" in path for _, path in hub.requests)
    assert "is not in the local cache and cannot be downloaded: " in complaint("hf:owner/gated", env)


def test_fetch_rejects_what_it_cannot_download(
    hub: FakeHub, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = complaint("hf:owner/unknown", env)
    assert f"the repository owner/unknown does not exist on {hub.url}, or it is private" in message
    assert "it has BF16, Q4_K_M, Q8_0" in complaint(f"hf:{REPO}:Q2_K", env)
    assert f"accept its terms at {hub.url}/owner/gated, then log in" in complaint("hf:owner/gated", env)
    monkeypatch.setenv("HF_TOKEN", "let-me-in")
    assert fetch("hf:owner/gated", env)[0].name == "m.gguf"
    env["HF_HOME"] += "2"
    Path(env["HF_HOME"]).write_text("a file where the cache folder should be")
    assert "cannot download m-Q4_K_M.gguf: " in complaint(f"hf:{REPO}", env)


def test_fetch_rejects_malformed_names(env: dict[str, str]) -> None:
    for name in ("hf:", "hf:repo", "hf:a/b/c", "hf:a/b:", "hf:a/b:c:d", "hf:/b", "hf:a/", "hf: a/b", "hf:../x"):
        assert "is not a valid name; use hf:owner/repo" in complaint(name, {})
    assert "is not a valid name" in complaint("hf:owner/a--b", env)  # by huggingface_hub's rules


def test_fetch_of_cached_file_works_without_huggingface_hub(
    hub: FakeHub, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, label = fetch(f"hf:{REPO}:Q8_0", env)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert fetch(f"hf:{REPO}:Q8_0", env) == (path, label)
    assert "only the local cache was searched" in complaint(f"hf:{REPO}:BF16", env)
    assert 'pip install "ngramspec[hub]"' in complaint(f"hf:{REPO}", {"HF_HOME": "/nowhere"})


REPOSITORY = [
    "README.md",
    "config.json",
    "Model-7B-Q4_K_M.gguf",
    "Model-7B-Q4_K_S.gguf",
    "Model-7B-Q8_0.gguf",
    "Model-7B-F16.gguf",
    "Model-7B-UD-Q2_K_XL.gguf",
    "Model-7B-IQ2_M.gguf",
    "Model-7B-UD-IQ2_M.gguf",
    "mmproj-F16.gguf",
    "mtp-Model-7B-Q4_K_M.gguf",
    "imatrix_q8_0.gguf",
    "BF16/Model-7B-BF16-00002-of-00002.gguf",
    "BF16/Model-7B-BF16-00001-of-00002.gguf",
    "Q6_K/Model-7B-Q6_K-00001-of-00002.gguf",
]

BF16 = [
    "BF16/Model-7B-BF16-00001-of-00002.gguf",
    "BF16/Model-7B-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        (None, ["Model-7B-Q4_K_M.gguf"]),
        ("Q4_K_M", ["Model-7B-Q4_K_M.gguf"]),
        ("q8_0", ["Model-7B-Q8_0.gguf"]),
        ("f16", ["Model-7B-F16.gguf"]),
        ("Q2_K_XL", ["Model-7B-UD-Q2_K_XL.gguf"]),
        ("IQ2_M", ["Model-7B-IQ2_M.gguf"]),
        ("UD-IQ2_M", ["Model-7B-UD-IQ2_M.gguf"]),
        ("bf16", BF16),
        ("Model-7B", BF16),
        ("Model-7B-Q4_K_S.gguf", ["Model-7B-Q4_K_S.gguf"]),
        ("BF16/Model-7B-BF16-00002-of-00002.gguf", BF16),
        ("Model-7B-BF16-00001-of-00002.gguf", BF16),
    ],
)
def test_choose_in_large_repository_returns_files_by_name(wanted: str | None, files: list[str]) -> None:
    assert choose(REPOSITORY, wanted) == choose(files, None) == files


def test_choose_without_match_raises_with_suggestions() -> None:
    for wanted, reason in (
        ("Q4_K", "there is no Q4_K in this repository; it has BF16, F16, IQ2_M, Q4_K_M, Q4_K_S,"),
        ("Model-7B-Q4_K_L.gguf", r"did you mean Model-7B-Q4_K_.\.gguf or "),
        ("zzzzzzzz.gguf", "there is no model file zzzzzzzz.gguf in this repository; it has BF16/"),
        ("mmproj-F16.gguf", "there is no model file mmproj-F16.gguf"),
        ("Q6_K", "only 1 of the 2 parts of Q6_K/Model-7B-Q6_K-00001-of-00002.gguf are there"),
    ):
        with pytest.raises(ModelError, match=reason):
            choose(REPOSITORY, wanted)
    with pytest.raises(ModelError, match=r"it has Q4_K_M$"):
        choose(["from-BF16-m-Q4_K_M.gguf"], "Q2_K")
    with pytest.raises(ModelError, match="no GGUF model"):
        choose(["model.safetensors", "mmproj-F16.gguf"], None)
    with pytest.raises(ModelError, match=r"the name of several files; name one of them: a/m\.gguf, b/m\.gguf"):
        choose(["a/m.gguf", "b/m.gguf"], "m.gguf")


@pytest.mark.parametrize(
    ("files", "wanted", "chosen"),
    [
        (["a.txt", "tiny.gguf", "mmproj-tiny.gguf"], None, "tiny.gguf"),
        # Without a quantisation, the choice is llama.cpp's.
        (["m.F16.gguf", "m.Q8_0.gguf"], None, "m.Q8_0.gguf"),
        (["m.Q2_K.gguf", "m.F16.gguf", "dflash-m-Q4_K_M.gguf"], None, "m.F16.gguf"),
        (["b-Q8_0.gguf", "a-Q8_0.gguf"], "Q8_0", "a-Q8_0.gguf"),
        # The end of a word matches if no whole word does.
        (["m-BF16.gguf", "m-F16.gguf"], "f16", "m-F16.gguf"),
        (["m-BF16.gguf", "m-Q8_0.gguf"], "f16", "m-BF16.gguf"),
        # These are the usual separators.
        (["m.Q4_K_M.gguf", "m-Q8_0.gguf"], None, "m.Q4_K_M.gguf"),
        (["m-q4_k_m.gguf", "m-Q8_0.gguf"], None, "m-q4_k_m.gguf"),
        (["m_Q4_K_M.gguf", "m-Q8_0.gguf"], None, "m_Q4_K_M.gguf"),
        # A word of a companion's name may be part of a model's name.
        (
            ["Qwen3.6-35B-A3B-MTP-Q4_K_M.gguf", "mtp-Qwen3.6-35B-A3B-Q4_K_M.gguf"],
            None,
            "Qwen3.6-35B-A3B-MTP-Q4_K_M.gguf",
        ),
        (["m-mtp-Q8_0.gguf", "m.mmproj-Q4_K_M.gguf", "m-mmproj-f16.gguf"], "Q8_0", "m-mtp-Q8_0.gguf"),
        (["eagle3-m-Q4_K_M.gguf", "m-eagle3-Q8_0.gguf"], None, "m-eagle3-Q8_0.gguf"),
        (["imatrix-Q4_K_M.gguf", "m-imatrix.gguf", "m-Q8_0-imatrix.gguf"], None, "m-Q8_0-imatrix.gguf"),
    ],
)
def test_choose_in_small_repository_returns_expected_file(files: list[str], wanted: str | None, chosen: str) -> None:
    assert choose(files, wanted) == [chosen]
