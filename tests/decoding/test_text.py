"""TextStream: what comes out is the text cut at the first stop string, however it was split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.decoding.text import TextStream

# Few letters, so that stop strings do occur and overlap; plus characters of 2, 3 and 4 bytes.
LETTERS = st.text(alphabet="ab\né漢🦙", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\né漢🦙", min_size=1, max_size=5), max_size=4)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


def run(stream: TextStream, pieces: list[bytes]) -> str:
    return "".join([stream.push(piece) for piece in pieces] + [stream.finish()])


def cut_at_first(text: str, stops: list[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(LETTERS, STOPS, st.lists(st.integers(0, 1000), max_size=30))
def test_any_text_any_split_any_stops(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(stops)
    assert run(stream, split(text.encode(), cuts)) == cut_at_first(text, stops)
    hits = [stop for stop in stops if stop in text]
    assert (stream.stopped is not None) == bool(hits)
    if stream.stopped is not None:
        assert text.startswith(stream.stopped, len(cut_at_first(text, stops)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=30), st.lists(st.integers(0, 1000), max_size=30))
def test_any_unicode_text_comes_back_whole(text: str, cuts: list[int]) -> None:
    assert run(TextStream(), split(text.encode(), cuts)) == text


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=24), st.lists(st.integers(0, 1000), max_size=24))
def test_invalid_bytes_read_the_same_however_split(data: bytes, cuts: list[int]) -> None:
    # A final ASCII letter closes any open character, so that decoding the whole is the expectation.
    data += b"."
    assert run(TextStream(), split(data, cuts)) == data.decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(LETTERS, STOPS, st.lists(st.integers(0, 1000), max_size=30))
def test_released_text_is_final_and_no_more_than_needed_is_held(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(stops)
    expected = cut_at_first(text, stops)
    released, seen = "", b""
    for piece in split(text.encode(), cuts):
        seen += piece
        released += stream.push(piece)
        assert expected.startswith(released)
        if stream.stopped is None:
            held = seen.decode(errors="ignore")[len(released) :]
            assert not held or any(stop.startswith(held[:1]) for stop in stops)
            assert len(held) < max((len(stop) for stop in stops), default=1)


@pytest.mark.parametrize("character", ["é", "漢", "🦙"])
def test_a_character_cut_off_at_the_end_is_dropped(character: str) -> None:
    for kept in range(1, len(character.encode())):
        stream = TextStream()
        assert run(stream, [b"x", character.encode()[:kept]]) == "x"


def test_an_incomplete_character_inside_the_text_is_replaced() -> None:
    assert run(TextStream(), ["漢".encode()[:2], b"x"]) == "\ufffdx"


def test_a_family_emoji_one_byte_at_a_time() -> None:
    text = "👩‍👩‍👧‍👦 ok"
    stream = TextStream()
    out = [stream.push(bytes([byte])) for byte in text.encode()]
    assert "".join(out) == text
    assert "\ufffd" not in "".join(out)


def test_a_stop_string_over_three_tokens() -> None:
    stream = TextStream(["<end>"])
    assert [stream.push(piece) for piece in (b"hi <e", b"n", b"d> more")] == ["hi ", "", ""]
    assert stream.stopped == "<end>"
    assert stream.push(b"ignored") == ""
    assert stream.finish() == ""


def test_a_suffix_that_turns_out_not_to_be_a_stop_string_is_released() -> None:
    stream = TextStream(["aab"])
    assert [stream.push(piece) for piece in (b"a", b"a", b"a", b"c")] == ["", "", "a", "aac"]
    assert stream.stopped is None


def test_a_stop_string_that_began_earlier_wins_over_one_that_ended_earlier() -> None:
    stream = TextStream(["bc", "abcd"])
    assert [stream.push(piece) for piece in (b"x", b"abc", b"d")] == ["x", "", ""]
    assert stream.stopped == "abcd"
    stream = TextStream(["bc", "abcd"])
    assert [stream.push(piece) for piece in (b"x", b"abc", b"e")] == ["x", "", "a"]
    assert stream.stopped == "bc"
    stream = TextStream(["bc", "abcd"])
    assert stream.push(b"xabc") == "x"
    assert stream.finish() == "a"
    assert stream.stopped == "bc"


def test_of_several_at_one_place_the_longest() -> None:
    stream = TextStream(["\n", "\n\n"])
    assert stream.push(b"a\n\nb") == "a"
    assert stream.stopped == "\n\n"


def test_a_complete_stop_string_does_not_wait_for_a_longer_one_at_its_place() -> None:
    stream = TextStream(["\n", "\n\n"])
    assert stream.push(b"a\n") == "a"
    assert stream.stopped == "\n"


def test_finish_releases_what_was_held_once() -> None:
    stream = TextStream(["stop"])
    assert stream.push(b"don't sto") == "don't "
    assert stream.finish() == "sto"
    assert stream.finish() == ""
    assert stream.stopped is None


@pytest.mark.parametrize("stop", [[""], ["a", ""], "ab"])
def test_bad_stop_strings_are_refused(stop: list[str]) -> None:
    with pytest.raises(ValueError, match="stop"):
        TextStream(stop)
