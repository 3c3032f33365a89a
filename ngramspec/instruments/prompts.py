"""Prompts from the package or from the user's own files and folders.

    no path     the packaged prompts
    .toml       category, source, licence; per [[prompts]] an id, and text or messages
    .jsonl      per line an object with id, category, and text or messages
    other text  one raw text; its category is the file's name without the suffix
    folder      its .toml and .jsonl files, and every other text file as one raw text, whose
                category is the folder's name

`messages` is a list of {role, content}; the key `system` adds a system message before them.
Keys that are not listed here are an error.
"""

from __future__ import annotations

import importlib.resources
import json
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngramspec.data import NGramSpecError
from ngramspec.storage import utf8

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

PACKAGE = "ngramspec_prompts"

ROLES = ("assistant", "system", "tool", "user")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt; exactly one of `text` and `messages` is set."""

    id: str  # unique within its category
    category: str  # kind of text, by which a benchmark groups its results
    text: str | None = None  # raw text to continue without a chat template
    # Messages of a chat, each with "role" and "content"; a system message comes first.
    messages: tuple[dict[str, str], ...] | None = None


def load_prompts(path: Path | None) -> list[Prompt]:
    """Return all prompts of a file or folder, sorted by file name, and within a file in the given order.

    In a folder, hidden files, subfolders, empty files, files that are not UTF-8 text, and files named README or
    LICENCE/LICENSE are skipped.

    Args:
        path: File or folder; `None` means the packaged prompts.

    Raises:
        NGramSpecError: The file does not exist, cannot be read, is malformed, or contains no prompts.
    """
    if path is None:
        prompts = _load_packaged()
    elif path.is_dir():
        prompts = _load_folder(path)
    else:
        _require(path.is_file(), f"no such file or folder of prompts: {path}")
        prompts = _load_file(path, path.stem)
    where = path or PACKAGE
    _require(prompts, f"{where} contains no prompts")
    keys: set[tuple[str, str]] = set()
    for prompt in prompts:
        key = prompt.category, prompt.id
        _require(key not in keys, f"{where}: two prompts of {prompt.category} have the id {prompt.id}")
        keys.add(key)
    return prompts


def _load_packaged() -> list[Prompt]:
    try:
        files = sorted(importlib.resources.files(PACKAGE).iterdir(), key=lambda file: file.name)
    except (ModuleNotFoundError, OSError) as error:
        raise NGramSpecError("the packaged prompts are missing from this installation") from error
    return [prompt for file in files if file.name.endswith(".toml") for prompt in _load_file(file, "")]


def _load_folder(folder: Path) -> list[Prompt]:
    try:
        files = sorted(file for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise NGramSpecError(f"cannot read {folder}: {error.strerror or error}") from error
    category = folder.resolve().name
    prompts: list[Prompt] = []
    for file in files:
        if file.name.startswith(".") or file.stem.upper() in {"README", "LICENCE", "LICENSE"}:
            continue
        with suppress(UnicodeError):
            if file.suffix in (".toml", ".jsonl") or _read(file).strip():
                prompts += _load_file(file, category)
    return prompts


def _load_file(file: Path | Traversable, category: str) -> list[Prompt]:
    """Return the prompts of one file; `category` is used for a raw text."""
    try:
        text = _read(file)
    except UnicodeError as error:
        raise NGramSpecError(f"{file.name} is {error}") from error
    if file.name.endswith(".toml"):
        return _parse_toml(text, file.name)
    if file.name.endswith(".jsonl"):
        return list(_parse_jsonl(text, file.name))
    _require(text.strip(), f"{file.name} is empty")
    return [Prompt(file.name, category, text=text)]


def _read(file: Path | Traversable) -> str:
    """Return the text of a file; raise a UnicodeError if it is not text."""
    try:
        text = utf8(file.read_bytes())
    except OSError as error:
        raise NGramSpecError(f"cannot read {file.name}: {error.strerror or error}") from error
    if "\0" in text:
        raise UnicodeError("not text (it holds NUL bytes)")
    return text


def _parse_toml(text: str, where: str) -> list[Prompt]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NGramSpecError(f"{where} is not valid TOML: {error}") from error
    _check_keys(data, ("category", "licence", "prompts", "source"), where)
    for key in {"source", "licence"} & data.keys():
        _string(data, key, where)
    category = _string(data, "category", where)
    entries = data.get("prompts")
    if not isinstance(entries, list):
        raise NGramSpecError(f"{where} has no [[prompts]]")
    return [_prompt(entry, category, f"{where}, prompt {number}") for number, entry in enumerate(entries, 1)]


def _parse_jsonl(text: str, where: str) -> Iterator[Prompt]:
    # splitlines() would also split at U+2028 and other characters that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise NGramSpecError(f"{place} is not valid JSON: {error}") from error
        _require(isinstance(entry, dict), f"{place} is not a JSON object")
        category = _string(entry, "category", place)
        yield _prompt({k: v for k, v in entry.items() if k != "category"}, category, place)


def _prompt(entry: Any, category: str, where: str) -> Prompt:
    _require(isinstance(entry, dict), f"{where} is not a table of keys and values")
    _check_keys(entry, ("id", "messages", "system", "text"), where)
    name = _string(entry, "id", where)
    _require(("text" in entry) != ("messages" in entry), f"{where} ({name}) requires either text or messages")
    if "text" in entry:
        _require("system" not in entry, f"{where} ({name}): a system message requires messages, not text")
        return Prompt(name, category, text=_string(entry, "text", where))
    messages = _messages(entry["messages"], f"{where} ({name})")
    if "system" in entry:
        _require(messages[0]["role"] != "system", f"{where} ({name}) has two system messages")
        messages.insert(0, {"role": "system", "content": _string(entry, "system", where)})
    return Prompt(name, category, messages=tuple(messages))


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    _require(isinstance(value, list) and value, f"{where}: messages must be a list of at least one message")
    for number, message in enumerate(value, 1):
        place = f"{where}, message {number}"
        _require(isinstance(message, dict), f"{place} is not a table with role and content")
        _check_keys(message, ("content", "role"), place)
        role = _string(message, "role", place)
        _require(role in ROLES, f"{place}: role must be one of {', '.join(ROLES)}, got {role!r}")
        _require(role != "system" or number == 1, f"{place}: a system message must come first")
        _string(message, "content", place)
    return [dict(message) for message in value]


def _string(table: dict[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise NGramSpecError(f"{where}: {key} must be a non-empty string")
    return value


def _check_keys(table: dict[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in sorted(table.keys() - set(allowed)):
        raise NGramSpecError(f"{where}: unknown key {key!r}; known keys: {', '.join(allowed)}")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise NGramSpecError(message)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt as token ids."""

    category: str
    id: str
    tokens: tuple[int, ...]


SkippedPrompt = dict[str, str]
"""The "category" and "id" of a prompt that this target cannot run, and the "reason"."""


def prepare(
    tokenizer: Vocabulary, prompts: Iterable[Prompt], max_tokens: int, n_ctx: int | None
) -> tuple[list[Case], list[SkippedPrompt]]:
    """Tokenize prompts, and skip those that the chat template rejects or that are too long for the context.

    Args:
        tokenizer: Vocabulary of the model.
        prompts: Prompts to tokenize.
        max_tokens: Number of tokens to generate after each prompt.
        n_ctx: Size of the context; `None` means no limit.

    Returns:
        Cases to run, and skipped prompts.

    Raises:
        NGramSpecError: All prompts were skipped.
    """
    cases: list[Case] = []
    skipped_prompts: list[SkippedPrompt] = []
    for prompt in prompts:
        try:
            if prompt.text is not None:
                tokens = tokenizer.tokenize(prompt.text)
            else:
                tokens = tokenizer.chat_prompt(prompt.messages or ())
            _require(tokens, "no tokens")
            is_short_enough = n_ctx is None or len(tokens) + max_tokens <= n_ctx
            message = f"{len(tokens)} tokens and {max_tokens} to generate do not fit in a context of {n_ctx}"
            _require(is_short_enough, message)
            cases.append(Case(prompt.category, prompt.id, tuple(tokens)))
        except NGramSpecError as error:
            skipped_prompts.append({"category": prompt.category, "id": prompt.id, "reason": str(error)})
    if not cases and skipped_prompts:
        first = skipped_prompts[0]
        raise NGramSpecError(
            f"all {len(skipped_prompts)} prompts were skipped; {first['category']}/{first['id']}: {first['reason']}"
        )
    return cases, skipped_prompts
