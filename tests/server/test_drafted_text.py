"""Tests of the reports on drafts: the accepted draft characters of a response, and its progress."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_service import Script
from support.http import ask, demo_vocabulary

from ngramspec.server.drafted_text import DraftedText
from ngramspec.steps import Step

CHATS = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def step(*pieces: str, accepted: int = 0) -> Step:
    return Step(tuple(range(len(pieces))), pieces, accepted=accepted)


def marked(text: DraftedText, part: str, *steps: Step) -> list[tuple[int, int]]:
    text.add(steps)
    return text.find(part)


def test_drafted_text_marks_accepted_draft_characters_across_chunks() -> None:
    text = DraftedText()
    assert marked(text, "a", step("abc", "de", accepted=1)) == [(0, 1)]
    assert marked(text, "bcdefg", step("f", "gh", "ij", accepted=2)) == [(0, 2), (4, 6)]
    assert marked(text, "hij") == [(0, 1)]
    assert marked(text, "klmn", step("kl", "m", accepted=1), step("n", "o", accepted=1)) == [(0, 2), (3, 4)]


def test_drafted_text_skips_text_that_the_parser_drops() -> None:
    text = DraftedText()
    assert marked(text, "so", step("<think>", "so", "</think>\n", "Yes", accepted=2)) == [(0, 2)]
    assert marked(text, "Yes") == []
    assert marked(text, "", step('{"name": "f", "x": ', '"Yes"', "}", "No", accepted=3)) == []
    assert marked(text, '"Yes"') == [(0, 5)]
    assert marked(text, "No") == []


def test_drafted_text_marks_only_matching_text() -> None:
    text = DraftedText()
    assert marked(text, "xyz", step("abc", "def", accepted=1)) == []
    assert marked(text, "abcdef") == [(0, 3)]


def drafted_by(script: Script) -> str:
    """Return the text of the script's draft tokens: in all steps except the first, all but the last of a full step."""
    tokens = demo_vocabulary().tokenize(script.text, add_bos=False)
    steps = [tokens[i : i + script.step] for i in range(0, len(tokens) + 1, script.step)]
    return b"".join(demo_vocabulary().piece(t) for one in steps[1:] for t in one[: script.step - 1]).decode()


def test_chat_completions_drafted_spans_are_equal_streamed_or_whole() -> None:
    smile, ascii_only = "Hello, world: a naïve 🙂 smile", "Hello, world: all of it"
    for text, more in ((smile, {}), (smile, {"logprobs": True}), (ascii_only, {})):
        script, body = Script(text=text, step=3), CHAT | {"return_drafts": True} | more
        (choice,) = ask(CHATS, body, script)[0]["choices"]
        whole = "".join(choice["message"]["content"][a:b] for a, b in choice["drafted"])
        streamed = content = ""
        for chunk in ask(CHATS, body | {"stream": True}, script)[0]:
            one = chunk["choices"][0]
            piece = one["delta"].get("content")
            if piece:
                content += piece
                streamed += "".join(piece[a:b] for a, b in one["drafted"])
        assert content == choice["message"]["content"] == text
        assert streamed == whole != ""
        if text == ascii_only:  # if no character spans several tokens
            assert whole == drafted_by(script)


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


@pytest.mark.parametrize(
    "disturbed",
    [
        {"is_quiet": False},
        {"expected_seconds": 0.0},
        {"expected_seconds": 0.01 / 1.3},
        {"expected_seconds": 0.01 * 2.1},
    ],
    ids=["load", "provisional curve", "slower than measured", "faster than measured"],
)
def test_timings_of_disturbed_response_omit_gain(disturbed: dict[str, Any]) -> None:
    told, _ = ask(CHATS, CHAT, Script(text="Hello, world: all of it" * 12, step=3, **disturbed))
    assert told["timings"]["draft_n"] > 32
    assert "gain" not in told["timings"]


def test_chat_completions_stream_with_return_progress_reports_prefill() -> None:
    told, service = ask(CHATS, CHAT | {"stream": True, "return_progress": True}, Script(n_cached=2))
    length = len(service.requests[0].prompt)
    assert told[0]["choices"][0]["delta"]["role"] == "assistant"
    for chunk, processed in zip(told[1:], (2, length), strict=False):
        assert chunk["prompt_progress"] == {"total": length, "cache": 2, "processed": processed}
    told, _ = ask(CHATS, CHAT | {"stream": True})
    assert not any("prompt_progress" in chunk for chunk in told)
