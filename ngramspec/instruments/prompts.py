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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ngramspec.data import NGramSpecError
from ngramspec.instruments.reports.report import limit_lines
from ngramspec.storage import utf8

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

PACKAGE = "ngramspec_prompts"

ROLES = ("assistant", "system", "tool", "user")


def _check_text(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Text = Annotated[str, AfterValidator(_check_text)]


def _check_message(message: dict[str, str]) -> dict[str, str]:
    if message.keys() != {"role", "content"}:
        raise ValueError(f"must have the keys role and content, got {', '.join(message)}")
    if message["role"] not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, got {message['role']!r}")
    _check_text(message["content"])
    return message


Message = Annotated[dict[str, str], AfterValidator(_check_message)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Prompt:
    """A prompt; exactly one of `text` and `messages` is set."""

    id: Text  # unique within its category
    category: Text  # kind of text, by which a benchmark groups its results
    text: Text | None = None  # raw text to continue without a chat template
    messages: Annotated[tuple[Message, ...], Field(min_length=1)] | None = None  # a system message comes first
    system: Text | None = None  # system message of a file, which is added to `messages`

    def __post_init__(self) -> None:
        roles = [message["role"] for message in self.messages or ()]
        if (self.text is None) == (self.messages is None):
            raise ValueError("requires either text or messages")
        if self.text is not None and self.system is not None:
            raise ValueError("a system message requires messages, not text")
        if "system" in roles[0 if self.system is not None else 1 :]:
            raise ValueError("has two system messages" if roles[0] == "system" else "a system message must come first")
        if self.system is not None:
            system = {"role": "system", "content": self.system}
            object.__setattr__(self, "messages", (system, *(self.messages or ())))
            object.__setattr__(self, "system", None)


class _File(BaseModel, extra="forbid"):
    category: Text
    source: Text | None = None
    licence: Text | None = None
    prompts: list[dict[str, Any]]


def _validate(kind: Any, data: object, where: str) -> Any:
    """Return the data as an instance of a type; an NGramSpecError names the place of the first error, from 1."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        messages = {
            "missing": "is missing",
            "unexpected_keyword_argument": "unknown key",
            "extra_forbidden": "unknown key",
        }
        message = messages.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise NGramSpecError(": ".join(filter(None, (where, place.lstrip("."), message)))) from None


def load_prompts(path: Path | None) -> list[Prompt]:
    """Return all prompts of a file or folder, in order; `None` means the packaged ones."""
    if path is None:
        try:
            files = sorted(importlib.resources.files(PACKAGE).iterdir(), key=lambda file: file.name)
        except (ModuleNotFoundError, OSError) as error:
            raise NGramSpecError("the packaged prompts are missing from this installation") from error
        prompts = [prompt for file in files if file.name.endswith(".toml") for prompt in _load_file(file, "")]
    elif path.is_dir():
        prompts = _load_folder(path)
    elif path.is_file():
        prompts = [*_load_file(path, path.stem)]
    else:
        raise NGramSpecError(f"no such file or folder of prompts: {path}")
    where = path or PACKAGE
    if not prompts:
        raise NGramSpecError(f"{where} contains no prompts")
    keys: set[tuple[str, str]] = set()
    for prompt in prompts:
        key = prompt.category, prompt.id
        if key in keys:
            raise NGramSpecError(f"{where}: two prompts of {prompt.category} have the id {prompt.id}")
        keys.add(key)
    return prompts


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


def _load_file(file: Path | Traversable, category: str) -> Iterator[Prompt]:
    """Yield the prompts of one file; `category` is used for a raw text."""
    name = file.name
    try:
        text = _read(file)
    except UnicodeError as error:
        raise NGramSpecError(f"{name} is {error}") from error
    if name.endswith(".jsonl"):
        # splitlines() would also split at U+2028 and other characters that JSON strings may contain.
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise NGramSpecError(f"{name}, line {number} is not valid JSON: {error}") from error
            yield _validate(Prompt, entry, f"{name}, line {number}")
    elif name.endswith(".toml"):
        try:
            content = _validate(_File, tomllib.loads(text), name)
        except tomllib.TOMLDecodeError as error:
            raise NGramSpecError(f"{name} is not valid TOML: {error}") from error
        for number, entry in enumerate(content.prompts, 1):
            yield _validate(Prompt, {"category": content.category} | entry, f"{name}, prompt {number}")
    else:
        yield _validate(Prompt, {"id": name, "category": category, "text": text}, name)


def _read(file: Path | Traversable) -> str:
    """Return the text of a file; raise a UnicodeError if it is not text."""
    try:
        text = utf8(file.read_bytes())
    except OSError as error:
        raise NGramSpecError(f"cannot read {file.name}: {error.strerror or error}") from error
    if "\0" in text:
        raise UnicodeError("not text (it holds NUL bytes)")
    return text


class Case(NamedTuple):
    category: str
    id: str
    tokens: Sequence[int]


SkippedPrompt = dict[str, str]
"""The "category" and "id" of a prompt that this target cannot run, and the "reason"."""


def prepare(
    tokenizer: Vocabulary, prompts: Iterable[Prompt], max_tokens: int, n_ctx: int | None
) -> tuple[list[Case], list[SkippedPrompt]]:
    """Return the prompts as tokens, and those that the template rejects or that are too long for a context."""
    cases: list[Case] = []
    skipped_prompts: list[SkippedPrompt] = []
    for prompt in prompts:
        try:
            if prompt.text is not None:
                tokens = tokenizer.tokenize(prompt.text)
            else:
                tokens = tokenizer.chats.tokens(prompt.messages or ())
            if not tokens:
                raise NGramSpecError("no tokens")
            if n_ctx is not None and len(tokens) + max_tokens > n_ctx:
                size = f"{len(tokens)} tokens and {max_tokens} to generate"
                raise NGramSpecError(f"{size} do not fit in a context of {n_ctx}")
            cases.append(Case(prompt.category, prompt.id, tuple(tokens)))
        except NGramSpecError as error:
            skipped_prompts.append({"category": prompt.category, "id": prompt.id, "reason": str(error)})
    if not cases and skipped_prompts:
        first = skipped_prompts[0]
        raise NGramSpecError(
            f"all {len(skipped_prompts)} prompts were skipped; {first['category']}/{first['id']}: {first['reason']}"
        )
    return cases, skipped_prompts


def format_skipped(prompts: Sequence[SkippedPrompt]) -> list[str]:
    lines = [f"skipped {prompt['category']}/{prompt['id']}: {prompt['reason']}" for prompt in prompts]
    return limit_lines(lines, "prompts skipped in total")
