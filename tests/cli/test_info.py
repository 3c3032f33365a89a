"""`ngramspec info` as a user has it."""

from __future__ import annotations

import re
from pathlib import Path

from support.cli_runner import DEMO, run
from support.tiny_models import write_model

from ngramspec.cost.kernels import SIZES
from ngramspec.llama.target import Target

INFO = ["info", "-t", "1", "-c", "512"]
PROBING = "comparing batch sizes"


def facts(out: str) -> dict[str, str]:
    """The lines that give a name and, in column 15, its value."""
    return {line[:15].rstrip(): line[15:] for line in out.splitlines() if re.match(r"[a-zK].{13} \S", line)}


def test_the_build_the_model_and_its_figures(env: dict[str, str]) -> None:
    done = run({**env, "COLUMNS": "80"}, *INFO)
    assert done.code == 0, done.err
    found = facts(done.out)
    with Target(DEMO, n_ctx=512, threads=1) as target:
        assert found["model"] == f"{target.name}, {DEMO}"
        assert found["architecture"].startswith(f"{target.architecture}, ")
        assert found["size"].endswith(f"{target.n_params / 1e6:.1f} M parameters")
        assert found["context"] == f"512 tokens (the model's: {target.n_ctx_train})"
        assert found["vocabulary"] == f"{target.n_vocab} tokens"
    assert found["KV cache"] == "drafts of any length can be taken back"
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
    assert exact
    assert tuple(map(int, exact[1].split())) in classes
    assert re.search(r"^A change of batch size .* costs ([\d.]+ ms|nothing that is certain)\.$", done.out, re.MULTILINE)
    assert "…" not in done.out


def test_what_was_measured_is_kept_until_fresh_is_asked_for(env: dict[str, str]) -> None:
    run(env, *INFO)
    again = run(env, *INFO)
    assert PROBING not in again.err
    fresh = run(env, *INFO, "--fresh")
    assert PROBING in fresh.err
    other = run(env, "info", "-t", "1", "-c", "512", "-ctk", "q8_0")
    assert PROBING in other.err
    assert "KV cache q8_0/f16" in other.out


def test_a_line_is_not_cut_where_nobody_looks(env: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / ("[bold]" + "long " * 40 + ":bug:")
    folder.mkdir()
    model = write_model(folder / "m.gguf", "mamba")
    done = run({**env, "COLUMNS": "40"}, *INFO, model)
    assert facts(done.out)["model"] == f"tiny mamba, {model}"
    about, _, _ = done.out.partition("Cost of a target pass")
    assert all(line == line.rstrip() for line in about.splitlines())


def test_a_recurrent_model_says_how_drafts_are_taken_back(env: dict[str, str], tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", "mamba")
    done = run(env, *INFO, model)
    assert done.code == 0, done.err
    assert "evaluating tokens again" in facts(done.out)["KV cache"]
    assert "Cost of a target pass" in done.out

    text = ["complete", "-t", "1", "-c", "512", "-n", "8", str(model)]
    drafted = run(env, *text, "--policy", "fixed", stdin=b"one two three")
    plain = run(env, *text, "--no-draft", stdin=b"one two three")
    assert (drafted.code, drafted.raw) == (0, plain.raw)
    exact = run(env, *text, "--exact", "on", stdin=b"one two three")
    assert "drafting is off with --exact" in exact.err
    assert "drafting is off" not in drafted.err + plain.err
