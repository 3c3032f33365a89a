"""Tests of the model's description and embeddings in Ollama's API."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from datetime import datetime
from typing import Any
from unittest import mock

import numpy as np
from support.fake_embedder import CountingEmbedder, expected_embeddings
from support.http import ask, demo_vocabulary, get_error, make_server, send, thinking_vocabulary

META = {"n_params": 1_540_000_000, "size": 900, "ftype": "Q4_K_M", "n_ctx_train": 9000}


def get(path: str, **settings: Any) -> Any:
    response = send(make_server(**settings)[0], path, method="GET")
    assert response.status_code == 200
    return response.json()


def test_ollama_tags_and_ps_list_the_model() -> None:
    ((listed,), (loaded,)) = (get(path, meta=META)["models"] for path in ("/api/tags", "/api/ps"))
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "1.5B",
        "quantization_level": "Q4_K_M",
    }
    for entry in (listed, loaded):
        assert (entry["name"], entry["model"], entry["size"]) == ("demo:latest", "demo:latest", 900)
        assert entry["details"] == details
        assert len(bytes.fromhex(entry["digest"])) == 32
    assert listed["digest"] == loaded["digest"]
    # Clients store the capabilities of a model under its digest.
    assert listed["digest"] != get("/api/tags", meta=META, embedder=CountingEmbedder())["models"][0]["digest"]
    assert datetime.fromisoformat(listed["modified_at"]) < datetime.fromisoformat(loaded["expires_at"])
    assert loaded["context_length"] == 512


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


def test_ollama_version_and_head_requests_succeed() -> None:
    major, minor, _ = get("/api/version")["version"].split(".")
    assert (int(major), int(minor)) >= (0, 6)  # Clients reject older versions.
    for path in ("/", "/api/version", "/api/tags"):
        assert send(make_server()[0], path, method="HEAD").status_code == 200


# --------------------------------------------------------------------------- embeddings


def test_ollama_embed_returns_embeddings_of_both_endpoints() -> None:
    tokens = [demo_vocabulary().tokenize(text) for text in ("hello", "you are")]
    both, _ = ask("/api/embed", {"model": "m", "input": ["hello", "you are"]}, embedder=CountingEmbedder())
    assert np.allclose(both["embeddings"], expected_embeddings(*tokens), atol=1e-6)
    assert (both["model"], both["prompt_eval_count"]) == ("m", sum(map(len, tokens)))
    assert isinstance(both["total_duration"], int)
    one, _ = ask("/api/embed", {"input": [7, 8, 9], "dimensions": 1}, embedder=CountingEmbedder())
    assert one["embeddings"] == [[1.0]]
    older, _ = ask("/api/embeddings", {"prompt": "hello"}, embedder=CountingEmbedder())
    assert np.allclose(older["embedding"], expected_embeddings(tokens[0])[0], atol=1e-6)
    for path, body, empty in (
        ("/api/embed", {"input": ""}, {"embeddings": []}),
        ("/api/embed", {}, {"embeddings": []}),
        ("/api/embeddings", {}, {"embedding": []}),
    ):
        answer, _ = ask(path, body, embedder=CountingEmbedder())
        assert empty.items() <= answer.items()


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


def test_ollama_embed_rejects_invalid_requests() -> None:
    assert "--embeddings" in get_error("/api/embed", {"input": "x"}, 501)
    assert get_error("/api/embed", {"input": [[]]}, embedder=CountingEmbedder()).startswith("input must not")
    assert get_error("/api/embed", {"input": "x", "dimensions": 4}, embedder=CountingEmbedder()).startswith(
        "dimensions must be"
    )
    assert "--pooling none" in get_error("/api/embeddings", {"prompt": "x"}, embedder=CountingEmbedder("none"))
