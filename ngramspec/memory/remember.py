"""Whether answers are remembered: a TOML file in the user's configuration folder, which can say `remember = true`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from ngramspec.errors import NGramSpecError
from ngramspec.storage import NotUtf8, config_folder, utf8, write_whole


class SettingsError(NGramSpecError):
    """The settings cannot be read or written."""


def settings_path() -> Path:
    """Where the settings are kept."""
    return config_folder() / "config.toml"


def remembers(path: Path | None = None) -> bool:
    """Whether the answers of this session are kept in the memory for later ones; not unless the file says so.

    Raises:
        SettingsError: it cannot be read, is no TOML, or has a key or a value that means nothing.
    """
    return _parse(_read(path or settings_path()), path or settings_path())


def write_remember(value: bool, path: Path | None = None) -> None:
    """Switch `remember` on or off; whatever else stands in the file stays.

    Raises:
        SettingsError: the file cannot be used or written; it is then as before.
    """
    path = path or settings_path()
    text = _read(path)
    _parse(text, path)
    line = f"remember = {str(value).lower()}"
    text, count = re.subn(r"^[ \t]*(\"?)remember\1[ \t]*=[ \t]*(true|false)", line, text, count=1, flags=re.MULTILINE)
    if not count:
        text = f"{line}\n{text}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.resolve()  # a link stays a link
        write_whole(path, text)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror or error}") from error


def _read(path: Path) -> str:
    try:
        return utf8(path.read_bytes())
    except FileNotFoundError:
        return ""
    except (OSError, NotUtf8) as error:
        raise SettingsError(f"cannot read the settings in {path}: {getattr(error, 'strerror', error)}") from error


def _parse(text: str, path: Path) -> bool:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"the settings in {path} are no TOML ({error}); mend the file or delete it") from error
    for key, value in values.items():
        if key != "remember":
            raise SettingsError(f"the settings in {path} name {key!r}; there is only: remember")
        if not isinstance(value, bool):
            raise SettingsError(f"the settings in {path} say {key} = {value!r}, but it must be true or false")
    return bool(values.get("remember"))
