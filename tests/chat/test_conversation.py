"""Tests of `Conversation`: the turns that stay in a short context, and its file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.chat.conversation import Conversation, Turn, answer_room, load, save
from ngramspec.chat.template import Message
from ngramspec.data import NGramSpecError, PromptError

TURNS = [Turn("aaaa", "bbbb"), Turn("cc", "dddddd", "hm"), Turn("e", "f")]


def encode(messages: list[Message]) -> list[int]:
    """Return one token per message and one per character, as a chat template."""
    return [code for m in messages for code in (0, *map(ord, m["content"]))]


def contents(prompt: tuple[list[int], int]) -> str:
    return "".join(map(chr, prompt[0])).replace("\0", " ").strip()


def saved(path: Path, conversation: Conversation) -> None:
    save(conversation, path, model="m", sampling={"seed": 3})


def test_conversation_messages_start_with_system_and_undo_drops_turn() -> None:
    conversation = Conversation("s", TURNS[:1])
    assert [m["role"] for m in conversation.messages()] == ["system", "user", "assistant"]
    assert [m["role"] for m in Conversation(None, TURNS[:1]).messages()] == ["user", "assistant"]
    conversation = Conversation("s", TURNS[:], first=3)
    assert conversation.undo() == TURNS[-1]
    assert (conversation.turns, conversation.first) == (TURNS[:2], 2)
    with pytest.raises(IndexError):
        Conversation().undo()


def test_conversation_prompt_with_too_long_message_raises() -> None:
    conversation = Conversation("s", list(TURNS))
    with pytest.raises(PromptError, match=r"system message make a prompt of 5 tokens, .* room for 4 "):
        conversation.prompt("qq", encode, 4)
    with pytest.raises(PromptError, match="the message makes a prompt of 3 tokens"):
        Conversation().prompt("qq", encode, 2)
    assert conversation == Conversation("s", TURNS)


def test_conversation_keeps_dropped_turns_out_of_later_prompts() -> None:
    conversation = Conversation("s", list(TURNS))
    prompt = conversation.prompt("qq", encode, 18)
    assert conversation.first == 0
    conversation.add(Turn("qq", "r"), prompt[1])
    assert conversation.first == 2
    assert contents(conversation.prompt("u", encode, 100)) == "s e f qq r u"
    assert conversation.turns == [*TURNS, Turn("qq", "r")]


@given(
    st.sampled_from([None, "s"]),
    st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), max_size=6),
    st.integers(1, 80),
)
def test_conversation_prompt_over_limit_drops_fewest_oldest_turns(
    system: str | None, turns: list[tuple[str, str]], most: int
) -> None:
    conversation = Conversation(system, [Turn(*turn) for turn in turns])
    try:
        prompt = conversation.prompt("q", encode, most)
    except PromptError:
        assert most < (4 if system else 2)
        return
    tokens, first = prompt
    assert len(tokens) <= most
    question = {"role": "user", "content": "q"}
    assert tokens == encode([*conversation.messages(first), question])
    if first > 0:
        assert len(encode([*conversation.messages(first - 1), question])) > most


def test_answer_room_returns_limit_or_share_of_context() -> None:
    assert answer_room(2048, 2**31) == 512
    assert answer_room(2048, 100) == 100
    assert answer_room(3, 100) == 1


@pytest.mark.parametrize("system", [None, "s\n\x1b ünï"])
def test_conversation_save_and_load_round_trip(tmp_path: Path, system: str | None) -> None:
    path = tmp_path / "chat.json"
    conversation = Conversation(system, list(TURNS), first=2)
    saved(path, conversation)
    found, model = load(path)
    assert (found.system, found.turns, found.first, model) == (system, TURNS, 0, "m")
    data = json.loads(path.read_text("utf-8"))
    assert data["sampling"] == {"seed": 3}
    assert data["messages"] == conversation.messages()
    assert [p.name for p in tmp_path.iterdir()] == ["chat.json"]


def test_conversation_save_overwrites_only_conversations_and_keeps_links(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    saved(path, Conversation())
    saved(path, Conversation(None, TURNS[:1]))
    assert load(path)[0].turns == TURNS[:1]
    path.write_text('{"name": "package"}')
    with pytest.raises(NGramSpecError, match="is not a saved conversation; use another name"):
        saved(path, Conversation())
    assert path.read_text() == '{"name": "package"}'
    with pytest.raises(NGramSpecError, match="is not a saved conversation"):
        saved(tmp_path, Conversation())
    path.unlink()
    link = tmp_path / "link.json"
    link.symlink_to("chat.json")
    saved(tmp_path / "chat.json", Conversation())
    saved(link, Conversation(None, TURNS[:1]))
    assert link.is_symlink()
    assert load(tmp_path / "chat.json")[0].turns == TURNS[:1]


def test_conversation_save_and_load_reject_unusable_paths(tmp_path: Path) -> None:
    for name, reason in (("none/chat.json", "No such file"), ("x" * 300, "name too long"), ("a\0b", "null")):
        with pytest.raises(NGramSpecError, match=rf"cannot write .*: [^:]*{reason}"):
            saved(tmp_path / name, Conversation())
    with (
        mock.patch.object(sys, "is_finalizing", return_value=True),
        pytest.raises(NGramSpecError, match="Python is ending"),
    ):
        saved(tmp_path / "chat.json", Conversation())
    assert not list(tmp_path.iterdir())
    with pytest.raises(NGramSpecError, match=r"cannot read .*: No such file"):
        load(tmp_path / "none.json")


def messages(*pairs: tuple[object, object]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


BAD = {
    "is not valid JSON": b"hello",
    "JSON": b"[" * 100_000,
    "is not a saved conversation: it is": b'"\xff"',
    'has no list "messages"': b"[]",
    'no list "messages"$': b'{"messages": 1}',
    "message 2 requires": messages(("user", "a"), ("assistant", None)),
    "message 1 requires": {"messages": ["user"]},
    'message 1 requires "role"': messages((["user"], "a")),
    "message 1 requires .* strings": messages(("user", "\ud800"), ("assistant", "")),
    "message 1 must have the role 'user', got 'assistant'": messages(("assistant", "a")),
    "message 3 must have the role 'assistant', got 'user'": messages(("system", "s"), ("user", "a"), ("user", "b")),
    "message 3 must have .*, got 'system'": messages(("user", "a"), ("assistant", "b"), ("system", "s")),
    "last message has no answer": messages(("user", "a")),
}


def test_conversation_load_rejects_other_files(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    for complaint, bad in BAD.items():
        path.write_bytes(bad if isinstance(bad, bytes) else json.dumps(bad).encode())
        with pytest.raises(NGramSpecError, match=complaint) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    # Only the messages are required in a file.
    path.write_text('{"messages": [], "model": 7}')
    assert load(path) == (Conversation(), "")
