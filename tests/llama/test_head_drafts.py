"""A model drafts with its own NextN layer: the texts are those of plain decoding, and drafts of every length fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from architectures.files import write_model

from ngramspec.cost.given import GivenCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Step
from ngramspec.drafting.model import ModelDrafter
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling

PROMPT = list(range(40, 70))
FREE = GivenCurve({1: 1.0, 64: 1.0})


@pytest.fixture(scope="module", params=["qwen35", "glm4moe", "qwen3next"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a recurrent state with snapshots, a KV cache, and a recurrent state that is evaluated again."""
    path = tmp_path_factory.mktemp("heads") / f"{request.param}.gguf"
    return write_model(path, request.param, head=True, half=False)


@pytest.fixture(scope="module")
def target(file: Path) -> Iterator[Target]:
    with Target(file, n_ctx=400, threads=1, exact="off", head=True) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def plain(file: Path) -> Iterator[SpeculativeDecoder]:
    with Target(file, n_ctx=400, threads=1, exact="off") as loaded:
        yield SpeculativeDecoder(loaded, drafter=None, exact="off", curve=FREE)


def on_head(target: Target, draft_max: int = 4) -> SpeculativeDecoder:
    assert target.head is not None
    drafter = ModelDrafter(target.head, n_vocab=target.n_vocab)
    return SpeculativeDecoder(
        target, drafter=drafter, policy="fixed", draft_max=draft_max, exact=target.exact, curve=FREE
    )


def run(decoder: SpeculativeDecoder, prompt: list[int] = PROMPT, **options: object) -> tuple[list[int], list[Step]]:
    steps = list(decoder.generate(prompt, max_tokens=50, **options))  # type: ignore[arg-type]
    return [token for step in steps for token in step.tokens], steps


@pytest.mark.parametrize(
    ("sampling", "method"),
    [(None, None), (Sampling(0.4, seed=3), "coupled"), (Sampling(0.4, top_k=3, seed=5), "coupled")],
)
def test_texts_are_those_of_plain_decoding(
    target: Target, plain: SpeculativeDecoder, sampling: Sampling | None, method: str | None
) -> None:
    decoder = on_head(target)
    text, steps = run(decoder, sampling=sampling, verify=method)
    assert text == run(plain, sampling=sampling)[0]
    drafts = [step for step in steps if step.drafted]
    # Drafts fail at their first token, at their second, and later.
    assert {min(step.accepted, 2) for step in drafts} == {0, 1, 2}


def test_another_prompt_and_the_same_one_again(target: Target, plain: SpeculativeDecoder) -> None:
    decoder = on_head(target)
    for prompt in (PROMPT, [*PROMPT[:20], 7, 8, 9], PROMPT[:5], PROMPT):
        text, steps = run(decoder, prompt)
        assert text == run(plain, prompt)[0]
        assert any(step.accepted for step in steps)


def test_a_text_left_in_the_middle_leaves_nothing_behind(target: Target, plain: SpeculativeDecoder) -> None:
    decoder = on_head(target)
    begun = decoder.generate(PROMPT, max_tokens=70)
    for _ in range(4):
        next(begun)
    begun.close()
    assert run(decoder)[0] == run(plain)[0]


def test_rejection_draws_from_the_head_s_law(target: Target) -> None:
    text, steps = run(on_head(target), sampling=Sampling(0.7, seed=2), verify="rejection")
    assert len(text) == 50
    assert any(step.accepted for step in steps)


def test_exact_mode_gives_the_text_of_a_model_without_its_head(file: Path) -> None:
    with Target(file, n_ctx=400, threads=1, exact="on") as loaded:
        expected = run(SpeculativeDecoder(loaded, drafter=None, exact="on"))[0]
    with Target(file, n_ctx=400, threads=1, exact="on", head=True) as loaded:
        text, steps = run(on_head(loaded))
    assert text == expected
    # Where tokens are evaluated again after a refusal, exact mode drafts nothing.
    assert any(step.accepted for step in steps) == loaded.exact_rollback
