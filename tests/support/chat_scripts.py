"""Scripted answers without a model: events in a valid order, and the responses of an API to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import strategies as st

from ngramspec.batching.request import Done, Started
from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.answer import End, TextEvent
from ngramspec.server.call import ApiError
from ngramspec.server.reply import Reply
from ngramspec.steps import Stats, Step
from ngramspec.tool_calls.deltas import Delta


def finish(
    reason: Literal["stop", "length", "tool_calls"] = "stop", stop_string: str | None = None, full: bool = False
) -> End:
    """The end of an answer of 7 tokens to a prompt of 20, of which 5 were cached; `full`: because the context was."""
    why: Any = "context" if full else "length" if reason == "length" else "eog"
    return End(reason, stop_string, full, Done(why, Stats(generated=7), 5, 0.1, 0.2), reasoning_tokens=2)


def refused(read: Callable[..., object], field: str, **fields: Any) -> None:
    """A request with these fields is a 400 whose message begins with the field that is wrong."""
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, field), fields
    assert caught.value.message.startswith(field)


Said = Delta | Logprobs | End
"""A token's delta, or its logprobs if it has no text yet; or the end of the answer."""


class ScriptedReader:
    """A parser that returns given deltas."""

    ended: bool | None = None

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def push(self, text: str) -> Sequence[Delta]:
        return self.deltas

    def finish(self, cut: bool = False) -> Sequence[Delta]:
        return ()


def events(reply: Reply, said: Sequence[Said]) -> Iterator[TextEvent]:
    """The events of the one answer of a reply, which takes them."""
    (answer,) = reply.answers
    reader = answer.reader = ScriptedReader()
    yield from answer.take(Started(0, 5, 20))
    for one in said:
        if isinstance(one, End):
            closed, _ = answer.take(one.done)
            answer.end = one
            yield from (closed, one)
        else:
            reader.deltas = [one] if isinstance(one, Delta) else []
            logprobs = (one,) if isinstance(one, Logprobs) else ()
            yield answer.write([Step((0,), ("x",), logprobs=logprobs)])


def whole(reply: Reply, said: Sequence[Said]) -> dict[str, Any]:
    """The response of an API that is not a stream."""
    for one in events(reply, said):
        reply.add(0, one)
    told: dict[str, Any] = reply.whole()
    return told


def streamed(reply: Reply, said: Sequence[Said]) -> list[dict[str, Any]]:
    """The data of the events that an API streams, whose names are their types."""
    return data("".join([reply.chunks(0, one) for one in events(reply, said)]))


def data(text: str) -> list[dict[str, Any]]:
    """The data of named events."""
    lines = text.splitlines()
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == [
        one["type"] for one in found
    ]
    return found


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def answers(draw: st.DrawFn, names: Sequence[str] = ("look", "write")) -> list[Said]:
    """Thoughts, texts and whole calls in any order, in pieces of any size, then the end."""
    deltas: list[Said] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["thought", "text", "call"]), max_size=6)):
        if kind != "call":
            deltas += [Delta(kind, piece) for piece in draw(st.lists(_TEXTS))]
            continue
        deltas.append(Delta("call", "", calls, f"call_{calls}", draw(st.sampled_from(names))))
        text = json.dumps(draw(st.dictionaries(_TEXTS, _VALUES, max_size=3)), ensure_ascii=False)
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
        deltas += [Delta("arguments", text[a:b], calls) for a, b in pairwise([0, *cuts, len(text)])]
        calls += 1
    return [*deltas, finish("tool_calls" if calls else draw(st.sampled_from(["stop", "length"])))]
