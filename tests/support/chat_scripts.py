"""Answers of a model that there is none of: deltas in a legal order."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Literal

import pytest
from hypothesis import strategies as st

from ngramspec.batching.request import Done
from ngramspec.decoding.step import Stats
from ngramspec.server.dialogue import ChatDelta, Finish
from ngramspec.server.errors import ApiError
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Reasoning


def finish(
    reason: Literal["stop", "length", "tool_calls"] = "stop",
    stop_string: str | None = None,
    prompt_tokens: int = 20,
    cached: int = 5,
    generated: int = 7,
    full: bool = False,
) -> Finish:
    """The end of an answer; `full`: because the context was."""
    why: Any = "context" if full else "length" if reason == "length" else "eog"
    return Finish(
        reason, stop_string, prompt_tokens, Done(why, Stats(generated=generated), cached, 0.1, 0.2), thought=2
    )


def turn(second: str) -> list[ChatDelta]:
    """Thoughts, text and two calls, in pieces; `second`: the tool that is called after "look"."""
    return [
        Reasoning("h"),
        Reasoning("m"),
        Content("I "),
        Content("löok."),
        CallBegin(0, "c0", "look"),
        CallArguments(0, '{"at": "'),
        CallArguments(0, 'x"}'),
        CallBegin(1, "c1", second),
        CallArguments(1, "{}"),
        finish("tool_calls"),
    ]


def refused(ask: Callable[..., object], **fields: Any) -> ApiError:
    """The error of a request with these fields: a 400 whose message begins with the field that it names."""
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.message.startswith(caught.value.param)
    return caught.value


async def played(deltas: Sequence[ChatDelta | None]) -> AsyncGenerator[ChatDelta | None, None]:
    for delta in deltas:
        yield delta


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def answers(draw: st.DrawFn, names: Sequence[str] = ("look", "write")) -> list[ChatDelta]:
    """Thoughts, texts and whole calls in any order, in pieces of any size, then the end."""
    deltas: list[ChatDelta] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["thought", "text", "call"]), max_size=6)):
        if kind != "call":
            deltas += [(Reasoning if kind == "thought" else Content)(piece) for piece in draw(st.lists(_TEXTS))]
            continue
        deltas.append(CallBegin(calls, f"call_{calls}", draw(st.sampled_from(names))))
        text = json.dumps(draw(st.dictionaries(_TEXTS, _VALUES, max_size=3)), ensure_ascii=False)
        for piece in draw(pieces(text)):
            deltas.append(CallArguments(calls, piece))
        calls += 1
    reason: Literal["stop", "length", "tool_calls"] = (
        "tool_calls" if calls else draw(st.sampled_from(["stop", "length"]))
    )
    deltas.append(finish(reason))
    return deltas


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """A text cut anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def broken(body: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A request of which one part, anywhere, became something else, or is gone."""
    return st.tuples(st.sampled_from(list(_paths(body))), st.just(_GONE) | _VALUES).map(lambda cut: _put(body, *cut))


_GONE = object()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from _paths(part, (*path, key))


def _put(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    place: Any = body
    for key in path[:-1]:
        place = place[key]
    if value is _GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return body
