"""The settings of a text as llama-server tells them: every field of `Sampling` under its own name, and a few more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ngramspec.sampling.settings import Sampling


def generation_settings(sampling: Sampling, max_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
    """What a text is generated with; `max_tokens` -1: as many as the context holds."""
    told: dict[str, Any] = {f.name: getattr(sampling, f.name) for f in fields(sampling)}
    told["logit_bias"] = [
        {"id": token, "bias": False if bias == -math.inf else bias} for token, bias in sampling.logit_bias
    ]
    told["grammar"] = sampling.grammar or ""
    return told | {"n_predict": max_tokens, "max_tokens": max_tokens, "stop": list(stop)}
