"""What is told of drafts: which characters of an answer were accepted ones, and how far an answer is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_service import Script
from support.http import asking, chunks, demo_vocabulary, scripted

from ngramspec.decoding.step import Step
from ngramspec.server.drafted import DraftedText
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Reasoning

CHAT = {"messages": [{"role": "user", "content": "hi"}], "return_drafts": True}
TEXT = "Hello, world: a naïve 🙂 smile"


def step(*pieces: str, accepted: int = 0) -> Step:
    return Step(tuple(range(len(pieces))), pieces, accepted=accepted)


def test_a_steps_first_tokens_are_the_drafted_ones() -> None:
    text = DraftedText()
    text.push(step("ab", "c", "de", accepted=2))
    assert text.mark(Content("abcde")) == Content("abcde", ((0, 3),))


def test_a_text_may_be_told_in_other_pieces_than_it_came() -> None:
    text = DraftedText()
    text.push(step("abc", "de", accepted=1))
    assert text.mark(Content("a")) == Content("a", ((0, 1),))
    text.push(step("fgh", "ij", accepted=1))
    assert text.mark(Content("bcdefg")) == Content("bcdefg", ((0, 2), (4, 6)))
    assert text.mark(Content("hij")) == Content("hij", ((0, 1),))


def test_what_a_parser_drops_is_passed_over() -> None:
    text = DraftedText()
    text.push(step("<think>", "so", "</think>\n", "Yes", accepted=2))
    assert text.mark(Reasoning("so")) == Reasoning("so", ((0, 2),))
    assert text.mark(Content("Yes")) == Content("Yes")
    text.push(step('{"name": "f", "x": ', '"Yes"', "}", "No", accepted=3))
    assert text.mark(CallBegin(0, "c", "f")) == CallBegin(0, "c", "f")
    assert text.mark(CallArguments(0, '"Yes"')) == CallArguments(0, '"Yes"', ((0, 5),))
    assert text.mark(Content("No")) == Content("No")


def test_nothing_is_said_of_what_is_not_found() -> None:
    text = DraftedText()
    text.push(step("abc", "def", accepted=1))
    assert text.mark(Content("xyz")) == Content("xyz")
    assert text.mark(Content("abcdef")) == Content("abcdef", ((0, 3),))


# --------------------------------------------------------------------------- over HTTP


def ask(body: dict[str, Any], script: Script) -> Any:
    server, _ = scripted(script)

    async def run() -> Any:
        async with asking(server) as client:
            return await client.post("/v1/chat/completions", json=body)

    response = asyncio.run(run())
    assert response.status_code == 200, response.text
    return response


def drafted_by(script: Script) -> str:
    """The text of the script's drafted tokens: in each step but the first, all but the last of a whole step are."""
    tokens = demo_vocabulary().tokenize(script.text, add_bos=False)
    steps = [tokens[i : i + script.step] for i in range(0, len(tokens) + 1, script.step)]
    return b"".join(demo_vocabulary().piece(t) for one in steps[1:] for t in one[: script.step - 1]).decode()


@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
@pytest.mark.parametrize("text", ["Hello, world: all of it", TEXT])
def test_streamed_and_whole_answers_tell_the_same_of_drafts(text: str, more: dict[str, Any]) -> None:
    script = Script(text=text, step=3)
    (choice,) = ask(CHAT | more, script).json()["choices"]
    whole = "".join(choice["message"]["content"][a:b] for a, b in choice["drafted"])
    streamed = content = ""
    for chunk in chunks(ask(CHAT | more | {"stream": True}, script).text)[:-1]:
        one = chunk["choices"][0]
        piece = one["delta"].get("content")
        if piece:
            content += piece
            streamed += "".join(piece[a:b] for a, b in one["drafted"])
    assert content == choice["message"]["content"] == text
    assert streamed == whole != ""
    if text != TEXT:  # where no character is in several tokens
        assert whole == drafted_by(script)


def test_nobody_is_told_of_drafts_who_did_not_ask() -> None:
    body = {"messages": CHAT["messages"]}
    assert "drafted" not in ask(body, Script(step=3)).json()["choices"][0]
    assert '"drafted"' not in ask(body | {"stream": True}, Script(step=3)).text


def test_every_chunk_tells_how_far_the_answer_is_where_that_is_asked_for() -> None:
    body = {"messages": CHAT["messages"], "stream": True, "timings_per_token": True}
    told = chunks(ask(body, Script(step=3, cached=2)).text)[1:-1]
    counts = [chunk["timings"]["predicted_n"] for chunk in told]
    assert counts == sorted(counts)
    assert counts[0] == 3
    assert len(set(counts)) > 1
    assert {chunk["timings"]["cache_n"] for chunk in told} == {2}


def test_the_gain_is_told_where_something_was_drafted() -> None:
    body = {"messages": CHAT["messages"]}
    script = Script(text="Hello, world: all of it", step=3)
    told = ask(body, script).json()["timings"]
    # Each of the fake's passes takes as long as a token alone.
    passes = -(-told["predicted_n"] // 3) - 1
    assert told["gain"] == pytest.approx((told["predicted_n"] - 3) / passes)
    assert "gain" not in ask(body, Script(step=1)).json()["timings"]
