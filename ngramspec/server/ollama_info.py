"""`/api/tags`, `/api/ps`, `/api/show` and `/api/version`: the model and the server in Ollama's format."""

from __future__ import annotations

import math
from hashlib import sha256
from typing import Any

from starlette.responses import Response

from ngramspec.chat.families import reasoning_tags
from ngramspec.server.call import Call
from ngramspec.server.json_text import JsonResponse, encode_json
from ngramspec.server.ollama import timestamp
from ngramspec.server.state import ServedModel

VERSION = "0.13.0"
"""The version of Ollama whose API this is. Clients reject servers with an older version than they require."""

_CENTURY = 100 * 365 * 86400.0  # seconds

_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n")


async def version(call: Call) -> Response:
    return JsonResponse({"version": VERSION})


async def tags(call: Call) -> Response:
    """Return the list of models, which has one entry."""
    return JsonResponse({"models": [{**_entry(call.model), "modified_at": timestamp(call.server.started_at)}]})


async def processes(call: Call) -> Response:
    """Return the list of loaded models: the same one, which is never unloaded."""
    process = {
        "expires_at": timestamp(call.server.started_at + _CENTURY),
        "size_vram": 0,
        "context_length": call.model.n_ctx,
    }
    return JsonResponse({"models": [_entry(call.model) | process]})


async def show(call: Call) -> Response:
    """Return details of the model, whatever name the request gives it."""
    model = call.model
    metadata = {
        name: value
        for name, value in model.vocabulary.metadata.items()
        if name != "tokenizer.chat_template" and not (isinstance(value, float) and not math.isfinite(value))
    }
    # Clients take this for the length of the longest prompt.
    metadata[f"{_family(model)}.context_length"] = model.n_ctx
    if "n_params" in model.meta:
        metadata["general.parameter_count"] = model.meta["n_params"]
    sampling = {name: getattr(call.server.sampling, name) for name in _PARAMETERS}
    parameters = {"num_ctx": model.n_ctx, **sampling}
    return JsonResponse(
        {
            "modelfile": f"FROM {model.path}\n",
            "parameters": "\n".join([f"{name:<30} {value}" for name, value in parameters.items()]),
            "template": model.vocabulary.chat_template or "",
            "details": _details(model),
            "model_info": metadata,
            "capabilities": _capabilities(model),
            "modified_at": timestamp(call.server.started_at),
        }
    )


def _entry(model: ServedModel) -> dict[str, Any]:
    name = model.name if ":" in model.name else f"{model.name}:latest"  # Ollama's names have tags
    capabilities, details = _capabilities(model), _details(model)
    # Clients store under the digest what they know about a model.
    digest = sha256(encode_json([name, model.path, dict(model.meta), capabilities, model.n_ctx]).encode()).hexdigest()
    size = model.meta.get("size", 0)
    return {"name": name, "model": name, "size": size, "digest": digest, "details": details}


def _details(model: ServedModel) -> dict[str, Any]:
    family, n_params = _family(model), model.meta.get("n_params", 0)
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.2f}M",
        "quantization_level": model.meta.get("ftype") or "unknown",
    }


def _family(model: ServedModel) -> str:
    return str(model.vocabulary.metadata.get("general.architecture", ""))


def _capabilities(model: ServedModel) -> list[str]:
    vocabulary = model.vocabulary
    marks = vocabulary.fill_in_tokens
    # Tools work without a template that knows them: they are described in a message.
    capabilities = {
        "completion": True,
        "tools": True,
        "thinking": bool(reasoning_tags(vocabulary.chat_template)),
        "insert": None not in (marks.prefix, marks.suffix, marks.middle),
        "embedding": model.embedder is not None and model.embedder.pooling != "none",
    }
    return [name for name, is_available in capabilities.items() if is_available]
