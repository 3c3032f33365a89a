"""`ngramspec complete` as a user has it: what it reads, what it prints where, and what may not change the text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import DEMO, run, shell
from support.fake_hub import FakeHub, serve

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama import amx
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling
from ngramspec.storage import cache_folder

TEXT = "".join(f"def value_{i}(self):\n    return self._value_{i}\n\n\n" for i in range(4)) + "def value_4("
SMALL = ["complete", "-t", "1", "-c", "512"]
EXACT = [*SMALL, "--exact", "on"]
TOKENS = 40
SUMMARY = re.compile(r"^\d+ tokens at .*; (length|eog|stop|context)(; seed \d+)?(; drafts are slow.*)?$", re.MULTILINE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(DEMO, n_ctx=512, threads=1, exact="on") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def decoder(env: dict[str, str], target: Target) -> SpeculativeDecoder:
    """Plain decoding in exact mode by the library, with the same measurements as the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", env["HOME"])
        patch.setenv("XDG_CACHE_HOME", env["XDG_CACHE_HOME"])
        folder = cache_folder("calibration")
    assert folder.is_relative_to(env["HOME"])
    return SpeculativeDecoder(target, drafter=None, exact="on", calibration_folder=folder)


def pieces(target: Target, decoder: SpeculativeDecoder, sampling: Sampling | None = None) -> list[str]:
    """The text of each token of the library's own continuation of TEXT."""
    steps = decoder.generate(target.tokenize(TEXT), max_tokens=TOKENS, sampling=sampling)
    return [piece for step in steps for piece in step.pieces]


@pytest.fixture(scope="module")
def plain(target: Target, decoder: SpeculativeDecoder) -> list[str]:
    found = pieces(target, decoder)
    assert len("".join(found)) > 20, "the demo model has little to say here; change TEXT"
    return found


def as_json(env: dict[str, str], *arguments: str | Path, stdin: bytes = b"") -> dict[str, Any]:
    done = run(env, *arguments, "--json", stdin=stdin)
    assert done.code == 0, done.err
    assert done.raw.endswith(b"\n")
    assert done.raw.count(b"\n") == 1
    result: dict[str, Any] = json.loads(done.out)
    return result


# ---------------------------------------------------------------------- what is continued


def test_every_way_to_name_the_text_gives_the_librarys_own_continuation(
    env: dict[str, str], plain: list[str], file: Path
) -> None:
    options = [*EXACT, "-n", str(TOKENS)]
    raw = TEXT.encode()
    ways: list[tuple[list[str | Path], bytes]] = [
        ([file], b""),
        ([], raw),
        (["-"], raw),
        ([DEMO, file], b""),
        ([DEMO], raw),
        ([DEMO, "-"], raw),
        (["-f", file], b""),
        ([DEMO, "-f", file], b"not this"),
    ]
    for arguments, stdin in ways:
        done = run(env, *options, *arguments, stdin=stdin)
        assert done.code == 0, done.err
        assert done.raw == "".join(plain).encode(), arguments
        assert SUMMARY.search(done.err), done.err
        assert ("no model given" in done.err) == (DEMO not in arguments)


def test_a_model_from_the_environment(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    model = shutil.copy(DEMO, tmp_path / "my own.gguf")
    done = run({**env, "NGRAMSPEC_MODEL": str(model)}, *SMALL, "-n", "2", file)
    assert done.code == 0
    assert "no model given" not in done.err
    done = run({**env, "NGRAMSPEC_MODEL": str(tmp_path / "gone.gguf")}, *SMALL, "-n", "2", file)
    assert done.code == 1
    assert "NGRAMSPEC_MODEL" in done.complaint


def test_a_model_from_the_hub(env: dict[str, str], file: Path) -> None:
    repos = {"owner/repo-GGUF": {"README.md": b"hello", "m-Q8_0.gguf": DEMO.read_bytes()}}
    with serve(FakeHub(repos)) as hub:
        online = {**env, "HF_ENDPOINT": hub.url}
        first = run(online, *SMALL, "-n", "4", "--no-draft", "hf:owner/repo-GGUF", file)
        assert first.code == 0, first.err
        assert any("resolve" in path for _, path in hub.requests)
        missing = run(online, *SMALL, "hf:owner/nothing", file)
    assert first.raw == run(env, *SMALL, "-n", "4", "--no-draft", file).raw
    assert missing.code == 1
    assert "owner/nothing" in missing.complaint
    offline = run({**env, "HF_HUB_OFFLINE": "1"}, *SMALL, "-n", "4", "--no-draft", "hf:owner/repo-GGUF", file)
    assert offline.raw == first.raw


def test_a_mistake_in_the_text_costs_no_download(env: dict[str, str]) -> None:
    with serve(FakeHub({})) as hub:
        done = run({**env, "HF_ENDPOINT": hub.url}, *SMALL, "hf:owner/repo", "gone.py")
        assert "gone.py" in done.complaint
        assert hub.requests == []


def test_emoji_and_line_ends_come_back_as_they_went_in(env: dict[str, str]) -> None:
    raw = "naïve 👩‍🚀 \r\n漢字\tend 🙂".encode()
    done = run(env, *SMALL, "-n", "3", "--echo", stdin=raw)
    assert done.code == 0
    assert done.raw.startswith(raw)
    done.raw.decode("utf-8")


def test_a_locale_without_the_characters(env: dict[str, str]) -> None:
    done = run({**env, "PYTHONIOENCODING": "ascii"}, *SMALL, "-n", "1", "--echo", stdin="é 🙂".encode())
    assert done.code == 0
    assert done.raw.startswith(b"? ?")


def test_whitespace_is_a_text(env: dict[str, str]) -> None:
    assert run(env, *SMALL, "-n", "2", stdin=b" \n").code == 0


def test_truncate_keeps_the_tail_and_the_start_of_text_token(
    env: dict[str, str], target: Target, decoder: SpeculativeDecoder
) -> None:
    text = TEXT * 20
    prompt = target.tokenize(text)
    assert prompt[:1] == target.tokenize(""), "the demo model has no start-of-text token"
    steps = decoder.generate(prompt[:1] + prompt[-(512 - 12 - 1) :], max_tokens=12)
    result = as_json(env, *EXACT, "-n", "12", "--truncate", stdin=text.encode())
    assert result["text"] == "".join(step.text for step in steps)
    assert result["prompt_tokens"] == 512 - 12
    done = run(env, "complete", "-t", "1", "-c", "32", "--truncate", "--echo", "-n", "-1", stdin=text.encode())
    assert re.search(r"the text has \d+ tokens; its last 16 are used", done.err)
    assert done.out.startswith(text)


# ---------------------------------------------------------------------- what is printed


def test_json_is_one_object_that_tells_all(env: dict[str, str], target: Target, plain: list[str]) -> None:
    result = as_json(env, *EXACT, "-n", str(TOKENS), "-s", "5", stdin=TEXT.encode())
    assert result["text"] == "".join(plain)
    assert result["tokens"] == len(plain)
    assert result["prompt_tokens"] == len(target.tokenize(TEXT))
    assert 0 < result["target_passes"] <= TOKENS
    assert 0 <= result["accepted"] <= result["drafted"]
    assert result["seconds"] > result["prefill_seconds"] > 0
    assert result["tokens_per_second"] > 0
    assert result["stop_reason"] == ("length" if len(plain) == TOKENS else "eog")
    assert result["seed"] == 5


def test_json_with_echo_holds_the_text_too(env: dict[str, str]) -> None:
    text = "naïve 🙂 text "
    assert as_json(env, *SMALL, "-n", "2", "--echo", stdin=text.encode())["text"].startswith(text)


def test_echo_is_the_text_and_its_continuation(env: dict[str, str], plain: list[str], file: Path) -> None:
    done = run(env, *EXACT, "-n", str(TOKENS), "--echo", file)
    assert done.raw == (TEXT + "".join(plain)).encode()


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_leaves_ends_it_quietly(env: dict[str, str], file: Path, form: list[str]) -> None:
    done = shell(env, '"$@" | head -c 5; exit ${PIPESTATUS[0]}', *SMALL, "-n", "200", "--echo", *form, file)
    assert done.code == 0
    assert done.raw == (b'{"tex' if form else TEXT.encode()[:5])
    for line in done.err.splitlines():
        assert "no model given" in line or line == amx.NOTE or SUMMARY.match(line)


# ---------------------------------------------------------------------- where it ends


def test_at_most_n_tokens_and_all_of_the_context(env: dict[str, str], plain: list[str], file: Path) -> None:
    for count in (1, 7):
        done = run(env, *EXACT, "-n", str(count), file)
        assert done.raw == "".join(plain[:count]).encode()
    sampled = ["complete", "-t", "1", "-c", "64", "-n", "-1", "--temp", "2", "--top-k", "0", "-s", "3"]
    result = as_json(env, *sampled, stdin=b"all that fits")
    assert result["stop_reason"] == "eog" or (
        result["stop_reason"] == "context" and result["tokens"] + result["prompt_tokens"] == 64
    )


def test_a_stop_string_split_over_two_tokens(env: dict[str, str], plain: list[str], file: Path) -> None:
    text, at = "".join(plain), 0
    for piece, following in pairwise(plain):
        at += len(piece)
        stop = text[at - 1 : at + 1]
        if piece and following and text.find(stop) == at - 1 > 0:
            break
    else:
        pytest.fail("the demo model repeats itself here; change TEXT")
    done = run(env, *EXACT, "-n", str(TOKENS), "--stop", "never in there", "--stop", stop, file)
    assert done.raw == text[: at - 1].encode()
    assert "; stop" in done.err
    assert as_json(env, *EXACT, "-n", str(TOKENS), "--stop", stop, file)["stop_reason"] == "stop"


# ---------------------------------------------------------------------- what may not change the text


@pytest.mark.parametrize("sampling", [[], ["--temp", "0.8", "-s", "7"]])
def test_drafts_change_nothing_in_exact_mode(
    env: dict[str, str], target: Target, decoder: SpeculativeDecoder, plain: list[str], sampling: list[str]
) -> None:
    wanted = "".join(pieces(target, decoder, Sampling(0.8, seed=7)) if sampling else plain)
    options = [*EXACT, "-n", str(TOKENS), *sampling]
    without = as_json(env, *options, "--no-draft", stdin=TEXT.encode())
    assert (without["drafted"], without["text"]) == (0, wanted)
    drafted = as_json(env, *options, "--policy", "fixed", "--draft-max", "3", stdin=TEXT.encode())
    assert drafted["drafted"] > 0
    assert drafted["text"] == wanted


def test_a_seed_is_a_text(env: dict[str, str], file: Path) -> None:
    # At this temperature two seeds that give the same forty tokens are no chance.
    options = [*EXACT, "-n", str(TOKENS), "--temp", "1.5", "--top-k", "0", str(file)]
    first = run(env, *options)
    seed = re.search(r"; seed (\d+)$", first.err, re.MULTILINE)
    assert seed, first.err
    assert run(env, *options, "-s", seed[1]).raw == first.raw
    assert as_json(env, *options, "--seed", seed[1])["text"] == first.out
    other = as_json(env, *options)
    assert other["seed"] != int(seed[1])
    assert other["text"] != first.out


def test_rejection_repeats_with_its_seed(env: dict[str, str], file: Path) -> None:
    options = [*EXACT, "-n", "20", "--temp", "0.8", "-s", "9", "--acceptance", "rejection", "--no-draft", str(file)]
    first = run(env, *options)
    assert first.code == 0
    assert run(env, *options).raw == first.raw
