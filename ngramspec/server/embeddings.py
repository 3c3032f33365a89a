"""Embeddings in the formats of OpenAI (`/v1/embeddings`), llama-server (`/embedding`) and Ollama (`/api/embed`)."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from ngramspec.llama.embedder import Embedder
from ngramspec.server.call import MAX_ITEMS, ApiError, Call, ServedModel, bad_field, json_answer, overflow
from ngramspec.server.openai_completions import read_tokens, several

Vectors = NDArray[np.float32]
"""Vectors of one text; shape (1, width), or (tokens, width) without pooling."""

NO_LIMIT = 2**31
"""More tokens than any request contains."""

LARGEST = 32760.0
"""Value that the largest element of a vector gets when it is scaled to 16 bits."""


async def embeddings(call: Call) -> Response:
    """Return a vector for each text; if they are in llama-server's field `content`, respond in its format."""
    given = call.given
    if "input" not in given and "content" in given:
        return await embedding(call)
    embedder = _pooling_embedder(call)
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
    """Return a list of vectors for each text: one vector, or without pooling one for each token."""
    embedder = _embedder(call)
    texts = await asyncio.to_thread(_read_texts, call, call.given.name("content", "input"))
    found = await _embed(call, embedder, texts)
    return json_answer([{"index": i, "embedding": vectors.tolist()} for i, vectors in enumerate(found)])


async def ollama_embed(call: Call) -> Response:
    """Return an embedding of each text, in Ollama's format; texts that are too long are truncated by default."""
    given, began = call.given, time.monotonic()
    embedder = _pooling_embedder(call)
    width = given.whole("dimensions", least=1, most=embedder.width)
    texts: list[list[int]] = []
    if given.data.get("input") not in (None, "", []):  # without an input, Ollama only loads the model
        texts = await asyncio.to_thread(_read_texts, call, "input", given.flag("truncate", True))
    vectors = await _embed(call, embedder, texts, width)
    return json_answer(
        {
            "model": given.text("model") or call.model.name,
            "embeddings": [vector.tolist() for (vector,) in vectors],
            "total_duration": round(1e9 * (time.monotonic() - began)),
            "load_duration": 0,
            "prompt_eval_count": sum(map(len, texts)),
        }
    )


async def ollama_embeddings(call: Call) -> Response:
    """Return the embedding of one text, in Ollama's older format."""
    embedder = _pooling_embedder(call)
    if not call.given.text("prompt"):
        return json_answer({"embedding": []})
    texts = await asyncio.to_thread(_read_texts, call, "prompt", True)
    ((vector,),) = await _embed(call, embedder, texts)
    return json_answer({"embedding": vector.tolist()})


def _pooling_embedder(call: Call) -> Embedder:
    """Return the embedder; raise an ApiError if it does not make one vector of each text."""
    embedder = _embedder(call)
    if embedder.pooling == "none":
        raise ApiError(
            400, "--pooling none returns one vector per token; use /embedding, or start the server with --pooling mean"
        )
    return embedder


def _embedder(call: Call) -> Embedder:
    found = call.model.embedder
    if found is None:
        raise ApiError(501, "embeddings are disabled; start the server with --embeddings")
    return found


def _read_texts(call: Call, name: str, truncate: bool = False) -> list[list[int]]:
    """Return the token ids of each text of a field; `truncate`: shorten texts that are longer than the context."""
    value, embedder = call.given.needed(name), _embedder(call)
    values = value if several(value) else [value]
    call.given.check_count(name, len(values), MAX_ITEMS, "texts")
    if not values:
        raise bad_field(name, f"{name} must not be empty")
    room = embedder.n_ctx
    if truncate:  # tokenizing a text that is much too long would be a waste of time
        most = embedder.n_ctx * call.model.vocabulary.longest_token
        values = [one[:most] if isinstance(one, str) else one for one in values]
        room = NO_LIMIT
    texts = [read_tokens(call.model, one, name, room) for one in values]
    if not all(texts):
        raise bad_field(name, f"{name} must not contain a text without tokens")
    if truncate:
        texts = [_truncated(call.model, text, embedder.n_ctx) for text in texts]
    longest = max(map(len, texts))
    if longest > embedder.n_ctx:
        raise overflow(longest, embedder.n_ctx)
    return texts


def _truncated(model: ServedModel, tokens: list[int], most: int) -> list[int]:
    """Return at most `most` tokens of a text, with its end token, which some models put the embedding in."""
    if len(tokens) <= most:
        return tokens
    end = tokens[-1:] if model.vocabulary.is_eog(tokens[-1]) else []
    return tokens[: most - len(end)] + end


async def _embed(
    call: Call, embedder: Embedder, texts: Sequence[Sequence[int]], width: int | None = None
) -> list[Vectors]:
    """Return the scaled vectors of each text, cut to `width` numbers; other requests run between the texts."""
    kind = call.given.whole("embd_normalize", call.model.embd_normalize, least=-1)
    assert kind is not None
    found = []
    for text in texts:
        vectors: Vectors = await asyncio.wrap_future(call.model.service.aside(partial(embedder.reading, text)))
        call.counters.prompt_tokens += len(text)
        if not np.isfinite(vectors).all():
            raise ApiError(500, "the embedding of this text is not finite")
        found.append(vectors if embedder.pooling == "none" else normalized(vectors[:, :width], kind))
    return found


def normalized(vectors: Vectors, kind: int) -> Vectors:
    """Return scaled vectors, as with llama-server's `--embd-normalize`.

    Args:
        vectors: Vectors, shape (any number, width).
        kind: Kind of scaling: -1 means no scaling, with 0 the largest number becomes LARGEST, and with p the p-norm
            becomes 1 (2 is the Euclidean length).
    """
    if kind == -1:
        return vectors
    largest = np.abs(vectors).max(axis=1, keepdims=True).astype(np.float64)
    largest[largest == 0] = 1.0
    parts = vectors / largest  # with numbers of at most 1, powers do not overflow
    if kind == 0:
        scaled = parts * LARGEST
    else:
        norms = np.linalg.norm(parts, kind, axis=1, keepdims=True)
        scaled = parts / np.where(norms == 0, 1.0, norms)
    found: Vectors = scaled.astype(np.float32)
    return found


def _coded(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
