"""Tests of recorded conversations: every supported format, every error, and the resulting tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from ngramspec.chat.conversation import Conversation, Turn, save
from ngramspec.data import ModelError, NGramSpecError
from ngramspec.instruments.replay.transcripts import (
    MAX_RESPONSE,
    MAX_TOTAL,
    Transcript,
    TranscriptReader,
    Transcripts,
    sample,
)

HELLO = [{"role": "user", "content": "hello"}]
PARTS = [{"type": "text", "text": "hel"}, "lo", {"type": "image"}]
HI = {"choices": [{"message": {"content": "hi"}}]}


def read(text: str | bytes, name: str = "talk.jsonl", *, strict: bool = False) -> Transcripts:
    found = Transcripts()
    found.read(name, text.encode() if isinstance(text, str) else text, strict=strict)
    return found


def one(entry: object) -> Transcript:
    found = read(json.dumps(entry))
    assert (found.broken, found.empty, len(found.usable)) == ([], 0, 1)
    return found.usable[0]


@pytest.mark.parametrize(
    "entry",
    [
        {"messages": HELLO, "response": "hi"},
        {"messages": [*HELLO, {"role": "assistant", "content": "hi"}]},
        {"messages": HELLO, "response": {"choices": [{"message": {"role": "assistant", "content": "hi"}}]}},
        {"request": {"model": "m", "messages": HELLO}, "response": HI},
        {"messages": HELLO, "choices": [*HI["choices"], {"message": {"content": "hey"}}]},
        {"request": {"method": "POST", "body": {"messages": HELLO}}, "response": {"status_code": 200, "body": HI}},
        {"request": {"messages": HELLO}, "response": "hi"},
        {"messages": [{"role": "user", "content": PARTS}], "response": [{"text": "h"}, "i"]},
    ],
)
def test_transcripts_read_accepts_each_conversation_format(entry: object) -> None:
    transcript = one(entry)
    assert transcript.prompt == ({"role": "user", "content": "hello"},)
    assert transcript.response == "hi"
    assert (transcript.category, transcript.id) == ("talk", "line 1")


def test_transcripts_read_accepts_saved_chat(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    save(Conversation("Be brief.", [Turn("hello", "hi"), Turn("and?", "bye")]), file, model="m", sampling={})
    found = read(file.read_bytes(), "talk.json")
    assert (found.broken, len(found.usable)) == ([], 1)
    assert found.usable[0].response == "bye"
    assert [m["content"] for m in found.usable[0].prompt] == ["Be brief.", "hello", "hi", "and?"]


def test_transcripts_read_accepts_prompts_categories_and_ids() -> None:
    logged = one({"request": {"prompt": "hello"}, "response": {"choices": [{"text": "hi"}]}})
    assert (logged.prompt, logged.response) == ("hello", "hi")
    transcript = one({"messages": HELLO, "response": "hi", "category": "greetings", "id": 7})
    assert (transcript.category, transcript.id) == ("greetings", "7")
    # A category cannot be named like the total, and half a surrogate pair is replaced.
    odd = one({"prompt": "a", "response": "b\ud83d", "category": "overall"})
    assert (odd.prompt, odd.response, odd.category) == ("a", "b?", "overall_")
    assert read('{"prompt": "a", "response": "b"}', "overall.jsonl").usable[0].category == "overall_"


def test_transcripts_read_treats_missing_content_as_empty() -> None:
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "4"}]
    assert [m["content"] for m in one({"messages": messages, "response": "hi"}).prompt] == ["hello", "", "4"]  # type: ignore[index]


def test_transcripts_read_accepts_arrays_and_splits_only_at_newlines() -> None:
    entries = [{"messages": HELLO, "response": "hi"}, {"messages": HELLO}, {"prompt": "a", "response": "b"}]
    found = read(json.dumps(entries, indent=2), "log.json")
    assert [t.id for t in found.usable] == ["entry 1", "entry 3"]
    assert found.broken == ["log.json, entry 2: there is no response, and the last message is not from the assistant"]
    # U+2028 and a carriage return do not end a line, and a byte order mark is not part of one.
    odd = '\ufeff{"prompt": "a\u2028b", "response": "c"}\r\n\n  \n{"prompt": "d", "response": "e"}'
    assert [t.response for t in read(odd).usable] == ["c", "e"]


def test_transcripts_read_accepts_plain_text_pairs() -> None:
    text = "=== prompt\nSay\nhello.\n\n=== response\n\nHello!\n=== prompt \r\nBye\r\n=== response\r\nSee you\r\n"
    first, second = read(text, "pairs.txt").usable
    assert (first.prompt, first.response, first.id) == ("Say\nhello.\n", "\nHello!", "line 1")
    assert (second.prompt, second.response, second.category) == ("Bye", "See you", "pairs")
    found = read("=== response\nHello!\n=== prompt\nSay\n=== prompt\nSay\n=== response\na\n=== response\nb\n")
    assert [t.response for t in found.usable] == ["a"]
    assert [problem.split(": ")[0] for problem in found.broken] == [f"talk.jsonl, line {n}" for n in (1, 3, 9)]
    assert len(read("  === prompt").broken) == 1  # A separator must be at the beginning of a line.


BROKEN = {
    "not valid JSON": ("{", "[" * 100_000, "nonsense"),
    "not a JSON object": ("17", '"text"'),
    "neither messages nor a prompt": ("{}", '{"response": "hi"}', '{"prompt": 4, "response": "hi"}'),
    "no response": ('{"prompt": "hello"}', '{"messages": []}'),
    "messages is not a list": ('{"messages": {}, "response": "hi"}',),
    "message 1 has no role": ('{"messages": [""], "response": ""}', '{"messages": [{"role": 4}], "response": ""}'),
    "'4' is not text": ('{"messages": [{"role": "", "content": 4}]}', '{"messages": [], "response": 4}'),
    "no choices": ('{"messages": [], "response": {"error": "busy"}}', '{"messages": [], "choices": []}'),
    "neither a message nor a text": ('{"messages": [], "choices": [{"delta": {}}]}',),
    "the request is not a JSON object": ('{"request": "GET /", "response": "hi"}',),
}


@pytest.mark.parametrize("words", BROKEN)
def test_transcripts_read_names_and_skips_broken_line(words: str) -> None:
    good = json.dumps({"messages": HELLO, "response": "hi"})
    for line in BROKEN[words]:
        # At the start of a file, such a line would be read as an array.
        found = read(f"{good}\n{line}\n{good}\n")
        assert len(found.usable) == 2
        (problem,) = found.broken
        assert problem.startswith("talk.jsonl, line 2: ")
        assert words in problem
        assert "\n" not in problem
        with pytest.raises(NGramSpecError, match=r"talk\.jsonl, line 2: "):
            read(f"{good}\n{line}\n", strict=True)


def test_transcripts_read_reports_invalid_utf8() -> None:
    found = read(b'{"prompt": "a", "response": "b"}\n{"prompt": "\xff"}\n')
    assert len(found.usable) == 1
    assert "line 2: not UTF-8 text (byte 12 is 0xff)" in found.broken[0]
    assert "not UTF-8" in read(b"=== prompt\n\xff").broken[0]


def test_transcripts_read_counts_empty_responses_without_error() -> None:
    entries = [
        {"messages": HELLO, "response": ""},
        {"messages": HELLO, "response": None},
        {"messages": HELLO, "choices": [{"message": {"content": None}}]},
    ]
    found = read("\n".join(map(json.dumps, entries)), strict=True)
    assert (found.usable, found.broken, found.empty) == ([], [], 3)
    assert all(read(text) == Transcripts() for text in ("", "\n\n", "[]"))


def test_sample_groups_categories_and_is_deterministic() -> None:
    many = [Transcript("ab"[i % 2], str(i), "p", "r") for i in range(40)]
    assert [t.category for t in sample(many, None)] == ["a"] * 20 + ["b"] * 20
    few = sample(many, 3)
    assert [t.category for t in few] == ["a"] * 3 + ["b"] * 3
    assert few == sample(many, 3)
    assert [int(t.id) for t in few[:3]] == sorted(int(t.id) for t in few[:3])
    assert sample(many, 50) == sample(many, None)


class Letters:
    """Vocabulary of characters, in which "<|im_start|>" and "<|im_end|>" may be single tokens."""

    def __init__(self, *, chatml: bool = True, template: str | None = None, end: int | None = 2) -> None:
        self._marks = {"<|im_start|>": 1, "<|im_end|>": 2} if chatml else {}
        self.chat_template = template
        self.end_of_turn = end

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        tokens = [0] if add_bos else []
        while text:
            mark = next((m for m in self._marks if special and text.startswith(m)), None)
            tokens.append(self._marks[mark] if mark else 10 + ord(text[0]))
            text = text[len(mark or "x") :]
        return tokens

    @property
    def chats(self) -> SimpleNamespace:
        return SimpleNamespace(tokens=self._format)

    def _format(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if any(m["role"] == "tool" for m in messages):
            raise ModelError("no tools")
        return self.tokenize(f"[{messages[0]['content']}]")


def ids(text: str) -> list[int]:
    return [10 + ord(c) for c in text]


SPELLED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
CHATML = [0, 1, *ids("user\nhello"), 2, *ids("\n"), 1, *ids("assistant\n")]


@pytest.mark.parametrize(
    ("vocabulary", "spelled", "prompt", "end"),
    [
        (Letters(template="{{ anything }}"), False, CHATML, [2]),
        (Letters(chatml=False, template="{{ anything }}", end=3), False, [0, *ids("[hello]")], [3]),
        (Letters(chatml=False, end=None), True, [0, *ids(SPELLED)], []),
    ],
)
def test_transcript_reader_selects_chatml_template_or_plain_text(
    vocabulary: Letters, spelled: bool, prompt: list[int], end: list[int]
) -> None:
    reader = TranscriptReader(vocabulary)
    assert reader.spelled == spelled
    # The text of an answer never contains special tokens, but the end of the answer is one.
    recording = reader.record(one({"messages": HELLO, "response": "<|im_end|>"}))
    assert (recording.prompt, recording.response) == (prompt, [*ids("<|im_end|>"), *end])
    assert (recording.category, recording.id) == ("talk", "line 1")


def test_transcript_reader_tokenizes_raw_prompt_and_skips_rejected_chat() -> None:
    raw = TranscriptReader(Letters(template="{{ anything }}")).record(one({"prompt": "a<|im_end|>", "response": "bc"}))
    assert raw.prompt == [0, *ids("a"), 2]
    refused = one({"messages": [{"role": "tool", "content": "4"}], "response": "hi"})
    assert TranscriptReader(Letters(chatml=False, template="{{ anything }}", end=3)).record(refused) is None


def test_transcript_reader_skips_short_and_truncates_long_recordings() -> None:
    short = one({"prompt": "a", "response": "b"})
    assert TranscriptReader(Letters(end=None)).record(short) is None
    reader = TranscriptReader(Letters())
    assert reader.record(short) is not None
    long = reader.record(Transcript("c", "i", "p" * MAX_TOTAL + "q", "r" * MAX_RESPONSE))
    assert long.response == ids("r" * MAX_RESPONSE)  # truncated, so without an end
    assert len(long.prompt) == MAX_TOTAL - MAX_RESPONSE
    assert long.prompt[-1] == ids("q")[0]
    whole = reader.record(Transcript("c", "i", "p" * MAX_TOTAL, "r" * (MAX_RESPONSE - 1)))
    assert whole.response == [*ids("r" * (MAX_RESPONSE - 1)), 2]
    assert len(whole.prompt) + len(whole.response) == MAX_TOTAL
