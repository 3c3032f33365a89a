"""`answer`: the text of one request, as pieces and an end, with whatever goes wrong as an `ApiError`.

What every endpoint that generates text is made of, chats included.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, NamedTuple

from ngramspec.batching.request import Done, Failed, Prefilled, Request, Started
from ngramspec.decoding.step import Step
from ngramspec.sampling.logprobs import Logprobs
from ngramspec.server.bridge import Running
from ngramspec.server.deadline import LineLimits
from ngramspec.server.errors import leaving, of_failure, overflow
from ngramspec.server.served import ServedModel


class Piece(NamedTuple):
    """Some more of a text.

    Attributes:
        text: that can be shown now; "" while it is held back.
        tokens: that were emitted.
        logprobs: where they were asked for: of the tokens whose text is out by now, those that end a text left out.
        step: the engine's.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    step: Step


class End(NamedTuple):
    """The end of a text.

    Attributes:
        reason: "stop" at the model's own end or a stop string, "length" at the most tokens, a full context or
            limits of lines.
        stop_string: that ended it, where one did.
        full: whether the context was full.
        slot: where it was generated.
        done: what the engine says.
    """

    reason: Literal["stop", "length"]
    stop_string: str | None
    full: bool
    slot: int
    done: Done


Progress = Started | Prefilled


def check_room(prompt: Sequence[int], n_ctx: int, max_tokens: int | None = None) -> None:
    """Refuse a prompt that leaves no room for a token, unless none is asked for.

    Raises:
        ApiError: the overflow that clients know.
    """
    if len(prompt) + (max_tokens != 0) > n_ctx:
        raise overflow(len(prompt), n_ctx)


async def answer(
    model: ServedModel, request: Request, limits: LineLimits | None = None, *, streamed: bool
) -> AsyncGenerator[Progress | Piece | End, None]:
    """Generate one text: its progress, its pieces, and an `End`.

    Args:
        limits: where the text ends before the engine ends it; new, as they belong to one text.
        streamed: whether its pieces are wanted as they come; else all may come at its end.

    Raises:
        ApiError: the request is wrong, the engine failed, or the server is being stopped.
    """
    check_room(request.prompt, model.n_ctx, request.max_tokens)
    held = _Held()
    slot, started, ended = 0, False, False
    stop_string: str | None = None
    with Running(model.service, request, streamed=streamed or limits is not None) as running:
        while True:
            event = await running.next()
            if isinstance(event, Failed):
                raise of_failure(event.error, started=started)
            if isinstance(event, Done):
                if event.reason == "cancelled" and not ended:
                    raise leaving()
                by_itself = not ended and event.reason in ("eog", "stop")
                full = event.reason == "context" and not ended
                yield End("stop" if by_itself else "length", stop_string if by_itself else None, full, slot, event)
                return
            if isinstance(event, Step):
                if ended:  # these came while the engine was being told
                    continue
                stop_string, text = event.stop_string, event.text
                if limits is not None:
                    text = limits.push(text) + (limits.finish() if event.stop is not None else "")
                    ended = limits.ended
                if ended:
                    running.cancel()
                yield Piece(text, tuple(event.tokens), held.push(event), event)
                continue
            if isinstance(event, Started):
                started, slot = True, event.slot
            yield event


class _Held:
    """Holds logprobs back while the text of their tokens is; those of tokens that end a text never have any."""

    def __init__(self) -> None:
        self._held: list[Logprobs] = []

    def push(self, step: Step) -> tuple[Logprobs, ...]:
        """The logprobs that are due with a step."""
        due: list[Logprobs] = []
        if not step.logprobs:
            return ()
        for one, piece in zip(step.logprobs, step.pieces, strict=True):
            self._held.append(one)
            if piece:
                due += self._held
                self._held.clear()
        if step.stop in ("length", "context"):
            due += self._held
        return tuple(due)
