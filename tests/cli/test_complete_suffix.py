"""`ngramspec complete --suffix`, as a user types it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_runner import DEMO, run
from support.tiny_models import write_model

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.fill_in import Limits, fill_in
from ngramspec.llama.target import Target

LINE = "    total = total + price(item, amount)\n"
BEFORE = "def cost(items):\n" + LINE * 6
AFTER = "\n    return total\n"
COMMAND = ["complete", DEMO, "-t", "1", "-n", "16"]


@pytest.fixture
def suffix(tmp_path: Path) -> Path:
    path = tmp_path / "after.py"
    path.write_bytes(AFTER.encode())
    return path


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(DEMO, n_ctx=512, threads=1, exact="on") as loaded:
        yield loaded


def middle(target: Target, prompt: list[int]) -> str:
    decoder = SpeculativeDecoder(target, drafter=None, exact="off")
    return "".join(step.text for step in decoder.generate(prompt, max_tokens=16))


def test_the_middle_alone_is_printed(env: dict[str, str], target: Target, suffix: Path, tmp_path: Path) -> None:
    expected = middle(target, fill_in(target, BEFORE, AFTER))
    assert expected.strip(), "the demo model has little to say here; change BEFORE"
    before = tmp_path / "before.py"
    before.write_bytes(BEFORE.encode())
    for arguments, stdin in (
        (["-", "--suffix", suffix], BEFORE),
        ([before, "--suffix", suffix], ""),
        ([before, "--suffix", "-"], AFTER),
        (["--no-draft", "-f", before, "--suffix", suffix], ""),
    ):
        done = run(env, *COMMAND, "--exact", "on", *arguments, stdin=stdin.encode())
        assert (done.code, done.out) == (0, expected), done.err


@pytest.mark.parametrize("form", [[], ["--beams", "2"]])
def test_echo_prints_the_whole_file(env: dict[str, str], suffix: Path, form: list[str]) -> None:
    arguments = [*COMMAND, *form, "--suffix", suffix]
    filled = run(env, *arguments, stdin=BEFORE.encode()).out
    assert run(env, *arguments, "--echo", stdin=BEFORE.encode()).out == BEFORE + filled + AFTER
    assert json.loads(run(env, *arguments, "--json", stdin=BEFORE.encode()).out)["text"] == filled
    whole = json.loads(run(env, *arguments, "--json", "--echo", stdin=BEFORE.encode()).out)["text"]
    assert whole == BEFORE + filled + AFTER


def test_the_files_start_and_end_are_gaps_too(env: dict[str, str], suffix: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.touch()
    assert run(env, *COMMAND, empty, "--suffix", suffix).code == 0
    assert run(env, *COMMAND, suffix, "--suffix", empty).code == 0
    done = run(env, *COMMAND, empty, "--suffix", "-")
    assert (done.code, done.complaint) == (1, "nothing stands round the gap")


@pytest.mark.parametrize(
    ("before", "after", "short"),
    [(BEFORE * 9, AFTER * 199, ""), (BEFORE * 9, AFTER, "after"), ("def", AFTER * 199, "before")],
)
def test_truncate_keeps_what_is_next_to_the_gap(
    env: dict[str, str], target: Target, before: str, after: str, short: str, tmp_path: Path
) -> None:
    """Three quarters of it before, unless one side does not need its share."""
    sizes = [len(target.tokenize(text, add_bos=False)) for text in (before, after)]
    marks = 4
    room = 512 - 16 - marks
    behind = {"": room // 4, "after": sizes[1], "before": room - sizes[0]}[short]
    kept = (room - behind, behind)
    path = tmp_path / "long.py"
    path.write_bytes(after.encode())
    arguments = [*COMMAND, "-c", "512", "--exact", "on", "--suffix", path]
    refused = run(env, *arguments, stdin=before.encode())
    assert (refused.code, refused.out) == (1, "")
    assert f"the text has {sum(sizes) + marks} tokens" in refused.complaint
    assert "keep only what is next to the gap with --truncate" in refused.complaint
    done = run(env, *arguments, "--truncate", "--json", stdin=before.encode())
    assert f"the texts have {sum(sizes)} tokens; the {kept[0]} before the gap and the {kept[1]} after it" in done.err
    told = json.loads(done.out)
    assert told["prompt_tokens"] == 512 - 16
    assert told["text"] == middle(target, fill_in(target, before, after, limits=Limits(*kept)))


def test_the_sampler_of_editors_ends_the_text(env: dict[str, str], suffix: Path) -> None:
    arguments = [*COMMAND, "--suffix", suffix, "--json", "--samplers"]
    plain = json.loads(run(env, *arguments, "top_k;temperature", stdin=BEFORE.encode()).out)
    done = run(env, *arguments, "top_k;infill;temperature", stdin=BEFORE.encode())
    assert done.code == 0, done.err
    assert json.loads(done.out)["tokens"] <= plain["tokens"]
    refused = run(env, *arguments, "infill;temperature", stdin=BEFORE.encode())
    assert (refused.code, refused.out) == (2, "")
    assert "infill without top_k before it" in refused.complaint


def test_a_model_that_cannot(env: dict[str, str], suffix: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", "llama")
    done = run(env, "complete", model, "-t", "1", "--suffix", suffix, stdin=b"abc")
    assert (done.code, done.out) == (1, "")
    assert done.complaint.startswith("this model cannot fill in the middle: its vocabulary has no token for prefix")


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["-", "--suffix", "-"], 2, "the texts before and after the gap are the same: stdin"),
        (["--suffix", ""], 2, "the name of the --suffix file is empty"),
        (["--suffix", "gone.py"], 1, "gone.py"),
        (["--beams", "2", "--samplers", "top_k;infill;temperature", "--suffix", "a"], 2, "leave out penalties"),
    ],
)
def test_mistakes(env: dict[str, str], arguments: list[str], code: int, complaint: str) -> None:
    done = run(env, *COMMAND, *arguments, stdin=b"abc")
    assert (done.code, done.out) == (code, "")
    assert complaint in done.complaint
