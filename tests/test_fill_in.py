"""Tests of the limits and tokens of infill prompts.

`server/test_infill.py` tests their layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.vocabulary_files import write_vocabulary

from ngramspec.fill_in import FillInTokens, Limits, fill_in

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

BEFORE = "def total(prices):\n    "
AFTER = "\n    return result\n"
OTHERS = (("shop.py", "PRICES = [1, 2]\n"), ("b.py", "import shop\n"))


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    """Yield a vocabulary with markers for the names of projects and files, like Qwen2.5-Coder's."""
    pytest.importorskip("llama_cpp")
    from ngramspec.llama.vocabulary import Vocabulary

    path = tmp_path_factory.mktemp("vocabulary") / "coder.gguf"
    with Vocabulary(write_vocabulary(path, controls=["<|repo_name|>", "<|file_sep|>"])) as vocabulary:
        yield vocabulary


@pytest.mark.parametrize("suffix_first", [False, True])
@pytest.mark.parametrize(("before", "after", "others", "prompt"), [(3, 2, 5, ""), (0, 0, 0, ""), (7, 3, 9, "abc abc")])
def test_fill_in_with_limits_keeps_text_nearest_to_the_gap(
    coder: Vocabulary, before: int, after: int, others: int, prompt: str, suffix_first: bool
) -> None:
    def cut(limits: Limits | None) -> list[int]:
        return fill_in(
            coder, BEFORE * 4, AFTER * 4, prompt=prompt, other_files=OTHERS, limits=limits, suffix_first=suffix_first
        )

    marks = coder.fill_in_tokens

    def parts(tokens: list[int]) -> tuple[list[int], list[int], list[int]]:
        first, second = sorted((tokens.index(marks.prefix), tokens.index(marks.suffix)))
        one, two = tokens[first + 1 : second], tokens[second + 1 : -1]
        prefix, suffix = (two, one) if suffix_first else (one, two)
        return tokens[1:first], prefix, suffix

    typed = coder.tokenize(prompt, add_bos=False)
    whole, limited = parts(cut(None)), parts(cut(Limits(before, after, others)))
    assert cut(Limits(before, after, others))[0] == cut(None)[0]  # The beginning of the text must stay the same.
    assert limited[0] == (whole[0][-others:] if others else [])
    kept = before + len(typed)
    assert limited[1] == (whole[1][-kept:] if kept else [])
    assert limited[2] == whole[2][: max(0, after - len(typed))]


def test_fill_in_limits_equal_those_of_llama_server() -> None:
    """The text before the gap gets three times the space of the text after it; other files get the rest.

    The rest of the context excludes twice the length of the answer.
    """
    for n_ctx, near, n_predict in itertools.product((64, 1000, 4096, 32768), (32, 512, 2048), (0, 16, 128, 20000)):
        limits = Limits.for_context(n_ctx, near=near, n_predict=n_predict)
        shown = (limits.before or 0, limits.after or 0, limits.other_files or 0)
        if near + 2 * n_predict <= n_ctx and n_predict >= 128:
            assert shown == (near * 3 // 4, near // 4 - 2, n_ctx - near - 2 * n_predict)
        # However small the context or long the answer, the prompt contains text around the gap and fits.
        marks = 4
        assert sum(shown) + marks <= n_ctx
        assert shown[0] >= min(near, n_ctx // 2) // 2 > 0
    # llama.vim fills the cache by a request for no tokens, whose prompt must equal that of the next request.
    assert Limits.for_context(32768, near=2048, n_predict=0) == Limits.for_context(32768, near=2048, n_predict=128)


def test_fill_in_tokens_come_from_token_names_or_metadata(
    coder: Vocabulary, demo_vocabulary: Vocabulary, tmp_path: Path
) -> None:
    from ngramspec.llama.vocabulary import Vocabulary

    assert coder.fill_in_tokens == FillInTokens(3, 4, 5, 4096, 4097)
    assert demo_vocabulary.fill_in_tokens == FillInTokens(3, 4, 5)
    keys = {f"tokenizer.ggml.fim_{name}_token_id": token for name, token in (("pre", 5), ("suf", 3), ("mid", 4))}
    with Vocabulary(write_vocabulary(tmp_path / "keys.gguf", fill_in=False, ids=keys)) as by_key:
        assert by_key.fill_in_tokens == FillInTokens(5, 3, 4)
