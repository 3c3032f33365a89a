"""Tests of the installed packages: their names and their files."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.imports import ROOT, find_modules, find_names

DATA = {".css", ".gguf", ".html", ".js", ".json", ".md", ".npz", ".pxd", ".toml", ".typed"}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def test_packages_have_separate_names_and_list_all_folders() -> None:
    folders = SETUPTOOLS["package-dir"]
    assert folders == {"ngramspec": "ngramspec", "ngramspec_cli": "cli", "ngramspec_prompts": "prompts"}
    packages = SETUPTOOLS["packages"]
    assert {name.split(".")[0] for name in packages} == set(folders)
    inner = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "ngramspec").rglob("__init__.py")}
    assert inner == {name for name in packages if name.split(".")[0] == "ngramspec"}
    assert PROJECT["project"]["scripts"] == {"ngramspec": "ngramspec_cli.app:main"}


def test_package_data_contains_every_data_file() -> None:
    data = SETUPTOOLS["package-data"]
    files = [path for path in (ROOT / "ngramspec").rglob("*.*") if path.suffix in DATA]
    assert len(files) > 10
    named = [(ROOT / Path(*name.split(".")), pattern) for name in data if name != "*" for pattern in data[name]]
    carried = {path for folder, pattern in named for path in folder.glob(pattern)}
    for path in files:
        assert path in carried or any(path.match(pattern) for pattern in data["*"]), path


def test_dependencies_contain_every_imported_package() -> None:
    spelt = {"llama_cpp": "llama-cpp-python", "prompt_toolkit": "prompt-toolkit", "huggingface_hub": "huggingface-hub"}
    spelt["markdown_it"] = "markdown-it-py"
    own = {"ngramspec", "ngramspec_cli", "ngramspec_prompts", "libc", "_typeshed"}  # the last are Cython's and mypy's
    wanted = set()
    for module, path in find_modules(ROOT).items():
        names = {name.split(".")[0] for name in find_names(module, path.read_text("utf-8"))[0]}
        wanted |= {spelt.get(name, name) for name in names if name not in sys.stdlib_module_names | own}
    extras = PROJECT["project"]["optional-dependencies"]
    required = PROJECT["project"]["dependencies"] + [line for e in ("hub", "server", "llm") for line in extras[e]]
    assert wanted <= {re.split(r"[^\w-]", line)[0] for line in required}


def compiled_modules() -> set[str]:
    """Return the sources below ROOT that contain options for compilation."""
    files = (ROOT / "ngramspec").rglob("*.py")
    return {f.relative_to(ROOT).as_posix() for f in files if f.read_text("utf-8").startswith("# cython:")}


def test_setup_py_lists_every_compiled_module() -> None:
    listed = re.findall(r'"(ngramspec[\w.]+)"', (ROOT / "setup.py").read_text("utf-8"))
    assert {name.replace(".", "/") + ".py" for name in listed} == compiled_modules()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a wheel and a source distribution, built without a C compiler (except on Windows)."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("setuptools is older than the build needs")
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("built")
    # The build uses a copy, so that it leaves no files in the tree.
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "ngramspec", "cli", "prompts", "tests", "tools"):
        if (ROOT / name).exists():
            (copy / name).symlink_to(ROOT / name)
    wheel = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder), "."]
    source = ["-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"]
    for command in (wheel, source):
        subprocess.run(
            [sys.executable, *command],
            cwd=copy,
            env={**os.environ, "CC": "no-such-compiler"},
            check=True,
            timeout=300,
            stdout=subprocess.DEVNULL,
        )
    return folder


@pytest.mark.exhaustive
def test_build_leaves_only_metadata_in_the_source(built: Path) -> None:
    assert {file.name for file in (built / "source").iterdir() if not file.is_symlink()} == {"ngramspec.egg-info"}


@pytest.mark.exhaustive
def test_wheel_contains_exactly_the_package_files(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"ngramspec", "ngramspec_cli", "ngramspec_prompts", info}
    assert "ngramspec = ngramspec_cli.app:main" in scripts
    # If there was a compiler, the wheel also contains the compiled modules.
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    names -= {source.removesuffix(".py") + suffix for source in compiled_modules() for suffix in suffixes}
    for installed, folder, endings in (
        ("ngramspec", "ngramspec", {".py", *DATA}),
        ("ngramspec_cli", "cli", {".py", ".toml", ".md"}),
        ("ngramspec_prompts", "prompts", {".py", ".toml", ".md"}),
    ):
        files = {f.relative_to(ROOT / folder).as_posix() for f in (ROOT / folder).rglob("*") if f.suffix in endings}
        assert {name.removeprefix(f"{installed}/") for name in names if name.startswith(f"{installed}/")} == files


@pytest.mark.exhaustive
def test_wheel_without_compiled_modules_drafts(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for compiled in {f for suffix in importlib.machinery.EXTENSION_SUFFIXES for f in tmp_path.rglob(f"*{suffix}")}:
        assert sys.platform == "win32", "it was compiled without a compiler"
        compiled.unlink()
    code = """
from ngramspec.drafting.draft import Ask
from ngramspec.drafting import find_uncompiled_modules
from ngramspec.drafting.mixture import guesser
from ngramspec.drafting import make_drafter
drafter = make_drafter("mixture", memory=True)
drafter.begin([1, 2, 3] * 4)
print(guesser.__file__, len(find_uncompiled_modules()), *drafter.propose(Ask(4)).tokens)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    file, plain, *tokens = done.stdout.split()
    assert int(plain) == sum(name.startswith("ngramspec/drafting/") for name in compiled_modules())
    assert Path(file) == tmp_path / "ngramspec" / "drafting" / "mixture" / "guesser.py"
    assert tokens == ["1", "2", "3", "1"]


@pytest.mark.exhaustive
def test_source_distribution_contains_sources_for_compilation(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    sources = compiled_modules()
    assert len(sources) > 3
    declarations = {file.relative_to(ROOT).as_posix() for file in (ROOT / "ngramspec").rglob("*.pxd")}
    assert {source.removesuffix(".py") for source in sources} > {name.removesuffix(".pxd") for name in declarations}
    assert sources | declarations | {"setup.py"} <= names
