"""Tests of the accepted draft characters of a response, its progress, and predicted outputs."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_service import Script
from support.http import CHAT, ask, demo_vocabulary, thinking_vocabulary

CHATS = "/v1/chat/completions"


LOOK = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "so"}}\n</tool_call>'


def drafted_characters(script: Script) -> list[bool]:
    """Return for each character of an ASCII text whether it is drafted.

    In all steps except the first, the script drafts all tokens except the last of a full step.
    """
    tokens = demo_vocabulary().tokenize(script.text, add_bos=False)
    steps = [tokens[i : i + script.step] for i in range(0, len(tokens) + 1, script.step)]
    return [
        number > 0 and i < script.step - 1
        for number, step in enumerate(steps)
        for i, token in enumerate(step)
        for _ in demo_vocabulary().piece(token)
    ]


@pytest.mark.parametrize(
    ("before", "text", "after", "fields"),
    [
        ("", "Hello, world: a naïve 🙂 smile", "", {}),
        ("", "Hello, world: a naïve 🙂 smile", "", {"logprobs": True}),
        ("", "Hello, world: all of it", "", {}),
        # The text before and after it contains the same words.
        ("<think>\nso it is\n</think>\n\n", "so it is. so", f"\n{CALL}", {"tools": [LOOK]}),
    ],
)
@pytest.mark.parametrize("step", [2, 3, 7])
def test_chat_completions_drafted_spans_are_equal_streamed_or_whole(
    before: str, text: str, after: str, fields: dict[str, Any], step: int
) -> None:
    script, body = Script(before + text + after, step=step), CHAT | {"return_drafts": True} | fields
    (choice,) = ask(CHATS, body, script, vocabulary=thinking_vocabulary())[0]["choices"]
    chunks, _ = ask(CHATS, body | {"stream": True}, script, vocabulary=thinking_vocabulary())
    whole = "".join(choice["message"]["content"][a:b] for a, b in choice["drafted"])
    pieces = [
        (piece, one["drafted"])
        for chunk in chunks
        for one in chunk["choices"]
        if (piece := one["delta"].get("content"))
    ]
    assert "".join(piece for piece, _ in pieces) == choice["message"]["content"] == text
    assert "".join(piece[a:b] for piece, spans in pieces for a, b in spans) == whole != ""
    if text.isascii():  # so that no character spans several tokens
        drafted = drafted_characters(script)[len(before) :]
        assert whole == "".join(character for character, is_drafted in zip(text, drafted, strict=False) if is_drafted)


def test_chat_completions_report_timings_and_drafts_on_request() -> None:
    told, _ = ask(CHATS, CHAT | {"stream": True, "timings_per_token": True}, Script(step=3, n_cached=2))
    counts = [chunk["timings"]["predicted_n"] for chunk in told[1:]]
    assert counts == sorted(counts)
    assert counts[0] == 3
    assert len(set(counts)) > 1
    assert {chunk["timings"]["cache_n"] for chunk in told[1:]} == {2}
    assert not any("drafted" in chunk["choices"][0] for chunk in told)
    told, _ = ask(CHATS, CHAT, Script(text="Hello, world: all of it" * 12, step=3))
    assert "drafted" not in told["choices"][0]
    # Each pass of the scripted engine takes as long as a pass over one token.
    tokens = told["timings"]["predicted_n"]
    assert told["timings"]["gain"] == pytest.approx((tokens - 3) / (-(-tokens // 3) - 1))
    assert "gain" not in ask(CHATS, CHAT, Script(step=1))[0]["timings"]


def test_timings_of_disturbed_response_omit_gain() -> None:
    told, _ = ask(CHATS, CHAT, Script(text="Hello, world: all of it" * 12, step=3, is_surprising=True))
    assert told["timings"]["draft_n"] > 32
    assert "gain" not in told["timings"]
