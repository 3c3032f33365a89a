"""The one object that `ngramspec complete --json` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.decoding.step import Stats, Step
from ngramspec.sampling.logprobs import Logprobs
from ngramspec.sampling.settings import Sampling


def result(
    text: str,
    prompt_tokens: int,
    steps: Sequence[Step],
    stats: Stats,
    seconds: float,
    ending: str,
    sampling: Sampling,
    acceptance: Acceptance,
    same: bool,
    piece: Callable[[int], bytes],
) -> dict[str, Any]:
    """What was generated, and how.

    Args:
        text: as printed without --json.
        prompt_tokens, seconds, ending: of the whole run.
        steps, stats: all of them, and their counters.
        sampling, acceptance: as asked for.
        same: whether the text is the same bit for bit without drafts.
        piece: the bytes of a token.
    """
    document = {
        "text": text,
        "tokens": stats.generated,
        "prompt_tokens": prompt_tokens,
        "target_passes": stats.passes,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "seconds": seconds,
        "prefill_seconds": stats.prefill_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_pass": stats.tokens_per_pass,
        "acceptance_rate": stats.acceptance_rate,
        "estimated_gain": stats.estimated_gain,
        "stop_reason": ending,
        "seed": sampling.seed,
        "lossy": acceptance.lossy,
        "exact": same,
        "close_calls": stats.close_calls,
    }
    explained = [step for step in steps if step.explained]
    if explained:
        document["steps"] = [
            {**step.explained, "drafted": len(step.drafted), "accepted": step.accepted} for step in explained
        ]
    told = [one for step in steps for one in step.logprobs]
    if told:
        document["logprobs"] = [_logprobs(one, piece) for one in told]
    return document


def _logprobs(one: Logprobs, piece: Callable[[int], bytes]) -> dict[str, Any]:
    top = [{**_token(token, piece), "logprob": value} for token, value in one.top]
    return {**_token(one.token, piece), "logprob": one.logprob, "top_logprobs": top}


def _token(token: int, piece: Callable[[int], bytes]) -> dict[str, Any]:
    # A token may be part of a character: its bytes say which.
    raw = piece(token)
    return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw)}
