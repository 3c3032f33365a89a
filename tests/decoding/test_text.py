"""Tests of `TextStream`: its output is the text up to the first stop string, however the text was split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.decoding.text import TextStream

# With few letters, stop strings occur and overlap; the other characters have 2, 3 and 4 bytes.
LETTERS = st.text(alphabet="ab\né漢🦙", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\né漢🦙", min_size=1, max_size=5), max_size=4)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


def run(stream: TextStream, pieces: list[bytes]) -> str:
    return "".join([stream.push(piece) for piece in pieces] + [stream.finish()])


def cut_at_first(text: str, stops: list[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


@given(LETTERS, STOPS, st.lists(st.integers(0, 1000), max_size=30))
def test_text_stream_with_any_split_stops_at_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(stops)
    assert run(stream, split(text.encode(), cuts)) == cut_at_first(text, stops)
    hits = [stop for stop in stops if stop in text]
    assert (stream.stop_string is not None) == bool(hits)
    if stream.stop_string is not None:
        assert text.startswith(stream.stop_string, len(cut_at_first(text, stops)))


@given(st.binary(max_size=24), st.lists(st.integers(0, 1000), max_size=24))
def test_text_stream_with_any_split_replaces_invalid_bytes(data: bytes, cuts: list[int]) -> None:
    # A final ASCII letter ends any incomplete character, so that the decoded whole is the expected text.
    data += b"."
    assert run(TextStream(), split(data, cuts)) == data.decode("utf-8", errors="replace")


@given(LETTERS, STOPS, st.lists(st.integers(0, 1000), max_size=30))
def test_text_stream_holds_back_only_possible_stop_strings(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(stops)
    expected = cut_at_first(text, stops)
    released, seen = "", b""
    for piece in split(text.encode(), cuts):
        seen += piece
        released += stream.push(piece)
        assert expected.startswith(released)
        if stream.stop_string is None:
            held = seen.decode(errors="ignore")[len(released) :]
            assert not held or any(stop.startswith(held[:1]) for stop in stops)
            assert len(held) < max((len(stop) for stop in stops), default=1)


CUT_OFF = [letter.encode()[:n] for letter in "é漢🦙" for n in range(1, len(letter.encode()))]


@pytest.mark.parametrize(
    ("stops", "pieces", "told", "stopped"),
    [
        # An incomplete character is dropped at the end of the text and replaced inside the text.
        *(([], [b"x", cut], ["x", "", ""], None) for cut in CUT_OFF),
        ([], ["漢".encode()[:2], b"x"], ["", "\ufffdx", ""], None),
        (["<end>"], [b"hi <e", b"n", b"d> more", b"ignored"], ["hi ", "", "", "", ""], "<end>"),
        (["aab"], [b"a", b"a", b"a", b"c"], ["", "", "a", "aac", ""], None),
        # A stop string that began earlier has priority over one that ended earlier.
        (["bc", "abcd"], [b"x", b"abc", b"d"], ["x", "", "", ""], "abcd"),
        (["bc", "abcd"], [b"x", b"abc", b"e"], ["x", "", "a", ""], "bc"),
        (["bc", "abcd"], [b"xabc"], ["x", "a"], "bc"),
        # The longest of several stop strings at one position applies, unless a shorter one is complete before it.
        (["\n", "\n\n"], [b"a\n\nb"], ["a", ""], "\n\n"),
        (["\n", "\n\n"], [b"a\n"], ["a", ""], "\n"),
        (["stop"], [b"don't sto"], ["don't ", "sto"], None),
    ],
)
def test_text_stream_with_each_example_returns_expected_pieces(
    stops: list[str], pieces: list[bytes], told: list[str], stopped: str | None
) -> None:
    stream = TextStream(stops)
    assert [*map(stream.push, pieces), stream.finish()] == told
    assert stream.stop_string == stopped
    assert stream.finish() == ""


A, AB, END = 300, 301, 302
CONTROLS = {"<a>": A, "<a>b": AB, "<end>": END, "<other>": 303}


@pytest.mark.parametrize(
    ("stops", "tokens", "text", "stopped"),
    [
        (["<a>"], ["x", A, "y"], "x", "<a>"),
        (["<a>"], ["x<", "a>", "y"], "x", "<a>"),  # the name as text
        (["x<a>y"], ["w", "x", A, "yz"], "w", "x<a>y"),
        (["x<a>y"], ["w", "x", A, "z"], "wxz", None),
        (["x<a>y"], ["w", "x", A], "wx", None),
        (["<a><end>", "y"], [A, "x", A, END, "y"], "x", "<a><end>"),
        (["<a>b"], [A, "b", AB, "c"], "b", "<a>b"),  # the longest name
        (["a>", "<a"], [A, "y"], "y", None),  # parts of a name
        (["<a>", "\n"], ["é"[:1], A], "é", "<a>"),
        (["\n"], ["x", A, "\n"], "x", "\n"),
    ],
)
def test_text_stream_with_control_token_in_stop_string_hides_its_name(
    stops: list[str], tokens: list[str | int], text: str, stopped: str | None
) -> None:
    stream = TextStream(stops, controls=CONTROLS)
    pieces = [token.encode() if isinstance(token, str) else stream.pieces.get(token, b"") for token in tokens]
    assert run(stream, pieces) == text
    assert stream.stop_string == stopped


@pytest.mark.parametrize("stop", [[""], ["a", ""], "ab"])
def test_text_stream_rejects_invalid_stop_strings(stop: list[str]) -> None:
    with pytest.raises(ValueError, match="stop"):
        TextStream(stop)


def test_text_stream_ignores_stop_strings_in_first_tokens() -> None:
    pieces = [b"a", b"b\xc3", b"\xa9b", b"b"]
    for min_tokens, text in enumerate(("", "a", "ab\xe9", "ab\xe9b", "ab\xe9bb")):
        assert run(TextStream(["b", "a"], min_tokens), pieces) == text
    stream = TextStream(["<a>"], 1, CONTROLS)
    assert run(stream, [stream.pieces[A], b"x", stream.pieces[A]]) == "x"
