"""The final JSON of a completion in llama-server's own format, which `verbose` adds to other formats too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ngramspec.sampling.settings import Sampling
from ngramspec.server.answer import Answer
from ngramspec.server.call import Call
from ngramspec.server.reply import timings
from ngramspec.server.request_fields import read_max_tokens
from ngramspec.server.state import ServedModel


def native_answer(call: Call, answer: Answer, *, has_prompt: bool = True) -> dict[str, Any]:
    """Return a completion that ended, with its text, its settings, and its prompt, which takes milliseconds if long."""
    model, request, done = call.model, answer.request, answer.done
    assert done is not None
    limit = read_max_tokens(call.fields)
    settings = generation_settings(request.sampling, -1 if limit is None else limit, request.stop)
    text = answer.text()
    return {
        "index": 0,
        "content": text,
        "tokens": answer.tokens,
        "id_slot": answer.slot,
        "stop": True,
        "model": model.name,
        "tokens_predicted": done.stats.generated,
        "tokens_evaluated": answer.prompt_tokens,
        "generation_settings": settings | {"n_probs": request.logprobs or 0, "stream": call.streamed},
        **({"prompt": prompt_text(model, request.prompt)} if has_prompt else {}),
        "has_new_line": "\n" in text,
        "truncated": answer.is_full,
        "stop_type": "limit" if answer.reason == "length" else "eos" if answer.stop_string is None else "word",
        "stopping_word": answer.stop_string or "",
        # The last token was never evaluated.
        "tokens_cached": answer.prompt_tokens + max(0, len(answer.tokens) - 1),
        "timings": timings(answer.prompt_tokens, *done[1:]),
    }


def verbose_field(call: Call, answer: Answer) -> dict[str, Any]:
    """Return llama-server's `__verbose` for one answer of another format; empty if it was not requested."""
    if not call.fields.boolean("verbose", call.server.is_verbose):
        return {}
    return {"__verbose": native_answer(call, answer)}


def prompt_text(model: ServedModel, tokens: Sequence[int]) -> str:
    """Return a prompt with the names of its control tokens."""
    return b"".join(map(model.vocabulary.display_piece, tokens)).decode("utf-8", "replace")


def generation_settings(sampling: Sampling, max_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a response: every field of `Sampling` under its own name, and a few more.

    A `max_tokens` of -1 means until the context is full.
    """
    settings: dict[str, Any] = {f.name: getattr(sampling, f.name) for f in fields(sampling)}
    # JSON has no infinity; llama-server writes null.
    biases = [{"id": token, "bias": None if bias == -math.inf else bias} for token, bias in sampling.logit_bias]
    constants = {"n_keep": 0, "n_discard": 0, "min_keep": 0, "adaptive_target": -1.0, "adaptive_decay": 0.9}
    return {
        **settings,
        "logit_bias": biases,
        "grammar": sampling.grammar or "",
        **constants,
        "n_predict": max_tokens,
        "max_tokens": max_tokens,
        "stop": list(stop),
    }
