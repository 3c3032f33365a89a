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
    """A text to continue."""

    prompt: Sequence[int]  # token ids, at least one
    max_tokens: int  # most tokens to emit; 0 only makes the cache hold the prompt
    sampling: Sampling = field(default_factory=Sampling)  # how tokens are chosen
    stop: tuple[str, ...] = ()  # strings that end the text, which then stops right before them
    # report the logprobs of each emitted token and of this many of the likeliest; None: no logprobs.
    logprobs: int | None = None
    # report the logprobs of the prompt's tokens too (`Scored`), which then is read with all of its logits.
    scored: bool = False
    # whether the text shows control tokens too, for whoever parses them; those that end a text stay hidden.
    controls: bool = False
    slot: int | None = None  # the slot to prefer; None: the one that holds most of the prompt
    cache_prompt: bool = True  # whether what a slot already holds of the prompt may be reused
    # token ids of a text that the answer is likely to copy: what it is drafted from first.
    prediction: Sequence[int] = ()
    rules: TextRules = NO_RULES  # where the text may end, and which words it may not hold


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
    """A request ended; nothing follows."""

    # why its text ended; "cancelled" where somebody asked for that; "prefilled" after `max_tokens` 0.
    reason: StopReason | Literal["cancelled", "prefilled"]
    stats: Stats  # counters over its passes
    cached: int  # tokens of its prompt that were not evaluated again
    prompt_seconds: float  # from leaving the queue to the prompt's logits
    seconds: float  # from there to the end


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
    """What a slot does now."""

    number: int  # from 0 on
    busy: bool  # whether a request works in it
    prompt: int  # tokens of that request's prompt, or of the last one's
    prefilled: int  # how many of them are in the cache
    generated: int  # tokens that it emitted
    held: int  # tokens in the slot's cache
    number_of_request: int = -1  # counts requests from 0 on; -1: none is at work here
    cached: int = 0  # tokens of its prompt that needed no work
    new_line: bool = False  # whether its text has a line end
    request: Request | None = None  # what it asks for


@dataclass(frozen=True, slots=True)
class Report:
    """What the engine does now, and counters since it began."""

    slots: tuple[Slot, ...]  # one for each
    waiting: int  # requests in the queue
    stats: Stats  # of all passes of all requests, ended or not
    prompt_tokens: int  # tokens of prompts that were evaluated; cached ones do not count
    cached_tokens: int  # tokens of prompts that were in the cache
    passes: int  # batches evaluated
    busy: int  # the sum of slots at work over those batches
