"""Classes in a user's Python file: `--drafter FILE.py:Class` and `--policy FILE.py:Class`.

Loading a class runs its file. All errors of the file are reported in one line that names the file and the line.
"""

from __future__ import annotations

import inspect
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, TypeVar, cast

from ngramspec.data import NGramSpecError
from ngramspec.storage import UTF16, is_utf16

FORM = "FILE.py:Class"

Base = TypeVar("Base")

_modules: dict[Path, tuple[int, ModuleType]] = {}  # time of modification and module of each file


class UserCodeError(NGramSpecError):
    """A user's class cannot be loaded, or its code raised an error."""


def is_user_class(name: str) -> bool:
    """Return True if a name means a file, and not one of ngramspec's own classes."""
    return ".py" in name


def load_class(name: str, base: Callable[..., Base]) -> type[Base]:
    """Load a class from FILE.py:Class; raise a UserCodeError if it has no such complete subclass of `base`."""
    kind = cast(type[Base], base)  # as a callable, because the type checker rejects an abstract class as a type
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py") or not class_name.isidentifier():
        raise UserCodeError(f"{name!r} does not name a class; use {FORM}")
    path = Path(file).expanduser()
    module = _load_module(path)
    value = getattr(module, class_name, None)
    if not isinstance(value, type):
        classes = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, kind)]
        own = [item.__name__ for item in classes if item.__module__ == module.__name__]
        raise UserCodeError(f"{path} has no class {class_name!r}; its classes for this option: {', '.join(own) or '-'}")
    if not issubclass(value, kind):
        raise UserCodeError(f"{name} must be derived from ngramspec.{kind.__name__}")
    if isinstance(value, ABCMeta) and (missing := value.__abstractmethods__):
        raise UserCodeError(f"{name} lacks the methods: {', '.join(sorted(missing))}")
    return value


def construct(name: str, kind: type[Base], arguments: Mapping[str, Any]) -> Base:
    """Construct a user's class; raise a UserCodeError if it does not accept these arguments or raises an error."""
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        words = f"the arguments {', '.join(arguments)}" if arguments else "no arguments"
        raise UserCodeError(f"the constructor of {name} must accept {words}: {error}") from error
    with user_code(name):
        return kind(**arguments)


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Report every error that a user's class raises as a UserCodeError with its file and line."""
    try:
        yield
    except UserCodeError:
        raise
    except Exception as error:
        raise UserCodeError(_describe(name, name.rpartition(":")[0], error)) from error


def _load_module(path: Path) -> ModuleType:
    try:
        modified_at, source = path.stat().st_mtime_ns, path.read_bytes()
    except OSError as error:
        raise UserCodeError(f"cannot read {path}: {error.strerror}") from error
    if is_utf16(source):
        raise UserCodeError(f"{path} is {UTF16}")
    path = path.resolve()
    if path in _modules and _modules[path][0] == modified_at:
        return _modules[path][1]
    # Unique, so that a file called `json.py` does not replace the module of that name.
    name = f"ngramspec_user_{len(_modules)}_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        # Not an import, which would write a folder `__pycache__` next to the user's file.
        exec(compile(source, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserCodeError(_describe(str(path), str(path), error)) from error
    _modules[path] = modified_at, module
    return module


def _describe(name: str, file: str, error: BaseException) -> str:
    """Return the message of an error, with the innermost line of the user's file."""
    path = os.path.realpath(os.path.expanduser(file))
    lines = [number for frame, number in walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    words = str(error)
    if isinstance(error, SyntaxError):
        lines, words, file = [error.lineno or 1], error.msg, error.filename or file
    place = f" ({file}, line {lines[-1]})" if lines else ""
    message = " ".join(words.split())
    return f"{name} failed: {type(error).__name__}{': ' if message else ''}{message}{place}"
