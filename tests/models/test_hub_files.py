"""Tests of `choose`: the files of a repository that a name selects."""

from __future__ import annotations

import pytest

from ngramspec.data import ModelError
from ngramspec.models.hub import choose

REPOSITORY = [
    "README.md",
    "config.json",
    "Model-7B-Q4_K_M.gguf",
    "Model-7B-Q4_K_S.gguf",
    "Model-7B-Q8_0.gguf",
    "Model-7B-F16.gguf",
    "Model-7B-UD-Q2_K_XL.gguf",
    "Model-7B-IQ2_M.gguf",
    "Model-7B-UD-IQ2_M.gguf",
    "mmproj-F16.gguf",
    "mtp-Model-7B-Q4_K_M.gguf",
    "imatrix_q8_0.gguf",
    "BF16/Model-7B-BF16-00002-of-00002.gguf",
    "BF16/Model-7B-BF16-00001-of-00002.gguf",
    "Q6_K/Model-7B-Q6_K-00001-of-00002.gguf",
]

BF16 = [
    "BF16/Model-7B-BF16-00001-of-00002.gguf",
    "BF16/Model-7B-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        (None, ["Model-7B-Q4_K_M.gguf"]),
        ("Q4_K_M", ["Model-7B-Q4_K_M.gguf"]),
        ("q8_0", ["Model-7B-Q8_0.gguf"]),
        ("f16", ["Model-7B-F16.gguf"]),
        ("Q2_K_XL", ["Model-7B-UD-Q2_K_XL.gguf"]),
        ("IQ2_M", ["Model-7B-IQ2_M.gguf"]),
        ("UD-IQ2_M", ["Model-7B-UD-IQ2_M.gguf"]),
        ("bf16", BF16),
        ("Model-7B", BF16),
        ("Model-7B-Q4_K_S.gguf", ["Model-7B-Q4_K_S.gguf"]),
        ("BF16/Model-7B-BF16-00002-of-00002.gguf", BF16),
        ("Model-7B-BF16-00001-of-00002.gguf", BF16),
    ],
)
def test_choose_in_large_repository_returns_files_by_name(wanted: str | None, files: list[str]) -> None:
    assert choose(REPOSITORY, wanted) == choose(files, None) == files


def test_choose_without_match_raises_with_suggestions() -> None:
    for wanted, reason in (
        ("Q4_K", "there is no Q4_K in this repository; it has BF16, F16, IQ2_M, Q4_K_M, Q4_K_S,"),
        ("Model-7B-Q4_K_L.gguf", r"did you mean Model-7B-Q4_K_.\.gguf or "),
        ("zzzzzzzz.gguf", "there is no model file zzzzzzzz.gguf in this repository; it has BF16/"),
        ("mmproj-F16.gguf", "there is no model file mmproj-F16.gguf"),
        ("Q6_K", "only 1 of the 2 parts of Q6_K/Model-7B-Q6_K-00001-of-00002.gguf are there"),
    ):
        with pytest.raises(ModelError, match=reason):
            choose(REPOSITORY, wanted)
    with pytest.raises(ModelError, match="no GGUF model"):
        choose(["model.safetensors", "mmproj-F16.gguf"], None)
    with pytest.raises(ModelError, match=r"the name of several files; name one of them: a/m\.gguf, b/m\.gguf"):
        choose(["a/m.gguf", "b/m.gguf"], "m.gguf")


@pytest.mark.parametrize(
    ("files", "wanted", "chosen"),
    [
        (["a.txt", "tiny.gguf", "mmproj-tiny.gguf"], None, "tiny.gguf"),
        # Without a quantisation, the choice is llama.cpp's.
        (["m.F16.gguf", "m.Q8_0.gguf"], None, "m.Q8_0.gguf"),
        (["m.Q2_K.gguf", "m.F16.gguf", "dflash-m-Q4_K_M.gguf"], None, "m.F16.gguf"),
        (["b-Q8_0.gguf", "a-Q8_0.gguf"], "Q8_0", "a-Q8_0.gguf"),
        # The end of a word matches if no whole word does.
        (["m-BF16.gguf", "m-F16.gguf"], "f16", "m-F16.gguf"),
        (["m-BF16.gguf", "m-Q8_0.gguf"], "f16", "m-BF16.gguf"),
        # These are the usual separators.
        (["m.Q4_K_M.gguf", "m-Q8_0.gguf"], None, "m.Q4_K_M.gguf"),
        (["m-q4_k_m.gguf", "m-Q8_0.gguf"], None, "m-q4_k_m.gguf"),
        (["m_Q4_K_M.gguf", "m-Q8_0.gguf"], None, "m_Q4_K_M.gguf"),
        # A word of a companion's name may be part of a model's name.
        (
            ["Qwen3.6-35B-A3B-MTP-Q4_K_M.gguf", "mtp-Qwen3.6-35B-A3B-Q4_K_M.gguf"],
            None,
            "Qwen3.6-35B-A3B-MTP-Q4_K_M.gguf",
        ),
        (["m-mtp-Q8_0.gguf", "m.mmproj-Q4_K_M.gguf", "m-mmproj-f16.gguf"], "Q8_0", "m-mtp-Q8_0.gguf"),
        (["eagle3-m-Q4_K_M.gguf", "m-eagle3-Q8_0.gguf"], None, "m-eagle3-Q8_0.gguf"),
        (["imatrix-Q4_K_M.gguf", "m-imatrix.gguf", "m-Q8_0-imatrix.gguf"], None, "m-Q8_0-imatrix.gguf"),
    ],
)
def test_choose_in_small_repository_returns_expected_file(files: list[str], wanted: str | None, chosen: str) -> None:
    assert choose(files, wanted) == [chosen]
