"""Models of the Hugging Face hub, downloaded with huggingface_hub (extra `hub`) or taken from its documented cache."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from ngramspec.data import ModelError
from ngramspec.models.check import SPLIT_NAME, is_companion, join_names
from ngramspec.models.gguf import read_header

PREFIX = "hf:"

PREFERRED_QUANTS = ("Q4_K_M", "Q8_0")  # in order of preference, as in llama.cpp's `common/download.cpp`
Progress = Callable[[str, int, int | None], None]  # (file name, bytes so far, bytes in all or None if unknown)
_NAME = re.compile(PREFIX + r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<wanted>[^:\s][^:]*))?")
_REPO_PREFIX = "models--"  # prefix of a repository's folder in the cache

# Parts of the names of files that may accompany a model (images and audio, statistics, and draft heads), and names
# of such files. llama.cpp's converter begins the names of heads so; Model-MTP.gguf is a model with a head.
_HINT = re.compile("mmproj|imatrix|mtp|eagle3|dflash|dspark")
_COMPANION = re.compile(r"(mtp|eagle3|dflash|dspark)-|imatrix|.*mmproj")
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|FP?16|FP?32)(?![A-Za-z0-9])", re.IGNORECASE
)
_GATED = (
    "{0}: access to {1} must be granted first; accept its terms at {2}/{1}, then log in with `hf auth login`"
    " or set HF_TOKEN"
)


def fetch(name: str, env: Mapping[str, str], progress: Progress | None = None) -> tuple[Path, str]:
    """Return the (first) path of the GGUF file of an `hf:` name, and a short name; download what the cache lacks."""
    match = _NAME.fullmatch(name)
    if match is None:
        repo = f"{PREFIX}owner/repo"
        raise ModelError(f"{name} is not a valid name; use {repo}, {repo}:{PREFERRED_QUANTS[0]} or {repo}:file.gguf")
    repo = match["repo"]
    folder = _repo_folder(repo, env)
    endpoint, names, offline = _list_files(name, repo, env)
    cached_files = _gguf_files(folder) if offline else {}
    if offline and not cached_files:
        raise ModelError(f"{name} is not in the local cache and cannot be downloaded: {offline}")
    try:
        files = choose(cached_files or names, match["wanted"], cached_files)
    except ModelError as error:
        hint = f" (only the local cache was searched: {offline})" if offline else ""
        raise ModelError(f"{name}: {error}{hint}") from None
    download = partial(_download, name, repo, endpoint, folder.parent, progress)
    paths = [cached_files[file] if offline else download(file) for file in files]
    return paths[0], f"{repo}:{PurePosixPath(files[0]).name}"


def _list_files(name: str, repo: str, env: Mapping[str, str]) -> tuple[str, list[str], str]:
    """Return the hub's address, the paths of all files of a repository, and "" or why they cannot be listed."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return "", [], 'the package huggingface_hub is not installed; pip install "ngramspec[hub]"'
    endpoint = (env.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    if env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):  # values that huggingface_hub accepts
        return endpoint, [], "--offline or HF_HUB_OFFLINE is set"
    from huggingface_hub import HfApi, errors  # these import an HTTP client

    try:
        info = HfApi(endpoint=endpoint).model_info(repo, timeout=10.0)  # huggingface_hub's default for other requests
    except errors.HFValidationError as error:
        raise ModelError(f"{name} is not a valid name: {_line(error)}") from error
    except errors.GatedRepoError as error:
        raise ModelError(_GATED.format(name, repo, endpoint)) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}: the repository {repo} does not exist on {endpoint}, or it is "
            "private; check the name, or log in with `hf auth login`"
        ) from error
    except Exception as error:
        # The class of a failed connection depends on the HTTP client that this version of huggingface_hub uses.
        return endpoint, [], f"{endpoint} cannot be reached ({_line(error)})"
    return endpoint, [sibling.rfilename for sibling in info.siblings or ()], ""


def _download(name: str, repo: str, endpoint: str, cache: Path, progress: Progress | None, file: str) -> Path:
    """Return the path of a file, which is downloaded unless the cache contains it and it is current."""
    from huggingface_hub import errors, hf_hub_download

    bar = _bar_class(file, progress)
    try:
        return Path(hf_hub_download(repo, file, endpoint=endpoint, cache_dir=cache, tqdm_class=bar))
    except errors.GatedRepoError as error:
        raise ModelError(_GATED.format(name, repo, endpoint)) from error
    except Exception as error:  # see _list_files
        raise ModelError(f"{name}: cannot download {file}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """Return the first line of an error's message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


def _bar_class(file: str, progress: Progress | None) -> type:
    """Return a class that huggingface_hub uses as a tqdm progress bar, and that reports to `progress`."""

    class Bar:
        def __init__(self, *, total: float | None = None, initial: float = 0, **_appearance: Any) -> None:
            self.total = total
            self.n = initial

        def update(self, step: float | None = 1) -> None:
            self.n += step or 0
            if progress is not None:
                progress(file, int(self.n), None if self.total is None else int(self.total))

        def update_transfer(self, step: float) -> None:
            """Ignore bytes on the network: only those on the disk are reported."""

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def __getattr__(self, _appearance: str) -> Callable[..., None]:
            # This covers close, refresh, set_postfix_str and so on, because the caller decides how a bar looks.
            return lambda *_args, **_kwargs: None

    return Bar


def list_cached(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield all models in the cache: the name, as `fetch` accepts it, and the file."""
    for folder in _folders(env):
        for repo_folder in sorted(folder.glob(f"{_REPO_PREFIX}*--*")):
            repo = repo_folder.name.removeprefix(_REPO_PREFIX).replace("--", "/", 1)
            if _repo_folder(repo, env) == repo_folder:
                files = _gguf_files(repo_folder).items()
                yield from ((f"{PREFIX}{repo}:{name}", path) for name, path in files if is_model(name, path))


def _folders(env: Mapping[str, str]) -> list[Path]:
    """Return the folders of the cache: first that for llama.cpp only, then that which huggingface_hub uses too."""
    shared, below = env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface/hub"
    for name, folder_below in (("HF_HOME", "hub"), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HUB_CACHE", "")):
        if env.get(name):  # the last one has priority
            shared, below = env[name], folder_below
    folders = [env["LLAMA_CACHE"]] if env.get("LLAMA_CACHE") else []
    return list(dict.fromkeys(Path(os.path.expanduser(folder)) for folder in (*folders, f"{shared}/{below}")))


def _repo_folder(repo: str, env: Mapping[str, str]) -> Path:
    """Return the folder of a repository in the cache; a new one is in the first folder, which llama.cpp would use."""
    folders = [folder / f"{_REPO_PREFIX}{repo.replace('/', '--')}" for folder in _folders(env)]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def _gguf_files(repo_folder: Path) -> dict[str, Path]:
    """Return the .gguf files of a cached repository's main branch, or of another one, by their paths in it."""
    refs = repo_folder / "refs"
    for ref in (refs / "main", *sorted(refs.glob("*"))):
        try:
            snapshot = repo_folder / "snapshots" / ref.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
        if snapshot.is_dir():
            paths = sorted(file for file in snapshot.rglob("*.gguf") if file.is_file())
            return {file.relative_to(snapshot).as_posix(): file for file in paths}
    return {}


def choose(
    paths: Iterable[str], file_or_quant: str | None, local: Mapping[str, Path] = MappingProxyType({})
) -> list[str]:
    """Choose the files of a model in a repository, in the order of its parts; `local` are those on this disk by path.

    `file_or_quant` is a file name that ends in .gguf (its folder may be left out), or a quantisation such as Q4_K_M.
    `None` means one of `PREFERRED_QUANTS`, and otherwise any. The first of several matches is chosen, as in llama.cpp.
    """
    models: dict[str, list[str]] = {}  # paths of a model's files in order, by the path of the first
    for file in sorted(path for path in paths if is_model(path, local.get(path))):
        split = SPLIT_NAME.match(file)
        first = f"{split['stem']}-00001-of-{split['parts']}.gguf" if split else file
        models.setdefault(first, []).append(file)
    if not models:
        raise ModelError("this repository contains no GGUF model")
    if file_or_quant is None:
        matches = next(filter(None, (_filter_by_quant(models, quant) for quant in PREFERRED_QUANTS)), list(models))
    elif file_or_quant.lower().endswith(".gguf"):
        matches = [first for first, files in models.items() if file_or_quant in files]
        if not matches:
            names = {first: [PurePosixPath(file).name for file in files] for first, files in models.items()}
            matches = [first for first in models if file_or_quant in names[first]]
        if not matches:
            close = difflib.get_close_matches(file_or_quant, models, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it has {join_names(models, 12)}"
            raise ModelError(f"there is no model file {file_or_quant} in this repository; {hint}")
        if len(matches) > 1:
            raise ModelError(
                f"{file_or_quant} is the name of several files; name one of them: {join_names(matches, 12)}"
            )
    else:
        matches = _filter_by_quant(models, file_or_quant)
        if not matches:
            words = [_QUANT.findall(PurePosixPath(model).name.removesuffix(".gguf")) for model in models]
            has = sorted({found[-1] if found else model for model, found in zip(models, words, strict=True)})
            raise ModelError(f"there is no {file_or_quant} in this repository; it has {join_names(has, 12)}")
    files = models[matches[0]]
    split = SPLIT_NAME.match(matches[0])
    if split is not None and len(files) != int(split["parts"]):
        raise ModelError(f"only {len(files)} of the {int(split['parts'])} parts of {matches[0]} are there")
    return files


def is_model(file: str, path: Path | None = None) -> bool:
    """Return True if a file is a model and not a companion, by its name, or by its header if the name is unclear."""
    name = PurePosixPath(file).name.lower()
    if not name.endswith(".gguf") or not _HINT.search(name):
        return name.endswith(".gguf")
    if path is not None:
        with suppress(ModelError, OSError, ValueError):
            return not is_companion(read_header(path))
    # A model that was quantised with an importance matrix may be called Model-Q4_K_M-imatrix.gguf.
    return not _COMPANION.match(name) and ("imatrix" not in name or _QUANT.search(name) is not None)


def _filter_by_quant(models: Iterable[str], quant: str) -> list[str]:
    """Return the models with `quant` as a word in their path; without any, those with a word that ends with it."""
    # Q2_K_XL matches UD-Q2_K_XL, Q4_K never Q4_K_M, and F16 matches BF16, as in llama.cpp, if there is no F16.
    names, end = list(models), rf"{re.escape(quant)}(?![A-Za-z0-9_])"
    words = (re.compile(pattern, re.IGNORECASE) for pattern in (rf"(?<![A-Za-z0-9]){end}", end))
    return next(filter(None, ([name for name in names if word.search(name)] for word in words)), [])
