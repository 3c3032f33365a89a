"""`ngramspec info` as a user has it, and what it and others say where the core of drafting was not compiled."""

from __future__ import annotations

import importlib.machinery
import re
from pathlib import Path

import pytest
from ngramspec_cli import info, view
from support.cli_runner import run
from support.tiny_models import write_model

from ngramspec import drafting
from ngramspec.cost.measure import SIZES
from ngramspec.drafting import uncompiled
from ngramspec.llama.target import Target

INFO = ["info", "-t", "1", "-c", "512"]
PROBING = "comparing the logits of batch sizes"


def facts(out: str) -> dict[str, str]:
    """The lines that give a name and, in column 15, its value."""
    return {line[:15].rstrip(): line[15:] for line in out.splitlines() if re.match(r"[a-zK].{13} \S", line)}


def test_the_build_the_model_and_its_figures(env: dict[str, str], tiny: Path) -> None:
    done = run({**env, "COLUMNS": "80"}, *INFO, tiny).ok()
    found = facts(done.out)
    with Target(tiny, n_ctx=512, threads=1) as target:
        assert found["model"] == f"{target.name}, {tiny}"
        assert found["architecture"].startswith(f"{target.architecture}, ")
        assert found["size"].endswith(f"{target.n_params / 1e6:.1f} M parameters")
        assert found["context"] == f"512 tokens (the model's: {target.n_ctx_train})"
        assert found["vocabulary"] == f"{target.n_vocab} tokens"
    assert found["KV cache"] == "drafts of any length can be rolled back"
    assert found["settings"] == "1 threads, flash attention auto, KV cache f16/f16"
    assert re.match(r"llama-cpp-python \d+\.\d+.*; .*CPU", found["build"])
    assert {"chat template", "devices", "machine"} <= found.keys()

    rows = [re.findall(r"[\d.]+", line) for line in done.out.splitlines() if re.match(r"\W *\d+ ", line)]
    assert [int(row[0]) for row in rows] == list(SIZES)
    assert all(float(row[1]) > 0 for row in rows)
    assert rows[0][2:4] == ["1.00", "1.00"]
    classes = [tuple(map(int, row[4:])) for row in rows]
    assert all(int(row[0]) in same for row, same in zip(rows, classes, strict=True))
    assert sorted(n for same in set(classes) for n in same) == list(SIZES)
    assert re.search(r"^Largest logit difference from single tokens: [\d.e-]+ \(contexts of", done.out, re.MULTILINE)
    exact = re.search(r"^Exact mode here uses batches of ([\d ]+)\.$", done.out, re.MULTILINE)
    assert tuple(map(int, exact[1].split())) in classes
    assert re.search(r"^A change of batch size .* costs ([\d.]+ ms|nothing that is certain)\.$", done.out, re.MULTILINE)
    assert "…" not in done.out


def test_what_was_measured_is_kept_until_fresh_is_asked_for(env: dict[str, str], tiny: Path) -> None:
    assert PROBING in run(env, *INFO, tiny, "--remeasure").err
    assert PROBING not in run(env, *INFO, tiny).err
    other = run(env, *INFO, tiny, "-fa", "off")
    assert PROBING in other.err
    assert "flash attention off" in other.out


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a recurrent state."""
    return write_model(tmp_path_factory.mktemp("models") / "m.gguf", "mamba")


def test_a_line_is_not_cut_where_nobody_looks(env: dict[str, str], mamba: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("[bold]" + "long " * 40 + ":bug:")
    folder.mkdir()
    model = folder / "m.gguf"
    model.symlink_to(mamba)
    done = run({**env, "COLUMNS": "40"}, *INFO, model)
    assert facts(done.out)["model"] == f"tiny mamba, {model}"
    about, _, _ = done.out.partition("Cost of a target pass")
    assert all(line == line.rstrip() for line in about.splitlines())


def test_a_recurrent_model_says_how_drafts_are_taken_back(env: dict[str, str], mamba: Path) -> None:
    done = run(env, *INFO, mamba).ok()
    assert "tokens are evaluated again" in facts(done.out)["KV cache"]
    assert "Cost of a target pass" in done.out

    text = ["complete", "-t", "1", "-c", "512", "-n", "8", str(mamba)]
    for draft, said in ((["--exact", "on"], True), (["--policy", "fixed"], False), (["--no-draft"], False)):
        assert ("drafting is off with --exact" in run(env, *text, *draft, stdin=b"one two three").err) == said


# ---------------------------------------------------------------------- a core that was not compiled


def test_what_lies_beside_its_source_is_compiled() -> None:
    folder = Path(str(drafting.__file__)).parent
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    plain = {
        "ngramspec.drafting." + path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
        for path in folder.rglob("*.pxd")
        if not any(path.with_suffix(suffix).exists() for suffix in suffixes)
    }
    assert set(uncompiled()) == plain


def test_where_the_core_is_plain_python_info_says_what_to_do_and_speeds_say_so(
    env: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel that is so: test_packaging.py."""
    for module in (info, view):
        monkeypatch.setattr(module, "uncompiled", lambda: ("ngramspec.drafting.draft",))
    core = facts(run(env, *INFO, tiny).out)["drafting"]
    assert "core in plain Python" in core
    assert "install a C compiler" in core
    for command in ("complete", "chat"):
        for draft, slow in (([], True), (["--no-draft"], False)):
            options = ["-t", "1", "-c", "512", "-n", "4", "--exact", "off", *draft]
            done = run(env, command, tiny, *options, stdin=b"def f(").ok()
            assert ("drafting is slow because its core is not compiled" in done.err.splitlines()[-1]) == slow
