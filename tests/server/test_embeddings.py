"""Tests of `/v1/embeddings` and `/embedding`: embedded texts, formats of embeddings, and rejected requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fake_embedder import CountingEmbedder, expected_embeddings
from support.http import ask, demo_vocabulary, get_error, make_server, send

from ngramspec.server.embeddings import scale_vectors
from ngramspec.server.limits import MAX_NUMBERS

OPENAI, NATIVE = "/v1/embeddings", "/embedding"


def told(path: str, body: Any, **settings: Any) -> Any:
    return ask(path, body, embedder=CountingEmbedder(**settings))[0]


def refused(path: str, body: Any, status: int = 400, **settings: Any) -> dict[str, Any]:
    return get_error(path, body, status, embedder=CountingEmbedder(**settings))


def of(*texts: Any) -> Any:
    """Return the expected embeddings of texts."""
    return expected_embeddings(*(t if isinstance(t, list) else demo_vocabulary().tokenize(t) for t in texts))


def test_embedding_without_pooling_returns_one_embedding_per_token() -> None:
    ((one,), (first, second)) = [text["embedding"] for text in told(NATIVE, {"input": [[7], [8, 9]]}, pooling="none")]
    assert (one, first, second) == ([7, 1, 0], [8, 2, 0], [9, 2, 0])
    assert "--pooling mean" in refused(OPENAI, {"input": "hello"}, pooling="none")["message"]
    assert "--pooling none" in get_error("/api/embeddings", {"prompt": "x"}, embedder=CountingEmbedder("none"))


def test_scale_vectors_normalises_by_requested_norm() -> None:
    assert told(NATIVE, {"content": [7, 8, 9], "embd_normalize": -1})[0]["embedding"] == [[7, 3, 0]]
    vectors = np.array([[3, -4, 0], [0, 0, 0], [3e30, 4e30, 0]], np.float32)
    assert scale_vectors(vectors, -1) is vectors
    length_1 = [[0.6, -0.8, 0], [0, 0, 0], [0.6, 0.8, 0]]
    assert np.allclose(scale_vectors(vectors, 2), length_1)
    assert np.allclose(scale_vectors(vectors[:2], 0), [[24570, -32760, 0], [0, 0, 0]])
    assert np.allclose(scale_vectors(vectors[:2], 1), [[3 / 7, -4 / 7, 0], [0, 0, 0]])
    assert np.isfinite(scale_vectors(vectors, 10**6)).all()


def test_embeddings_with_failed_decode_or_invalid_values_returns_500() -> None:
    assert "llama_decode" in refused(OPENAI, {"input": "hello"}, 500, scale=0)["message"]
    assert "not finite" in refused(OPENAI, {"input": "hello"}, 500, scale=float("nan"))["message"]


def test_embeddings_without_embedder_returns_501_with_option() -> None:
    for path in (OPENAI, "/embeddings", NATIVE):
        error = get_error(path, {"input": "hello"}, 501)
        assert error["type"] == "not_supported_error"
        assert "--embeddings" in error["message"]
    assert "--embeddings" in get_error("/api/embed", {"input": "x"}, 501)


def test_embeddings_rejects_requests_for_too_large_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingEmbedder, "width", MAX_NUMBERS // 16)
    for path, body, pooling in (
        (OPENAI, {"input": [[5]] * 17}, "mean"),
        ("/api/embed", {"input": ["a"] * 17}, "mean"),
        (NATIVE, {"input": [[5] * 9] * 2}, "none"),
    ):
        response = send(make_server(embedder=CountingEmbedder(pooling))[0], path, body)
        assert (response.status_code, f"at most {MAX_NUMBERS:,} numbers" in response.text) == (400, True)
