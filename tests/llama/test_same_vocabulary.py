"""Which vocabularies a draft model may have, and models that draft for others on llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.tiny_models import write_model
from support.vocabulary_files import FIRST_WORD, WORDS, write_words

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.model import ModelDrafter
from ngramspec.errors import ModelError
from ngramspec.llama.same_vocabulary import common_tokens
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling

ALL = FIRST_WORD + len(WORDS)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padding": 3},
    "longer padded": {"padding": 9},
    "another word": {"words": [*WORDS[:4], "zz", *WORDS[5:]]},
    "control": {"kind": gguf.TokenType.CONTROL},
    "more": {"words": [*WORDS, "more"]},
}


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Vocabulary]]:
    folder = tmp_path_factory.mktemp("vocabularies")
    with ExitStack() as opened:
        yield {
            name: opened.enter_context(Vocabulary(write_words(folder / f"{name}.gguf", **{"words": WORDS, **options})))
            for name, options in VARIANTS.items()
        }


def test_padding_behind_a_vocabulary_is_no_difference(vocabularies: dict[str, Vocabulary]) -> None:
    for target, draft, count in (
        ("plain", "plain", ALL),
        ("plain", "padded", ALL),
        ("longer padded", "plain", ALL),
        ("padded", "longer padded", ALL + 3),
    ):
        assert common_tokens(vocabularies[target], vocabularies[draft]) == count


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        ("plain", "another word", (f"at token {FIRST_WORD + 4}", "'bc' (normal)", "'zz' (normal)")),
        ("plain", "control", (f"at token {FIRST_WORD}", "'a' (normal)", "'a' (control)")),
        ("more", "plain", (f"at token {ALL} of {ALL + 1} and {ALL}", "'more' (normal) here", "missing in")),
        ("plain", "more", (f"at token {ALL} of {ALL} and {ALL + 1}", "missing here", "'more' (normal) in")),
        ("more", "padded", (f"at token {ALL}", "'more' (normal)", "'[PAD0]' (unused)")),
    ],
)
def test_what_differs_is_named(
    target: str, draft: str, said: Sequence[str], vocabularies: dict[str, Vocabulary]
) -> None:
    with pytest.raises(ModelError, match="cannot draft for") as refused:
        common_tokens(vocabularies[target], vocabularies[draft])
    message = str(refused.value)
    assert all(part in message for part in (*said, f"{draft}.gguf cannot", f"{target}.gguf: their"))
    assert "\n" not in message


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = write_model(tmp_path_factory.mktemp("target") / "target.gguf", "llama")
    with Target(path, n_ctx=256, threads=1, exact="on") as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("architecture", "padding"),
    [("llama", 0), ("llama", 5), ("mamba", 0), pytest.param("gemma2", 0, marks=pytest.mark.exhaustive)],
)
def test_texts_are_those_without_a_draft_model(architecture: str, padding: int, target: Target, tmp_path: Path) -> None:
    """Its twin, a padded relative with other weights, and models with a window and a recurrent state draft."""
    prompt = target.tokenize("abcdefgh" * 12)
    path = write_model(tmp_path / "draft.gguf", architecture, padding=padding)

    def text(drafter: Drafter | None, sampling: Sampling) -> tuple[list[int], int, int]:
        decoder = SpeculativeDecoder(target, drafter=drafter, policy="fixed", exact="on", calibration_folder=tmp_path)
        tokens: list[int] = []
        drafted = accepted = 0
        for step in decoder.generate(prompt, max_tokens=60, sampling=sampling):
            tokens += step.tokens
            drafted, accepted = drafted + len(step.drafted), accepted + step.accepted
            assert max(step.drafted, default=0) < target.n_vocab
        return tokens, drafted, accepted

    with Target(path, n_ctx=256, threads=1, exact="off") as model:
        drafter = ModelDrafter(model, n_vocab=common_tokens(target, model))
        for sampling in (Sampling(), Sampling(0.9, seed=5)):  # the second after another text's end
            tokens, drafted, accepted = text(drafter, sampling)
            assert tokens == text(None, sampling)[0]
            assert drafted > 30
            if architecture == "llama" and not padding:
                assert accepted > 0.9 * drafted
