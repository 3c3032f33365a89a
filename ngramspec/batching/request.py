"""What is asked of the engine, and what it tells while it answers. Knows nothing about HTTP or llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ngramspec.errors import NGramSpecError
from ngramspec.sampling.distribution import Logprobs
from ngramspec.sampling.settings import Sampling
from ngramspec.sampling.text_rules import NO_RULES, TextRules
from ngramspec.steps import Stats, Step, StopReason


@dataclass(frozen=True, slots=True)
class Request:
    """A text to continue.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: most tokens to emit; 0 only makes the cache hold the prompt.
        sampling: how tokens are chosen.
        stop: strings that end the text, which then stops right before them.
        logprobs: report the logprobs of each emitted token and of this many of the likeliest; None: no logprobs.
        scored: report the logprobs of the prompt's tokens too (`Scored`), which then is read with all of its logits.
        controls: whether the text shows control tokens too, for whoever parses them; those that end a text stay hidden.
        slot: the slot to prefer; None: the one that holds most of the prompt.
        cache_prompt: whether what a slot already holds of the prompt may be reused.
        rules: where the text may end, and which words it may not hold.
        prediction: token ids of a text that the answer is likely to copy: what it is drafted from first.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    scored: bool = False
    controls: bool = False
    slot: int | None = None
    cache_prompt: bool = True
    prediction: Sequence[int] = ()
    rules: TextRules = NO_RULES


class Started(NamedTuple):
    """A request left the queue."""

    slot: int  # that it works in
    cached: int  # tokens of its prompt that need not be evaluated again
    prompt_tokens: int


class Prefilled(NamedTuple):
    """A chunk of the prompt was evaluated: `done` of `total` tokens, those of the cache included."""

    done: int
    total: int


class Scored(NamedTuple):
    """The logprobs of a prompt's tokens but the first, each after those before it."""

    logprobs: tuple[Logprobs, ...]


class Done(NamedTuple):
    """A request ended; nothing follows.

    Attributes:
        reason: why its text ended; "cancelled" where somebody asked for that; "prefilled" after `max_tokens` 0.
        stats: counters over its passes.
        cached: tokens of its prompt that were not evaluated again.
        prompt_seconds: from leaving the queue to the prompt's logits.
        seconds: from there to the end.
    """

    reason: StopReason | Literal["cancelled", "prefilled"]
    stats: Stats
    cached: int
    prompt_seconds: float
    seconds: float


class Failed(NamedTuple):
    """A request ended with an error; nothing follows. Before `Started`, it is the request that was wrong."""

    error: NGramSpecError | ValueError


Event = Started | Prefilled | Scored | Step | Done | Failed

Listener = Callable[[Event], None]
"""Told of every event of a request, in order, on the engine's thread: it must return at once, and raise nothing."""


class ClosedError(NGramSpecError):
    """The engine takes no more requests."""


@dataclass(frozen=True, slots=True)
class Slot:
    """What a slot does now.

    Attributes:
        number: from 0 on.
        busy: whether a request works in it.
        prompt: tokens of that request's prompt, or of the last one's.
        prefilled: how many of them are in the cache.
        generated: tokens that it emitted.
        held: tokens in the slot's cache.
        number_of_request: counts requests from 0 on; -1: none is at work here.
        cached: tokens of its prompt that needed no work.
        new_line: whether its text has a line end.
        request: what it asks for.
    """

    number: int
    busy: bool
    prompt: int
    prefilled: int
    generated: int
    held: int
    number_of_request: int = -1
    cached: int = 0
    new_line: bool = False
    request: Request | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What the engine does now, and counters since it began.

    Attributes:
        slots: one for each.
        waiting: requests in the queue.
        stats: of all passes of all requests, ended or not.
        prompt_tokens: tokens of prompts that were evaluated; cached ones do not count.
        cached_tokens: tokens of prompts that were in the cache.
        passes: batches evaluated.
        busy: the sum of slots at work over those batches.
    """

    slots: tuple[Slot, ...]
    waiting: int
    stats: Stats
    prompt_tokens: int
    cached_tokens: int
    passes: int
    busy: int
