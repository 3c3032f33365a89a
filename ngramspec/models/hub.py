"""Models from the Hugging Face hub, through huggingface_hub.

huggingface_hub is an optional dependency (extra `hub`), imported only when a name asks for it. It
keeps the files in its own cache, shared with every other program that uses it; what is there needs no package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ngramspec.errors import ModelError
from ngramspec.models import hub_cache
from ngramspec.models.hub_files import PREFERRED, choose

PREFIX = "hf:"

Progress = Callable[[str, int, int | None], None]
"""Told about a running download: (file name, bytes so far, bytes in all or None when unknown)."""

_NAME = re.compile(PREFIX + r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<wanted>[^:\s][^:]*))?")
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})  # as huggingface_hub reads its switches
_LIST_TIMEOUT = 10.0  # seconds, huggingface_hub's own default for other requests


def fetch(name: str, env: Mapping[str, str], progress: Progress | None = None) -> tuple[Path, str]:
    """Get the GGUF file (all parts of it) that an `hf:` name asks for.

    From the hub, where files already in the local cache are not fetched again; from the cache alone
    when the hub cannot be reached, HF_HUB_OFFLINE is set, or the extra `hub` is not installed.

    Args:
        name: `hf:owner/repo`, `hf:owner/repo:QUANT` or `hf:owner/repo:FILE.gguf`; see `choose`.
        env: read for HF_ENDPOINT, LLAMA_CACHE, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE.
        progress: told about downloads.

    Returns:
        the path of the file (of the first part), and a short name for people.

    Raises:
        ModelError: the name is malformed; there is no such repository or file; access is not granted;
            the hub cannot be asked and the file is not in the cache; or the download failed.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ModelError(
            f"{name} is not a valid name; write {PREFIX}owner/repo, "
            f"{PREFIX}owner/repo:{PREFERRED[0]} or {PREFIX}owner/repo:file.gguf"
        )
    hub = _connect(name, match["repo"], env)
    listed: list[str] = []
    cached: dict[str, Path] = {}
    if hub is None:
        offline: str | None = 'it needs the package huggingface_hub; pip install "ngramspec[hub]"'
    elif env.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        offline = "HF_HUB_OFFLINE is set"
    else:
        listed, offline = hub.list_files()
    if offline is not None:
        cached = hub_cache.files(match["repo"], env)
        if not cached:
            raise ModelError(f"{name} is not in the local cache and cannot be fetched: {offline}")
        listed = list(cached)
    try:
        files = choose(listed, match["wanted"])
    except ModelError as error:
        hint = f" (only the local cache was searched: {offline})" if offline else ""
        raise ModelError(f"{name}: {error}{hint}") from None
    paths = [hub.download(file, progress) if hub and not cached else cached[file] for file in files]
    return paths[0], f"{match['repo']}:{PurePosixPath(files[0]).name}"


def _connect(name: str, repo: str, env: Mapping[str, str]) -> _Repository | None:
    """The repository, with the settings of `env`; None if the extra `hub` is not installed."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    endpoint = env.get("HF_ENDPOINT") or constants.ENDPOINT
    return _Repository(name, repo, endpoint.rstrip("/"), hub_cache.folder_of(repo, env))


@dataclass(frozen=True, slots=True)
class _Repository:
    """One repository on the hub.

    Attributes:
        name: what the user wrote, for messages.
        repo: owner/repo.
        endpoint: URL of the hub.
        cache: the cache folder.
    """

    name: str
    repo: str
    endpoint: str
    cache: Path

    def list_files(self) -> tuple[list[str], str | None]:
        """Paths of all files on the hub and None; or none, and why the hub could not be asked."""
        from huggingface_hub import HfApi, errors

        try:
            info = HfApi(endpoint=self.endpoint).model_info(self.repo, timeout=_LIST_TIMEOUT)
        except errors.HFValidationError as error:
            raise ModelError(f"{self.name} is not a valid name: {_line(error)}") from error
        except errors.GatedRepoError as error:
            raise self._gated() from error
        except errors.RepositoryNotFoundError as error:
            raise ModelError(
                f"{self.name}: there is no repository {self.repo} on {self.endpoint}, or it is "
                "private; check the name, or log in with `hf auth login`"
            ) from error
        except Exception as error:
            # The class of a failed connection depends on the HTTP client that this version of
            # huggingface_hub uses (requests, httpx, ...).
            return [], f"{self.endpoint} cannot be reached ({_line(error)})"
        return [sibling.rfilename for sibling in info.siblings or ()], None

    def download(self, file: str, progress: Progress | None) -> Path:
        """One file, from the cache when it is there and current."""
        from huggingface_hub import errors, hf_hub_download

        try:
            path = hf_hub_download(
                self.repo,
                file,
                endpoint=self.endpoint,
                cache_dir=self.cache,
                tqdm_class=_bar_class(file, progress),
            )
        except errors.GatedRepoError as error:
            raise self._gated() from error
        except Exception as error:  # see list_files
            raise ModelError(f"{self.name}: cannot download {file}: {_line(error)}") from error
        return Path(path)

    def _gated(self) -> ModelError:
        return ModelError(
            f"{self.name}: access to {self.repo} must be granted first; accept its terms at "
            f"{self.endpoint}/{self.repo}, then log in with `hf auth login` or set HF_TOKEN"
        )


def _line(error: Exception) -> str:
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


def _bar_class(file: str, progress: Progress | None) -> type:
    """A class that huggingface_hub takes for a tqdm progress bar, and that passes the counts on."""

    class Bar:
        def __init__(self, *, total: float | None = None, initial: float = 0, **_appearance: Any) -> None:
            self.total = total
            self.n = initial

        def update(self, step: float | None = 1) -> None:
            self.n += step or 0
            if progress is not None:
                progress(file, int(self.n), None if self.total is None else int(self.total))

        def update_transfer(self, step: float) -> None:
            """Bytes on the network, counted apart from those on the disk. Only the latter show."""

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def __getattr__(self, _appearance: str) -> Callable[..., None]:
            # close, refresh, set_postfix_str and so on: how a bar looks is the caller's business.
            return lambda *_args, **_kwargs: None

    return Bar
