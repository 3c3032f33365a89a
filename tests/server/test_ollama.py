"""Tests of what Ollama's API says of a model, and of its embeddings; the recorded exchanges show its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

from support.fake_embedder import CountingEmbedder
from support.http import ask, demo_vocabulary, get_error, make_server, send, thinking_vocabulary
from support.model_files import write_vocabulary

from ngramspec.llama.vocabulary import Vocabulary


def test_ollama_generate_with_suffix_requires_fill_in_the_middle(tmp_path: Path) -> None:
    with closing(Vocabulary(write_vocabulary(tmp_path / "plain.gguf", fill_in=False))) as plain:
        error = get_error("/api/generate", {"prompt": "a", "suffix": "b"}, vocabulary=plain)
        assert error.startswith("this model does not support fill-in-the-middle")
        assert "insert" not in send(make_server(vocabulary=plain)[0], "/api/show", {}).json()["capabilities"]


META = {"n_params": 1_540_000_000, "size": 900, "ftype": "Q4_K_M", "n_ctx_train": 9000}


def get(path: str, **settings: Any) -> Any:
    response = send(make_server(**settings)[0], path, method="GET")
    assert response.status_code == 200
    return response.json()


def test_ollama_tags_and_ps_list_the_model() -> None:
    """The recorded exchanges have the other fields."""
    ((listed,), (loaded,)) = (get(path, meta=META)["models"] for path in ("/api/tags", "/api/ps"))
    for entry in (listed, loaded):
        details = entry["details"]
        assert (entry["size"], details["parameter_size"], details["quantization_level"]) == (900, "1.5B", "Q4_K_M")
        assert len(bytes.fromhex(entry["digest"])) == 32
    assert listed["digest"] == loaded["digest"]
    # Clients store the capabilities of a model under its digest.
    assert listed["digest"] != get("/api/tags", meta=META, embedder=CountingEmbedder())["models"][0]["digest"]
    assert listed["modified_at"].endswith("Z")
    assert datetime.fromisoformat(listed["modified_at"]) < datetime.fromisoformat(loaded["expires_at"])


def test_ollama_show_describes_the_model_for_any_name() -> None:
    thinking = thinking_vocabulary()
    server, _ = make_server(vocabulary=thinking, meta=META, embedder=CountingEmbedder())
    shown = send(server, "/api/show", {"model": "any", "verbose": True}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "insert", "embedding"]
    assert send(make_server()[0], "/api/show", {"name": "any"}).json()["capabilities"] == [
        "completion",
        "tools",
        "insert",
    ]
    info = shown["model_info"]
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 512)
    assert info["general.parameter_count"] == 1_540_000_000
    assert shown["template"] == thinking.chat_template
    assert ["num_ctx", "512"] in [line.split() for line in shown["parameters"].splitlines()]
    assert shown["details"]["family"] == "llama"
    with mock.patch.object(thinking, "metadata", {"general.architecture": "x", "a": math.inf, "b": 0.5}):
        info = send(server, "/api/show", {}).json()["model_info"]
    assert info == {
        "general.architecture": "x",
        "b": 0.5,
        "x.context_length": 512,
        "general.parameter_count": 1.54e9,
    }


def test_ollama_embed_truncates_long_texts_unless_truncate_is_false() -> None:
    for text in ("word " * 30, "word " * 100_000):
        answer, _ = ask("/api/embed", {"input": text}, embedder=CountingEmbedder())
        assert answer["prompt_eval_count"] == CountingEmbedder.n_ctx
        message = get_error("/api/embed", {"input": text, "truncate": False}, embedder=CountingEmbedder())
        assert "exceeds the available context size (16 tokens)" in message
        older, _ = ask("/api/embeddings", {"prompt": text}, embedder=CountingEmbedder())
        assert len(older["embedding"]) == 3


def test_ollama_embed_truncation_keeps_end_token() -> None:
    end = next(token for token in range(demo_vocabulary().n_vocab) if demo_vocabulary().is_eog(token))
    seen = []

    class Recording(CountingEmbedder):
        def reading(self, tokens: Sequence[int], max_chunk: Callable[[], int]) -> Generator[None, None, Any]:
            seen.append(list(tokens))
            return super().reading(tokens, max_chunk)

    ask("/api/embed", {"input": [[*range(10, 40), end], [*range(10, 40)]]}, embedder=Recording())
    assert seen == [[*range(10, 25), end], [*range(10, 26)]]
