"""Recorded conversations from files, and their conversion to tokens for a replay.

README.md describes the formats of an entry. `content` may be a list of parts, of which only the texts are used. The
category "overall" gets a "_", because the total has this name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from ngramspec.data import ModelError, NGramSpecError
from ngramspec.instruments.replay.replay import Recording
from ngramspec.instruments.reports.report import OVERALL
from ngramspec.storage import UTF16, is_utf16, utf8

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

MAX_TOTAL = 8192  # tokens of a prompt and its response; longer prompts are cut at the start
MAX_RESPONSE = 1500  # tokens of a response; a longer one is cut, and then has no end of turn


@dataclass(frozen=True, slots=True)
class Transcript:
    category: str  # kind of text, by which results are grouped
    id: str  # id of the entry, or its place in the file
    # Messages of a conversation, each with "role" and "content", or the raw text before the response.
    prompt: tuple[dict[str, str], ...] | str
    response: str  # text of the response


@dataclass(slots=True)
class Transcripts:
    usable: list[Transcript] = field(default_factory=list)  # transcripts in the order of the files and their entries
    broken: list[str] = field(default_factory=list)  # error messages, one for each invalid entry
    empty: int = 0  # number of entries without a response

    def read(self, name: str, raw: bytes, *, strict: bool = False) -> None:
        """Add the entries of a file; raise an NGramSpecError if it is UTF-16, or if `strict`, for an invalid entry."""
        if is_utf16(raw):
            raise NGramSpecError(f"{name} is {UTF16}")
        category = PurePath(name).stem
        for place, entry in _entries(raw):
            try:
                transcript = _transcript(entry, category, place)
            except ValueError as error:
                problem = f"{name}, {place}: {error}"
                if strict:
                    raise NGramSpecError(problem) from None
                self.broken.append(problem)
                continue
            if transcript.response:
                self.usable.append(transcript)
            else:
                self.empty += 1


def _entries(raw: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the place and the object of each entry; a ValueError replaces an object that cannot be read."""
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    start = raw.strip()
    whole = _parse(raw) if start.startswith(b"[") or b"\n" in start else None
    if isinstance(whole, list):
        yield from ((f"entry {number}", entry) for number, entry in enumerate(whole, 1))
    elif isinstance(whole, dict) or start.startswith(b"["):
        yield "the whole file", whole
    elif re.match(rb"(\s*\n)?=== (prompt|response)\s*?(\n|$)", raw):
        yield from _pairs(raw)
    else:
        # splitlines() would also split at U+2028 and other characters that JSON strings may contain.
        for number, line in enumerate(raw.split(b"\n"), 1):
            if line.strip():
                yield f"line {number}", _parse(line)


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(utf8(raw))
    except UnicodeError as error:
        return error
    except (ValueError, RecursionError) as error:
        return ValueError(f"not valid JSON: {error}")


def _pairs(raw: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a plain text file: the text after each separator, without the line break at its end."""
    try:
        text = utf8(raw).replace("\r\n", "\n").removesuffix("\n") + "\n"
    except UnicodeError as error:
        yield "the whole file", error
        return
    marks = list(re.finditer(r"^=== (prompt|response)[^\S\n]*\n", text, re.MULTILINE))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    parts = [(mark[1], mark.start(), text[mark.end() : end][:-1]) for mark, end in zip(marks, ends, strict=True)]
    while parts:
        kind, start, content = parts.pop(0)
        place = f"line {1 + text.count(chr(10), 0, start)}"
        if kind == "prompt" and parts and parts[0][0] == "response":
            yield place, {"prompt": content, "response": parts.pop(0)[2]}
        else:
            yield place, ValueError(f"a prompt and a response are required, but there is only a {kind}")


def _transcript(entry: Any, category: str, place: str) -> Transcript:
    if isinstance(entry, ValueError):
        raise entry
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    request, answer = _body(entry.get("request", entry)), entry.get("response")
    response = None
    if isinstance(answer, dict) or "choices" in entry:
        response = _choice(_body(answer) if isinstance(answer, dict) else entry)
    elif "response" in entry:
        response = _text(answer)
    prompt: tuple[dict[str, str], ...] | str
    if "messages" in request:
        prompt = _messages(request["messages"])
        if response is None:
            if not prompt or prompt[-1]["role"] != "assistant":
                raise ValueError("there is no response, and the last message is not from the assistant")
            response, prompt = prompt[-1]["content"], prompt[:-1]
    elif isinstance(request.get("prompt"), str):
        prompt = _clean(request["prompt"])
    else:
        raise ValueError("neither messages nor a prompt string")
    if response is None:
        raise ValueError("there is no response")
    category = str(entry.get("category") or category)
    category += "_" if category == OVERALL else ""
    return Transcript(category, str(entry.get("id", place)), prompt, response)


def _body(part: Any) -> Mapping[str, Any]:
    """Return a request or response in OpenAI's format, without the envelope of a batch file."""
    if not isinstance(part, dict):
        raise ValueError("the request is not a JSON object")
    body = part.get("body")
    return body if isinstance(body, dict) else part


def _choice(answer: Mapping[str, Any]) -> str:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("the response has no choices")
    message = choices[0].get("message")
    if isinstance(message, dict):
        return _text(message.get("content"))
    if "text" in choices[0]:
        return _text(choices[0]["text"])
    raise ValueError("the response's first choice has neither a message nor a text")


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        raise ValueError("messages is not a list")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role")
        messages.append({"role": _clean(message["role"]), "content": _text(message.get("content"))})
    return tuple(messages)


def _text(content: Any) -> str:
    """Return the text of a message's content, which is null, a string, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(_text(part.get("text", "") if isinstance(part, dict) else part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{str(content)[:40]!r} is not text")
    return _clean(content)


def _clean(text: str) -> str:
    """Replace half surrogate pairs, which JSON may contain but tokenizers do not accept."""
    return text.encode("utf-8", "replace").decode("utf-8")


def sample(transcripts: Iterable[Transcript], limit: int | None) -> list[Transcript]:
    """Return transcripts grouped by category, in order of appearance; at most `limit` of each, with a fixed seed."""
    groups: dict[str, list[Transcript]] = {}
    for transcript in transcripts:
        groups.setdefault(transcript.category, []).append(transcript)
    for category, group in groups.items():
        if limit is not None and len(group) > limit:
            keep = np.random.default_rng(1234).choice(len(group), size=limit, replace=False)
            groups[category] = [group[i] for i in sorted(keep.tolist())]
    return list(chain.from_iterable(groups.values()))


class TranscriptReader:
    """A converter of transcripts to recordings. Special tokens are parsed only in prompts."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        marks = ("<|im_start|>", "<|im_end|>")
        has_tokens = all(len(tokenizer.tokenize(mark, special=True, add_bos=False)) == 1 for mark in marks)
        self._uses_template = not has_tokens and tokenizer.chat_template is not None
        # Whether the marks of ChatML are ordinary text, because the vocabulary lacks its tokens.
        self.spelled = not has_tokens and not self._uses_template

    def record(self, transcript: Transcript) -> Recording | None:
        """Return the tokens of a transcript; `None` if it is too short to replay, or the template rejects it."""
        tokenizer = self._tokenizer
        response = tokenizer.tokenize(transcript.response, add_bos=False)
        if len(response) >= MAX_RESPONSE:
            del response[MAX_RESPONSE:]
        elif tokenizer.end_of_turn is not None:
            response.append(tokenizer.end_of_turn)
        try:
            prompt = self._prompt(transcript.prompt)
        except ModelError:
            return None
        if len(response) < 2 or not prompt:
            return None
        prompt = prompt[max(0, len(prompt) - (MAX_TOTAL - len(response))) :]
        return Recording(transcript.category, transcript.id, prompt, response)

    def _prompt(self, prompt: tuple[dict[str, str], ...] | str) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.tokenize(prompt, special=True)
        if self._uses_template:
            return self._tokenizer.chats.tokens(prompt)
        turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in prompt)
        return self._tokenizer.tokenize("".join(turns) + "<|im_start|>assistant\n", special=True)
