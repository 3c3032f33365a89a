"""`Target` on real files: the demo model, and tiny models of every kind of memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.tiny_models import HEADS, LAYERS, WIDTH, WINDOW, write_model

from ngramspec.cost.kernels import SIZES, probe
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Step
from ngramspec.errors import ModelError, TargetError
from ngramspec.exactness.choice import Exact
from ngramspec.llama import amx, devices, huge_pages, log
from ngramspec.llama import target as target_module
from ngramspec.llama.kv_cache import CacheShape
from ngramspec.llama.lane import TAIL
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling

DEMO = Path(__file__).parents[2] / "ngramspec" / "demo" / "demo.gguf"
PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef add_three(a, b, c):\n    return a + b",
    "the cat sat on the mat. the cat sat on the hat. the cat sat on",
    "Once upon a time 1 2 3 4 5 6 7 8 9 1 2 3 4",
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def own_notes(target: Target) -> list[str]:
    """What was noted of the model; a build whose AMX kernels are broken is noted with every model."""
    return [note for note in target.notes if note != amx.NOTE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Path]:
    kinds = ("llama", "gemma2", "mamba")
    return {**{kind: write_model(folder / f"{kind}.gguf", kind) for kind in kinds}, "demo": DEMO}


@pytest.fixture(scope="module")
def demo() -> Iterator[Target]:
    with Target(DEMO, n_ctx=512, threads=1) as target:
        yield target


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Target]:
    with Target(DEMO, n_ctx=512, threads=1, exact="on") as target:
        yield target


@pytest.fixture(params=["demo", "llama", "gemma2", "mamba"])
def target(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Target]:
    with Target(files[request.param], n_ctx=512, threads=1) as opened:
        yield opened


def some(target: Target, n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, target.n_vocab, n)]


def close_to(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """Equal but for rounding: batches of several sizes run other kernels, on quantised weights most of all."""
    return bool(np.abs(a - b).max() < 0.15 * b.std())


# --------------------------------------------------------------------------- the four calls


def test_a_batch_gives_what_single_tokens_give(target: Target) -> None:
    text = some(target, 60)
    last = target.prefill(text).copy()
    target.prefill(text[:20])
    batch = target.evaluate(text[20:]).copy()
    assert batch.shape == (40, target.n_vocab)
    assert batch.dtype == np.float32
    assert target.tokens == text
    target.prefill(text[:20])
    single = np.concatenate([target.evaluate([t]).copy() for t in text[20:]])
    assert target.tokens == text
    assert close_to(batch, single)
    assert close_to(last, single[-1])
    assert not close_to(single[0], single[1])  # or closeness means nothing


def test_taking_back_leaves_no_trace(target: Target) -> None:
    text = some(target, 40)
    target.prefill(text)
    for size in (1, 2, 5, 16):
        tail = some(target, size, seed=size)
        first = target.evaluate(tail).copy()
        target.rollback(len(text))
        target.evaluate(some(target, 30, seed=99))
        target.rollback(len(text))
        assert target.tokens == text
        again = target.evaluate(tail).copy()
        target.rollback(len(text))
        assert np.array_equal(first, again)


def test_a_reused_prefix_gives_what_a_fresh_prefill_gives(target: Target) -> None:
    text = some(target, 200)
    fresh = target.prefill(text).copy()
    target.clear()
    target.prefill(text[:77])
    target.evaluate([*text[77:90], 5, 6])
    seen: list[tuple[int, int]] = []
    reused = target.prefill(text, progress=lambda *at: seen.append(at)).copy()
    assert target.tokens == text
    assert close_to(reused, fresh)
    assert seen[-1] == (200, 200)
    assert close_to(target.prefill(text).copy(), fresh)  # all of it cached: the last token is done again


@pytest.mark.parametrize("flash_attn", ["off", "auto"])
@pytest.mark.parametrize("kind", ["demo", "llama", "gemma2", "mamba"])
def test_an_aligned_prefill_does_not_depend_on_the_cache(kind: str, flash_attn: Any, files: dict[str, Path]) -> None:
    with Target(files[kind], n_ctx=512, threads=1, flash_attn=flash_attn) as target:
        text = some(target, 400)
        fresh = target.prefill(text, aligned=True).copy()
        for keep, aligned in ((300, True), (300, False), (130, True), (257, True), (399, True)):
            target.clear()
            target.prefill(text[:keep], aligned=aligned)
            for i in range(keep, min(keep + 60, 400), 7):
                target.evaluate(text[i : i + 7])
            target.rollback(len(target.tokens) - 1)
            assert np.array_equal(target.prefill(text, aligned=True), fresh), (keep, aligned)
        # What an unaligned prefill filled in is not taken for aligned later.
        target.clear()
        target.prefill(text[:150], aligned=True)
        target.prefill(text[:390])
        target.prefill(text[:395], aligned=True)
        assert np.array_equal(target.prefill(text, aligned=True), fresh)


def test_an_aligned_prefill_reuses_whole_chunks(files: dict[str, Path]) -> None:
    with Target(files["llama"], n_ctx=1000, threads=1, flash_attn="off") as target:
        text = some(target, 600)
        target.prefill(text, aligned=True)
        seen: list[tuple[int, int]] = []
        target.prefill([*text[:500], 7, 8], aligned=True, progress=lambda *at: seen.append(at))
        assert seen == [(502, 502)]  # from 384 on, a single chunk of 128


def test_progress_goes_by_chunks(files: dict[str, Path]) -> None:
    with Target(files["llama"], n_ctx=1000, threads=1) as target:
        seen: list[tuple[int, int]] = []
        target.prefill(some(target, 900), progress=lambda *at: seen.append(at))
        assert seen == [(512, 900), (900, 900)]


def test_logits_are_a_view(demo: Target) -> None:
    text = some(demo, 20)
    demo.prefill(text)
    rows = demo.evaluate([5, 6, 7])
    before = rows.copy()
    assert not rows.flags.owndata
    demo.rollback(20)
    assert np.array_equal(rows, before)  # valid until something is evaluated
    again = demo.evaluate([8, 9, 10])
    assert again.ctypes.data == rows.ctypes.data
    assert not np.array_equal(rows, before)


def test_logits_keep_the_target_alive(files: dict[str, Path]) -> None:
    expected = None
    for _ in range(3):
        row = Target(files["llama"], n_ctx=64, threads=1).prefill([1, 5, 6])
        gc.collect()
        np.ones(200_000)  # something else may take the memory
        expected = row.copy() if expected is None else expected
        assert np.array_equal(row, expected)
        assert np.abs(row).max() < 100


def test_what_does_not_fit_is_refused(target: Target) -> None:
    text = some(target, 512)
    for wrong in ([], [*text, 5]):
        with pytest.raises(ValueError, match="1 to 512"):
            target.prefill(wrong)
    target.prefill(text[:500])
    for wrong in ([], text[: MAX_EVALUATE + 1]):
        with pytest.raises(ValueError, match="1 to 64"):
            target.evaluate(wrong)
    for length in (-1, 501):
        with pytest.raises(ValueError, match="roll back"):
            target.rollback(length)
    assert target.tokens == text[:500]
    # The room for padding, and no more.
    target.evaluate(text[:MAX_EVALUATE])
    target.evaluate(text[:12])
    with pytest.raises(ValueError, match="do not fit"):
        target.evaluate([5])
    target.rollback(500)
    assert np.isfinite(target.evaluate([5])).all()


def test_tokens_outside_the_vocabulary_leave_the_cache_as_it_was(target: Target) -> None:
    text = some(target, 30)
    target.prefill(text)
    clean = target.evaluate([5, 6]).copy()
    target.rollback(30)
    for wrong in (-1, target.n_vocab, 10**6):
        with pytest.raises((TargetError, ValueError)):
            target.evaluate([5, wrong, 6])
        assert target.tokens == text
    assert np.array_equal(target.evaluate([5, 6]), clean)


def test_clear_forgets_everything(demo: Target) -> None:
    text = some(demo, 30)
    fresh = demo.prefill(text).copy()
    demo.evaluate([1, 2, 3])
    demo.clear()
    assert demo.tokens == []
    assert np.array_equal(demo.prefill(text), fresh)


# --------------------------------------------------------------------------- kinds of memory


def test_which_memories_roll_back(files: dict[str, Path]) -> None:
    for kind, again in (("demo", False), ("llama", False), ("gemma2", False), ("mamba", True)):
        with Target(files[kind], n_ctx=64, threads=1) as target:
            assert target.can_rollback
            assert target.replays is again, kind
            assert target.tokens == []
            assert own_notes(target) == []


def test_a_sliding_window_survives_rollback_and_reuse(files: dict[str, Path]) -> None:
    with Target(files["gemma2"], n_ctx=512, threads=1) as target:
        text = some(target, 6 * WINDOW)
        fresh = target.prefill(text).copy()
        # Far beyond the window, back over its edge, and forward again.
        target.evaluate(some(target, 60, seed=1))
        for length in (len(text), 5 * WINDOW, 3 * WINDOW, WINDOW // 2):
            target.rollback(length)
            assert close_to(target.prefill(text).copy(), fresh), length
        target.rollback(2 * WINDOW)
        rows = np.concatenate([target.evaluate([t]).copy() for t in text[2 * WINDOW :]])
        assert close_to(rows[-1], fresh)


def test_a_recurrent_memory_refills_itself(files: dict[str, Path]) -> None:
    with Target(files["mamba"], n_ctx=512, threads=1) as target:
        text = some(target, 300)
        fresh = target.prefill(text).copy()
        target.rollback(100)  # slow, but right
        assert target.tokens == text[:100]
        assert target.owed == 100
        assert close_to(target.prefill(text).copy(), fresh)


def test_a_checkpoint_spares_the_refill(files: dict[str, Path]) -> None:
    with Target(files["mamba"], n_ctx=512, threads=1) as target:
        text = some(target, 300)
        target.prefill(text)
        # A prompt that ends otherwise: all but its last tokens is there.
        target.evaluate([1, 2, 3])
        target.rollback(295)
        assert target.owed == 295 - (300 - TAIL)
        target.rollback(293)
        target.checkpoint()
        rows = target.evaluate(text[293:]).copy()
        target.rollback(293)
        assert target.owed == 0
        assert np.array_equal(target.evaluate(text[293:]), rows)
        # Tokens that are owed come before those of the next pass, and are in no row.
        target.rollback(297)
        assert target.owed == 4
        again = target.evaluate(text[297:]).copy()
        assert again.shape == (3, target.n_vocab)
        assert np.array_equal(again, rows[4:])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba"])
@pytest.mark.parametrize("exactly", ["off", "auto", "on"])
def test_the_decoder_on_every_memory(kind: str, exactly: Exact, files: dict[str, Path], tmp_path: Path) -> None:
    with Target(files[kind], n_ctx=256, threads=1, exact=exactly) as target:
        prompt = some(target, 20) * 3
        decoder = SpeculativeDecoder(target, exact=exactly, policy="fixed", calibration_folder=tmp_path)
        steps = list(decoder.generate(prompt, max_tokens=60))
        tokens = [t for s in steps for t in s.tokens]
        assert target.tokens == [*prompt, *tokens[:-1]]
        # By hand: greedy, token by token.
        margin_of_error = 0.15 * target.prefill(prompt).std()
        row = target.prefill(prompt)
        for token in tokens:
            assert row[token] >= row.max() - margin_of_error
            row = target.evaluate([token])[0]
        assert any(s.drafted for s in steps) == (kind != "mamba" or exactly != "on")


# --------------------------------------------------------------------------- exact mode


def texts(steps: list[Step]) -> list[int]:
    return [t for s in steps for t in s.tokens]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_change_no_bit_in_exact_mode(prompt: str, sampling: Sampling, exact: Target, folder: Path) -> None:
    tokens = exact.tokenize(prompt)
    plain = SpeculativeDecoder(exact, drafter=None, exact="on", calibration_folder=folder)
    expected = texts(list(plain.generate(tokens, max_tokens=64, sampling=sampling)))
    for policy in ("fixed", "cost"):
        drafted = SpeculativeDecoder(exact, policy=policy, exact="on", calibration_folder=folder)
        steps = list(drafted.generate(tokens, max_tokens=64, sampling=sampling))
        assert texts(steps) == expected
        sizes = drafted.calibration.exact_sizes
        assert sizes is not None
        assert {s.batch for s in steps[1:]} <= set(sizes)
        if policy == "fixed" and max(sizes) > 1:
            assert any(s.drafted for s in steps)
    # Whatever the cache held before.
    list(plain.generate([*tokens, 5, 6, 7], max_tokens=20))
    assert texts(list(plain.generate(tokens, max_tokens=64, sampling=sampling))) == expected


def test_drafts_change_no_bit_across_a_long_context(exact: Target, folder: Path) -> None:
    # Past 256 tokens llama.cpp's attention takes in another block of the cache; the draft spans the border.
    tokens = exact.tokenize(PROMPTS[0] * 12)[:225]
    assert len(tokens) == 225
    plain = SpeculativeDecoder(exact, drafter=None, exact="on", calibration_folder=folder)
    expected = texts(list(plain.generate(tokens, max_tokens=90)))
    drafted = SpeculativeDecoder(exact, policy="fixed", draft_max=7, exact="on", calibration_folder=folder)
    assert texts(list(drafted.generate(tokens, max_tokens=90))) == expected


@pytest.mark.parametrize("prompt", PROMPTS)
def test_default_mode_differs_only_where_the_model_wavers(prompt: str, demo: Target, folder: Path) -> None:
    report = probe(demo, [40, 300])
    tokens = demo.tokenize(prompt)
    plain = SpeculativeDecoder(demo, drafter=None, calibration_folder=folder)
    drafted = SpeculativeDecoder(demo, policy="fixed", draft_max=7, calibration_folder=folder)
    one = texts(list(plain.generate(tokens, max_tokens=150)))
    two = texts(list(drafted.generate(tokens, max_tokens=150)))
    same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    if same is None:
        assert one == two
    else:
        best, second = np.sort(demo.prefill([*tokens, *one[:same]]))[[-1, -2]]
        assert best - second <= 2 * report.max_difference  # each of the two may have moved by as much


def test_probing_the_demo(exact: Target) -> None:
    report = probe(exact, [40, 300])
    assert report.depths == (40, 300)
    assert sorted(n for c in report.classes for n in c) == list(SIZES)
    assert 0 <= report.max_difference < 1
    assert exact.tokens == []
    assert probe(exact, [40, 300]) == report


# --------------------------------------------------------------------------- tokens and text


@pytest.mark.parametrize(
    "text", ["", "hello", "a\nb\t c", "naïve café", "漢字 😀👨‍👩‍👧", "x\0y", "\u200b\ufeff", "  spaces  "]
)
def test_text_survives_tokens(text: str, demo: Target, files: dict[str, Path]) -> None:
    with Target(files["llama"], n_ctx=64, threads=1) as tiny:
        for target in (demo, tiny):
            tokens = target.tokenize(text, add_bos=False)
            assert all(0 <= t < target.n_vocab for t in tokens)
            back = b"".join(map(target.piece, tokens)).decode()
            assert back in (text, " " + text)  # sentencepiece puts a space in front
    assert (demo.tokenize(text) != demo.tokenize(text, add_bos=False)) <= bool(demo.tokenize(""))


def test_long_pieces_of_text(demo: Target) -> None:
    text = "word " * 5000
    assert b"".join(map(demo.piece, demo.tokenize(text, add_bos=False))).decode().strip() == text.strip()


def test_text_that_is_no_unicode_is_tokenized_somehow(demo: Target) -> None:
    assert len(demo.tokenize("a\ud800b")) >= 2


def test_special_tokens(demo: Target) -> None:
    plain = demo.tokenize("<|im_end|>", add_bos=False)
    special = demo.tokenize("<|im_end|>", special=True, add_bos=False)
    assert len(special) == 1
    assert len(plain) > 1
    assert demo.is_eog(special[0])
    assert demo.piece(special[0]) == b""
    assert b"".join(map(demo.piece, plain)).strip() == b"<|im_end|>"
    assert not any(map(demo.is_eog, plain))


def test_every_token_has_a_piece(demo: Target) -> None:
    pieces = [demo.piece(t) for t in range(demo.n_vocab)]
    assert sum(map(bool, pieces)) > 0.95 * demo.n_vocab
    assert pieces == [demo.piece(t) for t in range(demo.n_vocab)]
    for wrong in (-1, demo.n_vocab):
        with pytest.raises(ValueError, match=str(demo.n_vocab)):
            demo.piece(wrong)


def test_chat_prompts(demo: Target, files: dict[str, Path], folder: Path) -> None:
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"},
    ]
    prompt = demo.chat_prompt(talk)
    assert sum(map(demo.is_eog, prompt[1:])) == 3  # the first may be the BOS, which ends texts in some models
    assert prompt[: len(demo.chat_prompt(talk[:1])) - 4] == demo.chat_prompt(talk[:1])[:-4]  # turns only append
    own = write_model(folder / "own.gguf", "llama", chat_template=TEMPLATE)
    refusing = write_model(folder / "refusing.gguf", "llama", chat_template="{{ raise_exception('no') }}")
    doubled = write_model(folder / "doubled.gguf", "llama", chat_template="{{ bos_token }}" + TEMPLATE)
    with Target(own, n_ctx=64, threads=1) as target:
        assert target.chat_template == TEMPLATE
        assert target.chat_prompt(talk) == target.tokenize("<user>Hi<assistant>Yes?<user>Bye")
        expected = target.chat_prompt(talk)
        assert expected[0] == 1
    with Target(doubled, n_ctx=64, threads=1) as target:
        assert target.chat_prompt(talk).count(1) == 1  # a template that writes the BOS itself gets no second one
    with Target(files["llama"], n_ctx=64, threads=1) as target:
        assert target.chat_template is None
        text = b"".join(map(target.piece, target.chat_prompt(talk))).decode()
        assert "user\nHi" in text
        assert text.endswith("assistant\n")
    with Target(refusing, n_ctx=64, threads=1) as target, pytest.raises(ModelError, match="refuses"):
        target.chat_prompt(talk)


# --------------------------------------------------------------------------- loading


def test_what_is_known_of_a_model(files: dict[str, Path]) -> None:
    with Target(files["llama"], n_ctx=64, threads=1) as target:
        assert (target.name, target.architecture, target.n_ctx_train) == ("tiny llama", "llama", 1024)
        assert (target.n_ctx, target.threads, target.max_batch) == (64, 1, MAX_EVALUATE)
        assert target.n_params > 0
        assert target.size_bytes > 0
        assert target.n_vocab == len({target.piece(t) for t in range(3, 259)}) + 13


def test_the_context_is_capped_to_memory(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with Target(files["llama"], threads=1) as target:
        assert (target.n_ctx, own_notes(target)) == (1024, [])
    per_token = CacheShape(LAYERS, 1, WIDTH // HEADS, WIDTH // HEADS).bytes_per_token("f16", "f16")
    monkeypatch.setattr(devices, "free_bytes", lambda *_: int(2 * per_token * 800))
    with Target(files["llama"], threads=1) as target:
        assert target.n_ctx == 768
        assert ["768" in note and "1024" in note and "-c" in note for note in own_notes(target)] == [True]
    monkeypatch.setattr(devices, "free_bytes", lambda *_: 0)
    with Target(files["llama"], threads=1) as target:
        assert target.n_ctx == 512
    with Target(files["llama"], n_ctx=900, threads=1) as target:
        assert (target.n_ctx, own_notes(target)) == (900, [])  # asked for, so not capped
    with Target(files["llama"], n_ctx=1100, threads=1) as target:
        assert ["1100" in note and "1024" in note for note in own_notes(target)] == [True]


def test_bad_arguments_are_refused(files: dict[str, Path]) -> None:
    for wrong in (0, -5, -100, 2**31, 2**32, 2**40):
        with pytest.raises((ValueError, ModelError)):
            Target(files["llama"], n_ctx=wrong, threads=1)
    for threads in (0, -1):
        with pytest.raises(ValueError, match="threads"):
            Target(files["llama"], n_ctx=64, threads=threads)
    bad: Any
    for bad in ({"flash_attn": "maybe"}, {"cache_type_k": "q3"}, {"cache_type_v": "q3"}):
        with pytest.raises((ValueError, KeyError)):
            Target(files["llama"], n_ctx=64, threads=1, **bad)


@pytest.mark.filterwarnings("error")
def test_wrong_calls_leave_nothing_behind() -> None:
    with pytest.raises(TypeError):
        Target()  # type: ignore[call-arg]
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error", pytest.PytestUnraisableExceptionWarning)
        gc.collect()


def test_files_that_are_no_models(tmp_path: Path, files: dict[str, Path]) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "junk.gguf").write_bytes(b"junk" * 1000)
    (tmp_path / "cut.gguf").write_bytes(files["llama"].read_bytes()[:60_000])
    for path in (tmp_path, tmp_path / "missing.gguf", *tmp_path.iterdir()):
        with pytest.raises(ModelError, match="cannot load") as caught:
            Target(path, n_ctx=64, threads=1)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "no reason given" not in str(caught.value)


def test_huge_pages_are_asked_for_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(huge_pages, "anonymous", lambda: "before")
    monkeypatch.setattr(huge_pages, "advise", asked.append)
    with Target(DEMO, n_ctx=64, threads=1):
        assert asked == ["before"]


def test_a_load_that_ctrl_c_cut_short_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(*_: Any) -> None:
        log.tail.append((1, "llama_model_load_from_file_impl: cancelled model load"))

    monkeypatch.setattr(target_module.llama, "llama_model_load_from_file", cancelled)
    with pytest.raises(KeyboardInterrupt):
        Target(DEMO, n_ctx=64, threads=1)


def test_the_reason_is_llama_cpps_own(files: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="requires flash_attn"):
        Target(DEMO, n_ctx=64, threads=1, flash_attn="off", cache_type_v="q8_0")


def test_exact_mode_with_a_quantised_cache(tmp_path: Path) -> None:
    with Target(DEMO, n_ctx=256, threads=1, exact="on", cache_type_k="q8_0", cache_type_v="q8_0") as target:
        assert np.isfinite(target.prefill([5, 6, 7])).all()


def test_a_file_name_that_is_no_unicode(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / b"m\xff\xe9.gguf".decode("utf-8", "surrogateescape")
    try:
        path.write_bytes(files["llama"].read_bytes())
    except OSError:
        pytest.skip("this file system takes unicode names only")
    with Target(path, n_ctx=64, threads=1) as target:
        assert np.isfinite(target.prefill([5])).all()


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory")
def test_a_context_too_large_for_the_machine(files: dict[str, Path]) -> None:
    done = run(
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from ngramspec.errors import ModelError\nfrom ngramspec.llama.target import Target\n"
        f"try: Target({str(files['llama'])!r}, n_ctx=2**28, threads=1)\n"
        "except ModelError as e: print(e)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "268435456" in done.stdout
    assert "-c" in done.stdout


def test_a_closed_target_says_so(files: dict[str, Path]) -> None:
    # In a process of its own: what went wrong here was a segmentation fault.
    for call in ("t.evaluate([5])", "t.prefill([5])", "t.tokenize('a')", "t.piece(200)", "t.rollback(1)", "t.clear()"):
        done = run(
            f"from ngramspec.llama.target import Target\nt = Target({str(files['llama'])!r}, n_ctx=64, threads=1)\n"
            f"t.prefill([5, 6])\nt.close()\nt.close()\n"
            f"try: {call}\nexcept Exception as e: print(type(e).__name__)\n"
        )
        assert done.returncode == 0, (call, done.stderr)
        assert "Error" in done.stdout


# --------------------------------------------------------------------------- identity


def test_the_fingerprint_tells_settings_and_files_apart(files: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(files["llama"].read_bytes())
    changed = bytearray(copy.read_bytes())
    changed[-1] ^= 1
    (tmp_path / "changed.gguf").write_bytes(changed)

    def fingerprint(path: Path, **options: Any) -> str:
        with Target(path, **{"n_ctx": 64, "threads": 1, **options}) as target:
            assert target.fingerprint == target.fingerprint
            return target.fingerprint

    same = fingerprint(files["llama"])
    assert fingerprint(copy) == same
    others = [
        fingerprint(tmp_path / "changed.gguf"),
        fingerprint(files["gemma2"]),
        fingerprint(copy, threads=2),
        fingerprint(copy, threads_batch=2),
        fingerprint(copy, micro_batch=64),
        fingerprint(copy, mmap=False),
        fingerprint(copy, extra_buffers=False),
        fingerprint(copy, flash_attn="off"),
        fingerprint(copy, cache_type_k="f32"),
    ]
    assert len({same, *others}) == 10
    assert all(name.isalnum() for name in others)
