"""What is installed: the names the packages get, and the files that must come along."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_each_package_has_a_name_of_its_own(project: dict[str, Any]) -> None:
    folders = project["tool"]["setuptools"]["package-dir"]
    assert folders == {"ngramspec": "ngramspec", "ngramspec_cli": "cli", "ngramspec_prompts": "prompts"}
    packages = project["tool"]["setuptools"]["packages"]
    assert {name.split(".")[0] for name in packages} == set(folders)
    inner = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "ngramspec").rglob("__init__.py")}
    assert inner == {name for name in packages if name.split(".")[0] == "ngramspec"}
    assert project["project"]["scripts"] == {"ngramspec": "ngramspec_cli.app:main"}


def test_what_is_imported_is_a_dependency(project: dict[str, Any]) -> None:
    spelt = {"llama_cpp": "llama-cpp-python", "prompt_toolkit": "prompt-toolkit", "huggingface_hub": "huggingface-hub"}
    own = {"ngramspec", "ngramspec_cli", "ngramspec_prompts"}
    wanted = set()
    for file in [*(ROOT / "ngramspec").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        found = re.findall(r"^\s*(?:import|from) (\w+)", file.read_text("utf-8"), re.MULTILINE)
        wanted |= {spelt.get(name, name) for name in found if name not in sys.stdlib_module_names | own}
    required = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["hub"]
    assert wanted <= {re.split(r"[^\w-]", line)[0] for line in required}


def test_the_installed_command_is_this_one() -> None:
    (script,) = (
        script
        for script in importlib.metadata.distribution("ngramspec").entry_points
        if script.group == "console_scripts"
    )
    assert (script.name, script.value) == ("ngramspec", "ngramspec_cli.app:main")
    module, name = script.value.split(":")
    loaded = importlib.import_module(module)
    assert script.load() is getattr(loaded, name)
    assert Path(str(loaded.__file__)).parent.name in {"cli", "ngramspec_cli"}


def test_the_wheel_holds_all_of_it_and_no_more(tmp_path: Path) -> None:
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("setuptools is older than the build needs")
    pytest.importorskip("pip")
    # A copy, so that the build leaves nothing in the tree.
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "ngramspec", "cli", "prompts", "tests", "tools"):
        if (ROOT / name).exists():
            (copy / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), "."],
        cwd=copy,
        check=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"ngramspec", "ngramspec_cli", "ngramspec_prompts", info}
    assert "ngramspec = ngramspec_cli.app:main" in scripts
    for installed, folder, endings in (
        ("ngramspec", "ngramspec", {".py", ".typed", ".gguf", ".md"}),
        ("ngramspec_cli", "cli", {".py"}),
        ("ngramspec_prompts", "prompts", {".py", ".toml"}),
    ):
        files = {f.relative_to(ROOT / folder).as_posix() for f in (ROOT / folder).rglob("*") if f.suffix in endings}
        assert {name.removeprefix(f"{installed}/") for name in names if name.startswith(f"{installed}/")} == files
    assert {"ngramspec/demo/demo.gguf", "ngramspec/demo/MODEL_CARD.md", "ngramspec/py.typed"} <= names
