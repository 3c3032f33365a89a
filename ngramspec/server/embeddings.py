"""Embeddings in the formats of OpenAI (`/v1/embeddings`), llama-server (`/embedding`) and Ollama (`/api/embed`)."""

from __future__ import annotations

import asyncio
import base64
import time
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from ngramspec.llama.embedder import Embedder
from ngramspec.server.body import Body, FieldError, PromptField, Prompts, check_count, whole
from ngramspec.server.generation import read_tokens
from ngramspec.server.json_text import ApiError, Encoded, JsonResponse, context_length_error
from ngramspec.server.limits import MAX_ITEMS, MAX_NUMBERS
from ngramspec.server.state import Call

Vectors = NDArray[np.float32]
"""Vectors of one text; shape (1, width), or (tokens, width) without pooling."""


class EmbeddingsBody(Body):
    model: str = ""
    input: PromptField | None = None
    content: PromptField | None = None  # llama-server's name of `input`
    prompt: str = ""  # Ollama's older API
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, whole()] | None = None
    embd_normalize: Annotated[int, whole(-1)] | None = None
    truncate: bool = True


async def embeddings(call: Call[EmbeddingsBody]) -> Response:
    """Return a vector for each text; if they are in llama-server's field `content`, respond in its format."""
    body = call.body
    if body.input is None and body.content is not None:
        return await embedding(call)
    embedder = _embedder(call, pools=True)
    if body.dimensions not in (None, embedder.width):
        problem = f"dimensions: must be {embedder.width}, the size of this model's embeddings"
        raise ApiError(400, problem, param="dimensions")
    texts, vectors = await _embed(call, "input", body.input)
    count = sum(map(len, texts))
    usage = {"prompt_tokens": count, "total_tokens": count}

    def show(vector: Vectors) -> Any:
        is_coded = body.encoding_format == "base64"
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_coded else vector.tolist()

    def encode() -> Response:
        data = ({"object": "embedding", "index": i, "embedding": show(vector)} for i, (vector,) in enumerate(vectors))
        fields = {"object": "list", "data": Encoded.join(data), "model": body.model or call.model.name, "usage": usage}
        return JsonResponse(fields)

    return await asyncio.to_thread(encode)


async def embedding(call: Call[EmbeddingsBody]) -> Response:
    """Return a list of vectors for each text: one vector, or without pooling one for each token."""
    name, prompts = ("input", call.body.input) if call.body.content is None else ("content", call.body.content)
    _, results = await _embed(call, name, prompts)

    def encode() -> Response:
        lists = (Encoded.join(vector.tolist() for vector in vectors) for vectors in results)
        return JsonResponse(Encoded.join({"index": i, "embedding": vectors} for i, vectors in enumerate(lists)))

    return await asyncio.to_thread(encode)


async def ollama_embed(call: Call[EmbeddingsBody]) -> Response:
    """Return an embedding of each text, in Ollama's format; texts that are too long are truncated by default."""
    body, width = call.body, _embedder(call, pools=True).width
    if body.dimensions is not None and not 1 <= body.dimensions <= width:
        raise FieldError(f"must be a whole number from 1 to {width}, got {body.dimensions}", "dimensions")
    texts, vectors = list[list[int]](), list[Vectors]()
    if body.input is not None and body.input.values not in ([""], []):  # otherwise Ollama only loads the model
        texts, vectors = await _embed(call, "input", body.input, body.truncate, body.dimensions)
    fields = {
        "model": body.model or call.model.name,
        "embeddings": await asyncio.to_thread(Encoded.join, (vector.tolist() for (vector,) in vectors)),
        "total_duration": round(1e9 * (time.monotonic() - call.started_at)),
        "load_duration": 0,
        "prompt_eval_count": sum(map(len, texts)),
    }
    return JsonResponse(fields)


async def ollama_embeddings(call: Call[EmbeddingsBody]) -> Response:
    """Return the embedding of one text, in Ollama's older format."""
    _embedder(call, pools=True)
    if not call.body.prompt:
        return JsonResponse({"embedding": []})
    _, ((vector,),) = await _embed(call, "prompt", Prompts([call.body.prompt], False), True)
    return JsonResponse({"embedding": vector.tolist()})


def _embedder(call: Call[EmbeddingsBody], *, pools: bool = False) -> Embedder:
    """Return the embedder; raise an ApiError if it does not make one vector of each text (`pools`)."""
    embedder = call.model.embedder
    if embedder is None:
        raise ApiError(501, "embeddings are disabled; start the server with --embeddings")
    if pools and embedder.pooling == "none":
        problem = "--pooling none returns one vector per token"
        raise ApiError(400, f"{problem}; use /embedding, or start the server with --pooling mean")
    return embedder


def _read_texts(call: Call[EmbeddingsBody], name: str, prompts: Prompts | None, truncate: bool) -> list[list[int]]:
    """Return the token ids of each text of a field; `truncate`: shorten texts that are longer than the context."""
    embedder, vocabulary = _embedder(call), call.model.vocabulary
    if prompts is None:
        raise FieldError("is missing", name)
    values = prompts.values
    check_count(len(values), MAX_ITEMS, "texts", name)
    if not values:
        raise FieldError("must not be empty", name)
    room = embedder.n_ctx
    if truncate:  # tokenizing a text that is much too long would be a waste of time
        max_characters = embedder.n_ctx * vocabulary.longest_token
        values = [text[:max_characters] if isinstance(text, str) else text for text in values]
        room = 2**31  # more tokens than any request contains
    texts = [read_tokens(call.model, prompt, name, room) for prompt in values]
    if not all(texts):
        raise FieldError("must not contain a text without tokens", name)
    for text in texts if truncate else ():  # the end token stays, because some models put the embedding in it
        n_end = vocabulary.is_eog(text[-1])
        del text[embedder.n_ctx - n_end : len(text) - n_end]
    longest = max(map(len, texts))
    if longest > embedder.n_ctx:
        raise context_length_error(longest, embedder.n_ctx)
    n_vectors = sum(map(len, texts)) if embedder.pooling == "none" else len(texts)
    check_count(n_vectors * embedder.width, MAX_NUMBERS, "numbers in its embeddings", name)
    return texts


async def _embed(
    call: Call[EmbeddingsBody], name: str, prompts: Prompts | None, truncate: bool = False, width: int | None = None
) -> tuple[list[list[int]], list[Vectors]]:
    """Return the texts of a field, and their vectors, cut to `width` numbers; other requests run between the texts."""
    embedder = _embedder(call)
    texts = await asyncio.to_thread(_read_texts, call, name, prompts, truncate)
    kind = call.model.embd_normalize if call.body.embd_normalize is None else call.body.embd_normalize
    results = list[Vectors]()
    for text in texts:
        vectors: Vectors = await asyncio.wrap_future(
            call.model.service.run_between_passes(partial(embedder.reading, text))
        )
        call.counters.prompt_tokens += len(text)
        if not np.isfinite(vectors).all():
            raise ApiError(500, "the embedding of this text is not finite")
        results.append(vectors if embedder.pooling == "none" else scale_vectors(vectors[:, :width], kind))
    return texts, results


def scale_vectors(vectors: Vectors, kind: int) -> Vectors:
    """Return scaled vectors, shape (any number, width), as with llama-server's `--embd-normalize`.

    `kind` is -1 for no scaling, 0 for a largest number of 16 bits, or p for a p-norm of 1 (2 is the Euclidean length).
    """
    if kind == -1:
        return vectors
    largest = np.abs(vectors).max(axis=1, keepdims=True).astype(np.float64)
    largest[largest == 0] = 1.0
    parts = vectors / largest  # with numbers of at most 1, powers do not overflow
    if kind == 0:
        result = parts * 32760.0
    else:
        norms = np.linalg.norm(parts, kind, axis=1, keepdims=True)
        result = parts / np.where(norms == 0, 1.0, norms)
    scaled: Vectors = result.astype(np.float32)
    return scaled
