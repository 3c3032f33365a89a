"""A chat as every dialect of the server sees it: a `ChatTask` goes in, deltas come out.

`/v1/chat/completions`, `/v1/messages` and `/v1/responses` each turn their JSON into a `ChatTask`, and the deltas of
`ChatDelta` into their own stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ngramspec.batching.request import Done
from ngramspec.decoding.step import Stats
from ngramspec.sampling.logprobs import Logprobs
from ngramspec.sampling.settings import Sampling
from ngramspec.tool_calls.deltas import Delta, Tool


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A conversation to answer.

    Attributes:
        messages: in OpenAI's form: "role" (system, user, assistant, tool), "content" (a string always), and where they
            apply "tool_calls" (with arguments as a JSON string), "tool_call_id", "name", "reasoning_content".
        tools: that may be called; empty: none.
        tool_choice: "auto", "none", "required", or the name of the tool that must be called.
        parallel: whether one answer may hold several calls.
        schema: the answer must be JSON of this schema ({} is any object); None: free text.
        max_tokens: most tokens to emit; None: as many as the context holds.
        sampling, stop: see `ngramspec.batching.request.Request`.
        logprobs: see there too.
        variables: further variables of the chat template ("enable_thinking": False, ...).
        slot: see `Request`.
        progress: whether `Progress` is told.
        drafts: whether deltas tell what of their text was drafted.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    slot: int | None = None
    progress: bool = False
    drafts: bool = False


class Progress(NamedTuple):
    """How far an answer is, with the deltas that come next counted.

    Attributes:
        prompt_tokens: of the prompt, cached ones included.
        cached, stats, prompt_seconds, seconds: as in `ngramspec.batching.request.Done`, so far.
    """

    prompt_tokens: int
    cached: int
    stats: Stats
    prompt_seconds: float
    seconds: float


class Likely(NamedTuple):
    """The logprobs of the tokens of the `Content` right before it."""

    logprobs: tuple[Logprobs, ...]


class Finish(NamedTuple):
    """The last delta.

    Attributes:
        reason: why the answer ended: by itself or at a stop string, at the most tokens, or to have tools called.
        stop_string: the stop string that ended it, where one did.
        prompt_tokens: of the prompt, cached ones included.
        done: what the engine says.
        thought: how many of the tokens it emitted told thoughts, the ones around these included.
    """

    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None
    prompt_tokens: int
    done: Done
    thought: int = 0


ChatDelta = Delta | Progress | Likely | Finish
