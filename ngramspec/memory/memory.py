"""`Memory`: texts that a drafter searches in addition to the context, in a folder with a file for each tokenizer.

A TOML file in the user's configuration folder can contain `save_answers = true`, so that answers are saved.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ngramspec.data import NGramSpecError, get_reason
from ngramspec.drafting.mixture.drafter import TextIndexSet
from ngramspec.drafting.token_index import SEAM, TokenIndex
from ngramspec.memory.store import NOTHING, Contents, MemoryFileError, Store
from ngramspec.storage import FOLDERS, utf8, write_whole


class Memory(TextIndexSet):
    """Texts of earlier sessions, of the user's files, and of this process, whose indexes come last in `indexes`."""

    def __init__(
        self, contents: Contents = NOTHING, *, store: Store | None = None, saves_answers: bool = False
    ) -> None:
        self._store, self._contents = store, contents
        self.saves_answers = saves_answers and store is not None  # for later sessions
        super().__init__(_indexes(contents))

    @property
    def n_stored_tokens(self) -> int:
        """Number of tokens from the store, including seams."""
        return sum(index.size for index in self.indexes[: -len(self._session_indexes)])

    def refresh(self) -> None:
        """Load the store again if it was rewritten; do nothing if its file cannot be used."""
        with suppress(MemoryFileError):
            if self._store is None or self._store.generation() == self._contents.generation:
                return
            self._contents = self._store.read()
            if self.saves_answers:
                # The file now contains the texts added in this process.
                self._session_indexes = [TokenIndex()]
            self.indexes[:] = [*_indexes(self._contents), *self._session_indexes]

    def save_answer(self, tokens: Sequence[int]) -> None:
        """Save an answer for later sessions if `saves_answers` is set."""
        if tokens and self.saves_answers and self._store is not None:
            self._store.append(tokens)


def _indexes(contents: Contents) -> list[TokenIndex]:
    """Return the index of the store and that of its latest answers, without empty ones."""
    latest = TokenIndex()
    for answer in contents.answers:
        latest.extend(answer.tokens.tolist())
        latest.append(SEAM)
    return [index for index in (contents.index, latest) if index is not None and index.size]


DEFAULT = "default"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def memory_folder(name: str = DEFAULT) -> Path:
    """Return the folder of the memory `name`, which need not exist; raise a MemoryFileError if it is not allowed."""
    if not _NAME.fullmatch(name):
        raise MemoryFileError(
            f"{name!r} is not a valid name for a memory: use up to 64 letters, digits, '_', '-' and '.',"
            " and do not begin with '-' or '.'"
        )
    return FOLDERS.user_data_path / "memory" / name


def memory_names() -> list[str]:
    """Return the names of the memories that are not empty."""
    try:
        paths = sorted((FOLDERS.user_data_path / "memory").iterdir())
    except OSError:
        return []
    return [path.name for path in paths if _NAME.fullmatch(path.name) and Store.all_in(path)]


def settings_path() -> Path:
    return FOLDERS.user_config_path / "config.toml"


def saves_answers(path: Path | None = None) -> bool:
    """Return True if answers are saved to the memory for later sessions; raise an NGramSpecError for a wrong file."""
    return _read_settings(path or settings_path())[1]


def write_save_answers(value: bool, path: Path | None = None) -> None:
    """Set `save_answers` and leave the rest of the file unchanged, or all of it if it cannot be used or written."""
    path = path or settings_path()
    text, _ = _read_settings(path)
    line = f"save_answers = {str(value).lower()}"
    pattern = re.compile(r"^[ \t]*(\"?)save_answers\1[ \t]*=[ \t]*(true|false)", re.MULTILINE)
    text, count = pattern.subn(line, text, count=1)
    text = text if count else f"{line}\n{text}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.resolve()  # replaces the file that a link points to, and not the link
        write_whole(path, text)
    except OSError as error:
        raise NGramSpecError(f"cannot write {path}: {error.strerror or error}") from error


def _read_settings(path: Path) -> tuple[str, bool]:
    """Return the text of the file and its value of `save_answers`."""
    try:
        text = utf8(path.read_bytes())
        values = tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):  # NotADirectoryError occurs with HOME=/dev/null
        return "", False
    except tomllib.TOMLDecodeError as error:
        raise NGramSpecError(f"the settings in {path} are not valid TOML ({error}); fix or delete the file") from error
    except (OSError, UnicodeError) as error:
        raise NGramSpecError(f"cannot read the settings in {path}: {get_reason(error)}") from error
    for key, value in values.items():
        if key != "save_answers":
            raise NGramSpecError(f"unknown setting {key!r} in {path}; known settings: save_answers")
        if not isinstance(value, bool):
            raise NGramSpecError(f"{key} in {path} must be true or false, got {value!r}")
    return text, bool(values.get("save_answers"))


def open_memory(
    name: str | None, vocabulary_hash: bytes, path: Path, *, on_note: Callable[[str], object], keep: bool
) -> Memory:
    """Return a memory for the tokenizer of a model file: the named one, or the default memory, which need not exist.

    With `keep`, it saves answers for later sessions, if the user has enabled that. An NGramSpecError means that the
    named memory contains nothing for this tokenizer.
    """
    keep = keep and saves_answers()
    folder = memory_folder(name or DEFAULT)
    store = Store(folder, vocabulary_hash, path.name)
    if name is None and not keep and not Store.all_in(folder):
        return Memory(store=store)
    try:
        contents = store.read()
    except MemoryFileError as error:
        on_note(f"warning: memory {name or DEFAULT!r} is not used: {error}")
        return Memory()
    if not contents.generation and not keep:
        missing = f"memory {name or DEFAULT!r} has no files for this model's tokenizer"
        advice = f"ngramspec memory add --memory {name or DEFAULT} --model {path} PATH adds files"
        if name is not None:
            raise NGramSpecError(f"{missing} ({advice})")
        on_note(f"{missing}, only for other tokenizers ({advice})")
    return Memory(contents, store=store, saves_answers=keep)
