"""Tests of the vocabularies that a draft model may have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import gguf
import pytest
from support.vocabulary_files import FIRST_WORD, WORDS, write_words

from ngramspec.data import ModelError
from ngramspec.llama.vocabulary import Vocabulary, common_tokens

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


def test_common_tokens_ignores_padding_at_end_of_vocabulary(vocabularies: dict[str, Vocabulary]) -> None:
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
        (
            "more",
            "plain",
            (f"at token {ALL} of {ALL + 1} and {ALL}", "'more' (normal) and, in the draft model, missing"),
        ),
        (
            "plain",
            "more",
            (f"at token {ALL} of {ALL} and {ALL + 1}", "missing and, in the draft model, 'more' (normal)"),
        ),
        ("more", "padded", (f"at token {ALL}", "'more' (normal)", "'[PAD0]' (unused)")),
    ],
)
def test_common_tokens_with_different_vocabularies_names_first_difference(
    target: str, draft: str, said: Sequence[str], vocabularies: dict[str, Vocabulary]
) -> None:
    with pytest.raises(ModelError, match="cannot draft for") as refused:
        common_tokens(vocabularies[target], vocabularies[draft])
    message = str(refused.value)
    assert all(part in message for part in (*said, f"{draft}.gguf cannot", f"{target}.gguf: their"))
    assert "\n" not in message
