"""`/v1/embeddings`: vectors that stand for texts, in OpenAI's words; `/embedding`: in llama-server's."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from ngramspec.llama.embedder import Embedder
from ngramspec.server.call import ApiError, Call, bad_field, json_answer, overflow
from ngramspec.server.openai_completions import read_tokens, several

Vectors = NDArray[np.float32]
"""Of one text; shape (1, width), or (tokens, width) where none are pooled."""

LARGEST = 32760.0
"""Value that the largest element of a vector gets when it is scaled to 16 bits."""


async def embeddings(call: Call) -> Response:
    """A vector for each text. Where `content` holds them, as llama-server has it, the answer is llama-server's too."""
    given, embedder = call.given, _embedder(call)
    if "input" not in given and "content" in given:
        return await embedding(call)
    if embedder.pooling == "none":
        raise ApiError(
            400, "--pooling none returns one vector per token; use /embedding, or start the server with --pooling mean"
        )
    coded = given.choice("encoding_format", ("float", "base64"), "float") == "base64"
    if given.whole("dimensions", embedder.width) != embedder.width:
        raise given.refused("dimensions", f"must be {embedder.width}, the size of this model's embeddings")
    texts = await asyncio.to_thread(_read_texts, call, "input")
    told = [
        {"object": "embedding", "index": i, "embedding": _coded(vector) if coded else vector.tolist()}
        for i, (vector,) in enumerate(await _embed(call, embedder, texts))
    ]
    tokens = sum(map(len, texts))
    return json_answer(
        {
            "object": "list",
            "data": told,
            "model": given.text("model") or call.model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def embedding(call: Call) -> Response:
    """A list of vectors for each text: of one, or of as many as it has tokens where none are pooled."""
    embedder = _embedder(call)
    texts = await asyncio.to_thread(_read_texts, call, call.given.name("content", "input"))
    found = await _embed(call, embedder, texts)
    return json_answer([{"index": i, "embedding": vectors.tolist()} for i, vectors in enumerate(found)])


def _embedder(call: Call) -> Embedder:
    found = call.model.embedder
    if found is None:
        raise ApiError(501, "embeddings are disabled; start the server with --embeddings")
    return found


def _read_texts(call: Call, name: str) -> list[list[int]]:
    """The token ids of each text of a field."""
    value, embedder = call.given.needed(name), _embedder(call)
    values = value if several(value) else [value]
    if not values:
        raise bad_field(name, f"{name} must not be empty")
    texts = [read_tokens(call.model, one, name, embedder.n_ctx) for one in values]
    if not all(texts):
        raise bad_field(name, f"{name} must not contain a text without tokens")
    longest = max(map(len, texts))
    if longest > embedder.n_ctx:
        raise overflow(longest, embedder.n_ctx)
    return texts


async def _embed(call: Call, embedder: Embedder, texts: Sequence[Sequence[int]]) -> list[Vectors]:
    """The vectors of each text, scaled. Texts of other requests come between them."""
    kind = call.given.whole("embd_normalize", call.model.embd_normalize, least=-1)
    assert kind is not None
    found = []
    for text in texts:
        vectors: Vectors = await asyncio.wrap_future(call.model.service.aside(partial(embedder.reading, text)))
        call.counters.prompt_tokens += len(text)
        if not np.isfinite(vectors).all():
            raise ApiError(500, "the embedding of this text is not finite")
        found.append(vectors if embedder.pooling == "none" else normalized(vectors, kind))
    return found


def normalized(vectors: Vectors, kind: int) -> Vectors:
    """Vectors, shape (any number, width), scaled as llama-server's `--embd-normalize` says.

    `kind` -1: not at all; 0: the largest number becomes LARGEST; p: the p-norm becomes 1, with 2 the length.
    """
    if kind == -1:
        return vectors
    largest = np.abs(vectors).max(axis=1, keepdims=True).astype(np.float64)
    largest[largest == 0] = 1.0
    parts = vectors / largest  # powers of them stay within what a float holds
    if kind == 0:
        scaled = parts * LARGEST
    else:
        norms = np.linalg.norm(parts, kind, axis=1, keepdims=True)
        scaled = parts / np.where(norms == 0, 1.0, norms)
    found: Vectors = scaled.astype(np.float32)
    return found


def _coded(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
