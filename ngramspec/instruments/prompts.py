"""Reading prompts: the packaged ones, or the user's own files and folders.

    nothing     the packaged prompts
    .toml       category, source, licence; per [[prompts]] an id, and text or messages
    .jsonl      per line an object with id, category, and text or messages
    other text  one raw text; its category is the file's name without the ending
    folder      its .toml and .jsonl files, and every other text file as one raw text, whose
                category is the folder's name

`messages` is a list of {role, content}; `system` beside it goes before them as a system message.
Keys that are not listed here are an error, not ignored.
"""

from __future__ import annotations

import importlib.resources
import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ngramspec.errors import ModelError, NGramSpecError
from ngramspec.storage import NotUtf8, utf8
from ngramspec.tokens import ChatTokenizer

PACKAGE = "ngramspec_prompts"

ROLES = frozenset({"system", "user", "assistant", "tool"})
_FILE_KEYS = frozenset({"category", "source", "licence", "prompts"})
_PROMPT_KEYS = frozenset({"id", "text", "messages", "system"})
_STRUCTURED = frozenset({".toml", ".jsonl"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt; exactly one of `text` and `messages` is set."""

    id: str  # unique within its category
    category: str  # the kind of text, by which a benchmark groups its results
    text: str | None = None  # raw text to be continued as it stands, without a chat template
    # A chat, each message with "role" and "content"; a system message comes first.
    messages: tuple[dict[str, str], ...] | None = None


def load_prompts(path: Path | None) -> list[Prompt]:
    """All prompts of a file or folder (None: the packaged ones), by file names, and within a file as written.

    In a folder, hidden files, subfolders, empty files, files that are no UTF-8 text, and files
    named README or LICENCE/LICENSE are passed over.

    Raises:
        NGramSpecError: there is no such file, it cannot be read, it is malformed (with the file's
            name and the reason), or there is no prompt in it.
    """
    if path is None:
        prompts = _packaged()
    elif path.is_dir():
        prompts = _in_folder(path)
    elif path.is_file():
        prompts = _in_file(path, path.stem)
    else:
        raise NGramSpecError(f"no such file or folder of prompts: {path}")
    if not prompts:
        raise NGramSpecError(f"{path or PACKAGE} holds no prompts")
    _check_unique(prompts, str(path or PACKAGE))
    return prompts


def _packaged() -> list[Prompt]:
    try:
        files = sorted(importlib.resources.files(PACKAGE).iterdir(), key=lambda file: file.name)
    except (ModuleNotFoundError, OSError) as error:
        raise NGramSpecError("the packaged prompts are missing from this installation") from error
    return [prompt for file in files if file.name.endswith(".toml") for prompt in _in_file(file, "")]


def _in_folder(folder: Path) -> list[Prompt]:
    try:
        files = sorted(file for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise NGramSpecError(f"cannot read {folder}: {error.strerror or error}") from error
    category = folder.resolve().name
    prompts: list[Prompt] = []
    for file in files:
        if file.name.startswith(".") or file.stem.upper() in {"README", "LICENCE", "LICENSE"}:
            continue
        if file.suffix in _STRUCTURED or _is_some_text(file):
            prompts += _in_file(file, category)
    return prompts


def _is_some_text(file: Path) -> bool:
    try:
        return bool(_read(file).strip())
    except NotUtf8:
        return False


def _in_file(file: Path | Traversable, category: str) -> list[Prompt]:
    """The prompts of one file; `category` is that of a raw text."""
    try:
        text = _read(file)
    except NotUtf8 as error:
        raise NGramSpecError(f"{file.name} is {error}") from error
    if file.name.endswith(".toml"):
        return list(_from_toml(text, file.name))
    if file.name.endswith(".jsonl"):
        return list(_from_jsonl(text, file.name))
    if not text.strip():
        raise NGramSpecError(f"{file.name} is empty")
    return [Prompt(file.name, category, text=text)]


def _read(file: Path | Traversable) -> str:
    """The text of a file; NotUtf8 if it is none."""
    try:
        text = utf8(file.read_bytes(), marked=True)
    except OSError as error:
        raise NGramSpecError(f"cannot read {file.name}: {error.strerror or error}") from error
    if "\0" in text:
        raise NotUtf8("not text (it holds NUL bytes)")
    return text


def _from_toml(text: str, where: str) -> Iterator[Prompt]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NGramSpecError(f"{where} is not valid TOML: {error}") from error
    _check_keys(data, _FILE_KEYS, where)
    for key in ("source", "licence"):
        if key in data:
            _string(data, key, where)
    category = _string(data, "category", where)
    entries = data.get("prompts")
    if not isinstance(entries, list):
        raise NGramSpecError(f"{where} has no [[prompts]]")
    for number, entry in enumerate(entries, 1):
        yield _prompt(entry, category, f"{where}, prompt {number}")


def _from_jsonl(text: str, where: str) -> Iterator[Prompt]:
    # Not splitlines(): JSON strings may hold U+2028 and others that it splits at.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise NGramSpecError(f"{place} is not valid JSON: {error}") from error
        if not isinstance(entry, dict):
            raise NGramSpecError(f"{place} is not a JSON object")
        category = _string(entry, "category", place)
        yield _prompt({k: v for k, v in entry.items() if k != "category"}, category, place)


def _prompt(entry: Any, category: str, where: str) -> Prompt:
    if not isinstance(entry, dict):
        raise NGramSpecError(f"{where} is not a table of keys and values")
    _check_keys(entry, _PROMPT_KEYS, where)
    name = _string(entry, "id", where)
    if ("text" in entry) == ("messages" in entry):
        raise NGramSpecError(f"{where} ({name}) needs either text or messages")
    if "text" in entry:
        if "system" in entry:
            raise NGramSpecError(f"{where} ({name}): a system message needs messages, not text")
        return Prompt(name, category, text=_string(entry, "text", where))
    messages = _messages(entry["messages"], f"{where} ({name})")
    if "system" in entry:
        if messages[0]["role"] == "system":
            raise NGramSpecError(f"{where} ({name}) has two system messages")
        messages.insert(0, {"role": "system", "content": _string(entry, "system", where)})
    return Prompt(name, category, messages=tuple(messages))


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise NGramSpecError(f"{where}: messages must be a list of at least one message")
    for number, message in enumerate(value, 1):
        place = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise NGramSpecError(f"{place} is not a table with role and content")
        _check_keys(message, frozenset({"role", "content"}), place)
        role = _string(message, "role", place)
        if role not in ROLES:
            raise NGramSpecError(f"{place}: role {role!r} is none of {', '.join(sorted(ROLES))}")
        if role == "system" and number > 1:
            raise NGramSpecError(f"{place}: a system message must come first")
        _string(message, "content", place)
    return [dict(message) for message in value]


def _string(table: dict[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise NGramSpecError(f"{where}: {key} must be a string that is not empty")
    return value


def _check_keys(table: dict[str, Any], known: Iterable[str], where: str) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise NGramSpecError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _check_unique(prompts: Iterable[Prompt], where: str) -> None:
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        if (prompt.category, prompt.id) in seen:
            raise NGramSpecError(f"{where}: two prompts of {prompt.category} have the id {prompt.id}")
        seen.add((prompt.category, prompt.id))


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt as token ids."""

    category: str
    id: str
    tokens: tuple[int, ...]


Skipped = dict[str, str]
"""The "category" and "id" of a prompt that cannot be run on this target, and the "reason"."""


def prepare(
    tokenizer: ChatTokenizer, prompts: Iterable[Prompt], max_tokens: int, n_ctx: int | None
) -> tuple[list[Case], list[Skipped]]:
    """Tokenize prompts; those that the chat template refuses are skipped, and those too long for a context.

    `max_tokens` are to be generated after each. Where there is no `n_ctx`, prompts of any length will do.
    """
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for prompt in prompts:
        tokens: list[int] = []
        reason = "no tokens"
        try:
            if prompt.text is not None:
                tokens = tokenizer.tokenize(prompt.text)
            else:
                tokens = tokenizer.chat_prompt(prompt.messages or ())
        except ModelError as error:
            reason = str(error)
        fits = n_ctx is None or len(tokens) + max_tokens <= n_ctx
        if tokens and fits:
            cases.append(Case(prompt.category, prompt.id, tuple(tokens)))
            continue
        if tokens:
            reason = f"{len(tokens)} tokens and {max_tokens} to generate are too long for a context of {n_ctx}"
        skipped.append({"category": prompt.category, "id": prompt.id, "reason": reason})
    return cases, skipped
